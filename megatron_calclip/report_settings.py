"""Tables of what runs were given: settings in which they differ, all settings, versions."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_calclip.report_data import Run
from megatron_calclip.report_tables import NONE, Row, Table

_NOT_COMPARED = "run_dir"
"""Differs always, and says nothing."""


def differences(runs: Sequence[Run]) -> Table:
    """Settings whose values are not the same in all runs."""
    names = dict.fromkeys(name for run in runs for name in run.config if name != _NOT_COMPARED)
    compared = [run for run in runs if run.config]
    different = [name for name in names if len({run.config.get(name) for run in compared}) > 1]
    return Table(
        title="Settings that differ",
        note="All settings of each run are at the end.",
        columns=("", *range(len(runs))),
        rows=tuple(Row(None, (name, *(run.config.get(name, NONE) for run in runs))) for name in different),
    )


def versions(runs: Sequence[Run]) -> Table:
    """Versions of the packages that computed."""
    names = dict.fromkeys(name for run in runs for name in run.versions)
    return Table(
        title="Versions",
        note="Of the process that wrote last.",
        columns=("", *range(len(runs))),
        rows=tuple(Row(None, (name, *(run.versions.get(name, NONE) for run in runs))) for name in names),
    )


def settings(run: Run) -> Table:
    """All settings of a run."""
    return Table(
        title=f"Settings of {run.label}",
        note="",
        columns=("setting", "value"),
        rows=tuple(Row(None, pair) for pair in run.config.items()),
    )
