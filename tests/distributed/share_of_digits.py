"""A reward that tells untrained policies apart: what share of a completion is digits."""

from __future__ import annotations

from megatron_calclip.rewards import RewardSample


def share_of_digits(sample: RewardSample) -> float:
    """Between 0 and 1."""
    return sum(character.isdigit() for character in sample.completion) / max(len(sample.completion), 1)
