"""Runs as one HTML page: curves overlaid, tables of what the clip did, settings and versions.

The page is a file that loads nothing (`html_page`). A legend that stays in sight names the runs; its boxes hide a run in every
plot and table, by style sheet alone. Tables scroll within themselves, so that the page never grows wider than a phone.

Equal files give an equal page: there is no clock and no path in it, except what a run's own settings hold.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_calclip import report_svg, report_tables
from megatron_calclip.html_page import document, text
from megatron_calclip.report_axes import step_range
from megatron_calclip.report_charts import Chart, Section, sections
from megatron_calclip.report_data import Run
from megatron_calclip.report_settings import differences, settings, versions
from megatron_calclip.report_style import dash, style
from megatron_calclip.report_tables import Cell, Row, Table

_STYLE = """
:root { --shade: #2597ff; }
body { max-width: 100rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 .75rem; scroll-margin-top: 5rem; }
h3 { font-size: .95rem; margin: 0; }
p { margin: .25rem 0 .5rem; } figcaption, .note { color: var(--soft); font-size: .8125rem; }
a { color: inherit; } nav { display: flex; flex-wrap: wrap; gap: .1rem 1rem; font-size: .875rem; }
ul.note { padding-left: 1.2rem; }
.legend { position: sticky; top: 0; z-index: 2; display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin: .75rem -1rem 0;
  padding: .4rem 1rem; max-height: 30vh; overflow-y: auto; background: var(--page); border-bottom: 1px solid var(--line);
  font-size: .875rem; }
.legend label { display: inline-flex; align-items: center; gap: .35rem; cursor: pointer; }
.legend input { margin: 0; accent-color: var(--c); flex: none; }
svg.swatch { display: inline-block; width: 30px; height: 8px; flex: none; vertical-align: middle; margin-right: .4rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); gap: .75rem; }
figure, .card { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .7rem .8rem; }
figure { display: flex; flex-direction: column; min-width: 0; }
figcaption { margin: 0 0 .4rem; flex: 1; }
.card { margin-top: .75rem; min-width: 0; } .scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-size: .8125rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: 500; vertical-align: bottom; }
tbody th { font-weight: 600; } .name { text-align: left; position: sticky; left: 0; background: var(--card); }
.name, thead [class^="r"] { white-space: normal; min-width: 10.5rem; max-width: 22rem; }
td.long { white-space: normal; text-align: left; min-width: 14rem; }
td small { display: block; font-size: inherit; }
td.shade { background: color-mix(in srgb, var(--shade) var(--share), transparent); }
details > summary { cursor: pointer; font-weight: 600; font-size: .875rem; }
@media (max-width: 30rem) { .name { min-width: 8rem; max-width: 9rem; } }
@media print { ul.note { padding-left: 1.2rem; }
.legend { position: static; } }
""".strip()

_LONG_TEXT = 40
"""Characters; cells of more may break their lines."""
_MOST_DIFFERENCES = 16
"""Settings that are shown unasked."""
_FULL_SHADE = 55.0
"""Percent of colour behind a share of 1: text stays readable on it."""


def page(runs: Sequence[Run]) -> str:
    """The whole page.

    Args:
        runs: of `report_data.load_runs`.
    """
    found, absent = sections(runs)
    steps = step_range(chart for section in found for chart in section.charts)
    different = differences(runs)
    tables = {
        "learning": [_table(report_tables.evaluations(runs), runs)],
        "clipping": [_calibrations(runs)],
        "overclip": [
            _table(report_tables.overclip(runs), runs),
            *(_table(table, runs) for table in report_tables.attributions(runs)),
        ],
        "cost": [_table(report_tables.timing(runs), runs)],
    }
    shown = [section for section in found if section.charts or any(tables.get(section.key, []))]
    parts = [
        _navigation(shown),
        _legend(runs),
        _notes(runs),
        "<h2>Summary</h2>",
        _table(report_tables.summary(runs), runs, titled=False),
        _folded(different, "", runs, unfolded=len(different.rows) <= _MOST_DIFFERENCES) if different.rows else "",
        *(_section(section, runs, steps, tables.get(section.key, [])) for section in shown),
        f'<p class="note">Not logged by any of the runs: {text(", ".join(absent))}.</p>' if absent else "",
        '<h2 id="settings">Settings and versions</h2>',
        _table(versions(runs), runs),
        *(_folded(settings(run), f"r{index}", runs) for index, run in enumerate(runs) if run.config),
    ]
    return document(
        _title(runs), style="\n".join([_STYLE, style(), report_svg.STYLE, _hiding(runs)]), body="\n".join(parts)
    )


def _title(runs: Sequence[Run]) -> str:
    return f"Report of {runs[0].label}" if len(runs) == 1 else f"Report of {len(runs)} runs"


def _hiding(runs: Sequence[Run]) -> str:
    """A run's box in the legend rules over everything of its class outside the legend."""
    return "\n".join(
        f"body:has(#show{index}:not(:checked)) :is(figure g, tr, th, td, details).r{index} {{ display: none; }}"
        for index in range(len(runs))
    )


def _navigation(shown: Sequence[Section]) -> str:
    places = [*((section.key, section.title) for section in shown), ("settings", "Settings and versions")]
    return "<nav>" + "".join(f'<a href="#{key}">{title}</a>' for key, title in places) + "</nav>"


def _legend(runs: Sequence[Run]) -> str:
    boxes = "".join(
        f'<label class="r{index}"><input type="checkbox" id="show{index}" checked>{_swatch(index)}{text(run.label)}</label>'
        for index, run in enumerate(runs)
    )
    return f'<div class="legend">{boxes}</div>'


def _swatch(index: int) -> str:
    dashes = " ".join(f"{length:g}" for length in dash(index))
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<svg class="swatch r{index}" viewBox="0 0 30 8" aria-hidden="true"><path class="line"{dashed} d="M1 4H29"/></svg>'


def _notes(runs: Sequence[Run]) -> str:
    """Each note once, with the runs that have it."""
    by_note: dict[str, list[str]] = {}
    for run in runs:
        for note in run.notes:
            by_note.setdefault(note, []).append(run.label)
    lines = "".join(f"<li><b>{text(', '.join(labels))}</b>: {text(note)}</li>" for note, labels in by_note.items())
    return f'<ul class="note">{lines}</ul>' if lines else ""


def _section(section: Section, runs: Sequence[Run], steps: tuple[float, float], tables: Sequence[str]) -> str:
    labels = [run.label for run in runs]
    figures = "".join(_figure(chart, labels, steps) for chart in section.charts)
    charts = f'<div class="charts">{figures}</div>' if figures else ""
    return "\n".join([f'<h2 id="{section.key}">{section.title}</h2>', charts, *tables])


def _figure(chart: Chart, labels: Sequence[str], steps: tuple[float, float]) -> str:
    return (
        f"<figure><h3>{text(chart.title)}</h3><figcaption>{text(chart.description)}</figcaption>"
        f"{report_svg.draw(chart, labels, steps=steps)}</figure>"
    )


def _calibrations(runs: Sequence[Run]) -> str:
    tables = [(report_tables.calibrations(run), index) for index, run in enumerate(runs)]
    return "\n".join(_folded(table, f"r{index}", runs) for table, index in tables if table.rows)


def _table(table: Table, runs: Sequence[Run], *, titled: bool = True) -> str:
    """A table in a card; nothing where it has no rows."""
    title = f"<h3>{text(table.title)}</h3>" if titled else ""
    return f'<div class="card">{title}{_content(table, runs)}</div>' if table.rows else ""


def _folded(table: Table, classes: str, runs: Sequence[Run], *, unfolded: bool = False) -> str:
    """A table that a reader opens, or closes."""
    opened = " open" if unfolded else ""
    summary = f"<summary>{text(table.title)}</summary>"
    return f'<details class="card {classes}"{opened}>{summary}{_content(table, runs)}</details>'


def _content(table: Table, runs: Sequence[Run]) -> str:
    columns = ("run", *table.columns) if table.rows[0].run is not None else table.columns
    head = _head(columns[0], runs, "name") + "".join(_head(column, runs) for column in columns[1:])
    rows = "".join(_row(row, table.columns, runs) for row in table.rows)
    note = f'<p class="note">{text(table.note)}</p>' if table.note else ""
    # A region that scrolls has to be reachable by keyboard.
    return f'{note}<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _head(column: str | int, runs: Sequence[Run], classes: str = "") -> str:
    if isinstance(column, int):
        return f'<th class="r{column}">{_name(column, runs)}</th>'
    return f'<th class="{classes}">{text(column)}</th>' if classes else f"<th>{text(column)}</th>"


def _row(row: Row, columns: Sequence[str | int], runs: Sequence[Run]) -> str:
    cells = [_cell(cell, column) for cell, column in zip(row.cells, columns, strict=True)]
    if row.run is not None:
        return f'<tr class="r{row.run}"><th class="name">{_name(row.run, runs)}</th>{"".join(cells)}</tr>'
    first = row.cells[0]
    assert isinstance(first, str)
    return f'<tr><th class="name">{_breakable(first)}</th>{"".join(cells[1:])}</tr>'


def _name(run: int, runs: Sequence[Run]) -> str:
    return f"{_swatch(run)}{_breakable(runs[run].label)}"


def _breakable(name: str) -> str:
    """A dotted name that a narrow column may break between its words."""
    return re.sub(r"(?<=[._/])", "<wbr>", text(name))


def _cell(cell: str | Cell, column: str | int) -> str:
    if isinstance(cell, Cell):
        detail = f"<small>{text(cell.detail)}</small>" if cell.detail else ""
        return f'<td class="shade" style="--share: {_FULL_SHADE * cell.shade:.1f}%">{text(cell.text)}{detail}</td>'
    classes = [f"r{column}"] if isinstance(column, int) else []
    classes += ["long"] if len(cell) > _LONG_TEXT else []
    attribute = f' class="{" ".join(classes)}"' if classes else ""
    return f"<td{attribute}>{text(cell)}</td>"
