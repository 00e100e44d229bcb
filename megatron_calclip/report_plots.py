"""The charts of a report as files for slides and papers: PNG and SVG, one pair for each chart, through matplotlib.

They show the points of the page's charts in the light colours, with a legend of their own. Equal runs give equal files.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from megatron_calclip.html_page import visible
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


def save_plots(runs: Sequence[Run], folder: Path) -> int:
    """Write `<metric>.png` and `<metric>.svg` of every chart.

    Args:
        runs: of `report_data.load_runs`.
        folder: is created; files of the same names are replaced.

    Returns:
        The number of charts.
    """
    charts = [chart for section in sections(runs)[0] for chart in section.charts]
    steps = step_range(charts)
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(_SETTINGS):
        for chart in charts:
            figure = draw(chart, [run.label for run in runs], steps=steps)
            figure.savefig(folder / f"{chart.key}.svg", metadata={"Date": None})
            figure.savefig(folder / f"{chart.key}.png", dpi=_DPI, metadata={"Software": None})
    return len(charts)


def draw(chart: Chart, labels: Sequence[str], *, steps: tuple[float, float]) -> Figure:
    """One chart.

    Args:
        chart: with at least one value.
        labels: of all runs.
        steps: range of the horizontal axis.
    """
    names = [textwrap.fill(visible(labels[line.run]), _LEGEND_WIDTH) for line in chart.lines]
    num_columns = max(1, _LEGEND_WIDTH // (max(map(len, names)) + _LEGEND_LINE))
    num_rows = -(-len(names) // num_columns)
    figure = Figure(figsize=(_WIDTH, _HEIGHT + _LEGEND_ROW * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(chart.title, loc="left", fontsize="medium")
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
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
    figure.legend(
        [Line2D([], [], **_look(line.run)) for line in chart.lines],
        names,
        loc="outside lower left",
        ncols=num_columns,
        fontsize="small",
        frameon=False,
    )
    return figure


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
