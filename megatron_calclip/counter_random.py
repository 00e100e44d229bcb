"""Counter-based random numbers: the n-th one is computed from n, without those before it, alike on every device."""

from __future__ import annotations

from torch import Tensor


def signed(value: int) -> int:
    """The int64 that has the same 64 bits as `value` modulo 2^64."""
    value %= 1 << 64
    return value - (1 << 64) if value >= 1 << 63 else value


GOLDEN_GAMMA = signed(0x9E3779B97F4A7C15)
"""2^64 divided by the golden ratio: the step of SplitMix64's counter."""


def shift_right(values: Tensor, num_bits: int) -> Tensor:
    """Logical shift: the shift of int64 would drag the sign along."""
    return (values >> num_bits) & ((1 << (64 - num_bits)) - 1)


def splitmix64(state: Tensor) -> Tensor:
    """First output of the SplitMix64 generator (Steele, Lea and Flood, OOPSLA 2014) from each int64 state.

    Output n (from 0) of a generator at `state` is `splitmix64(state + n * GOLDEN_GAMMA)`: every position
    can be reached without those before it. Sums and products of int64 wrap around, modulo 2^64 as needed.
    """

    z = state + GOLDEN_GAMMA
    z = (z ^ shift_right(z, 30)) * signed(0xBF58476D1CE4E5B9)
    z = (z ^ shift_right(z, 27)) * signed(0x94D049BB133111EB)
    return z ^ shift_right(z, 31)
