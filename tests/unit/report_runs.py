"""Run folders for tests of the report: small, written by hand, with numbers that are easy to follow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_calclip.report_data import Evaluation, Run


def run_of(rows: Sequence[Mapping[str, Any]] = (), *, label: str = "run", **parts: Any) -> Run:
    """A run in memory; rows without a step get 1, 2, ..."""
    numbered = tuple({"step": step, **row} for step, row in enumerate(rows, start=1))
    empty: dict[str, Any] = {"calibrations": (), "evaluations": (), "config": {}, "versions": {}, "notes": ()}
    return Run(label=label, rows=numbered, **{**empty, **parts})


def evaluation_of(step: int, value: float) -> Evaluation:
    estimates = {"avg@4": {"value": value, "low": value - 0.1, "high": None}, "response_length": {"value": 7.25}}
    return Evaluation(step, {"sums": estimates})


def calibration_row(step: int, **changes: Any) -> dict[str, Any]:
    """A row of `calibration.jsonl` with one false clip at L and entropy above 2."""
    report = {
        "lower_before": 0.6, "lower_after": 0.65, "lower_status": "moved", "lower_reason": "",
        "lower_choice": 0.82, "lower_choice_low": 0.78, "lower_choice_high": 0.86, "lower_overclip_multiple": 2.5,
        "upper_before": 1.8, "upper_after": 1.8, "upper_status": "held", "upper_reason": "no token with A > 0",
        "upper_choice": None, "upper_choice_low": None, "upper_choice_high": None, "upper_overclip_multiple": None,
        "alpha": 0.04, "alpha_low": 0.03, "alpha_high": 0.05,
    }  # fmt: skip
    below = {"lower": None, "upper": 2.0, "num_low": 0, "num_high": 0, "rate_low": 0.0, "rate_high": 0.0}
    above = {"lower": 2.0, "upper": None, "num_low": 1, "num_high": 0, "rate_low": 0.5, "rate_high": None}
    buckets = [below | {"num_negative": 40, "num_positive": 40}, above | {"num_negative": 2, "num_positive": 0}]
    return {"step": step, "report": report | changes, "log": [], "attribution": {"entropy": buckets}}


def metrics_row(step: int, **changes: Any) -> dict[str, Any]:
    """A row of `metrics.jsonl` with a measured step's numbers."""
    return {
        "step": step,
        "reward/mean": step / 10,
        "entropy": 1.0 / step,
        "clip/low_negative": 0.02,
        "clip/lower": 0.6,
        "clip/upper": 1.8,
        "clip_fp8/num_low": 6.0,
        "clip_bf16/num_low": 4.0,
        "missed_clip/low": 0.25,
        "clip_fp8/num_high": 0.0,
        "clip_bf16/num_high": 0.0,
        "timing/step": 2.0,
        "timing/rollout": 0.5,
    } | changes


def write_run(
    folder: Path,
    metrics: Sequence[Any] = (),
    *,
    calibrations: Sequence[Any] = (),
    config: str | None = "train: {num_steps: 9, lr: [1, 2]}\nrun_dir: x\n",
) -> Path:
    """A run's folder. Rows that are text are written as they are, half lines included."""
    folder.mkdir(parents=True)
    for name, rows in (("metrics", metrics), ("calibration", calibrations)):
        if rows:
            lines = [row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows]
            (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    if config is not None:
        (folder / "config.yaml").write_text(config, encoding="utf-8")
    (folder / "versions.json").write_text('{"torch": "2.13"}')
    return folder
