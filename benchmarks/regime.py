"""What FP8 does to the clip in `conf/noisy_cpu.yaml`, and what calibration repairs there: arms times seeds, and a table.

    python -m benchmarks.regime                            # all arms, seeds 0 to 2; minutes an arm and seed on one core
    python -m benchmarks.regime --arms calibrated --seeds 0

Arms: `vanilla` (tensorwise FP8, fixed reference bounds), `calibrated` (grid [0.2, 0.9], on three times the prompts of the
configuration: BF16 clips a few tokens a step, and fewer than `min_tail_tokens` hold L) and `bf16` (no FP8, where every
multiple must be exactly 1). All measure every step with shadow passes. Seeds differ in prompts and sampling; they share one
supervised start, that of seed 0, whose making is the longest part.

Judged are tokens that chose no bound: those of the steps after a calibration, clipped by FP8 at the bounds in force and
by BF16 at the references. Shares are pooled as token counts over steps and seeds. L has settled with the second of two
successive calibrations that moved it by at most one step of its grid: while a task is learned, BF16 clips fewer and fewer
tokens, and L follows late. The paper's grid [0.5, 0.9] is replayed on the dumps of `calibrated`.

A run that is there and complete is not repeated, so the benchmark can be stopped and started again. Results do not
depend on the machine's load. Left out on purpose: rewards of the arms as a result. The noise is dialled in; a toy run
shows the statistics of clipping and their repair, and says nothing about what they are worth.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.results import FOLDER, Result, write_report
from megatron_calclip import warm_start
from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.calibration_report import CalibrationReport
from megatron_calclip.algorithms.calibration_settings import START, CalibrationSettings
from megatron_calclip.algorithms.replay import CalibrationDump, Replay, replay
from megatron_calclip.commands.replay import load_dumps
from megatron_calclip.config_file import load_config

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "conf" / "noisy_cpu.yaml"
COMMON = ("calibration.measure=every_step", "eval.every=0", "checkpoint.save_every=0", "tracking.tensorboard=false")
ARMS: dict[str, tuple[str, ...]] = {
    "vanilla": ("calibration.enabled=false", "train.num_steps=15"),
    "calibrated": ("calibration.dump=true", "train.prompts_per_step=120", "train.num_steps=60"),
    "bf16": (
        "calibration.enabled=false",
        *("precision.recipe=bf16", "precision.backend=auto", "precision.output_layer=false"),
        "precision.emulation={block_size: null, channel_outlier: 1, first_token_outlier: 1}",
        "train.num_steps=5",
    ),
}
"""Overrides of each arm. The first steps are left out of the multiples: Adam's first updates are not typical."""
FIRST_STEP = 5
ASKED: dict[str, tuple[float, Literal["higher", "lower"]]] = {"vanilla": (2.0, "higher"), "calibrated": (1.4, "lower")}
"""Multiples at the lower bound: over-clipping that can be seen, and its repair."""
MIN_JUDGED = {"vanilla": 1, "calibrated": 500}
"""Tokens that BF16 clips: a multiple of fewer is shown, and meets no goal."""
PAPER_GRID = CalibrationSettings.paper().grid_lower
NEVER = 10**9
"""Tail tokens that no run has: a replay that asks for so many keeps its start bounds."""

HISTOGRAM_EDGES = torch.logspace(-1, 0.5, 61)
"""Of importance ratios."""

Row = dict[str, Any]


def train(overrides: Sequence[str], folder: Path) -> None:
    """Train, unless the run is there and complete."""
    overrides = [*COMMON, *overrides, f"run_dir={folder}"]
    rows = read_rows(folder / "metrics.jsonl")
    if rows and rows[-1]["step"] >= load_config(str(CONFIG), overrides).train.num_steps:
        return
    command = [sys.executable, str(ROOT / "examples" / "grpo_fp8.py"), str(CONFIG), *overrides]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "output.txt").open("w") as output:
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=output, stderr=output)


def start_folder(runs: Path) -> Path:
    """The supervised start that all runs load as an ordinary model; a run of one step makes it where it is missing."""
    start = warm_start.cached_folder(load_config(str(CONFIG), []))
    if not start.is_dir():
        train(["train.num_steps=1"], runs / "start")
    return start


def read_rows(path: Path) -> list[Row]:
    """A JSON Lines file of steps, without the evaluation before the first; empty when it is not there."""
    if not path.is_file():
        return []
    return [row for row in map(json.loads, path.read_text().splitlines()) if row["step"] > 0]


def pooled(rows: Sequence[Row], side: str) -> tuple[int, int, float | None]:
    """Tokens that FP8 and that BF16 clips over some steps, and their quotient."""
    clipped8, clipped16 = (int(sum(row[f"clip_{name}/num_{side}"] for row in rows)) for name in ("fp8", "bf16"))
    return clipped8, clipped16, clipped8 / clipped16 if clipped16 else None


def settled(reports: Sequence[Row], grid_step: float) -> int | None:
    """The step of the second of two successive calibrations that made a choice and moved L by at most one step of its grid.

    None when there are none. A held bound rests because nothing is known, and does not count.
    """

    def rests(row: Row) -> bool:
        moved = abs(row["lower_after"] - row["lower_before"])
        return row["lower_status"] != "held" and moved <= grid_step * (1 + 1e-6)

    return next((second["step"] for first, second in pairwise(reports) if rests(first) and rests(second)), None)


def judge_vanilla(runs: dict[int, Path]) -> Row:
    """Over-clip multiples at the reference bounds."""
    rows = {
        seed: [row for row in read_rows(run / "metrics.jsonl") if row["step"] >= FIRST_STEP]
        for seed, run in runs.items()
    }
    everything = [row for of_seed in rows.values() for row in of_seed]
    found: Row = {"steps": len(everything)}
    for side in ("low", "high"):
        clipped8, clipped16, multiple = pooled(everything, side)
        found |= {f"{side}_fp8": clipped8, f"{side}_bf16": clipped16, f"{side}_multiple": multiple}
    return found | {f"low_multiple, seed {seed}": pooled(of_seed, "low")[2] for seed, of_seed in rows.items()}


def judge_calibrated(runs: dict[int, Path]) -> Row:
    """Clipping after L has settled, balances, and what the paper's grid would have found."""
    after: list[Row] = []
    reports: list[Row] = []
    paper: list[Replay] = []
    fixed: list[Replay] = []
    solvable: list[Row] = []
    by_seed: Row = {}
    ratios: Row = {"edges": HISTOGRAM_EDGES.tolist()}
    for seed, run in runs.items():
        own = [row["report"] for row in read_rows(run / "calibration.jsonl") if row["report"]]
        dumps = load_dumps([run])
        settings = dumps[0].settings
        step = settled(own, settings.grid_lower[2])
        rows = [] if step is None else [row for row in read_rows(run / "metrics.jsonl") if row["step"] > step]
        reports, after = reports + own, after + rows
        if "seed" not in ratios:
            bounds = ClipBounds(own[-1]["lower_after"], own[-1]["upper_after"])
            ratios |= {"seed": seed, **histograms(dumps, bounds, settings.reference)}
        paper.append(replay(dumps, replace(settings, grid_lower=PAPER_GRID, start=START)))
        fixed.append(replay(dumps, replace(settings, start=settings.reference, min_tail_tokens=NEVER)))
        eager = replay(dumps, replace(settings, min_balance_range=0.0, max_interval_share=1.0))
        solvable += [row for row in map(CalibrationReport.as_row, eager.reports) if row["upper_status"] != "held"]
        by_seed |= {
            f"settled after step, seed {seed}": step,
            f"low_multiple, seed {seed}": pooled(rows, "low")[2],
            f"L, seed {seed}": [row["lower_after"] for row in own],
        }
    clipped8, clipped16, multiple = pooled(after, "low")
    return {
        "steps": len(after),
        "low_fp8": clipped8,
        "low_bf16": clipped16,
        "low_multiple": multiple,
        "low_multiple, replayed at the references": next_multiple(fixed),
        "low_multiple, replayed on the paper's grid": next_multiple(paper),
        "L by status on the paper's grid": Counter(report.lower.status for run in paper for report in run.reports),
        **by_seed,
        "ratios of A < 0": ratios,
        "L by status": Counter(row["lower_status"] for row in reports),
        "H by status": Counter(row["upper_status"] for row in reports),
        "H with a solution, replayed without the rules for flat balances": len(solvable),
        "balance at H* there, largest error": largest_error(solvable, "balance_choice"),
        "balance at the new bounds, largest error": largest_error(reports, "balance_after"),
    }


def histograms(dumps: Sequence[CalibrationDump], bounds: ClipBounds, reference: ClipBounds) -> Row:
    """Tokens with A < 0 by their ratio, and how many lie under a lower bound; for a picture.

    The first update of each step is left out: there the weights have not moved, and all ratios are 1.

    Args:
        dumps: of one run.
        bounds: that the run ended with.
        reference: what BF16 clips at.
    """
    counted = [dump.select(dump.minibatches > 0) for dump in dumps]
    ratio8, ratio16 = (
        torch.cat([getattr(dump, name)[dump.advantages < 0] for dump in counted]) for name in ("ratio8", "ratio16")
    )

    def count(ratios: Tensor) -> list[int]:
        return [int(found) for found in torch.histogram(ratios, HISTOGRAM_EDGES).hist]

    return {
        "fp8": count(ratio8),
        "bf16": count(ratio16),
        "reference": [reference.lower, reference.upper],
        "bounds": [bounds.lower, bounds.upper],
        "fp8 under the reference": int((ratio8 <= reference.lower).sum()),
        "bf16 under the reference": int((ratio16 <= reference.lower).sum()),
        "fp8 under the bound": int((ratio8 <= bounds.lower).sum()),
    }


def next_multiple(replays: Sequence[Replay]) -> float:
    """Tokens with A < 0 that FP8 clips over those that BF16 clips, on the dump after each calibration."""
    return sum(run.clips.lower8 for run in replays) / sum(run.clips.lower16 for run in replays)


def largest_error(reports: Sequence[Row], name: str) -> float | None:
    """Largest relative distance of a balance from BF16's."""
    return max((abs(row[name] / row["balance_target"] - 1) for row in reports if row["balance_target"]), default=None)


def judge_bf16(runs: dict[int, Path]) -> Row:
    """All multiples of a learner without FP8, which must be 1."""
    rows = [row for run in runs.values() for row in read_rows(run / "metrics.jsonl")]
    multiples = [row[name] for row in rows for name in ("overclip/low", "overclip/high") if name in row]
    return {"steps": len(rows), "multiples": len(multiples), "all_exactly_one": all(value == 1 for value in multiples)}


JUDGES = {"vanilla": judge_vanilla, "calibrated": judge_calibrated, "bf16": judge_bf16}


def compare(results: dict[str, Row]) -> list[Result]:
    """Over-clip multiples at the lower bound; seeds are the repetitions."""
    compared = []
    for arm, (goal, better) in ASKED.items():
        found = results.get(arm, {})
        if found.get("low_multiple") is not None:
            seeds = [
                value for key, value in found.items() if key.startswith("low_multiple, seed") and value is not None
            ]
            spread = (min(seeds), max(seeds)) if len(seeds) > 1 else None
            judged = goal if found["low_bf16"] >= MIN_JUDGED[arm] else None
            what = f"clips at the lower bound, {arm}"
            compared.append(Result(what, "BF16", "x tokens", found["low_multiple"], judged, better, spread))
    return compared


def print_results(results: dict[str, Row]) -> None:
    """One line for each number."""
    width = max(len(name) for found in results.values() for name in found)
    for arm, found in results.items():
        for name, value in found.items():
            text = f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
            print(f"{arm:11}{name:{width + 2}}{text}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/regime"), help="folder of the runs")
    parser.add_argument("--output", type=Path, default=FOLDER / "regime.json")
    arguments = parser.parse_args(argv)
    results: dict[str, Row] = {}
    start = [f"model.hf={start_folder(arguments.runs)}", "model.shape=null", "model.warm_start.num_steps=0"]
    for arm in arguments.arms:
        runs = {seed: arguments.runs / f"{arm}_{seed}" for seed in arguments.seeds}
        for seed, folder in runs.items():
            train([*start, *ARMS[arm], f"train.seed={seed}"], folder)
        results[arm] = JUDGES[arm](runs)
    print_results(results)
    write_report(arguments.output, compare(results), arms=results)


if __name__ == "__main__":
    main()
