"""Rewards: from a prompt and the text of a completion to a number."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

from megatron_calclip.batch import Prompt
from megatron_calclip.config import RewardConfig
from megatron_calclip.errors import EXIT_FAILED, UserError
from megatron_calclip.tasks import scratchpad_reward

Reward = Callable[[Prompt, str], float]


def exact(prompt: Prompt, completion: str) -> float:
    """1 when the completion, stripped, is the answer; else 0."""
    return float(completion.strip() == prompt.answer.strip())


def scratchpad(prompt: Prompt, completion: str) -> float:
    """1 when every running sum is right and followed by a letter; see `tasks.Scratchpad`."""
    return scratchpad_reward(prompt.answer, completion)


BUILT_IN: dict[str, Reward] = {"exact": exact, "scratchpad": scratchpad}


def load_reward(config: RewardConfig) -> Reward:
    """The reward that `reward.name` names, guarded: a reward that fails stops the run with a clear error.

    Raises:
        UserError: when a dotted path cannot be imported, or names no function.
    """
    if config.name in BUILT_IN:
        return BUILT_IN[config.name]
    module_name, _, function_name = config.name.rpartition(".")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:  # importing runs the user's own code
        raise UserError(
            "reward.name",
            f"cannot import {config.name!r} ({type(error).__name__}: {error}); give `exact`, or "
            "package.module.function of a module on PYTHONPATH",
        ) from None
    if not callable(function):
        raise UserError("reward.name", f"{config.name!r} is a {type(function).__name__}; name a function")
    return _guarded(config.name, function)


def _guarded(name: str, function: Callable[[Prompt, str], Any]) -> Reward:
    def reward(prompt: Prompt, completion: str) -> float:
        try:
            value = float(function(prompt, completion))
        except Exception as error:  # the user's own code: whatever it raises is reported as theirs
            raise UserError(
                "reward.name",
                f"{name} raised {type(error).__name__}: {error} (prompt id {prompt.id}, completion "
                f"{completion[:40]!r}); correct the reward",
                exit_code=EXIT_FAILED,
            ) from error
        if not math.isfinite(value):
            raise UserError(
                "reward.name",
                f"{name} returned {value} for prompt id {prompt.id}; return a finite number",
                exit_code=EXIT_FAILED,
            )
        return value

    return reward
