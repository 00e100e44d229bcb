"""A reward from which an untrained policy can learn."""

from __future__ import annotations

from megatron_calclip.rewards import RewardSample


def share_of_digits(sample: RewardSample) -> float:
    """How much of a completion is digits."""
    return sum(character.isdigit() for character in sample.completion) / max(len(sample.completion), 1)
