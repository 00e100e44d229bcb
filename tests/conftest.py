"""`--record FILE`: what tests measured, as JSON, where the documentation takes its figures from.

    pytest -m faults tests/faults --record docs/measured/faults.json

A row for each test: its name and outcome, the seconds it took, and what it handed to pytest's own `record_property`; beside
them command, date, commit and machine, as in the files of `benchmarks/`. Left out on purpose: how a figure is shown, which is
`benchmarks/tables.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


class Recorder:
    """Collects a session's tests.

    Args:
        output: the file.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self.rows: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the test itself, and what kept it from running."""
        if report.when == "call" or (report.when == "setup" and not report.passed):
            row = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
            self.rows.append(row | dict(report.user_properties))

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        from benchmarks.results import write_report

        write_report(self.output, [], tests=self.rows)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option."""
    parser.addoption("--record", type=Path, metavar="FILE", help="write what tests measured as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Record where it is asked for; workers of xdist hand their reports to the session that started them."""
    if (output := config.getoption("--record")) is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(output.resolve()))
