"""Calibrations repeated with other settings on the tokens that runs have dumped, and judged on the next dump.

What: for each setting the bounds it ends at, how often a bound was moved, held or at the edge of its grid, what its bounds clip
of tokens that did not choose them, and where its false clips lie by entropy; and the same for the reference bounds kept
throughout, which is what FP8 does without calibration. All counts are exact, and pooled over steps and seeds.

Left out on purpose: how training would have gone on under those bounds, which no dump can tell.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.overclip import (
    ATTRIBUTION_COUNTS,
    ENTROPY_EDGES,
    OverclipSums,
    PairedRatios,
    attribution_sums,
    no_attribution,
    overclip_sums,
)
from megatron_calclip.algorithms.replay import CalibrationDump, NextClips, replay
from megatron_calclip.commands.replay import AS_RUN, load_dumps, variants

Row = dict[str, Any]

FIXED = "no calibration: the references"
"""Name of the row whose bounds never move."""
SIDES = {"low": "lower", "high": "upper"}


def replays(folders: Sequence[Path], entries: Sequence[Sequence[str]]) -> dict[str, Row]:
    """Every setting on the same tokens.

    Args:
        folders: runs of one configuration, with dumps.
        entries: changes that go together, as `megatron-calclip replay --set` takes them, `preset=...` among them.

    Returns:
        rows by the setting's name: `FIXED`, the run's own settings, then the entries'. A row has `clips` (the fields of
        `NextClips`), `lower` and `upper` (bounds at the end, one for each run), `lower_statuses` and `upper_statuses`
        (calibrations by status), and `by_entropy` (counts by bucket, columns `ATTRIBUTION_COUNTS`).
    """
    found: dict[str, Row] = {}
    for folder in folders:
        dumps = load_dumps([folder])
        _add(found, FIXED, dumps, [dumps[0].settings.reference] * (len(dumps) - 1))
        settings = {AS_RUN: dumps[0].settings}
        for entry in entries:
            presets = [name for one in entry if one.startswith("preset=") for name in one[len("preset=") :].split(",")]
            changes = [one for one in entry if not one.startswith("preset=")]
            settings |= variants(dumps[0].settings, presets, changes)
        for name, setting in settings.items():
            result = replay(dumps, setting)
            row = _add(found, name, dumps, [report.after for report in result.reports[:-1]])
            for side in SIDES.values():
                bounds = [getattr(report, side) for report in result.reports]
                row[side].append(bounds[-1].after)
                for bound in bounds:
                    row[f"{side}_statuses"][bound.status] = row[f"{side}_statuses"].get(bound.status, 0) + 1
    return found


def _add(found: dict[str, Row], name: str, dumps: Sequence[CalibrationDump], bounds: Sequence[ClipBounds]) -> Row:
    """Judge the bounds after each calibration but the last on the dump that follows; returns the setting's row."""
    empty: Row = {"clips": NextClips()._asdict(), "by_entropy": no_attribution(ENTROPY_EDGES).tolist()}
    empty |= {key: [] for key in SIDES.values()} | {f"{key}_statuses": {} for key in SIDES.values()}
    row = found.setdefault(name, empty)
    for dump, after in zip(dumps[1:], bounds, strict=True):
        clips = NextClips.of(dump, after, dump.settings.reference)._asdict()
        row["clips"] = {key: row["clips"][key] + count for key, count in clips.items()}
        row["by_entropy"] = (torch.tensor(row["by_entropy"]) + by_entropy(dump, after)).tolist()
    return row


def pairs_of(dump: CalibrationDump, bounds: ClipBounds) -> PairedRatios:
    """A dump's tokens, FP8 clipped with these bounds and BF16 with the references."""
    everywhere = torch.ones(dump.num_tokens, dtype=torch.bool)
    return PairedRatios(dump.ratio8, dump.ratio16, dump.advantages, everywhere, bounds, dump.settings.reference)


def by_entropy(dump: CalibrationDump, bounds: ClipBounds) -> Tensor:
    """int64 [len(ENTROPY_EDGES) + 1, len(ATTRIBUTION_COUNTS)]: where the bounds' false clips lie."""
    return attribution_sums(pairs_of(dump, bounds), dump.entropy.float(), edges=ENTROPY_EDGES)


def at_references(folders: Sequence[Path]) -> Row:
    """What FP8 clips at the reference bounds, on all dumps of some runs.

    Returns:
        `clips`: metrics of `OverclipSums.finalize`; `by_entropy` as in `replays`; `answers`: false clips at the lower bound by
        the mean entropy of their answer, above 1 nat and in all.
    """
    sums, attribution, answers = OverclipSums.empty(), no_attribution(ENTROPY_EDGES), torch.zeros(2, dtype=torch.int64)
    for dump in (dump for folder in folders for dump in load_dumps([folder])):
        reference = dump.settings.reference
        pairs = pairs_of(dump, reference)
        sums = sums.merge(overclip_sums(pairs, weights=dump.importance_weights))
        attribution += by_entropy(dump, reference)
        rows = torch.arange(dump.lengths.numel()).repeat_interleave(dump.lengths)
        entropy = torch.zeros(dump.lengths.numel()).index_add_(0, rows, dump.entropy.float()) / dump.lengths
        fp8, bf16 = pairs.clipped()
        false = fp8.low & ~bf16.low
        answers += torch.stack([(false & (entropy[rows] > 1.0)).sum(), false.sum()])
    return {"clips": sums.finalize(), "by_entropy": attribution.tolist(), "answers": answers.tolist()}


def entropy_table(rows: dict[str, list[list[int]]], *, side: str) -> list[str]:
    """Markdown: for each row the share of its false clips in each bucket, and how many in 1,000 tokens of the bucket. Rows of equal
    counts are one.

    Args:
        rows: counts by bucket (`by_entropy`) by name.
        side: `low` or `high`.
    """
    limits = ["", *(f"{edge:g}" for edge in ENTROPY_EDGES), ""]
    names = [
        f"< {high}" if not low else f">= {low}" if not high else f"{low} to {high}"
        for low, high in itertools.pairwise(limits)
    ]
    lines = ["| false clips by entropy, nats | " + " | ".join(names) + " | all |", "|---" * (len(names) + 2) + "|"]
    false_name, tokens_name = {"low": ("false_low", "negative"), "high": ("false_high", "positive")}[side]
    false_column, tokens_column = ATTRIBUTION_COUNTS.index(false_name), ATTRIBUTION_COUNTS.index(tokens_name)
    names_of: dict[tuple[tuple[int, int], ...], list[str]] = {}
    for name, buckets in rows.items():
        names_of.setdefault(tuple((one[false_column], one[tokens_column]) for one in buckets), []).append(name)
    for counts, equal in names_of.items():
        total, tokens = (sum(column) for column in zip(*counts, strict=True))
        cells = [f"{false / total:.0%}, {per_1000(false, of)}" if total else "-" for false, of in counts]
        lines.append(f"| {'; '.join(equal)} | " + " | ".join(cells) + f" | {total}, {per_1000(total, tokens)} |")
    return lines


def per_1000(count: int, of: int) -> str:
    """A count in 1,000; `-` of none."""
    rate = 1000 * count / of if of else None
    return "-" if rate is None else f"{rate:.0f}‰" if rate >= 100 else f"{rate:.3g}‰"


def replay_table(rows: dict[str, Row]) -> list[str]:
    """Markdown: a row for each setting."""
    lines = [
        "| setting | L, end | its calibrations | FP8 / BF16 clips of A < 0 | false | H, end | its calibrations | FP8 / BF16 clips of A > 0 | false |",
        "|---" * 9 + "|",
    ]
    for name, row in rows.items():
        cells = [name]
        for side in SIDES.values():
            clips = row["clips"]
            cells += [
                ", ".join(f"{value:.2f}" for value in row[side]) or "-",
                ", ".join(f"{count} {status}" for status, count in sorted(row[f"{side}_statuses"].items())) or "-",
                multiple(clips[f"{side}8"], clips[f"{side}16"]),
                per_1000(clips[f"{side}_false"], clips[f"{side}_kept16"]),
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def multiple(fp8: float, bf16: float) -> str:
    """FP8 clips over BF16 clips, with the counts."""
    quotient = f"{fp8 / bf16:.2f}" if bf16 else "-"
    return f"{quotient} ({fp8:.0f} / {bf16:.0f})"
