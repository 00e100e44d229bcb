"""How long training stands still for a checkpoint: written in the background against written at once, in the same run.

    OMP_NUM_THREADS=1 python -m benchmarks.checkpoint [--quick] [--hidden-size 768] [--repetitions 5]

One process, a randomly initialised model in BF16 with FP32 masters and Adam's moments (14 bytes a parameter), which has
done a step. In turns, a checkpoint is saved at once, and begun in the background and finished after as much training as it
takes; what counts is the time until training can go on: the whole save there, the beginning and the finishing here.
The steps that run meanwhile are timed, too: the writing process shares cores and disk with them. Medians of ratios;
exits with status 1 when the stall in the background exceeds 20% of the whole save.

Left out on purpose: reading a checkpoint, and other numbers of ranks, which write in parallel.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import FOLDER, Result, write_report

ASKED = 0.20
MAX_WAITING_STEPS = 500


def make(hidden_size: int) -> tuple[Any, Any, Any]:
    """A learner after one step, the function that does another, and a tokenizer."""
    from megatron_calclip.config_file import config_from_dict
    from megatron_calclip.hf import character_tokenizer, load_hf_config
    from megatron_calclip.learner import runtime

    config = config_from_dict(
        {
            "model": {
                "shape": {
                    "num_layers": 8,
                    "hidden_size": hidden_size,
                    "ffn_hidden_size": 3 * hidden_size,
                    "num_attention_heads": 8,
                    "num_query_groups": 8,
                },
                "tokenizer": "characters",
            },
        }
    )
    tokenizer = character_tokenizer(config.model.characters)
    hf_config = load_hf_config(config, tokenizer)
    started = runtime.start(config)
    from megatron_calclip.batch import Completion, Prompt, ScoredTokens, Trajectories
    from megatron_calclip.initial import random_weights
    from megatron_calclip.learner.learner import Learner
    from megatron_calclip.weights.load import HFSource

    learner = Learner(
        config,
        hf_config,
        started,
        source=HFSource.from_tensors(random_weights(hf_config, init="default", seed=0)),
        lr=1e-5,
        num_steps=1,
        warmup_steps=0,
        decay="constant",
        min_lr=0.0,
    )
    prompts = [Prompt(i, (1, 2, 3, 4), "", "") for i in range(4)]
    answers = [[Completion((5,) * 28, (0.0,) * 28, finished=True, policy_version=0)] for _ in prompts]
    trajectories = Trajectories.from_completions(prompts, answers)

    def objective(scored: ScoredTokens) -> tuple[torch.Tensor, None]:
        return scored.log_probs.mean(), None

    def step() -> None:
        learner.begin_step()
        learner.update(learner.prepare(trajectories, num_minibatches=1), 0, objective)

    step()
    return learner, step, tokenizer


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two repetitions")
    parser.add_argument("--output", type=Path, default=FOLDER / "checkpoint.json")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repetitions = 2
    learner, step, tokenizer = make(arguments.hidden_size)
    from megatron_calclip.learner import checkpoint

    options: dict[str, Any] = dict(tokenizer=tokenizer, state={}, tensors={"a": torch.zeros(1)}, keep=1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        for repetition in range(arguments.repetitions + 1):
            began = time.perf_counter()
            step()
            step_alone = time.perf_counter() - began
            began = time.perf_counter()
            saved = checkpoint.save(run_dir, 2 * repetition, learner, **options)
            whole = time.perf_counter() - began
            size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
            began = time.perf_counter()
            pending = checkpoint.begin_save(run_dir, 2 * repetition + 1, learner, **options)
            stall = time.perf_counter() - began
            steps: list[float] = []
            while not pending.is_written() and len(steps) < MAX_WAITING_STEPS:
                began = time.perf_counter()
                step()
                steps.append(time.perf_counter() - began)
            began = time.perf_counter()
            pending.finish()
            stall += time.perf_counter() - began
            beside = statistics.median(steps) / step_alone if steps else float("nan")
            rows.append({"whole": whole, "stall": stall, "ratio": stall / whole, "step_beside": beside, "bytes": size})
    rows = rows[1:]
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    print(f"{medians['bytes'] / 1e9:.2f} GB, {len(rows)} repetitions")
    print(f"{'saved at once':<34}{medians['whole']:8.2f} s")
    print(f"{'training stands still, background':<34}{medians['stall']:8.2f} s")
    met = "yes" if medians["ratio"] <= ASKED else "no"
    print(f"{'share':<34}{medians['ratio']:8.1%}   asked {ASKED:.0%}, met: {met}")
    print(f"{'a step beside the writer':<34}{medians['step_beside']:8.2f} x a step alone")
    ratios = [row["ratio"] for row in rows]
    result = Result.of("stall, saved in the background", "saved at once", "x time", ratios, goal=ASKED, better="lower")
    write_report(arguments.output, [result], medians=medians, rows=rows)
    return int(medians["ratio"] > ASKED)


if __name__ == "__main__":
    sys.exit(main())
