"""Numbers in the servers' command line, `rollout.vllm.arguments`: what they are started with is the one place to read them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_calclip.errors import UserError


def number_of(arguments: Sequence[str], name: str, default: float) -> float:
    """A positive number, given as `[--name, value]` or `[--name=value]`.

    Args:
        arguments: of the command line.
        name: with its dashes.
        default: vLLM's, where it is not given.

    Raises:
        UserError: for anything but a positive number.
    """
    words = [word for argument in arguments for word in argument.split("=", 1)]
    if name not in words:
        return default
    text = next(iter(words[words.index(name) + 1 :]), "")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < math.inf:
        raise UserError("rollout.vllm.arguments", f"{name} is {text!r}; give a positive number")
    return value


def tensor_parallel(arguments: Sequence[str]) -> int:
    """GPUs of one server.

    Raises:
        UserError: for anything but a whole number from 1 on.
    """
    value = number_of(arguments, "--tensor-parallel-size", 1)
    if value != int(value):
        raise UserError("rollout.vllm.arguments", f"--tensor-parallel-size is {value}; give a whole number")
    return int(value)
