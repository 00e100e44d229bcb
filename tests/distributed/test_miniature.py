"""The layout of the shipped 32B run in 16 processes; see `check_miniature.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import run

SCRIPT = Path(__file__).with_name("check_miniature.py")
TIMEOUT_SECONDS = 900  # a hang is a failure; on two idle cores it takes minutes


@pytest.mark.slow
def test_every_rank_of_the_32b_layout_steps() -> None:
    output = run(SCRIPT, num_processes=16, timeout=TIMEOUT_SECONDS)
    assert "ok   the updates raised what they should" in output
