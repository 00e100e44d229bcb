"""Log-probs over a vocabulary sharded on two ranks, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("check_logprobs.py")
ROOT = SCRIPT.parents[2]
TIMEOUT_SECONDS = 180  # a hang is a failure; the check itself takes seconds


def test_two_ranks_equal_one_process() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    completed = subprocess.run(
        [*launcher, str(SCRIPT)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
