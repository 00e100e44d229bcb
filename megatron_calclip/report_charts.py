"""Which curves a report shows, and their points.

What: one table of charts by section; a chart is a metric over the steps with a line for each run. Clip bounds come with every
calibration's choice and interval from `calibration.jsonl`, held-out scores with their standard error. How charts are drawn is
left to `report_svg` and `report_plots`. Rewards of a run's own and several evaluation sets add charts of their own.

Left out on purpose: smoothing and means over seeds. A reader sees what was logged; a study that compares arms has to say how
(`examples/study`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_calclip.metrics import METRICS
from megatron_calclip.report_data import Point, Run, number

Form = Literal["number", "percent"]


@dataclass(frozen=True)
class Bar:
    """An interval at a step."""

    step: int
    low: float
    high: float


@dataclass(frozen=True)
class Mark:
    """A calibration's choice at a step."""

    step: int
    value: float
    status: str
    """`moved`, `unchanged`, `edge` or `held` (`algorithms.calibration_report.Status`)."""


@dataclass(frozen=True)
class Line:
    """What one run adds to a chart."""

    run: int
    """Index of the run."""
    points: tuple[Point, ...]
    bars: tuple[Bar, ...] = ()
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True)
class Chart:
    """A plot over the steps."""

    key: str
    """Names its files."""
    title: str
    description: str
    lines: tuple[Line, ...]
    form: Form = "number"
    """How values are written."""
    reference: float | None = None
    """A value to compare with, drawn across."""
    stairs: bool = False
    """The value holds until the next one."""
    log: bool = False
    """Logarithmic axis; values that are not positive are gaps."""


_MAX_CHOICES = 40
"""Calibrations of a line that are drawn."""


def shown_choices(line: Line) -> tuple[tuple[Bar, ...], tuple[Mark, ...]]:
    """Intervals and marks to draw: of many calibrations every n-th, back from the last. Evaluations have no marks, and stay."""
    every = -(-len(line.marks) // _MAX_CHOICES) or 1
    marks = line.marks[::-1][::every][::-1]
    steps = {mark.step for mark in marks}
    return tuple(bar for bar in line.bars if not marks or bar.step in steps), marks


@dataclass(frozen=True)
class Section:
    """Charts that belong together."""

    key: str
    title: str
    charts: tuple[Chart, ...]


@dataclass(frozen=True)
class _Spec:
    metric: str
    title: str
    form: Form = "number"
    reference: float | None = None
    log: bool = False
    spread: str | None = None
    """A metric to draw as an interval of plus and minus itself."""
    meaning: str | None = None
    """Where that of METRICS leans on the entry before it."""


_ALIGNED = 1.0
"""Of a multiple: FP8 clips as often as BF16."""

_SECTIONS: dict[str, tuple[str, tuple[_Spec, ...]]] = {
    "learning": (
        "Learning",
        (
            _Spec("reward/mean", "Reward"),
            _Spec("eval/score", "Held-out score", spread="eval/stderr"),
            _Spec("entropy", "Entropy"),
            _Spec("response/mean_length", "Response length"),
            _Spec("grad_norm", "Gradient norm", log=True),
            _Spec("kl/k3", "Step of the policy"),
        ),
    ),
    "clipping": (
        "Clipping",
        (
            _Spec("clip/low_negative", "Clipped at L, A < 0", form="percent"),
            _Spec("clip/high_positive", "Clipped at H, A > 0", form="percent"),
            _Spec("ratio/min", "Smallest ratio", log=True, meaning="smallest pi_theta / pi_old"),
            _Spec("ratio/max", "Largest ratio", log=True, meaning="largest pi_theta / pi_old"),
        ),
    ),
    "overclip": (
        "FP8 against BF16",
        (
            _Spec("overclip/low", "Over-clip multiple at L", reference=_ALIGNED),
            _Spec("overclip/high", "Over-clip multiple at H", reference=_ALIGNED),
            _Spec("false_clip/low", "False clips at L", form="percent"),
            _Spec("false_clip/high", "False clips at H", form="percent"),
            _Spec(
                "lost_penalty/share",
                "Lost penalty",
                form="percent",
                meaning="part of BF16's push on A < 0 tokens (w |A| r16) that only FP8 clips",
            ),
            _Spec("nmae/ratio", "Error of the ratio"),
            _Spec("nmae/probability", "Error of the probability"),
            _Spec("nmae/amplification", "Amplification", reference=1.0),
        ),
    ),
    "mismatch": (
        "Sampler against learner",
        (
            _Spec("mismatch/mean_abs_dlogp", "Mismatch"),
            _Spec("mismatch/token_mult_prob_error", "Multiplicative error"),
            _Spec("mismatch/outliers", "Outliers"),
            _Spec("importance/truncated", "Truncated importance weights", form="percent"),
            _Spec("importance/ess", "Effective sample size"),
            _Spec("canary/mean_abs_dlogp", "Canary"),
        ),
    ),
    "cost": (
        "Cost",
        (
            _Spec("ledger/shadow_share", "Calibration's share of time", form="percent"),
            _Spec("ledger/flops_share", "Shadow passes' share of work", form="percent"),
            _Spec("timing/step", "Time of a step"),
            _Spec("throughput/tokens_per_s", "Throughput"),
        ),
    ),
}
_OWN = {
    "reward": re.compile(r"reward/([^/]+)"),
    "eval": re.compile(r"eval/([^/]+)/score"),
}
"""Names that a run's own rewards and evaluation sets bring along (`metrics.is_known`)."""


def sections(runs: Sequence[Run]) -> tuple[tuple[Section, ...], tuple[str, ...]]:
    """All charts of some runs.

    Returns:
        The sections, without charts that would be empty; and the titles of those.
    """
    built, absent = [], []
    for key, (title, specs) in _SECTIONS.items():
        charts = [_chart(spec, runs) for spec in specs]
        if key == "learning":
            charts += [_chart(spec, runs) for spec in _own_specs(runs)]
        if key == "clipping":
            charts = [_bound_chart("lower", "L", runs), _bound_chart("upper", "H", runs), *charts]
        absent += [chart.title for chart in charts if _is_empty(chart)]
        built.append(Section(key, title, tuple(chart for chart in charts if not _is_empty(chart))))
    return tuple(built), tuple(absent)


def _is_empty(chart: Chart) -> bool:
    values = (value for line in chart.lines for _, value in line.points)
    return not any(value is not None and (value > 0 or not chart.log) for value in values)


def _own_specs(runs: Sequence[Run]) -> list[_Spec]:
    """Charts of names that are not in METRICS."""
    names = sorted({name for run in runs for row in run.rows for name in row if name not in METRICS})
    specs = []
    for kind, title in (("reward", "Reward: {}"), ("eval", "Held-out score: {}")):
        own = [(name, found[1]) for name in names if (found := _OWN[kind].fullmatch(name))]
        specs += [_Spec(name, title.format(short)) for name, short in own]
    return specs


def _chart(spec: _Spec, runs: Sequence[Run]) -> Chart:
    known = METRICS.get(spec.metric)
    meaning = spec.meaning or (known.meaning if known else "")
    return Chart(
        key=re.sub(r"[^A-Za-z0-9]+", "_", spec.metric),
        title=spec.title,
        description=f"{spec.metric}: {meaning}" if meaning else spec.metric,
        lines=tuple(
            Line(index, points, bars=_spread(run, spec))
            for index, run in enumerate(runs)
            if (points := run.points(spec.metric))
        ),
        form=spec.form,
        reference=spec.reference,
        log=spec.log,
    )


def _spread(run: Run, spec: _Spec) -> tuple[Bar, ...]:
    if spec.spread is None:
        return ()
    middle = dict(run.points(spec.metric))
    return tuple(
        Bar(step, value - half, value + half)
        for step, half in run.points(spec.spread)
        if half is not None and (value := middle.get(step)) is not None
    )


def _bound_chart(side: Literal["lower", "upper"], letter: str, runs: Sequence[Run]) -> Chart:
    lines = []
    for index, run in enumerate(runs):
        bars, marks = [], []
        for row in run.calibrations:
            report, step = row.get("report"), int(row["step"])
            if not isinstance(report, dict) or (choice := number(report.get(f"{side}_choice"))) is None:
                continue
            marks.append(Mark(step, choice, str(report.get(f"{side}_status"))))
            low, high = number(report.get(f"{side}_choice_low")), number(report.get(f"{side}_choice_high"))
            if low is not None and high is not None:
                bars.append(Bar(step, low, high))
        if points := run.points(f"clip/{side}"):
            lines.append(Line(index, points, bars=tuple(bars), marks=tuple(marks)))
    return Chart(
        key=f"bound_{side}",
        title=f"{'Lower' if side == 'lower' else 'Upper'} bound {letter}",
        description=f"Line: {letter} in force. Points: each calibration's choice {letter}* with its bootstrap interval; "
        "triangle: at the edge of the grid, cross: held. Of many, every n-th.",
        lines=tuple(lines),
        stairs=True,
    )
