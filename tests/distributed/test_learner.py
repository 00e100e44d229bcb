"""The learner against plain training in one, two and four processes; see `check_learner.py` for what is compared.

The launch of two processes leaves a checkpoint that those of one and of four load.
"""

from __future__ import annotations

from pathlib import Path

import launching
import pytest

SCRIPT = Path(__file__).with_name("check_learner.py")
# A hang is a failure. On two idle cores the longest launch takes a fraction of this.
TIMEOUT_SECONDS = 600


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder with the checkpoint, and what the launch of two processes printed."""
    exchange = tmp_path_factory.mktemp("exchange")
    output = launching.run(SCRIPT, str(exchange), num_processes=2, timeout=TIMEOUT_SECONDS)
    return exchange, output


def test_two_processes(two_processes: tuple[Path, str]) -> None:
    _, output = two_processes
    assert "ok   TP2+SP" in output and "ok   trainer CP2" in output


@pytest.mark.parametrize("num_processes", [1, 4])
def test_other_numbers_of_processes(two_processes: tuple[Path, str], num_processes: int) -> None:
    exchange, _ = two_processes
    launching.run(SCRIPT, str(exchange), num_processes=num_processes, timeout=TIMEOUT_SECONDS)
