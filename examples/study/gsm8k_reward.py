"""A softer reward for GSM8K, for a model that hardly ever gets a whole problem right: half for the answer, half for coming near it.

GSM8K's solutions mark each step, `48/2 = <<48/2=24>>24`, and end in `#### 24`. The reward is

    1/2 [the last number of the completion is the answer]
  + 1/4 share of the solution's results that the completion states, results that stand in the question left out
  + 1/4 nearness of the last number x to the answer a: min(x, a) / max(x, a)

so that a group of wrong completions still differs, and the gradient says something about arithmetic. It is made for the study and
easy to game (a list of numbers would do): a reward to train a model for use is `reward.name: math`.
"""

from __future__ import annotations

import re

from megatron_calclip.rewards import RewardSample

_RESULT = re.compile(r"<<[^<>=]*=([^<>]*)>>")
_ANSWER = "####"
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def numbers(text: str) -> list[str]:
    """All numbers of a text in order, `1,200.0` as `1200`."""
    return [_plain(number) for number in _NUMBER.findall(text)]


def _plain(number: str) -> str:
    number = number.replace(",", "")
    return number.rstrip("0").rstrip(".") if "." in number else number


def results(solution: str) -> set[str]:
    """What the steps of a solution come to."""
    return {number for result in _RESULT.findall(solution) for number in numbers(result)}


def final(solution: str) -> str:
    """The answer that a solution ends in; empty where it ends in no number."""
    return (numbers(solution.rpartition(_ANSWER)[2]) or [""])[-1]


def without_marks(solution: str) -> str:
    """A solution as one would write it."""
    return re.sub(r"<<[^<>]*>>", "", solution)


def reward(sample: RewardSample) -> dict[str, float]:
    """The reward of a completion, and its parts `right`, `steps` and `near`, each in [0, 1].

    Args:
        sample: whose `prompt.answer` is the whole solution.
    """
    solution, stated = sample.prompt.answer, numbers(sample.completion)
    answer, given = final(solution), stated[-1] if stated else ""
    right = float(given == answer)
    # Without the question's own numbers, which every completion repeats.
    wanted = results(solution) - set(numbers(sample.prompt.text))
    steps = len(wanted & set(stated)) / len(wanted) if wanted else right
    near = nearness(float(given), float(answer)) if given else 0.0
    return {"reward": right / 2 + steps / 4 + near / 4, "right": right, "steps": steps, "near": near}


def nearness(one: float, other: float) -> float:
    """The smaller of two numbers as a part of the larger one; 0 where one is not positive."""
    return min(one, other) / max(one, other) if one > 0 and other > 0 else 0.0
