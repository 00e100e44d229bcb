r"""The mathematics reward: whether a completion's final answer is the reference.

`extraction` finds the two expressions, `math_text` gives them one spelling, `math_compare` decides.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

from megatron_calclip.rewards.extraction import final_answer, reference_answer
from megatron_calclip.rewards.math_compare import Rules, equal
from megatron_calclip.rewards.math_numbers import split_unit
from megatron_calclip.rewards.math_text import bare, normalize

# Longer answers are wrong unread: no reference is as long, and taking one apart takes quadratic time.
_MAX_LENGTH = 5000


class MathReward:
    """1 when the final answer is the reference, else 0.

    Args:
        relative_tolerance: of decimals; see `math_numbers`.
    """

    def __init__(self, *, relative_tolerance: float) -> None:
        self.rules = Rules(relative_tolerance)

    def __call__(self, completion: str, answer: str, metadata: dict[str, Any]) -> float:
        """Score a completion; `metadata` may hold `tolerance` (absolute) and `unit` (of the reference)."""
        given = final_answer(completion)
        if given is None or len(given) > _MAX_LENGTH:
            return 0.0
        rules = self.rules
        if (tolerance := _number_of(metadata.get("tolerance"))) is not None:
            rules = replace(rules, tolerance=tolerance)
        gold = _reference(answer, str(metadata.get("unit") or ""))
        return float(equal(gold, normalize(given), rules))


def check_reference(answer: str, metadata: dict[str, Any]) -> None:
    """Whether a reference answer holds anything to compare with, and its tolerance is a number.

    Raises:
        ValueError: with the reason.
    """
    gold = normalize(reference_answer(answer))
    if not bare(gold) or not re.search(r"\w|\\emptyset|\\infty|\{", gold):
        raise ValueError(f"has an empty reference answer ({answer!r})")
    tolerance = metadata.get("tolerance")
    number = _number_of(tolerance)
    if tolerance not in (None, "") and (number is None or not 0 <= number < math.inf):
        raise ValueError(f"has a tolerance that is no number of at least 0 ({tolerance!r})")


def _number_of(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


@lru_cache(maxsize=8192)
def _reference(answer: str, unit: str) -> str:
    gold = normalize(reference_answer(answer))
    if unit and not split_unit(gold).unit:
        unit = normalize(unit.replace("$", ""))
        return f"{gold}{unit}" if unit.startswith(("^", "%")) else rf"{gold} \text{{{unit}}}"
    return gold
