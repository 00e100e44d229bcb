"""The charts of a report as files for slides and papers: PNG and SVG, one pair for each chart, through matplotlib.

They show the points of the page's charts in the light colours, with a legend of their own, and the page's tables of where false
clips come from as bars. Equal runs give equal files.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from megatron_calclip.html_page import visible
from megatron_calclip.report_attribution import Attribution, attributions, bucket_name
from megatron_calclip.report_axes import step_range, value_range, value_ticks
from megatron_calclip.report_charts import Chart, Line, sections, shown_choices
from megatron_calclip.report_data import Run
from megatron_calclip.report_style import LIGHT, dash
from megatron_calclip.report_svg import MAX_DOTS

_WIDTH, _HEIGHT, _LEGEND_ROW = 6.0, 3.4, 0.2
"""Inches; a row of the legend adds to the height."""
_DPI = 200
_SETTINGS: dict[Any, Any] = {"svg.hashsalt": "megatron-calclip", "svg.fonttype": "none", "text.parse_math": False}
"""Names in the SVG do not depend on chance; its text stays text; a `$` in a run's name is a dollar."""
_MARKERS = {"edge": "^", "held": "x"}
_LEGEND_WIDTH, _LEGEND_LINE = 84, 8
"""Characters across a picture, and those that the line of an entry takes."""
_MARGIN = 0.015
"""Of the steps: the last mark is whole."""
_BARS_WIDTH = 0.8
"""Of the distance between two buckets, all bars of one together."""
_HATCHES = {"low": "", "high": "////"}
"""The upper bound's bars are hatched."""


def save_plots(runs: Sequence[Run], folder: Path) -> int:
    """Write `<metric>.png` and `<metric>.svg` of every chart, and `attribution_<covariate>` of every attribution.

    Args:
        runs: of `report_data.load_runs`.
        folder: is created; files of the same names are replaced.

    Returns:
        The number of pictures.
    """
    charts = [chart for section in sections(runs)[0] for chart in section.charts]
    steps, labels = step_range(charts), [run.label for run in runs]
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(_SETTINGS):
        figures: dict[str, Figure] = {}
        for chart in charts:  # names of a user's own may differ in what no file name keeps
            same = sum(key == chart.key or key.startswith(f"{chart.key}.") for key in figures)
            figures[f"{chart.key}.{same + 1}" if same else chart.key] = draw(chart, labels, steps=steps)
        figures |= {f"attribution_{found.covariate}": draw_attribution(found, labels) for found in attributions(runs)}
        for key, figure in figures.items():
            figure.savefig(folder / f"{key}.svg", metadata={"Date": None})
            figure.savefig(folder / f"{key}.png", dpi=_DPI, metadata={"Software": None})
    return len(figures)


def draw(chart: Chart, labels: Sequence[str], *, steps: tuple[float, float]) -> Figure:
    """One chart.

    Args:
        chart: with at least one value.
        labels: of all runs.
        steps: range of the horizontal axis.
    """
    lines = [Line2D([], [], **_look(line.run)) for line in chart.lines]
    figure = _figure(lines, [labels[line.run] for line in chart.lines])
    axes = figure.add_subplot()
    axes.set_title(chart.title, loc="left", fontsize="medium")
    axes.set_xlabel("step")
    _plain(axes)
    if chart.log:
        axes.set_yscale("log")
    low, high = value_range(chart)
    axes.set_yticks(*value_ticks(chart, low, high))
    axes.set_yticks([], minor=True)
    if chart.reference is not None:
        axes.axhline(chart.reference, color="grey", linestyle=":")
    for line in chart.lines:
        _draw_line(axes, chart, line)
    axes.set_xlim(steps[0], steps[1] + _MARGIN * (steps[1] - steps[0]))
    axes.set_ylim(low, high)
    return figure


def draw_attribution(found: Attribution, labels: Sequence[str]) -> Figure:
    """Where false clips come from: a bar for each bucket, run and bound; shares at the left, rates at the right.

    Args:
        found: with a false clip.
        labels: of all runs.
    """
    looks: list[dict[str, Any]] = [
        {"facecolor": LIGHT[bound.run % len(LIGHT)], "hatch": _HATCHES[bound.side], "edgecolor": "white"}
        for bound in found.bounds
    ]
    names = [f"{labels[bound.run]}, {'L' if bound.side == 'low' else 'H'}" for bound in found.bounds]
    figure = _figure([Patch(**look) for look in looks], names)
    values = {"% of all false clips": _shares(found)}
    if any(bound.total.rate is not None for bound in found.bounds):
        values["false clips in 1,000 tokens of the bucket"] = _rates(found)
    width = _BARS_WIDTH / len(found.bounds)
    buckets = [bucket_name(bucket) for bucket in found.buckets]
    for axes, (title, heights) in zip(figure.subplots(1, len(values), squeeze=False)[0], values.items(), strict=True):
        for index, (of_bound, look) in enumerate(zip(heights, looks, strict=True)):
            offset = (index - (len(looks) - 1) / 2) * width
            axes.bar([place + offset for place in range(len(buckets))], of_bound, width, **look)
        axes.set_title(title, loc="left", fontsize="small")
        axes.set_xticks(range(len(buckets)), buckets, rotation=45, ha="right", fontsize="small")
        _plain(axes)
    figure.suptitle(found.title, x=0.01, ha="left", fontsize="medium")
    return figure


def _shares(found: Attribution) -> list[list[float]]:
    """Percent of each bound's false clips by bucket."""
    return [
        [100 * bound.counts(bucket).false_clips / bound.total.false_clips for bucket in found.buckets]
        for bound in found.bounds
    ]


def _rates(found: Attribution) -> list[list[float]]:
    """False clips in 1,000 tokens by bucket; NaN, which draws nothing, where no step says of how many."""
    return [
        [math.nan if (rate := bound.counts(bucket).rate) is None else 1000 * rate for bucket in found.buckets]
        for bound in found.bounds
    ]


def _figure(handles: Sequence[Line2D | Patch], names: Sequence[str]) -> Figure:
    """An empty figure with a legend below, which adds to the height."""
    names = [textwrap.fill(visible(name), _LEGEND_WIDTH) for name in names]
    num_columns = max(1, _LEGEND_WIDTH // (max(map(len, names)) + _LEGEND_LINE))
    height = _HEIGHT + _LEGEND_ROW * -(-len(names) // num_columns)
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.legend(handles, names, loc="outside lower left", ncols=num_columns, fontsize="small", frameon=False)
    return figure


def _plain(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _look(run: int) -> dict[str, Any]:
    dashes = dash(run)
    return {"color": LIGHT[run % len(LIGHT)], "linestyle": (0, dashes) if dashes else "-", "linewidth": 1.5}


def _draw_line(axes: Axes, chart: Chart, line: Line) -> None:
    colour = LIGHT[line.run % len(LIGHT)]
    steps = [step for step, _ in line.points]
    values = [float("nan") if value is None or (chart.log and value <= 0) else value for _, value in line.points]
    axes.plot(
        steps,
        values,
        drawstyle="steps-post" if chart.stairs else "default",
        marker="o" if len(steps) <= MAX_DOTS and not chart.stairs else None,
        markersize=3,
        **_look(line.run),
    )
    bars, marks = shown_choices(line)
    for bar in bars:
        axes.plot([bar.step, bar.step], [bar.low, bar.high], color=colour, alpha=0.45, linewidth=1)
    for mark in marks:
        axes.plot(mark.step, mark.value, _MARKERS.get(mark.status, "o"), color=colour, markersize=4)
