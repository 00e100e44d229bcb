"""The planner against learners that are really built and stepped, in one and two processes; see `check_plan.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import run

SCRIPT = Path(__file__).with_name("check_plan.py")
TIMEOUT_SECONDS = 400  # a hang is a failure


RATIOS = ("update", "log-probs", "shadow", "held", "FLOPs")
"""Columns of the script's table that are planned over real."""


def table_rows(output: str) -> Iterator[dict[str, str | float]]:
    """The script's table, one row for each rank of each case."""
    for line in output.splitlines():
        if line.startswith("| "):
            case, rank, parameters, *ratios, _ = (cell.strip() for cell in line.strip("|").split("|"))
            numbers = {"rank": int(rank), "parameters": int(parameters.replace(",", ""))}
            yield {"case": case, **numbers, **dict(zip(RATIOS, map(float, ratios), strict=True))}


@pytest.mark.parametrize("num_processes", [1, 2])
def test_parameters_bytes_and_flops(num_processes: int, record_property: Callable[[str, object], None]) -> None:
    output = run(SCRIPT, "--table", num_processes=num_processes, timeout=TIMEOUT_SECONDS)
    rows = list(table_rows(output))
    assert len(rows) == num_processes * output.count(": FLOPs") > 0
    record_property("rows", rows)
