"""Clip bounds: what is allowed."""

import dataclasses

import pytest

from megatron_calclip.algorithms.bounds import ClipBounds


def test_bounds_hold_ratios_and_cannot_be_changed():
    bounds = ClipBounds(0.8, 1.28)
    assert (bounds.lower, bounds.upper) == (0.8, 1.28)
    with pytest.raises(dataclasses.FrozenInstanceError):
        bounds.lower = 0.5


def test_a_lower_bound_of_zero_is_allowed():
    assert ClipBounds(0.0, 2.0).lower == 0.0


@pytest.mark.parametrize(
    ("lower", "upper"),
    [(1.0, 1.2), (0.8, 1.0), (-0.1, 1.2), (1.2, 1.4), (0.8, float("inf")), (float("nan"), 1.2), (0.2, 0.28)],
)
def test_bounds_must_enclose_one(lower, upper):
    with pytest.raises(ValueError, match="do not enclose the ratio 1; choose"):
        ClipBounds(lower, upper)
