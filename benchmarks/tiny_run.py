"""Runs of `conf/tiny_cpu.yaml`, as the README starts them: what they learn, and how long they take.

    python -m benchmarks.tiny_run            # three seeds: six minutes on two cores
    python -m benchmarks.tiny_run --quick    # one seed and few steps

Each run is torchrun with two processes and a cache of its own, so that the supervised start is made anew: seconds count from
launch to the end of the first RL step, and to the end of the run. What a run learned is the held-out score after it less the score
before it, also in standard errors of the difference (4 samples of each problem; the error is over problems).

Left out on purpose: precisions against each other, which is what `examples/study` is for.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import FOLDER, ROOT, Result, write_report

MIN_GAIN, MIN_STANDARD_ERRORS = 0.15, 3.0
MAX_SECONDS_TO_STEP, MAX_SECONDS = 90.0, 300.0
QUICK = ("train.num_steps=7", "model.warm_start.num_steps=10")


def run(run_dir: Path, cache: Path, *overrides: str) -> dict[str, float]:
    """One run; seconds from its launch to the end of the first step, and to its end.

    Args:
        run_dir: its folder.
        cache: of supervised starts.
        *overrides: of the configuration.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(ROOT / "examples" / "grpo_fp8.py"), str(ROOT / "conf" / "tiny_cpu.yaml")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MEGATRON_CALCLIP_CACHE": str(cache)}
    began, first = time.perf_counter(), math.nan
    process = subprocess.Popen(
        [*launcher, *script, *overrides, f"run_dir={run_dir}"], env=environment, stdout=subprocess.DEVNULL
    )
    while process.poll() is None:
        if math.isnan(first) and any(row["step"] == 1 for row in rows_of(run_dir)):
            first = time.perf_counter() - began
        time.sleep(0.1)
    if process.returncode != 0:
        raise SystemExit(f"a run ended with exit status {process.returncode}; see above")
    return {"seconds_to_first_step": first, "seconds": time.perf_counter() - began}


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's metrics so far."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def measure_learning(folder: Path, seed: int, *overrides: str) -> dict[str, Any]:
    """One seed: scores with their standard errors, and seconds."""
    run_dir = folder / f"seed_{seed}"
    seconds = run(run_dir, folder / f"cache_{seed}", f"train.seed={seed}", *overrides)
    scored = [row for row in rows_of(run_dir) if "eval/score" in row]
    first, last = ({"score": row["eval/score"], "stderr": row["eval/stderr"]} for row in (scored[0], scored[-1]))
    gain = last["score"] - first["score"]
    errors = gain / math.hypot(first["stderr"], last["stderr"])
    steps = int(scored[-1]["step"])
    print(
        f"seed {seed}: {first['score']:.3f} +- {first['stderr']:.3f} to {last['score']:.3f} +- {last['stderr']:.3f} in "
        f"{steps} steps; first step after {seconds['seconds_to_first_step']:.0f} s, all after {seconds['seconds']:.0f} s"
    )
    return {
        "seed": seed,
        "steps": steps,
        "start": first,
        "end": last,
        "gain": gain,
        "standard_errors": errors,
    } | seconds


def compare(seeds: Sequence[dict[str, Any]]) -> list[Result]:
    """What was asked of the run; the worst seed counts."""

    def worst(what: str, peer: str, unit: str, name: str, goal: float, *, lower: bool = False) -> Result:
        values = [row[name] for row in seeds]
        spread = (min(values), max(values)) if len(values) > 1 else None
        if lower:
            return Result(what, peer, unit, max(values), goal, "lower", spread)
        return Result(what, peer, unit, min(values), goal, "higher", spread)

    return [
        worst("held-out score, gain of the worst seed", "the start", "more", "gain", MIN_GAIN),
        worst("the same in standard errors", "the start", "errors", "standard_errors", MIN_STANDARD_ERRORS),
        worst(
            "launch to the first RL step, slowest seed",
            "no peer",
            "s",
            "seconds_to_first_step",
            MAX_SECONDS_TO_STEP,
            lower=True,
        ),
        worst("launch to the end, slowest seed", "no peer", "s", "seconds", MAX_SECONDS, lower=True),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print, and write all numbers as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one seed, few steps, nothing learned")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=FOLDER / "tiny_run.json")
    arguments = parser.parse_args(argv)
    seeds, overrides = (arguments.seeds[:1], QUICK) if arguments.quick else (arguments.seeds, ())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        learned = [measure_learning(folder, seed, *overrides) for seed in seeds]
    write_report(arguments.output, compare(learned), seeds=learned)


if __name__ == "__main__":
    main()
