"""Tables of a study's runs: means over seeds with 95% intervals, differences of arms, bounds over time, replays.

Multiples of a run are pooled as tokens over its steps, shares are means over them. An interval over seeds is Student's t: with three seeds it is
wide, and says so. Arms of one seed saw the same prompts, so their difference is taken seed by seed.

Left out on purpose: curves, which `megatron-calclip report RUN...` draws.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.study.arms import REPLAYED
from examples.study.replays import entropy_table, replay_table, replays

Row = dict[str, Any]

FIRST_STEP = 5
"""Steps before are left out of clip statistics: Adam's first updates are not typical."""
T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""97.5% quantile of Student's t by the number of seeds."""
SURGE = 1.5
"""Entropy above so many times that of the first third is called a surge."""
VANILLA, CALIBRATED = "fp8", "fp8, calibrated"
"""The arm that others are compared with, and the one whose dumps are replayed."""

LEARNING: dict[str, str] = {
    "eval/score": "held-out score, end",
    "reward/mean": "reward, last third",
    "entropy first": "entropy, first third",
    "entropy": "entropy, last third",
    "entropy max": "entropy, largest",
    "response/mean_length": "response tokens, last third",
    "shadow time": "calibration's share of time",
    "ledger/flops_share": "all shadow passes, share of FLOPs",
}
CLIPPING: dict[str, str] = {
    "clip/low_negative": "clipped of A < 0, %",
    "clip16/low": "BF16 would, %",
    "overclip low": "FP8 / BF16, A < 0",
    "clip/high_positive": "clipped of A > 0, %",
    "clip16/high": "BF16 would, %",
    "overclip high": "FP8 / BF16, A > 0",
    "false low": "false, of A < 0, %",
    "false high": "false, of A > 0, %",
    "nmae/amplification": "amplification",
    "clip/lower": "L, end",
    "clip/upper": "H, end",
}
"""Key of a result -> heading. Clip statistics are of the steps from `FIRST_STEP` on; FP8 clips at the bounds in force, BF16 at the
references; false: FP8 clips what BF16 keeps."""
CLIPPING_NOTE = (
    "FP8 clips at the bounds in force, BF16 at the references. The oracle clips by BF16's ratios and CISPO takes no gradient away: of "
    "these two, FP8 / BF16 and false clips are what FP8's ratios would do."
)
_PERCENT = ("clip/low_negative", "clip/high_positive", "clip16/low", "clip16/high", "false low", "false high")


@dataclass(frozen=True)
class Run:
    """One run of a study."""

    recipe: str
    arm: str
    seed: int
    folder: Path

    @staticmethod
    def steps_done(folder: Path) -> int:
        """Steps that a folder's metrics hold; a line that is being written, or was torn, does not count."""
        path = folder / "metrics.jsonl"
        lines = path.read_text().rpartition("\n")[0].splitlines() if path.is_file() else []
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def rows(self) -> list[Row]:
        """Its metrics, without the evaluation before the first step."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if row["step"] > 0]


def of_run(run: Run) -> Row:
    """The numbers of one run."""
    rows = run.rows()
    third = max(len(rows) // 3, 1)
    late, counted = rows[-third:], [row for row in rows if row["step"] >= FIRST_STEP]
    found: Row = {name: mean(name, late) for name in ("reward/mean", "entropy", "response/mean_length")}
    entropies = [row["entropy"] for row in rows if row.get("entropy") is not None]
    found |= {"entropy first": mean("entropy", rows[:third]), "entropy max": max(entropies, default=None)}
    found |= {name: mean(name, counted) for name in ("clip/low_negative", "clip/high_positive", "nmae/amplification")}
    found |= {name: rows[-1].get(name) for name in ("eval/score", "clip/lower", "clip/upper", "ledger/flops_share")}
    found["shadow time"] = shadow_time(rows)
    for side in ("low", "high"):
        clipped8, clipped16 = (total(f"clip_{name}/num_{side}", counted) for name in ("fp8", "bf16"))
        found[f"overclip {side}"] = clipped8 / clipped16 if clipped16 else None
        found |= {
            f"clip16/{side}": mean(f"clip_bf16/{side}", counted),
            f"false {side}": mean(f"false_clip/{side}", counted),
        }
    return found


def mean(name: str, rows: Sequence[Row]) -> float | None:
    """Of the rows that have the metric."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return statistics.fmean(values) if values else None


def total(name: str, rows: Sequence[Row]) -> float:
    """Sum over the rows that have the metric."""
    return math.fsum(row.get(name) or 0.0 for row in rows)


def shadow_time(rows: Sequence[Row]) -> float | None:
    """Seconds of the shadow passes that calibration needed, over those of the run without what is measured for the study alone."""
    last = rows[-1]
    seconds = total("timing/step", rows) - last.get("ledger/study_seconds", 0.0)
    return last.get("ledger/shadow_seconds", 0.0) / seconds if seconds > 0 else None


def over_seeds(values: Sequence[float | None]) -> Row | None:
    """Mean, standard error, half the width of the 95% interval, and number of the seeds that have a value."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None
    half = None if error is None else T_975[len(known)] * error
    return {"mean": statistics.fmean(known), "stderr": error, "half": half, "seeds": len(known)}


def summarise(runs: Sequence[Run]) -> Row:
    """All numbers.

    Returns:
        `arms`: recipe -> arm -> column -> mean; `differences`: recipe -> arm -> column -> mean of the seeds' differences to
        `VANILLA`; `bounds`: recipe -> arm -> step -> means of L and H in force; `replays`: recipe -> those of the calibrated arm.
    """
    results: Row = {"arms": {}, "differences": {}, "bounds": {}, "replays": {}}
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.recipe, run.arm), []).append(run)
    numbers = {key: {run.seed: of_run(run) for run in members} for key, members in groups.items()}
    for (recipe, arm), members in groups.items():
        by_seed, vanilla = numbers[recipe, arm], numbers.get((recipe, VANILLA), {})
        columns = LEARNING | CLIPPING
        table = {column: over_seeds([one[column] for one in by_seed.values()]) for column in columns}
        results["arms"].setdefault(recipe, {})[arm] = table
        shared = by_seed.keys() & vanilla.keys()
        if arm != VANILLA and shared:
            results["differences"].setdefault(recipe, {})[arm] = {
                column: over_seeds([_difference(by_seed[seed][column], vanilla[seed][column]) for seed in shared])
                for column in ("eval/score", "reward/mean", "entropy", "response/mean_length")
            }
        if (over_time := bounds_over_time(members)) is not None:
            results["bounds"].setdefault(recipe, {})[arm] = over_time
        dumped = [run.folder for run in members if list((run.folder / "dumps").glob("*"))]
        if dumped and arm == CALIBRATED:
            results["replays"][recipe] = replays(dumped, REPLAYED)
    return results


def _difference(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def bounds_over_time(members: Sequence[Run]) -> dict[str, list[float]] | None:
    """L and H in force, means over the seeds, at the steps at which one of them changed; None where none did."""
    by_step: dict[int, list[tuple[float, float]]] = {}
    for run in members:
        for row in run.rows():
            if row.get("clip/lower") is not None and row.get("clip/upper") is not None:
                by_step.setdefault(row["step"], []).append((row["clip/lower"], row["clip/upper"]))
    means = {step: [statistics.fmean(side) for side in zip(*pairs, strict=True)] for step, pairs in by_step.items()}
    kept: dict[str, list[float]] = {}
    for step in sorted(means):
        if not kept or means[step] != list(kept.values())[-1]:
            kept[str(step)] = means[step]
    return kept if len(kept) > 1 else None


def cell(value: Row | None, *, scale: float = 1.0) -> str:
    """A mean with half of its interval, or a dash."""
    if value is None:
        return "-"
    half = f" ± {scale * value['half']:.2g}" if value["half"] is not None else ""
    return f"{scale * value['mean']:.3g}{half}"


def _table(arms: Row, columns: dict[str, str]) -> list[str]:
    lines = ["| arm | seeds | " + " | ".join(columns.values()) + " |", "|---" * (len(columns) + 2) + "|"]
    for arm, numbers in arms.items():
        seeds = max((value["seeds"] for value in numbers.values() if value), default=0)
        cells = [cell(numbers.get(name), scale=100 if name in _PERCENT else 1) for name in columns]
        lines.append(f"| {arm} | {seeds} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def verdicts(results: Row) -> list[str]:
    """What of the paper does not show in these runs, and what does, in sentences that follow from the numbers."""
    lines = []
    for recipe, arms in results["arms"].items():
        for arm in ("fp8, oracle", CALIBRATED):
            score = results["differences"].get(recipe, {}).get(arm, {}).get("eval/score")
            if score is not None:
                lines.append(
                    f"- {recipe}: held-out score of *{arm}* less that of *{VANILLA}* {cell(score)}: {says(score)}"
                )
        entropy = [arms.get(VANILLA, {}).get(name) for name in ("entropy first", "entropy max")]
        if None not in entropy:
            factor = entropy[1]["mean"] / entropy[0]["mean"]
            surge = "a surge" if factor > SURGE else "no surge"
            lines.append(
                f"- {recipe}: entropy of *{VANILLA}* is at most {factor:.2f} times that of its first third: {surge}."
            )
        for arm in (VANILLA, CALIBRATED):
            if (multiple := arms.get(arm, {}).get("overclip low")) is not None:
                lines.append(
                    f"- {recipe}: *{arm}* clips {cell(multiple)} times as many tokens with A < 0 as BF16 would."
                )
    return lines


def says(difference: Row) -> str:
    """Whether the interval of a difference holds 0."""
    if difference["half"] is None:
        return "one seed, which says nothing."
    if difference["half"] == 0:
        return "exactly as much in every seed, of which there are too few for an interval."
    if abs(difference["mean"]) <= difference["half"]:
        return "no difference that the seeds could tell from chance."
    return "more than chance between seeds."


def write_tables(results: Row, path: Path) -> str:
    """Markdown, written and returned."""
    text = markdown(results)
    path.write_text(text + "\n")
    return text


def markdown(results: Row) -> str:
    """All tables, what did not show first."""
    lines = [
        "Means over seeds ± half of their 95% interval (Student's t). A toy with noise dialled in: see the study's own description.",
        "",
        *verdicts(results),
        "",
    ]
    for recipe, arms in results["arms"].items():
        lines += [f"## {recipe}", "", *_table(arms, LEARNING), *_table(arms, CLIPPING), CLIPPING_NOTE, ""]
        for arm, steps in results["bounds"].get(recipe, {}).items():
            shown = ", ".join(f"{step}: [{lower:.3g}, {upper:.3g}]" for step, (lower, upper) in steps.items())
            lines.append(f"Bounds in force from a step on, {arm}: {shown}")
        lines.append("")
        if recipe in results["replays"]:
            rows = results["replays"][recipe]
            lines += ["Replayed on the calibrated arm's dumps, each calibration judged on the next dump:", ""]
            lines += [*replay_table(rows), ""]
            lines += entropy_table({name: row["by_entropy"] for name, row in list(rows.items())[:2]}, side="low")
            lines.append("")
    return "\n".join(lines)
