"""From a job to the components of its reward: what a worker of the pool does.

A job is a pickled tuple. For the built-in rewards it is (completion, answer, metadata), so that a worker needs no
torch to read it; for a reward of the user's own it is the `RewardSample` itself.

A built-in verifier that fails on some text has met an answer it cannot read: a wrong answer, reported on stderr. A
user's reward that fails ends the run, because nobody but its author can tell what it should have returned.
"""

from __future__ import annotations

import importlib
import math
import pickle
import re
import sys
from collections.abc import Callable
from typing import Any

from megatron_calclip.rewards.worker import Handler

TASK = "task"
"""The component that every reward has: what it says of the answer, before any shaping."""
FORMAT = "format"
RESERVED = {"mean", "std", "equal_groups", "overlong", "timed_out", FORMAT}
"""Names below `reward/` that a user's component cannot have."""
METADATA_USED = {"math": ("tolerance", "unit"), "code": ("tests",)}
"""Columns of the data row that the built-in rewards read, which are all that travel to the workers."""

# Patterns that `reward.format.pattern` knows by name. Both are searched in the whole completion.
FORMATS = {
    "boxed": r"^(?!.*\\boxed.*\\boxed).*\\boxed\{.+\}",
    "think": r"^\s*<think>(?!.*<think>).*?</think>(?!.*</think>)\s*\S",
}


def exact(completion: str, answer: str, metadata: dict[str, Any]) -> float:
    """1 when the completion, stripped, is the answer; else 0."""
    return float(completion.strip() == answer.strip())


def scratchpad(completion: str, answer: str, metadata: dict[str, Any]) -> float:
    """1 when every running sum is right and followed by a letter; see `tasks.Scratchpad`."""
    from megatron_calclip.tasks import scratchpad_reward

    return scratchpad_reward(answer, completion)


def load(name: str) -> Callable[..., Any]:
    """The function at a dotted path.

    Raises:
        ValueError: when it cannot be imported, or is no function, with the reason.
    """
    module_name, _, function_name = name.rpartition(".")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:  # importing runs the user's own code
        raise ValueError(f"cannot import {name!r} ({type(error).__name__}: {error})") from None
    if not callable(function):
        raise ValueError(f"{name!r} is a {type(function).__name__}, not a function")
    return function


def make_handler(settings: dict[str, Any]) -> Handler:
    """What a worker does with a job.

    Args:
        settings: `reward` as a JSON object.

    Returns:
        a function from a job to {component: value}, or to {"error": reason} when a user's reward failed.
    """
    name, pattern = settings["name"], settings["format"]["pattern"]
    matches = re.compile(FORMATS.get(pattern, pattern), re.DOTALL).search if pattern else None
    own: Callable[..., Any] | None = None
    built_in = _built_in(name, settings)

    def handle(job: bytes) -> dict[str, Any]:
        nonlocal own
        payload = pickle.loads(job)
        if built_in is not None:
            completion = payload[0]
            try:
                components = {TASK: built_in(*payload)}
            except MemoryError:
                raise
            except Exception as error:  # any text may be met; none may end the run
                print(f"reward {name}: {type(error).__name__}: {error} on {completion[-80:]!r}", file=sys.stderr)
                components = {TASK: 0.0}
        else:
            completion = payload.completion
            try:
                own = own or load(name)  # after the fork: it may start threads
                components = as_components(own(payload))
            except MemoryError:
                raise
            except Exception as error:
                return {"error": f"raised {type(error).__name__}: {error}"}
            if (reason := _unusable(components)) is not None:
                return {"error": reason}
        if matches is not None:
            components[FORMAT] = float(bool(matches(completion)))
        return components

    return handle


def _built_in(name: str, settings: dict[str, Any]) -> Callable[[str, str, dict[str, Any]], float] | None:
    """The verifier of that name, with what it needs imported; None when it is a dotted path."""
    if name == "math":
        from megatron_calclip.rewards.math_answer import MathReward
        from megatron_calclip.rewards.math_symbols import warm_up

        warm_up()  # before the fork: all workers have it
        return MathReward(relative_tolerance=settings["math"]["relative_tolerance"])
    if name == "code":
        from megatron_calclip.rewards.code import CodeReward

        return CodeReward(settings["code"])
    return {"exact": exact, "scratchpad": scratchpad}.get(name)


def as_components(value: Any) -> dict[str, float]:
    """What a user's reward returned, as components: a number, or a dictionary with `reward` among others.

    Raises:
        KeyError, TypeError, ValueError: when it is neither.
    """
    if not isinstance(value, dict):
        return {TASK: float(value)}
    if TASK in value:
        raise ValueError(f"{TASK!r} is what `reward` is called among the components; choose another name")
    others = {str(key): float(part) for key, part in value.items() if key != "reward"}
    return others | {TASK: float(value["reward"])}


def _unusable(components: dict[str, float]) -> str | None:
    if reserved := RESERVED & components.keys():
        return f"returned a component named {min(reserved)!r}, which is a metric of its own; choose another name"
    for key, value in components.items():
        if not key or "/" in key:
            return f"returned a component named {key!r}, which no metric can be called; choose a name without /"
        if not math.isfinite(value):
            return f"returned {value}{'' if key == TASK else f' for {key!r}'}; return finite numbers"
    return None
