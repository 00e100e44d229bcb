"""Sampler-learner importance weights."""

import math

import pytest
import torch

from megatron_calclip.algorithms.importance import importance_weights

# Sequence 0: pi_old / mu = 2, 4 and a masked token; sequence 1: 1/2, 1, 1/4.
RATIO = torch.tensor([2.0, 4.0, float("nan"), 0.5, 1.0, 0.25])
MASK = torch.tensor([True, True, False, True, True, True])
IDS = torch.tensor([0, 0, 0, 1, 1, 1])
SAMPLER = torch.full((6,), -2.0)
OLD = SAMPLER + RATIO.log()


def weigh(**kwargs):
    return importance_weights(OLD, SAMPLER, MASK, IDS, num_sequences=2, **kwargs)


@pytest.mark.parametrize(
    ("level", "expected", "truncated"),
    [
        ("off", [1, 1, 1, 1, 1, 1], []),
        ("token", [2, 3, 1, 0.5, 1, 0.25], [1]),
        ("sequence_product", [3, 3, 1, 0.125, 0.125, 0.125], [0, 1]),  # 2 * 4 = 8 is cut to 3
        ("sequence_geometric", [8**0.5, 8**0.5, 1, 0.5, 0.5, 0.5], []),  # (1/8)^(1/3) = 1/2
    ],
)
def test_levels_by_hand(level, expected, truncated):
    result = weigh(level=level, cap=3.0)
    torch.testing.assert_close(result.weights, torch.tensor(expected, dtype=torch.float32))
    assert result.truncated.nonzero().flatten().tolist() == truncated


def test_default_cap_is_two():
    assert weigh(level="token").weights.tolist() == pytest.approx([2, 2, 1, 0.5, 1, 0.25])


def test_a_weight_at_the_cap_is_not_truncated():
    # Token 4 weighs exactly 1.
    assert weigh(level="token", cap=1.0).truncated.nonzero().flatten().tolist() == [0, 1]


def test_mask_mode_removes_what_exceeds_the_cap():
    assert weigh(level="token", cap=3.0, mode="mask").weights.tolist() == pytest.approx([2, 0, 1, 0.5, 1, 0.25])
    by_sequence = weigh(level="sequence_product", cap=3.0, mode="mask")
    assert by_sequence.weights.tolist() == pytest.approx([0, 0, 1, 0.125, 0.125, 0.125])


def test_weights_are_detached_float32_and_finite():
    old = torch.tensor([1e4, -1e4], dtype=torch.float64, requires_grad=True)
    for level in ("token", "sequence_product", "sequence_geometric"):
        result = importance_weights(
            old,
            torch.zeros(2),
            torch.ones(2, dtype=torch.bool),
            torch.arange(2),
            num_sequences=2,
            level=level,
        )
        assert result.weights.dtype == torch.float32 and not result.weights.requires_grad
        assert result.weights.tolist() == pytest.approx([2.0, math.exp(-20)])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"level": "sequence"}, "unknown; choose from"),
        ({"level": "token", "mode": "drop"}, "unknown; choose from"),
        ({"level": "token", "cap": 0.5}, "choose at least 1"),
    ],
)
def test_errors(kwargs, message):
    with pytest.raises(ValueError, match=message):
        weigh(**kwargs)
