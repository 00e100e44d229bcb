"""Where a run's false clips come from: counts of `calibration.jsonl` by bucket of a covariate, pooled over measured steps.

What: for each run and bound the part of all false clips that lies in a bucket (its share), and how many of the bucket's own
tokens are clipped falsely (its rate). Both are needed: a bucket with most of the false clips may just have most of the tokens.
Counts are added over steps before they are divided. Files of older versions say of no bucket how many tokens it has: such steps
count in shares and not in rates.

Left out on purpose: how it is shown (`report_tables`, `report_plots`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_calclip.report_data import Run, mapping, number

Side = Literal["low", "high"]

COVARIATES = {
    "entropy": "entropy, nats",
    "probability": "probability",
    "position": "position, tokens",
    "length": "response length, tokens",
}
"""Name in the files -> name for readers."""
_TOKENS: dict[Side, str] = {"low": "num_negative", "high": "num_positive"}
"""Columns of the tokens that each bound can clip."""


@dataclass
class Counts:
    """Tokens of one bucket at one bound, over the steps that were measured."""

    false_clips: int = 0
    """FP8 clips, BF16 keeps."""
    counted_false_clips: int = 0
    """Those of steps that say of how many tokens."""
    tokens: int = 0
    """Tokens that the bound can clip, in those steps."""

    @property
    def rate(self) -> float | None:
        """False clips over tokens; None where no step tells."""
        return self.counted_false_clips / self.tokens if self.tokens else None

    def add(self, other: Counts) -> None:
        """Add another bucket's, or another step's."""
        self.false_clips += other.false_clips
        self.counted_false_clips += other.counted_false_clips
        self.tokens += other.tokens


@dataclass(frozen=True)
class BoundCounts:
    """One run at one bound."""

    run: int
    """Index of the run."""
    side: Side
    """`low`: the lower bound, which clips tokens with A < 0; `high`: the upper one, A > 0."""
    by_bucket: dict[tuple[float, float], Counts] = field(default_factory=dict)

    def counts(self, bucket: tuple[float, float]) -> Counts:
        """Those of a bucket; zeros where the run has none."""
        return self.by_bucket.get(bucket, Counts())

    @property
    def total(self) -> Counts:
        """All buckets together."""
        total = Counts()
        for counts in self.by_bucket.values():
            total.add(counts)
        return total


@dataclass(frozen=True)
class Attribution:
    """False clips of some runs by one covariate."""

    covariate: str
    """Key of `COVARIATES`."""
    buckets: tuple[tuple[float, float], ...]
    """lower <= covariate < upper, ascending; those that hold a token."""
    bounds: tuple[BoundCounts, ...]
    """Runs and bounds that have a false clip, in the runs' order, the lower bound first."""

    @property
    def title(self) -> str:
        """For readers."""
        return f"False clips by {COVARIATES[self.covariate]}"


def attributions(runs: Sequence[Run]) -> list[Attribution]:
    """One for each covariate that tells tokens apart (two buckets at least) and has a false clip."""
    found = (_attribution(runs, covariate) for covariate in COVARIATES)
    return [one for one in found if one.bounds and len(one.buckets) > 1]


def _attribution(runs: Sequence[Run], covariate: str) -> Attribution:
    bounds: dict[tuple[int, Side], BoundCounts] = {}
    for index, run in enumerate(runs):
        for row in run.calibrations:
            lines = mapping(row.get("attribution")).get(covariate)
            for line in map(mapping, lines if isinstance(lines, list) else ()):
                if _is_empty(line):
                    continue
                for side in _TOKENS:
                    counted = bounds.setdefault((index, side), BoundCounts(index, side))
                    counted.by_bucket.setdefault(_bucket(line), Counts()).add(_counts(line, side))
    buckets = {bucket for counted in bounds.values() for bucket in counted.by_bucket}
    shown = tuple(counted for counted in bounds.values() if counted.total.false_clips)
    return Attribution(covariate, tuple(sorted(buckets)), shown)


def _is_empty(line: Mapping[str, Any]) -> bool:
    """Whether no token lies in a step's bucket; files of older versions tell only by their rates."""
    has_tokens = any(number(line.get(name)) for name in _TOKENS.values())
    return not has_tokens and all(number(line.get(name)) is None for name in ("rate_low", "rate_high"))


def _bucket(line: Mapping[str, Any]) -> tuple[float, float]:
    """Its limits; infinities are null in the files."""
    lower, upper = number(line.get("lower")), number(line.get("upper"))
    return -math.inf if lower is None else lower, math.inf if upper is None else upper


def _counts(line: Mapping[str, Any], side: Side) -> Counts:
    false_clips = int(number(line.get(f"num_{side}")) or 0)
    tokens = number(line.get(_TOKENS[side]))
    return Counts(false_clips, *((false_clips, int(tokens)) if tokens is not None else (0, 0)))


def bucket_name(bucket: tuple[float, float]) -> str:
    """A bucket's limits as text."""
    lower, upper = bucket
    if math.isinf(lower):
        return f"< {upper:g}"
    return f"≥ {lower:g}" if math.isinf(upper) else f"{lower:g} to {upper:g}"
