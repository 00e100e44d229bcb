"""Tables of the study's second part: the diagnosis, a few GRPO steps, their replays, and the paper's figures beside them.

The paper ("Towards Full Pipeline FP8 Reinforcement Learning for LLMs", arXiv 2609.22870) measured another experiment: Qwen3-8B and
larger, hundreds of steps on GPUs. Its figures stand beside ours to compare the kind of an effect, never its size.

Left out on purpose: any statement on rewards. The reward is made so that there is a gradient, and the steps are few.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.study.replays import FIXED, at_references, entropy_table, multiple, replay_table, replays
from examples.study.tables import Run, mean, total
from megatron_calclip.algorithms.overclip import ENTROPY_EDGES
from megatron_calclip.commands.diagnose import FP32_SCALES
from megatron_calclip.commands.replay import AS_RUN

Row = dict[str, Any]

PAPER_AMPLIFICATION = {"tensorwise": 2.90, "rowwise": 2.08, "blockwise": 1.65}
"""Of the ratio's error over the probability's, in the paper: an 8B model, sampled answers, a training step."""
PAPER_DIAGNOSED = {
    "tensorwise": PAPER_AMPLIFICATION["tensorwise"],
    "rowwise": PAPER_AMPLIFICATION["rowwise"],
    f"blockwise:{FP32_SCALES}": PAPER_AMPLIFICATION["blockwise"],
}
"""The same beside the variants of recipes that a diagnosis measures; the paper's blocks have FP32 scales."""
PAPER_MULTIPLE = {"tensorwise": 6.68, "rowwise": 5.48, "blockwise": 3.94}
PAPER_LOWER, PAPER_ENTROPY = 0.70, 0.90
"""Late in its training: over-clipping at the lower bound, and the part of it from answers with entropy above 1.0."""

NUM_BELOW_1 = 1 + ENTROPY_EDGES.index(1.0)
"""Buckets of an attribution by entropy below 1 nat."""

SETTINGS: tuple[tuple[str, ...], ...] = (
    ("preset=paper,robust",),
    ("grid_lower=0.2:0.9:0.02",),
    ("start=0.8:1.24",),
    ("token_fraction=0.25,0.5",),
    ("minibatches=last",),
    ("balance=surrogate",),
    ("weighting=token",),
    ("pool=1",),
)
"""Replayed on the dumps, beside the run's own: each entry, all its changes together."""


def summarise(diagnosis: Row | None, runs: Sequence[Run]) -> Row:
    """All numbers: the diagnosis as it was written, and of each run its steps, clips at the references and replays."""
    return {"diagnosis": diagnosis, "runs": {run.recipe: of_run(run) for run in runs}}


def of_run(run: Run) -> Row:
    """The numbers of one run."""
    path = run.folder / "calibration.jsonl"
    lines = map(json.loads, path.read_text().splitlines() if path.is_file() else [])
    reports = {line["step"]: line["report"] for line in lines if line["report"]}
    rows = run.rows()
    dumped = [run.folder] if list((run.folder / "dumps").glob("*.safetensors")) else []
    return {
        "steps": [row | {"report": reports.get(row["step"])} for row in rows],
        "at_references": at_references(dumped) if dumped else None,
        "replays": replays(dumped, SETTINGS),
    }


def write_tables(summary: Row, path: Path) -> str:
    """Markdown, written and returned."""
    text = markdown(summary)
    path.write_text(text + "\n")
    return text


def markdown(summary: Row) -> str:
    """All tables, what did not show first."""
    lines = [
        "SmolLM2-135M-Instruct (decoded from 4-bit codes) on easy GSM8K problems, FP8 emulated, no noise dialled in. The paper's",
        "figures are NOT of this experiment: Qwen3-8B, hundreds of steps, FP8 of GPUs. Rewards are no result here: see the study's",
        "own description.",
        "",
    ]
    for recipe, numbers in summary["runs"].items():
        lines += verdicts(recipe, numbers)
    if summary["diagnosis"] is not None:
        lines += ["", "## Diagnosis", "", *diagnosis_table(summary["diagnosis"])]
    for recipe, numbers in summary["runs"].items():
        lines += ["", f"## GRPO, {recipe}", "", *steps_table(numbers["steps"])]
        if (references := numbers["at_references"]) is not None:
            lines += ["", *paper_table(recipe, numbers["steps"], references)]
        if numbers["replays"]:
            rows = numbers["replays"]
            lines += [
                "",
                "Settings replayed on the run's dumps, each calibration judged on the next dump:",
                "",
                *replay_table(rows),
            ]
            for side, name in (("low", "lower bound, A < 0"), ("high", "upper bound, A > 0")):
                buckets = {setting: row["by_entropy"] for setting, row in rows.items()}
                lines += [
                    "",
                    f"At the {name}: share of the false clips, and false clips in 1,000 tokens of the bucket.",
                    "",
                ]
                lines += entropy_table(buckets, side=side)
    return "\n".join(lines)


def verdicts(recipe: str, numbers: Row) -> list[str]:
    """What of the paper does not show in a run, then what does, in sentences that follow from the numbers."""
    steps, references, replayed = numbers["steps"], numbers["at_references"], numbers["replays"]
    lines = []
    if (amplification := mean("nmae/amplification", steps)) is not None:
        lines.append(f"amplification is {amplification:.2f} (paper {PAPER_AMPLIFICATION.get(recipe, '-')}).")
    statuses = [(row["report"]["lower_status"], row["report"]["upper_status"]) for row in steps if row["report"]]
    if statuses:
        edges = [sum(status == "edge" for status in side) for side in zip(*statuses, strict=True)]
        held = [sum(status == "held" for status in side) for side in zip(*statuses, strict=True)]
        lines.append(
            f"of {len(statuses)} calibrations L was at the edge of its grid in {edges[0]} and held in {held[0]}, H at the edge "
            f"in {edges[1]} and held in {held[1]}."
        )
    if replayed:
        clips = {name: replayed[name]["clips"] for name in (FIXED, AS_RUN)}
        before, after = (multiple(one["lower8"], one["lower16"]) for one in clips.values())
        lines.append(
            f"FP8 / BF16 clips of A < 0 on the dumps that follow a calibration: {before} without it, {after} with it."
        )
    if references is not None:
        found = over_clipping(references)
        missed, lower = references["clips"].get("missed_clip/low"), found["lower"]
        lines.append(f"of the tokens with A < 0 that BF16 clips, FP8 keeps {_percent(missed)} at the same bound.")
        paper = PAPER_MULTIPLE.get(recipe, "-")
        lines.append(f"FP8 / BF16 clips at the references: {multiple(found['fp8'], found['bf16'])} (paper {paper}).")
        lines.append(f"{_percent(lower)} of the over-clipping is at the lower bound (paper about {PAPER_LOWER:.0%}).")
    if (right := mean("reward/right", steps)) is not None:
        differ = 1 - (mean("reward/equal_groups", steps) or 0.0)
        lines.append(f"{right:.1%} of the answers are right, and {differ:.0%} of the groups differ in reward.")
    return [f"- {recipe}: {line}" for line in lines]


def over_clipping(references: Row) -> Row:
    """FP8 clips over BF16 clips of both bounds, the lower bound's part of what is too many, and the parts of its false clips from
    tokens and from answers with an entropy above 1 nat; None where nothing is too many."""
    clips, (above, all_false) = references["clips"], references["answers"]
    fp8, bf16 = (
        {side: clips.get(f"clip_{name}/num_{side}", 0.0) for side in ("low", "high")} for name in ("fp8", "bf16")
    )
    excess = {side: fp8[side] - bf16[side] for side in fp8}
    low = [bucket[0] for bucket in references["by_entropy"]]
    return {
        "fp8": sum(fp8.values()),
        "bf16": sum(bf16.values()),
        "multiple": sum(fp8.values()) / sum(bf16.values()) if sum(bf16.values()) else None,
        "lower": excess["low"] / sum(excess.values()) if sum(excess.values()) > 0 else None,
        "tokens above 1": sum(low[NUM_BELOW_1:]) / sum(low) if sum(low) else None,
        "answers above 1": above / all_false if all_false else None,
    }


def paper_table(recipe: str, steps: Sequence[Row], references: Row) -> list[str]:
    """Measures that the paper gives, too."""
    found, clips = over_clipping(references), references["clips"]
    rows = {
        "FP8 / BF16 clips at the references, both bounds": (
            multiple(found["fp8"], found["bf16"]),
            PAPER_MULTIPLE.get(recipe),
        ),
        "the same, A < 0": (_multiple_of(clips, "low"), None),
        "the same, A > 0": (_multiple_of(clips, "high"), None),
        "over-clipping at the lower bound": (_percent(found["lower"]), f"about {PAPER_LOWER:.0%}, late in training"),
        "its false clips from tokens with entropy above 1.0": (_percent(found["tokens above 1"]), None),
        "its false clips from answers with entropy above 1.0": (
            _percent(found["answers above 1"]),
            f"nearly {PAPER_ENTROPY:.0%}, late in training",
        ),
        "FP8 clips what BF16 keeps, of A < 0": (_percent(clips.get("false_clip/low")), None),
        "FP8 keeps what BF16 clips, of A < 0": (_percent(clips.get("missed_clip/low")), None),
        "FP8 clips what BF16 keeps, of A > 0": (_percent(clips.get("false_clip/high")), None),
        "FP8 keeps what BF16 clips, of A > 0": (_percent(clips.get("missed_clip/high")), None),
        "amplification, mean of the steps (r = 1 in both in the first mini-batch)": (
            _number(mean("nmae/amplification", steps)),
            PAPER_AMPLIFICATION.get(recipe),
        ),
        "shadow passes, share of the run's time": (_percent(steps[-1].get("ledger/shadow_share")), None),
        "the same at an interval of 20": (_percent(at_interval(steps, 20)), "not given"),
    }
    lines = ["| all steps together | here | paper, another experiment |", "|---|---|---|"]
    return lines + [f"| {name} | {here} | {'' if paper is None else paper} |" for name, (here, paper) in rows.items()]


def at_interval(steps: Sequence[Row], interval: int) -> float | None:
    """Share of the time that shadow passes would take if one step in so many had them."""
    shadow, whole = steps[-1].get("ledger/shadow_seconds"), total("timing/step", steps)
    return None if shadow is None or whole <= shadow else shadow / interval / (whole - shadow + shadow / interval)


def _multiple_of(clips: Mapping[str, float], side: str) -> str:
    return multiple(clips.get(f"clip_fp8/num_{side}", 0), clips.get(f"clip_bf16/num_{side}", 0))


def diagnosis_table(report: Row) -> list[str]:
    """One row a recipe, for the largest update."""
    low, high = report["bounds"]
    update = [recipe["updates"][-1] for recipe in report["recipes"]]
    lines = [
        f"{report['num_sequences']} sampled answers, {report['num_tokens']} tokens, one update at learning rate "
        f"{update[0]['lr']:.2g}; clip range [{low:g}, {high:g}].",
        "",
        "| recipe | mean, p95 of abs(dlogp) | NMAE p | NMAE r | amplification | paper, another experiment | r outside | r <= L of A < 0 | r >= H of A > 0 |",
        "|---" * 9 + "|",
    ]
    bf16 = update[0]["bf16"]
    lines.append(f"| BF16 | | | | | | {_clip_cells(bf16)} |")
    for recipe, moved in zip(report["recipes"], update, strict=True):
        name, noise = recipe["recipe"], recipe["unmoved"]
        cells = (
            f"{noise['mean_abs_dlogp']:.3f}, {noise['p95_abs_dlogp']:.2f}",
            *(_percent(moved[key]) for key in ("nmae_p", "nmae_r")),
            _number(moved["amplification"]),
            str(PAPER_DIAGNOSED.get(name, "")),
            _clip_cells(moved["fp8"]),
        )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _clip_cells(shares: Row) -> str:
    return " | ".join(_percent(shares[name]) for name in ("outside", "low_negative", "high_positive"))


def steps_table(steps: Sequence[Row]) -> list[str]:
    """One row a step."""
    columns = {
        "reward": lambda row: _number(row.get("reward/mean")),
        "right": lambda row: _percent(row.get("reward/right")),
        "groups that differ": lambda row: _percent(1 - row["reward/equal_groups"]),
        "entropy": lambda row: _number(row.get("entropy")),
        "tokens": lambda row: _number(row.get("response/mean_length")),
        "clipped of A < 0": lambda row: _percent(row.get("clip_fp8/low")),
        "BF16 would": lambda row: _percent(row.get("clip_bf16/low")),
        "clipped of A > 0": lambda row: _percent(row.get("clip_fp8/high")),
        "BF16's": lambda row: _percent(row.get("clip_bf16/high")),
        "amplification": lambda row: _number(row.get("nmae/amplification")),
        "L": lambda row: _bound(row["report"], "lower"),
        "H": lambda row: _bound(row["report"], "upper"),
        "seconds": lambda row: _number(row.get("timing/step")),
    }
    lines = ["| step | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in steps:
        lines.append(f"| {row['step']} | " + " | ".join(make(row) for make in columns.values()) + " |")
    return [
        *lines,
        "",
        "FP8 clips at the bounds in force, BF16 at the references. L and H: before and after the step's calibration.",
    ]


def _bound(report: Row | None, side: str) -> str:
    if report is None:
        return "-"
    return f"{report[f'{side}_before']:.3g} to {report[f'{side}_after']:.3g}, {report[f'{side}_status']}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3g}%"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
