"""A chart as inline SVG: small, sharp at any size, in the colours of the page around it.

What: shapes only; strokes and fonts are the page's style sheet (`STYLE`), so that light and dark need one drawing. Each run is
a group of class `r<index>`, which the page's legend can hide. Long runs are thinned to the extremes of each stretch of steps:
a spike of one step is still seen.

Left out on purpose: anything that needs a script. Files for slides and papers come from `report_plots`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from megatron_calclip.html_page import text
from megatron_calclip.report_axes import NUM_TICKS, Axis, tick_labels, ticks, value_range, value_ticks
from megatron_calclip.report_charts import Chart, Line
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
svg .edge { fill: var(--c); } svg .held { fill: none; stroke: var(--c); stroke-width: 1.5; }
""".strip()

_WIDTH, _HEIGHT = 360, 190
_TOP, _BOTTOM, _RIGHT = 8, 22, 12
_CHARACTER = 6.3
"""Pixels of a digit at most."""
MAX_POINTS = 600
"""Of a line, two for each stretch: about as many as a screen shows."""
_MAX_DOTS = 30
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


def thinned(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` points or a few more, among them the extremes of each stretch and all gaps' ends.

    Args:
        points: ascending in their steps.
        limit: at least 2.
    """
    if len(points) <= limit:
        return list(points)
    size = -(-2 * len(points) // limit)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        finite = [(value, step) for step, value in stretch if value is not None]
        if len(finite) < len(stretch):
            kept.append((next(step for step, value in stretch if value is None), None))
        kept += [(step, value) for value, step in {min(finite), max(finite)}] if finite else []
    return sorted(kept, key=lambda point: point[0])


def _line(chart: Chart, line: Line, label: str, x: Axis, y: Axis) -> str:
    points = [
        (x(step), None if value is None or (chart.log and value <= 0) else y(value))
        for step, value in thinned(line.points)
    ]
    dashes = " ".join(f"{length:g}" for length in dash(line.run))
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    parts = [f'<g class="r{line.run}"><title>{text(_described(chart, line, label))}</title>']
    if line.bars:
        bars = "".join(f"M{_pixel(x(bar.step))} {_pixel(y(bar.low))}V{_pixel(y(bar.high))}" for bar in line.bars)
        parts.append(f'<path class="bars" d="{bars}"/>')
    if path := _path(points, stairs=chart.stairs):
        parts.append(f'<path class="line"{dashed} d="{path}"/>')
    dots = [point for point in points if point[1] is not None]
    if len(line.points) <= _MAX_DOTS and not chart.stairs:
        parts.append(f'<path class="dots" d="{_path(dots, joined=False)}"/>')
    parts += _marks(line, x, y)
    return "".join([*parts, "</g>"])


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


def _marks(line: Line, x: Axis, y: Axis) -> list[str]:
    shapes: dict[str, list[str]] = {"edge": [], "held": [], "dots": []}
    for mark in line.marks:
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
