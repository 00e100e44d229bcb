"""What adapters of other frameworks share, on two ranks in processes of their own."""

from __future__ import annotations

from pathlib import Path

from launching import run

SCRIPT = Path(__file__).with_name("check_integrations.py")


def test_two_ranks() -> None:
    run(SCRIPT, num_processes=2, timeout=300)
