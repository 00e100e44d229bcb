r"""The code reward: whether the program in a completion passes a problem's tests.

Tests come in the layout of APPS, TACO and Eurus: {"inputs": [...], "outputs": [...]}, to which a program answers on
stdout, and with "fn_name" the arguments and results of a function. They stand in the row's column `tests`, or in the
reference answer, as an object or as JSON. Programs run in `sandbox`; what they print is compared out here.

Left out on purpose: languages other than Python, and problems with several right outputs (they need a checker: write
a reward of your own).
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from megatron_calclip.rewards.sandbox import limits_of, run_program, sandbox_problem

_FENCE = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)```", re.DOTALL)
# Two outputs that both hold decimals agree within this, relative to the expected one (APPS compares so).
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Tests:
    """Tests of one problem."""

    inputs: list[str]
    """stdin, or the JSON list of arguments."""
    outputs: list[Any]
    """stdout, or the value returned."""
    function: str | None


def parse_tests(answer: str, metadata: dict[str, Any]) -> Tests:
    """The tests of a row.

    Raises:
        ValueError: with the reason, as a predicate.
    """
    given = metadata.get("tests", answer)
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ValueError(f"has tests that are not JSON ({error})") from None
    if not isinstance(given, dict) or not {"inputs", "outputs"} <= given.keys():
        raise ValueError("has tests without `inputs` and `outputs`")
    inputs, outputs, function = given["inputs"], given["outputs"], given.get("fn_name") or None
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        raise ValueError("has tests whose `inputs` and `outputs` are no lists of the same length, at least 1")
    if function is not None and not (isinstance(function, str) and function.isidentifier()):
        raise ValueError(f"has tests whose `fn_name` is no name ({function!r})")
    return Tests([_input(one, function) for one in inputs], outputs, function)


def _input(given: Any, function: str | None) -> str:
    if function is None:
        return "\n".join(map(str, given)) if isinstance(given, list) else str(given)
    if isinstance(given, str):  # Eurus: one argument to a line, as JSON
        given = [json.loads(line) for line in given.splitlines() if line.strip()]
    return json.dumps(given if isinstance(given, list) else [given])


def check_tests(answer: str, metadata: dict[str, Any]) -> None:
    """Whether a row has tests that can be run.

    Raises:
        ValueError: with the reason, as a predicate.
    """
    parse_tests(answer, metadata)


def extract_program(completion: str) -> str | None:
    """The last fenced block, of Python if there is one; None when there is no block."""
    blocks = _FENCE.findall(completion.rpartition("</think>")[2])
    python = [text for language, text in blocks if language.lower() in ("python", "python3", "py")]
    return (python or [text for _, text in blocks] or [None])[-1]


class CodeReward:
    """1 when the completion's program passes all tests, or the share it passes with `partial_credit`.

    Args:
        settings: the section `reward.code`.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.limits = limits_of(settings)
        self.max_tests: int = settings["max_tests"]
        self.partial_credit: bool = settings["partial_credit"]
        self.total_seconds: float = settings["total_timeout_seconds"]
        self.isolate = sandbox_problem() is None
        if not self.isolate and not settings["allow_unsandboxed"]:
            raise PermissionError("no sandbox; set reward.code.allow_unsandboxed to do without")

    def __call__(self, completion: str, answer: str, metadata: dict[str, Any]) -> float:
        """Run the program."""
        program = extract_program(completion)
        if program is None:
            return 0.0
        tests = parse_tests(answer, metadata)
        chosen = _spread(len(tests.inputs), self.max_tests)
        inputs = [tests.inputs[index] for index in chosen]
        deadline = time.monotonic() + self.total_seconds
        passed = 0
        runs = run_program(program, inputs, function=tests.function, limits=self.limits, isolate=self.isolate)
        with closing(runs):  # type: ignore[type-var]
            for index, run in zip(chosen, runs, strict=True):
                good = run.status == "ok" and _same_output(run.output, tests.outputs[index], tests.function)
                passed += good
                if not (good or self.partial_credit) or time.monotonic() > deadline:
                    break
        share = passed / len(chosen)
        return share if self.partial_credit else float(share == 1)


def _spread(num_tests: int, most: int) -> list[int]:
    """Indices of at most so many tests, evenly spaced."""
    count = min(num_tests, most)
    return [index * num_tests // count for index in range(count)]


def _same_output(output: str, expected: Any, function: str | None) -> bool:
    if function is None:
        wanted = "\n".join(map(str, expected)) if isinstance(expected, list) else str(expected)
        return same_text(output, wanted)
    try:
        value = json.loads(output)
        if isinstance(expected, str):  # Eurus keeps results as JSON
            expected = _json_or_text(expected, value)
    except ValueError:
        return False
    # APPS wraps a result into a list.
    return _same_value(value, expected) or (
        isinstance(expected, list) and len(expected) == 1 and _same_value(value, expected[0])
    )


def _json_or_text(expected: str, value: Any) -> Any:
    if isinstance(value, str) and value == expected:
        return expected
    try:
        return json.loads(expected)
    except ValueError:
        return expected


def _same_value(value: Any, expected: Any) -> bool:
    if isinstance(value, float) or isinstance(expected, float):
        numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (value, expected))
        try:
            return numbers and math.isclose(value, expected, rel_tol=_TOLERANCE)
        except OverflowError:  # an integer beyond all floats
            return False
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_same_value(value[key], expected[key]) for key in value)
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_same_value, value, expected))
    return type(value) is type(expected) and value == expected


def same_text(output: str, expected: str) -> bool:
    """Whether two outputs agree: line by line without spaces at the ends, or token by token where decimals differ."""
    lines, wanted = _lines(output), _lines(expected)
    if lines == wanted:
        return True
    if len(lines) != len(wanted):
        return False
    return all(_same_tokens(line.split(), other.split()) for line, other in zip(lines, wanted, strict=True))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _same_tokens(tokens: Sequence[str], expected: Sequence[str]) -> bool:
    if len(tokens) != len(expected):
        return False
    for token, wanted in zip(tokens, expected, strict=True):
        if token == wanted:
            continue
        if "." not in wanted:
            return False
        try:
            if not math.isclose(float(token), float(wanted), rel_tol=_TOLERANCE):
                return False
        except ValueError:
            return False
    return True
