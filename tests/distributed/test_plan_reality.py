"""The planner against learners that are really built and stepped, in one and two processes; see `check_plan.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import run

SCRIPT = Path(__file__).with_name("check_plan.py")
TIMEOUT_SECONDS = 400  # a hang is a failure


@pytest.mark.parametrize("num_processes", [1, 2])
def test_parameters_bytes_and_flops(num_processes: int) -> None:
    output = run(SCRIPT, num_processes=num_processes, timeout=TIMEOUT_SECONDS)
    assert "FLOPs" in output
