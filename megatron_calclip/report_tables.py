"""The tables of a report, as plain cells.

What: counts are pooled over a run's measured steps before they are divided, never means of shares. Over-clipping and false
clips follow from the counts that every measured step logs (`algorithms.overclip`):

    FP8 only  = clipped by FP8 - clipped by both        both = clipped by BF16 x (1 - missed)

Where false clips lie is counted in `report_attribution`; tables of settings are in `report_settings`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_calclip import report_attribution
from megatron_calclip.report_attribution import Attribution, Counts, bucket_name
from megatron_calclip.report_data import Run, mapping, number

NONE = "-"
"""Shown for what a run has not."""
_WINDOW, _WINDOW_SHARE = 10, 4
"""Start and end of a run are means over a quarter of its steps, at most ten."""
_STAGES = ("rollout", "reward", "log_probs", "update", "sync", "eval", "checkpoint")


@dataclass(frozen=True)
class Cell:
    """A cell that is shaded by a share in [0, 1]."""

    text: str
    shade: float
    detail: str = ""
    """Smaller, on a line of its own."""


@dataclass(frozen=True)
class Row:
    """Cells of a run, or of none in particular."""

    run: int | None
    """Its index: the row starts with its name and hides with it."""
    cells: tuple[str | Cell, ...]


@dataclass(frozen=True)
class Table:
    """A table of a report."""

    title: str
    note: str
    columns: tuple[str | int, ...]
    """Titles, without that of the rows' runs; an index stands for the run whose column it is."""
    rows: tuple[Row, ...]


def summary(runs: Sequence[Run]) -> Table:
    """One column a run: where it began and ended, what the clip did, what calibration cost."""
    lines: dict[str, Callable[[Run], str]] = {
        "steps": _steps,
        "reward": lambda run: _from_to(run, "reward/mean"),
        "held-out score": _scores,
        "entropy": lambda run: _from_to(run, "entropy"),
        "length": lambda run: _from_to(run, "response/mean_length"),
        "clipped at L, A < 0": lambda run: _mean(run, "clip/low_negative"),
        "clipped at H, A > 0": lambda run: _mean(run, "clip/high_positive"),
        "over-clip L": lambda run: _multiple(_clips(run, "low")),
        "over-clip H": lambda run: _multiple(_clips(run, "high")),
        "amplification": lambda run: _number(_median(run, "nmae/amplification"), ".2f"),
        "last bounds": _last_bounds,
        "calibration's time": lambda run: _number(_last(run, "ledger/shadow_share"), ".1%"),
        "s/step": lambda run: _number(_median(run, "timing/step"), ".3g"),
        "skipped updates": lambda run: _number(sum(run.values("updates/skipped")), ".0f"),
        "alarms": lambda run: _number(sum(run.values("alarm/entropy")) + sum(run.values("alarm/loss")), ".0f"),
    }
    return Table(
        title="Summary",
        note="Reward, entropy and length: mean over the first and over the last steps (a quarter of the run, at most ten). "
        "Clipped: mean over the steps. Over-clip: tokens that FP8 clips over tokens that BF16 clips at the reference, all "
        "measured steps together; 1 is the aim. Amplification and seconds: median.",
        columns=("", *range(len(runs))),
        rows=tuple(Row(None, (name, *map(make, runs))) for name, make in lines.items()),
    )


def evaluations(runs: Sequence[Run]) -> Table:
    """First and last evaluation of every set, with intervals."""
    chosen = [(index, one) for index, run in enumerate(runs) for one in run.evaluations[:1] + run.evaluations[1:][-1:]]
    names = dict.fromkeys(name for _, one in chosen for estimates in one.sets.values() for name in estimates)
    return Table(
        title="Evaluations",
        note="First and last of each run, with 95% intervals over problems.",
        columns=("step", "set", *names),
        rows=tuple(
            Row(index, (str(one.step), name, *(_estimate(mapping(estimates.get(column)), column) for column in names)))
            for index, one in chosen
            for name, estimates in one.sets.items()
        ),
    )


def overclip(runs: Sequence[Run]) -> Table:
    """What FP8 clips and BF16 does not, and the reverse, pooled over measured steps."""
    rows = []
    for index, run in enumerate(runs):
        for side, name in (("low", "L, A < 0"), ("high", "H, A > 0")):
            clips = _clips(run, side)
            if not clips.num_steps:
                continue
            false, missed = clips.fp8 - clips.both, clips.bf16 - clips.both
            rows.append(
                Row(
                    index,
                    (
                        name,
                        str(clips.num_steps),
                        f"{clips.fp8:,}",
                        f"{clips.bf16:,}",
                        _multiple(clips),
                        f"{false:,}",
                        f"{false / clips.fp8:.0%}" if clips.fp8 else NONE,
                        f"{missed:,}",
                        f"{missed / clips.bf16:.0%}" if clips.bf16 else NONE,
                    ),
                )
            )
    return Table(
        title="Over-clipping",
        note="Tokens of all measured steps. FP8 clips at the bounds in force, BF16 at the references. False: FP8 clips what BF16 "
        "keeps; missed: FP8 keeps what BF16 clips. Bounds match how many tokens are clipped, not which.",
        columns=("bound", "measured steps", "FP8", "BF16", "multiple", "false", "of FP8's", "missed", "of BF16's"),
        rows=tuple(rows),
    )


def attributions(runs: Sequence[Run]) -> list[Table]:
    """Where false clips come from: a table for each covariate whose buckets tell tokens apart; without false clips, none."""
    return [_attribution(found) for found in report_attribution.attributions(runs)]


def _attribution(found: Attribution) -> Table:
    rows = []
    for bound in found.bounds:
        total = bound.total
        cells = []
        for bucket in found.buckets:
            counts = bound.counts(bucket)
            share = counts.false_clips / total.false_clips
            cells.append(Cell(f"{share:.0%}", share, _per_1000(counts)))
        whole = Cell(f"{total.false_clips:,}", 0.0, _per_1000(total))
        rows.append(Row(bound.run, ("L" if bound.side == "low" else "H", *cells, whole)))
    return Table(
        title=found.title,
        note="Part of all false clips. ‰: false clips in 1,000 tokens of the bucket (of A < 0 at L, of A > 0 at H).",
        columns=("bound", *map(bucket_name, found.buckets), "false clips"),
        rows=tuple(rows),
    )


def _per_1000(counts: Counts) -> str:
    if counts.rate is None:
        return ""
    rate = 1000 * counts.rate
    return f"{rate:.0f}‰" if rate >= 100 else f"{rate:.3g}‰"


def calibrations(run: Run) -> Table:
    """Every calibration of a run."""
    rows = []
    for line in run.calibrations:
        report = mapping(line.get("report"))
        if not report:
            continue
        rows.append(Row(None, (str(line["step"]), *_bound(report, "lower", "alpha"), *_bound(report, "upper"))))
    return Table(
        title=f"Calibrations of {run.label}",
        note="* the choice before smoothing, with its bootstrap interval. Alpha: share of A < 0 tokens that BF16 clips at the "
        "lower reference. Multiple: FP8 over BF16 clips, both at the reference.",
        columns=tuple(
            ["step", "L", "L*", "status", "multiple", "alpha", "why", "H", "H*", "status", "multiple", "why"],
        ),
        rows=tuple(rows),
    )


def _bound(report: Any, side: str, share: str | None = None) -> list[str]:
    def value(name: str) -> float | None:
        return number(report.get(name))

    before, after = value(f"{side}_before"), value(f"{side}_after")
    moved = "" if before == after else f"{_number(before, '.4g')} → "
    choice = _number(value(f"{side}_choice"), ".4g")
    interval = _interval(value(f"{side}_choice_low"), value(f"{side}_choice_high"), ".4g")
    cells = [f"{moved}{_number(after, '.4g')}", choice + interval, str(report.get(f"{side}_status", NONE))]
    cells.append(_number(value(f"{side}_overclip_multiple"), ".2f"))
    if share is not None:
        cells.append(_number(value(share), ".2%") + _interval(value(f"{share}_low"), value(f"{share}_high"), ".2%"))
    return [*cells, str(report.get(f"{side}_reason") or "")]


def timing(runs: Sequence[Run]) -> Table:
    """Where the time of a step goes."""
    stages = [stage for stage in _STAGES if any(run.values(f"timing/{stage}") for run in runs)]
    rows = []
    for index, run in enumerate(runs):
        whole = math.fsum(run.values("timing/step"))
        if not whole:
            continue
        shares = (math.fsum(run.values(f"timing/{stage}")) / whole for stage in stages)
        cells = (Cell(f"{share:.1%}", min(share, 1.0)) for share in shares)
        rows.append(Row(index, (_number(whole, ",.0f"), *cells, _number(_last(run, "ledger/shadow_seconds"), ",.1f"))))
    return Table(
        title="Time",
        note="Seconds of all logged steps on rank 0, and the share of each stage. Shadow passes lie within stages.",
        columns=("seconds", *stages, "calibration, s"),
        rows=tuple(rows),
    )


@dataclass(frozen=True)
class _Clips:
    """Tokens that the clip took, over a run's measured steps."""

    num_steps: int
    fp8: int
    bf16: int
    both: int


def _clips(run: Run, side: str) -> _Clips:
    num_steps = fp8 = bf16 = both = 0
    for row in run.rows:
        by_fp8, by_bf16 = number(row.get(f"clip_fp8/num_{side}")), number(row.get(f"clip_bf16/num_{side}"))
        if by_fp8 is None or by_bf16 is None:
            continue
        # Without a clip of BF16 the share that FP8 misses is undefined, and not logged.
        missed = number(row.get(f"missed_clip/{side}")) or 0.0
        num_steps += 1
        fp8, bf16, both = fp8 + round(by_fp8), bf16 + round(by_bf16), both + round(by_bf16 * (1 - missed))
    return _Clips(num_steps, fp8, bf16, both)


def _multiple(clips: _Clips) -> str:
    if clips.bf16:
        return f"{clips.fp8 / clips.bf16:.2f}"
    return f"{clips.fp8:,} / 0" if clips.fp8 else NONE


def _steps(run: Run) -> str:
    planned = run.config.get("train.num_steps")
    return str(run.num_steps) if planned in (None, str(run.num_steps)) else f"{run.num_steps} of {planned}"


def _from_to(run: Run, name: str) -> str:
    values = run.values(name)
    if not values:
        return NONE
    window = max(1, min(_WINDOW, len(values) // _WINDOW_SHARE))
    start, end = statistics.fmean(values[:window]), statistics.fmean(values[-window:])
    return f"{start:.3g} → {end:.3g}"


def _scores(run: Run) -> str:
    spread = dict(run.points("eval/stderr"))
    scores = [(value, spread.get(step)) for step, value in run.points("eval/score") if value is not None]
    shown = [f"{value:.3f}" + (f" ± {half:.3f}" if half is not None else "") for value, half in scores]
    return " → ".join(shown[:1] + shown[1:][-1:]) or NONE


def _last_bounds(run: Run) -> str:
    lower, upper = _last(run, "calibration/lower_after"), _last(run, "calibration/upper_after")
    if lower is None or upper is None:
        lower, upper = _last(run, "clip/lower"), _last(run, "clip/upper")
    return NONE if lower is None or upper is None else f"[{lower:.4g}, {upper:.4g}]"


def _mean(run: Run, name: str) -> str:
    values = run.values(name)
    return f"{statistics.fmean(values):.2%}" if values else NONE


def _median(run: Run, name: str) -> float | None:
    values = run.values(name)
    return statistics.median(values) if values else None


def _last(run: Run, name: str) -> float | None:
    return next(reversed(run.values(name)), None)


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else f"{value:{form}}"


def _interval(low: float | None, high: float | None, form: str) -> str:
    return "" if low is None or high is None else f" ({low:{form}} to {high:{form}})"


def _estimate(estimate: Any, name: str) -> str:
    value = number(estimate.get("value"))
    form = ".1f" if name == "response_length" else ".1%"
    return _number(value, form) + _interval(number(estimate.get("low")), number(estimate.get("high")), form)
