"""Masked log-ratios and sequence sums."""

import math

import pytest
import torch

from megatron_calclip.algorithms.ratio import (
    MAX_LOG_RATIO,
    bounded_exp,
    masked,
    masked_log_ratio,
    sequence_mean,
    sequence_sum,
)

IDS = torch.tensor([0, 2, 0, 2, 2])
MASK = torch.tensor([True, True, True, False, True])


def test_masked_log_ratio_ignores_what_is_outside_in_value_and_gradient():
    numerator = torch.tensor([1.0, 2.0, 3.0, float("nan"), 5.0], requires_grad=True)
    denominator = torch.tensor([0.5, 0.5, 0.5, float("inf"), 0.5])
    ratio = masked_log_ratio(numerator, denominator, MASK)
    ratio.square().sum().backward()
    assert ratio.tolist() == [0.5, 1.5, 2.5, 0.0, 4.5]
    assert numerator.grad.tolist() == [1.0, 3.0, 5.0, 0.0, 9.0]


def test_half_precision_is_widened_before_the_difference():
    # -8 + 5/128 = -7.9609375 needs 11 significant bits; bfloat16 has 8.
    ratio = masked_log_ratio(
        torch.tensor([-8.0], dtype=torch.bfloat16),
        torch.tensor([-0.0390625], dtype=torch.bfloat16),
        torch.tensor([True]),
    )
    assert ratio.item() == -7.9609375


def test_half_precision_is_widened_and_double_is_kept():
    assert masked(torch.ones(5, dtype=torch.bfloat16), MASK).dtype == torch.float32
    assert masked(torch.ones(5, dtype=torch.float64), MASK).dtype == torch.float64


@pytest.mark.parametrize("log_ratio", [-1e4, -20.5, 20.5, 1e4])
def test_bounded_exp_is_finite_and_flat_beyond_the_bound(log_ratio):
    x = torch.tensor([log_ratio], requires_grad=True)
    y = bounded_exp(x)
    y.backward()
    assert y.item() == pytest.approx(math.exp(math.copysign(MAX_LOG_RATIO, log_ratio)), rel=1e-6)
    assert x.grad.item() == 0.0


def test_sequence_sum_and_mean_by_hand():
    values = torch.tensor([1.0, 2.0, 3.0, 0.0, 5.0], requires_grad=True)
    assert sequence_sum(values, IDS, num_sequences=4).tolist() == [4.0, 0.0, 7.0, 0.0]
    # Sequence 2 has two response tokens, sequences 1 and 3 none.
    mean = sequence_mean(values, MASK, IDS, num_sequences=4)
    assert mean.tolist() == [2.0, 0.0, 3.5, 0.0]
    mean.sum().backward()
    assert values.grad.tolist() == [0.5] * 5
