"""A reward for `test_train.py` that can hold a run up at a chosen moment, so that it is killed there and nowhere else."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

from megatron_calclip.rewards import RewardSample

CALLS_VARIABLE = "STALL_AFTER_CALLS"
FOLDER_VARIABLE = "STALL_FOLDER"

_calls = itertools.count(1)


def share_of_digits(sample: RewardSample) -> float:
    """How much of a completion is digits: an untrained policy, too, then has something to learn from.

    After the call that `STALL_AFTER_CALLS` names (of a rank, which must have one worker), each rank leaves a file in `STALL_FOLDER` and waits for its end.
    """
    limit = os.environ.get(CALLS_VARIABLE)
    if limit is not None and next(_calls) > int(limit):
        (Path(os.environ[FOLDER_VARIABLE]) / f"rank_{os.environ['RANK']}").touch()
        time.sleep(3600)
    return sum(character.isdigit() for character in sample.completion) / max(len(sample.completion), 1)
