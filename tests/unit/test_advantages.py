"""Advantages, dynamic sampling, overlong shaping."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_calclip.algorithms.advantages import degenerate_groups, group_advantages, overlong_penalty

# Interleaved, with labels that are not 0..G-1. Group 7: rewards 1, 0, 0, 1; group 3: 2, 2; group 9: 0, 3.
GROUPS = torch.tensor([7, 3, 7, 9, 7, 3, 7, 9])
REWARDS = torch.tensor([1.0, 2.0, 0.0, 0.0, 0.0, 2.0, 1.0, 3.0])


def test_group_norm_by_hand():
    # Group 7: mean 1/2, sample variance 4 * (1/2)^2 / 3 = 1/3. Group 9: mean 3/2, sample variance 9/2.
    seven = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    nine = 1.5 / (math.sqrt(4.5) + 1e-6)
    expected = torch.tensor([seven, 0, -seven, -nine, -seven, 0, seven, nine])
    advantages = group_advantages(REWARDS, GROUPS, kind="group_norm")
    assert advantages.dtype == torch.float32
    torch.testing.assert_close(advantages, expected)


def test_epsilon_is_added_to_the_std():
    # Group 9 of two: std = 3 / sqrt(2) = 2.1213; with epsilon 1, 1.5 / 3.1213 = 0.48057.
    advantages = group_advantages(REWARDS, GROUPS, kind="group_norm", epsilon=1.0)
    assert advantages[7].item() == pytest.approx(0.48057, abs=1e-5)


def test_mean_only_by_hand():
    expected = [0.5, 0, -0.5, -1.5, -0.5, 0, 0.5, 1.5]
    assert group_advantages(REWARDS, GROUPS, kind="mean_only").tolist() == expected


def test_leave_one_out_by_hand():
    # Group 7, first member: 1 - (0 + 0 + 1) / 3 = 2/3; second: 0 - 2/3. Group 9: 0 - 3 and 3 - 0.
    expected = torch.tensor([2 / 3, 0, -2 / 3, -3, -2 / 3, 0, 2 / 3, 3])
    torch.testing.assert_close(group_advantages(REWARDS, GROUPS, kind="leave_one_out"), expected)


@pytest.mark.parametrize("kind", ["group_norm", "mean_only", "leave_one_out"])
def test_equal_rewards_give_exactly_zero(kind):
    # Ten times 0.1 add up to 0.9999999999999999, so that the mean is not 0.1; 1e-17 / 1e-30 would be large.
    rewards = torch.full((10,), 0.1, dtype=torch.float64)
    advantages = group_advantages(rewards, torch.zeros(10, dtype=torch.int64), kind=kind, epsilon=1e-30)
    assert (advantages == 0).all()


def test_a_group_of_one():
    rewards, groups = torch.tensor([1.0, 0.0, 5.0]), torch.tensor([4, 4, 8])
    for kind in ("group_norm", "leave_one_out"):
        with pytest.raises(ValueError, match="group 8 has one answer"):
            group_advantages(rewards, groups, kind=kind)
    assert group_advantages(rewards, groups, kind="mean_only").tolist() == [0.5, -0.5, 0.0]


def test_errors():
    with pytest.raises(ValueError, match="unknown; choose from"):
        group_advantages(REWARDS, GROUPS, kind="std")
    with pytest.raises(ValueError, match="NaN or infinite"):
        group_advantages(torch.tensor([float("nan"), 1.0]), torch.zeros(2, dtype=torch.int64), kind="mean_only")


def test_degenerate_groups():
    assert degenerate_groups(REWARDS, GROUPS).tolist() == [
        False,
        True,
        False,
        False,
        False,
        True,
        False,
        False,
    ]


@given(st.permutations(range(8)), st.sampled_from(["group_norm", "mean_only", "leave_one_out"]))
def test_order_does_not_matter(order, kind):
    order = torch.tensor(order)
    shuffled = group_advantages(REWARDS[order], GROUPS[order], kind=kind)
    torch.testing.assert_close(shuffled, group_advantages(REWARDS, GROUPS, kind=kind)[order])
    assert torch.equal(degenerate_groups(REWARDS[order], GROUPS[order]), degenerate_groups(REWARDS, GROUPS)[order])


def test_overlong_penalty_by_hand():
    # L_max 100, buffer 20: nothing up to 80, then (80 - n) / 20, -1 from 100 on.
    lengths = torch.tensor([1, 80, 81, 90, 99, 100, 101, 1000])
    expected = [0.0, 0.0, -0.05, -0.5, -0.95, -1.0, -1.0, -1.0]
    torch.testing.assert_close(overlong_penalty(lengths, max_length=100, buffer=20), torch.tensor(expected))
    with pytest.raises(ValueError, match="choose it inside"):
        overlong_penalty(lengths, max_length=100, buffer=101)
