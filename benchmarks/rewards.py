r"""Math rewards per second, against math-verify in one process with the same time-outs.

    python -m benchmarks.rewards            # 2,000 answers, three repetitions, two cores: about ten minutes
    python -m benchmarks.rewards --quick    # 200 answers, once

The answers are like those of MATH-500: its golds (MEGATRON_CALCLIP_DATA), or generated ones of the same kinds, each
boxed at the end of a paragraph, four to a problem: as the reference writes it, in another spelling, and two wrong.
One in a hundred explodes: `9^{9^{9}}`, which no machine can write out.

math-verify (`parse` of the completion, `verify`, with its defaults; golds parsed once) runs alone in a process of its
own with a time-out of N seconds for each of the two; ours gets N seconds of CPU for a completion, and two workers.
Both start, import and warm up on the same expressions before the clock runs. Each repetition draws answers anew; ours
and theirs alternate, and the speed-up is the median of the ratios within a repetition. `ordinary` is measured without
the exploding answers. Accuracy is printed beside speed: both score the same completions, whose right verdicts are known.

math-verify's time-out is a signal, which waits for the end of a C call: where an exploding answer becomes one, its
process hangs, and is ended after `--patience` seconds; then the ratio over all is a lower bound.

Left out on purpose: rewards of other frameworks, which call the same library.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import FOLDER, Result, write_report
from megatron_calclip.config import RewardConfig
from megatron_calclip.prompt import Prompt
from megatron_calclip.rewards import RewardSample, make_scorer
from megatron_calclip.rewards.math_symbols import SYNTAX

NUM_WORKERS = 2
MIN_SPEED_UP = 1.6
EXPLODING = "9^{9^{9}}"
_PROSE = "We write the quantity in terms of what is given, simplify, and check the result against the small cases. "


@dataclass(frozen=True)
class Item:
    """A completion, the reference, and the right verdict."""

    completion: str
    gold: str
    right: bool


def golds() -> list[str]:
    """Reference answers of MATH-500, or generated ones of the same kinds."""
    folder = os.environ.get("MEGATRON_CALCLIP_DATA")
    if folder is not None and (path := Path(folder) / "math500.jsonl").is_file():
        return [json.loads(line)["answer"] for line in path.read_text().splitlines() if line.strip()]
    rng = random.Random(0)
    made: list[str] = []
    for _ in range(500):
        a, b, c = (rng.randint(2, 40) for _ in range(3))
        kinds = [str(a * b)] * 6 + [
            rf"\frac{{{a}}}{{{b * c + 1}}}", rf"{a}\sqrt{{{b}}}", f"({a},{-b},{c})", rf"{a}x^2 - {b}x + {c}",
            rf"{a}\pi", rf"[{a}, {a + b})", rf"{a}^\circ", rf"\text{{({'ABCDE'[a % 5]})}}",
        ]  # fmt: skip
        made.append(rng.choice(kinds))
    return made


def respelled(gold: str) -> str:
    """The same answer, written otherwise."""
    return (
        gold.replace(r"\frac", r"\dfrac")
        .replace("(", r"\left( ")
        .replace(")", r" \right)")
        .replace("^\\circ", r"^{\circ}")
    )


def make_items(count: int, *, num_exploding: int, seed: int) -> list[Item]:
    """Completions in random order."""
    rng, pool = random.Random(seed), golds()
    items: list[Item] = []
    while len(items) < count - num_exploding:
        gold, other = rng.choice(pool), rng.choice(pool)
        wrong = other if other != gold else "-1"
        for answer, right in ((gold, True), (respelled(gold), True), (wrong, False), (f"{gold} + 1", False)):
            items.append(Item(f"{_PROSE * 10}\n\nThe answer is $\\boxed{{{answer}}}$.", gold, right))
    items = items[: count - num_exploding]
    items += [Item(f"{_PROSE * 10}\n\n$\\boxed{{{EXPLODING}}}$", rng.choice(pool), False) for _ in range(num_exploding)]
    rng.shuffle(items)
    return items


def _serve_peer(connection: Any, items: list[Item], timeout: int) -> None:
    """math-verify in this process: its seconds and verdicts."""
    import logging

    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    references = {gold: parse(f"\\boxed{{{gold}}}", parsing_timeout=timeout) for gold in {item.gold for item in items}}
    for text in SYNTAX:
        verify(parse(f"${text}$"), parse(f"$\\boxed{{{text} + 1}}$"))
    connection.send(None)
    start = time.perf_counter()
    verdicts = [
        verify(references[item.gold], parse(item.completion, parsing_timeout=timeout), timeout_seconds=timeout)
        for item in items
    ]
    connection.send((time.perf_counter() - start, verdicts))


def time_peer(items: list[Item], *, timeout: int, patience: float) -> tuple[float, list[bool] | None]:
    """Seconds of math-verify, and its verdicts; None instead when it did not end within `patience` seconds."""
    context = multiprocessing.get_context("spawn")
    own, theirs = context.Pipe()
    process = context.Process(target=_serve_peer, args=(theirs, items, timeout))
    process.start()
    own.recv()
    start = time.perf_counter()
    try:
        return own.recv() if own.poll(patience) else (time.perf_counter() - start, None)
    finally:
        process.kill()
        process.join()


def time_ours(items: list[Item], *, timeout: int) -> tuple[float, list[bool], int]:
    """Seconds, verdicts and time-outs of our pool."""
    samples = [
        RewardSample(Prompt(index, (1,), "", item.gold), item.completion, 1, True) for index, item in enumerate(items)
    ]
    with closing(make_scorer(RewardConfig("math", num_workers=NUM_WORKERS, timeout_seconds=timeout))) as scorer:
        warm_up = RewardSample(Prompt(0, (1,), "", "x"), r"\boxed{\frac{x}{2}}", 1, True)
        scorer.score([warm_up] * 8)
        start = time.perf_counter()
        scores = scorer.score(samples)
        seconds = time.perf_counter() - start
    return seconds, [score.value == 1.0 for score in scores], sum(score.timed_out for score in scores)


def measure(count: int, *, exploding: bool, seed: int, timeout: int, patience: float) -> dict[str, Any]:
    """One repetition: both on the same completions."""
    items = make_items(count, num_exploding=count // 100 if exploding else 0, seed=seed)
    theirs, their_verdicts = time_peer(items, timeout=timeout, patience=patience)
    ours, verdicts, num_timed_out = time_ours(items, timeout=timeout)

    def accuracy(given: list[bool]) -> float:
        return statistics.mean(verdict == item.right for verdict, item in zip(given, items, strict=True))

    return {
        "ours_seconds": ours,
        "peer_seconds": theirs,
        "peer_ended": their_verdicts is not None,
        "speed_up": theirs / ours,
        "ours_per_second": count / ours,
        "peer_per_second": count / theirs,
        "ours_accuracy": accuracy(verdicts),
        "peer_accuracy": accuracy(their_verdicts) if their_verdicts is not None else None,
        "ours_timed_out": num_timed_out,
    }


def print_table(rows: dict[str, list[dict[str, Any]]]) -> None:
    """Medians over the repetitions."""
    print(
        f"{'':22} {'ours /s':>9} {'peer /s':>9} {'speed-up':>9} {'asked':>6} {'ours right':>11} {'peer right':>11}  met"
    )
    for title, runs in rows.items():
        speed_up = statistics.median(run["speed_up"] for run in runs)
        peers = [run["peer_accuracy"] for run in runs if run["peer_accuracy"] is not None]
        print(
            f"{title:22} {statistics.median(run['ours_per_second'] for run in runs):9.0f} "
            f"{statistics.median(run['peer_per_second'] for run in runs):9.1f} {speed_up:9.2f} {MIN_SPEED_UP:6.1f} "
            f"{statistics.median(run['ours_accuracy'] for run in runs):11.2%} "
            f"{f'{statistics.median(peers):.2%}' if peers else 'never ended':>11}  {'yes' if speed_up >= MIN_SPEED_UP else 'no'}"
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write all numbers as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="200 answers, once")
    parser.add_argument("--answers", type=int, default=2000)
    parser.add_argument("--timeout", type=int, default=5, help="seconds, of both")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds after which math-verify is ended")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output", type=Path, default=FOLDER / "rewards.json")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.answers, arguments.repetitions = 200, 1
    rows: dict[str, list[dict[str, Any]]] = {
        title: [
            measure(
                arguments.answers,
                exploding=exploding,
                seed=seed,
                timeout=arguments.timeout,
                patience=arguments.patience,
            )
            for seed in range(arguments.repetitions)
        ]
        for title, exploding in (("ordinary", False), ("one in 100 explodes", True))
    }
    print_table(rows)
    results = [
        Result.of(
            f"math rewards, {title}", "math-verify", "x speed", [run["speed_up"] for run in runs], goal=MIN_SPEED_UP
        )
        for title, runs in rows.items()
    ]
    sizes = {"answers": arguments.answers, "timeout_seconds": arguments.timeout, "num_workers": NUM_WORKERS}
    write_report(arguments.output, results, **sizes, runs=rows)


if __name__ == "__main__":
    main()
