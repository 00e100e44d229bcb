r"""What the columns of known data sets mean: for each layout a function from a raw row to (problem, answer, other columns).

A layout also names the reward that its answers are for, and the sentence that asks for an answer in the form which that
reward reads. The readers take a set's published columns, and those of its common copies (`problem` or `question`; an answer,
or a solution with a boxed one), so that one table serves training sets and evaluation sets.

Left out on purpose: anything about files (`data_files`), and corrections of the sets' own faults: a row without an answer is
an error that names its line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_calclip.errors import UserError
from megatron_calclip.rewards.extraction import find_boxes
from megatron_calclip.rewards.scorer import BUILT_IN
from megatron_calclip.tasks import Row

if TYPE_CHECKING:
    from megatron_calclip.config import Config

RawMapping = Mapping[str, Any]

MATH_INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
"""Of Qwen2.5-Math (Yang et al., arXiv 2409.12122), and so of most evaluations on these sets."""
CODE_INSTRUCTION = (
    "Write a Python program that solves the problem, in one block that starts with ```python and ends with ```."
)

_LARGEST_EXACT_FLOAT = 2.0**53
"""Whole numbers up to here are exact as floats, so that 27.0 can be written 27."""


class NotOfThisLayout(ValueError):
    """A row of another kind in a mixed file: left out and counted, never an error."""


TASK_REWARDS = {"arithmetic": ("exact", "math"), "scratchpad": ("scratchpad",)}
"""Generated task -> built-in rewards that can read its answers, the usual one first."""


def fitting_rewards(name: str) -> tuple[str, ...]:
    """Built-in rewards that can read the answers of a set, the usual one first: of its layout or task; else all.

    Args:
        name: as in `data.train` and `eval.sets`.
    """
    layout = name.partition("=")[0]
    return (PRESETS[layout].reward,) if layout in PRESETS else TASK_REWARDS.get(name, BUILT_IN)


def fits(reward: str, name: str) -> bool:
    """Whether a reward can read a set's answers; of a user's own we cannot know."""
    return reward not in BUILT_IN or reward in fitting_rewards(name)


def check_training_reward(config: Config) -> None:
    """Whether a run's reward can read the answers of its training set.

    Raises:
        UserError: when it is a built-in reward that would score 0 throughout.
    """
    reward, name = config.reward.name, config.data.train
    if not fits(reward, name):
        usable = " or ".join(fitting_rewards(name))
        raise UserError(
            "reward.name",
            f"{reward} cannot score the answers of data.train={name}; use {usable}, or a function of your own",
        )


@dataclass(frozen=True)
class Preset:
    """A known layout."""

    summary: str
    """The data sets that have it."""
    row: Callable[[RawMapping], Row]
    """Reads a row; raises ValueError with a predicate ("has no field 'answer'")."""
    reward: str
    """The built-in reward that its answers are for."""
    instruction: str
    """Follows each problem on a line of its own; empty where the problems say it themselves."""


def field(row: RawMapping, *names: str) -> Any:
    """The first of these columns that a row has.

    Raises:
        ValueError: when it has none.
    """
    for name in names:
        if name in row:
            return row[name]
    raise ValueError(f"has no field {' or '.join(map(repr, names))}")


def problem_text(row: RawMapping, *names: str) -> str:
    """A problem.

    Raises:
        ValueError: when it is no text, or an empty one.
    """
    value = field(row, *names)
    name = next(name for name in names if name in row)
    if not isinstance(value, str):
        raise ValueError(f"field {name!r} is a {type(value).__name__}, not a text")
    if not value.strip():
        raise ValueError(f"field {name!r} is empty")
    return value


def answer_text(value: Any, name: str) -> str:
    """An answer as text; a whole number stays whole when its file made a float of it.

    Raises:
        ValueError: when it is neither text nor number.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"field {name!r} is a {type(value).__name__}, not a text or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"field {name!r} is {value}, which is no answer")
    if isinstance(value, float) and value.is_integer() and abs(value) < _LARGEST_EXACT_FLOAT:
        value = int(value)
    return str(value)


def _required(text: str, name: str) -> str:
    if not text.strip():
        raise ValueError(f"field {name!r} is empty")
    return text.strip()


def _math(row: RawMapping) -> Row:
    """`problem` or `question` with an `answer`, or with a `solution` that boxes one."""
    problem = problem_text(row, "problem", "question", "prompt")
    kept = {name: row[name] for name in ("level", "subject", "type", "difficulty") if name in row}
    for name in ("answer", "final_answer", "ground_truth"):
        if name in row:
            return problem, _required(answer_text(row[name], name), name), kept
    boxes = find_boxes(problem_text(row, "solution"))
    if not boxes:
        raise ValueError(r"has no field 'answer', and its 'solution' has no \boxed{...}")
    return problem, _required(boxes[-1].content, "solution"), kept


def _gsm8k(row: RawMapping) -> Row:
    """The number after `####`, without its thousands separators."""
    _, mark, answer = problem_text(row, "answer").rpartition("####")
    if not mark:
        raise ValueError("field 'answer' has no `####`")
    return problem_text(row, "question"), _required(answer.replace(",", ""), "answer"), {}


def _olympiad(row: RawMapping) -> Row:
    """A list of answers with a unit and a tolerance, and sometimes a text that several problems share."""
    answers = field(row, "final_answer", "answer")
    if isinstance(answers, str):
        answers = [answers]
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise ValueError("field 'final_answer' is no list of texts")
    answer = _required(", ".join(filter(None, map(str.strip, answers))), "final_answer")
    problem, context = problem_text(row, "question", "problem"), row.get("context")
    metadata: dict[str, Any] = {"unit": row["unit"]} if row.get("unit") else {}
    if row.get("error"):
        try:
            metadata["tolerance"] = float(row["error"])
        except (TypeError, ValueError):
            raise ValueError(f"field 'error' is {row['error']!r}, not one number") from None
    return f"{context}\n{problem}" if context else problem, answer, metadata


def _conversation(row: RawMapping) -> tuple[str, dict[str, Any]]:
    """verl's `prompt`: a list of messages, of which one user's and at most one system message before it are read."""
    messages = field(row, "prompt")
    if isinstance(messages, str):
        return problem_text(row, "prompt"), {}
    try:
        turns = [(message["role"], message["content"]) for message in messages]
    except (TypeError, KeyError):
        raise ValueError("field 'prompt' is no list of messages with role and content") from None
    roles = [role for role, _ in turns]
    if roles not in (["user"], ["system", "user"]) or not all(isinstance(text, str) for _, text in turns):
        raise ValueError(
            f"field 'prompt' is a conversation of {', '.join(map(str, roles))}; one question is what is read"
        )
    if not turns[-1][1].strip():
        raise ValueError("field 'prompt' is empty")
    return turns[-1][1], {"system": turns[0][1]} if len(turns) == 2 else {}


def _verl(row: RawMapping) -> Row:
    """verl's layout: `prompt` messages, and the answer in `reward_model.ground_truth`."""
    problem, metadata = _conversation(row)
    judge = field(row, "reward_model")
    if not isinstance(judge, Mapping) or "ground_truth" not in judge:
        raise ValueError("field 'reward_model' has no 'ground_truth'")
    answer = _required(answer_text(judge["ground_truth"], "reward_model.ground_truth"), "reward_model.ground_truth")
    return problem, answer, metadata | {"data_source": row.get("data_source")}


def _eurus_code(row: RawMapping) -> Row:
    """Eurus-2's coding problems: tests in `reward_model.ground_truth`; its mathematics is left out."""
    ability = row.get("ability", "code")
    if ability != "code":
        raise NotOfThisLayout(f"has ability {ability!r}")
    problem, tests, metadata = _verl(row)
    return problem, "", metadata | {"tests": _tests(tests, "reward_model.ground_truth")}


def _apps(row: RawMapping) -> Row:
    """APPS and TACO: tests in `input_output`, sometimes a piece of program to start from."""
    problem, starter = problem_text(row, "question", "problem", "prompt"), row.get("starter_code")
    name = "input_output" if "input_output" in row else "tests"
    if isinstance(starter, str) and starter.strip():
        problem = f"{problem}\n\nStart from this code:\n```python\n{starter}\n```"
    return problem, "", {"tests": _tests(field(row, "input_output", "tests"), name)}


def _tests(value: Any, name: str) -> dict[str, Any]:
    """Inputs and outputs of a program, from an object or from its JSON."""
    try:
        tests = json.loads(value) if isinstance(value, str) else value
        if not isinstance(tests, dict) or len(tests["inputs"]) != len(tests["outputs"]) or not tests["inputs"]:
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"field {name!r} holds no tests (as many inputs as outputs, at least one)") from None
    return tests


def _math_preset(summary: str, row: Callable[[RawMapping], Row] = _math) -> Preset:
    return Preset(summary, row, "math", MATH_INSTRUCTION)


PRESETS: dict[str, Preset] = {
    "gsm8k": _math_preset("GSM8K", _gsm8k),
    "math": _math_preset("MATH and its subsets"),
    "deepmath": _math_preset("DeepMath-103K"),
    "deepscaler": _math_preset("DeepScaleR-Preview"),
    "dapo": Preset("DAPO-Math-17k, and other mathematics in verl's layout", _verl, "math", ""),
    "eurus_code": Preset("the coding problems of Eurus-2-RL-Data", _eurus_code, "code", ""),
    "apps": Preset("APPS, TACO", _apps, "code", CODE_INSTRUCTION),
    "aime24": _math_preset("AIME 2024"),
    "aime25": _math_preset("AIME 2025"),
    "amc23": _math_preset("AMC 2023"),
    "amc24": _math_preset("AMC 2024"),
    "math500": _math_preset("MATH-500"),
    "gaokao2023en": _math_preset("Gaokao 2023, in English"),
    "minerva_math": _math_preset("Minerva Math"),
    "olympiadbench": _math_preset("OlympiadBench", _olympiad),
}
