"""FP8 training, delayed scaling's histories and the shadow pass on two ranks, in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import run

SCRIPT = Path(__file__).with_name("check_precision.py")
# A hang is a failure: on two free cores the checks take well under two minutes, those of every layout four.
TIMEOUT_SECONDS = 600


def test_two_ranks() -> None:
    run(SCRIPT, num_processes=2, timeout=TIMEOUT_SECONDS)


@pytest.mark.slow
def test_every_recipe_on_every_layout() -> None:
    run(SCRIPT, "--all", "layouts", "histories", "shadow", num_processes=2, timeout=3 * TIMEOUT_SECONDS)
