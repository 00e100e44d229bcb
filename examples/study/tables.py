"""Tables of a study: means over seeds with their standard error, and replays on the dumps of the calibrated arm."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.study.arms import REPLAYED
from megatron_calclip.algorithms.replay import replay
from megatron_calclip.commands.replay import AS_RUN, load_dumps, variants

Row = dict[str, Any]

FIRST_STEP = 5
"""Steps before are left out of clip statistics: Adam's first updates are not typical."""

COLUMNS: dict[str, str] = {
    "eval/score": "held-out score, end",
    "reward/mean": "reward, last third",
    "entropy": "entropy, last third",
    "response/mean_length": "response tokens, last third",
    "clip/low_negative": "clipped of A < 0",
    "clip/high_positive": "clipped of A > 0",
    "overclip low": "FP8 / BF16 clips, low",
    "overclip high": "FP8 / BF16 clips, high",
    "nmae/amplification": "amplification",
    "clip/lower": "L, end",
    "clip/upper": "H, end",
    "ledger/flops_share": "shadow passes of every step, share of FLOPs",
}
"""Key of a result -> heading. Shares and multiples are pooled over the steps from `FIRST_STEP` on."""


@dataclass(frozen=True)
class Run:
    """One run of a study."""

    recipe: str
    arm: str
    seed: int
    folder: Path

    @staticmethod
    def steps_done(folder: Path) -> int:
        """Steps that a folder's metrics hold."""
        path = folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def rows(self) -> list[Row]:
        """Its metrics, without the evaluation before the first step."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if row["step"] > 0]


def of_run(run: Run) -> Row:
    """The numbers of one run."""
    rows = run.rows()
    late, counted = rows[-max(len(rows) // 3, 1) :], [row for row in rows if row["step"] >= FIRST_STEP]

    def mean(name: str, over: Sequence[Row]) -> float | None:
        values = [row[name] for row in over if row.get(name) is not None]
        return statistics.fmean(values) if values else None

    found: Row = {name: mean(name, late) for name in ("reward/mean", "entropy", "response/mean_length")}
    found |= {name: mean(name, counted) for name in ("clip/low_negative", "clip/high_positive", "nmae/amplification")}
    found |= {name: rows[-1].get(name) for name in ("eval/score", "clip/lower", "clip/upper", "ledger/flops_share")}
    for side in ("low", "high"):
        clipped8 = sum(row.get(f"clip_fp8/num_{side}", 0) for row in counted)
        clipped16 = sum(row.get(f"clip_bf16/num_{side}", 0) for row in counted)
        found[f"overclip {side}"] = clipped8 / clipped16 if clipped16 else None
    return found


def over_seeds(values: Sequence[float | None]) -> Row | None:
    """Mean, standard error and number of the seeds that have a value."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None
    return {"mean": statistics.fmean(known), "stderr": error, "seeds": len(known)}


def summarise(runs: Sequence[Run]) -> Row:
    """All numbers: recipe -> arm -> column -> mean, and the replays of each recipe's calibrated arm."""
    results: Row = {"arms": {}, "replays": {}}
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.recipe, run.arm), []).append(run)
    for (recipe, arm), members in groups.items():
        numbers = [of_run(run) for run in members]
        table = {column: over_seeds([one[column] for one in numbers]) for column in COLUMNS}
        results["arms"].setdefault(recipe, {})[arm] = table
        dumped = [run.folder for run in members if list((run.folder / "dumps").glob("*"))]
        if dumped:
            results["replays"][recipe] = replays(dumped)
    return results


def replays(folders: Sequence[Path]) -> dict[str, Row]:
    """Ablations on the same tokens: clips on the dump after each calibration, pooled over seeds."""
    found: dict[str, Row] = {}
    for entry in REPLAYED:
        presets = [
            name for one in entry if one.startswith("preset=") for name in one.removeprefix("preset=").split(",")
        ]
        changes = [one for one in entry if not one.startswith("preset=")]
        for folder in folders:
            dumps = load_dumps([folder])
            for name, settings in variants(dumps[0].settings, presets, changes).items():
                if name == AS_RUN and entry != REPLAYED[0]:
                    continue  # once is enough
                result = replay(dumps, settings)
                row = found.setdefault(name, {"fp8": 0, "bf16": 0, "lower": [], "upper": []})
                row["fp8"] += result.clips.lower8
                row["bf16"] += result.clips.lower16
                if result.reports:
                    row["lower"].append(result.reports[-1].lower.after)
                    row["upper"].append(result.reports[-1].upper.after)
    return found


def _cell(value: Row | None) -> str:
    if value is None:
        return "-"
    error = f" +- {value['stderr']:.2g}" if value["stderr"] is not None else ""
    return f"{value['mean']:.3g}{error}"


def write_tables(results: Row, path: Path) -> str:
    """Markdown, written and returned."""
    lines = ["Means over seeds +- standard errors. A toy with noise dialled in: see the study's own description.", ""]
    for recipe, arms in results["arms"].items():
        lines += [f"## {recipe}", "", "| arm | seeds | " + " | ".join(COLUMNS.values()) + " |"]
        lines.append("|---" * (len(COLUMNS) + 2) + "|")
        for arm, numbers in arms.items():
            seeds = max((value["seeds"] for value in numbers.values() if value), default=0)
            lines.append(f"| {arm} | {seeds} | " + " | ".join(_cell(numbers[name]) for name in COLUMNS) + " |")
        lines.append("")
        if recipe in results["replays"]:
            lines += ["Replayed on the calibrated arm's dumps, judged on the next one:", ""]
            lines += ["| setting | FP8 / BF16 clips, low | tokens | L, end | H, end |", "|---|---|---|---|---|"]
            for name, row in results["replays"][recipe].items():
                multiple = f"{row['fp8'] / row['bf16']:.2f}" if row["bf16"] else "-"
                ends = [", ".join(f"{value:.2f}" for value in row[side]) for side in ("lower", "upper")]
                lines.append(f"| {name} | {multiple} | {row['fp8']} / {row['bf16']} | {ends[0]} | {ends[1]} |")
            lines.append("")
    text = "\n".join(lines)
    path.write_text(text + "\n")
    return text
