"""HF and Megatron checkpoints through real Megatron models; see `check_weights.py` for what is compared."""

from __future__ import annotations

from pathlib import Path

import launching
import pytest

SCRIPT = Path(__file__).with_name("check_weights.py")
TIMEOUT_SECONDS = 600  # a hang is a failure; it takes 40 seconds of CPU time, over all processes


def test_two_processes() -> None:
    output = launching.run(SCRIPT, num_processes=2, timeout=TIMEOUT_SECONDS)
    assert "ok   qwen3 PP2 VPP2 fp32: Megatron loads a converted checkpoint" in output and "FAIL" not in output


@pytest.mark.slow
def test_four_processes() -> None:
    output = launching.run(SCRIPT, num_processes=4, timeout=TIMEOUT_SECONDS)
    assert "ok   llama TP2 PP2 VPP2 fp32: stream" in output and "FAIL" not in output
