"""A chart as inline SVG: small, sharp at any size, in the colours of the page around it.

What: shapes only; strokes and fonts are the page's style sheet (`STYLE`), so that light and dark need one drawing. Each run is
a group of class `r<index>`, which the page's legend can hide. A line of many steps is drawn as the mean of each stretch of them,
within a band from the smallest to the largest value, so that a spike of one step is still seen.

Left out on purpose: anything that needs a script. Files for slides and papers come from `report_plots`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from megatron_calclip.html_page import text
from megatron_calclip.report_axes import NUM_TICKS, Axis, tick_labels, ticks, value_range, value_ticks
from megatron_calclip.report_charts import Chart, Line, Mark, shown_choices
from megatron_calclip.report_data import Point
from megatron_calclip.report_style import dash

STYLE = """
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font: 11px system-ui, sans-serif; font-variant-numeric: tabular-nums; fill: var(--soft); }
svg .end { text-anchor: end; } svg .middle { text-anchor: middle; }
svg .grid { stroke: var(--line); } svg .reference { stroke: var(--soft); stroke-dasharray: 2 3; }
svg .line { fill: none; stroke: var(--c); stroke-width: 1.7; stroke-linejoin: round; stroke-linecap: round; }
svg .dots { fill: none; stroke: var(--c); stroke-width: 4.5; stroke-linecap: round; }
svg .bars { fill: none; stroke: var(--c); opacity: .45; stroke-width: 1.3; }
svg .band { fill: var(--c); opacity: .18; }
svg .edge { fill: var(--c); } svg .held { fill: none; stroke: var(--c); stroke-width: 1.5; }
""".strip()

_WIDTH, _HEIGHT = 360, 190
_TOP, _BOTTOM, _RIGHT = 8, 22, 12
_CHARACTER = 6.3
"""Pixels of a digit at most."""
MAX_POINTS = 300
"""Of a line, one by one: about as many as can be told apart."""
MAX_DOTS = 30
"""Lines of more points are drawn without dots."""
_NEW_POINT = "h0"
"""A line of no length, which round ends make a dot."""


def draw(chart: Chart, labels: Sequence[str], *, steps: tuple[float, float]) -> str:
    """The drawing as an `svg` element.

    Args:
        chart: with at least one value.
        labels: of all runs.
        steps: range of the horizontal axis.
    """
    low, high = value_range(chart)
    values, names = value_ticks(chart, low, high)
    left = 8 + _CHARACTER * max(map(len, names))
    x = Axis(*steps, start=left, end=_WIDTH - _RIGHT)
    y = Axis(low, high, start=_HEIGHT - _BOTTOM, end=_TOP, log=chart.log)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{text(chart.title)}">']
    for value, name in zip(values, names, strict=True):
        place = _pixel(y(value))
        parts.append(f'<path class="grid" d="M{_pixel(left)} {place}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text class="end" x="{_pixel(left - 5)}" y="{_pixel(y(value) + 4)}">{name}</text>')
    whole = [value for value in ticks(*steps, count=NUM_TICKS) if value == int(value) and value >= 0]
    for value, name in zip(whole, tick_labels(whole, form="number"), strict=True):
        parts.append(f'<text class="middle" x="{_pixel(x(value))}" y="{_HEIGHT - 6}">{name}</text>')
    if chart.reference is not None:
        parts.append(f'<path class="reference" d="M{_pixel(left)} {_pixel(y(chart.reference))}H{_WIDTH - _RIGHT}"/>')
    parts += [_line(chart, line, labels[line.run], x, y) for line in chart.lines]
    return "".join([*parts, "</svg>"])


@dataclass(frozen=True)
class Stretch:
    """Consecutive points of a line."""

    step: float
    """Their middle."""
    values: tuple[float, float, float] | None
    """The smallest, their mean, the largest; None where one was not finite."""


def stretches(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Stretch]:
    """Points as they are, or where there are too many, stretches of about equally many.

    Args:
        points: ascending in their steps.
        limit: most points that stay as they are; half as many stretches are made of more.
    """
    count = len(points) if len(points) <= limit else limit // 2
    edges = [index * len(points) // count for index in range(count + 1)]
    found = []
    for start, end in pairwise(edges):
        part = points[start:end]
        values = [value for _, value in part if value is not None]
        middle = (part[0][0] + part[-1][0]) / 2
        if len(values) < len(part):
            found.append(Stretch(middle, None))
        else:
            found.append(Stretch(middle, (min(values), statistics.fmean(values), max(values))))
    return found


def _line(chart: Chart, line: Line, label: str, x: Axis, y: Axis) -> str:
    points = [(step, None if value is None or (chart.log and value <= 0) else value) for step, value in line.points]
    parts_of_line = stretches(points)
    dashes = " ".join(f"{length:g}" for length in dash(line.run))
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    parts = [f'<g class="r{line.run}"><title>{text(_described(chart, line, label))}</title>']
    bars, marks = shown_choices(line)
    if bars:
        path = "".join(f"M{_pixel(x(bar.step))} {_pixel(y(bar.low))}V{_pixel(y(bar.high))}" for bar in bars)
        parts.append(f'<path class="bars" d="{path}"/>')
    if len(parts_of_line) < len(points):
        parts.append(f'<path class="band" d="{_band(parts_of_line, x, y)}"/>')
    pixels = [(x(part.step), y(part.values[1]) if part.values else None) for part in parts_of_line]
    if path := _path(pixels, stairs=chart.stairs):
        parts.append(f'<path class="line"{dashed} d="{path}"/>')
    if len(points) <= MAX_DOTS and not chart.stairs:
        dots = [point for point in pixels if point[1] is not None]
        parts.append(f'<path class="dots" d="{_path(dots, joined=False)}"/>')
    return "".join([*parts, *_marks(marks, x, y), "</g>"])


def _band(line: Sequence[Stretch], x: Axis, y: Axis) -> str:
    """The area between the extremes, interrupted with the line."""
    areas = []
    for is_gap, group in groupby(line, key=lambda part: part.values is None):
        if is_gap:
            continue
        edges = [(x(part.step), y(part.values[0]), y(part.values[2])) for part in group if part.values]
        around = [(place, high) for place, _, high in edges] + [(place, low) for place, low, _ in reversed(edges)]
        areas.append("M" + "L".join(f"{_pixel(place)} {_pixel(value)}" for place, value in around) + "z")
    return "".join(areas)


def _described(chart: Chart, line: Line, label: str) -> str:
    finite = [(step, value) for step, value in line.points if value is not None]
    if not finite:
        return label
    step, value = finite[-1]
    shown = f"{value:.4g}" if chart.form == "number" else f"{value:.3%}"
    return f"{label}: {shown} at step {step}"


def _path(points: Sequence[tuple[float, float | None]], *, stairs: bool = False, joined: bool = True) -> str:
    """Pixels as path data, interrupted where there is no value."""
    parts = []
    for is_gap, group in groupby(points, key=lambda point: point[1] is None):
        if is_gap:
            continue
        for index, (x, y) in enumerate(group):
            assert y is not None
            if index == 0 or not joined:
                parts.append(f"M{_pixel(x)} {_pixel(y)}{_NEW_POINT}")
            else:
                parts.append(f"H{_pixel(x)}V{_pixel(y)}" if stairs else f"L{_pixel(x)} {_pixel(y)}")
    return "".join(parts)


def _marks(marks: Sequence[Mark], x: Axis, y: Axis) -> list[str]:
    shapes: dict[str, list[str]] = {"edge": [], "held": [], "dots": []}
    for mark in marks:
        across, down = x(mark.step), y(mark.value)
        if mark.status == "edge":
            shapes["edge"].append(f"M{_pixel(across - 4)} {_pixel(down + 3)}h8l-4 -7z")
        elif mark.status == "held":
            shapes["held"].append(f"M{_pixel(across - 3)} {_pixel(down - 3)}l6 6m0 -6l-6 6")
        else:
            shapes["dots"].append(f"M{_pixel(across)} {_pixel(down)}{_NEW_POINT}")
    return [f'<path class="{name}" d="{"".join(paths)}"/>' for name, paths in shapes.items() if paths]


def _pixel(value: float) -> str:
    """Tenths are finer than a screen."""
    return f"{value:.1f}".removesuffix(".0")
