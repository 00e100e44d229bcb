"""Rewards that tell untrained policies apart: what share of a completion is digits.

In a module of their own, because scoring processes import it: they need no Megatron.
"""

from __future__ import annotations

from megatron_calclip.rewards import RewardSample


def share_of_digits(sample: RewardSample) -> float:
    """Between 0 and 1."""
    return sum(character.isdigit() for character in sample.completion) / max(len(sample.completion), 1)


def share_of_digits_of_some(sample: RewardSample) -> float:
    """The same, but nothing for every third prompt, whose groups teach nothing."""
    return 0.0 if sample.prompt.id % 3 == 1 else share_of_digits(sample)
