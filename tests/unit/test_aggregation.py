"""Loss weights: hand cases, and the loss does not depend on how a mini-batch is cut up."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_batches import random_batch

from megatron_calclip.algorithms.aggregation import loss_weights
from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.cispo import cispo_loss
from megatron_calclip.algorithms.gspo import gspo_surrogate
from megatron_calclip.algorithms.policy_loss import clipped_surrogate

AGGREGATIONS = ["token_mean", "sequence_mean", "fixed_length"]
# Sequence 0: 1 of 2 tokens is response; sequence 1: 3 of 4; sequence 2: none of 1.
MASK = torch.tensor([False, True, True, True, False, True, False])
IDS = torch.tensor([0, 0, 1, 1, 1, 1, 2])


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [0, 1 / 4, 1 / 4, 1 / 4, 0, 1 / 4, 0]),
        ("sequence_mean", [0, 1 / 3, 1 / 9, 1 / 9, 0, 1 / 9, 0]),
        ("fixed_length", [0, 1 / 24, 1 / 24, 1 / 24, 0, 1 / 24, 0]),
    ],
)
def test_weights_by_hand(aggregation, expected):
    weights = loss_weights(MASK, IDS, aggregation=aggregation, num_tokens=4, num_sequences=3, max_response_length=8)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, torch.tensor(expected))


def test_denominators_are_global_not_those_of_the_call():
    weights = loss_weights(MASK, IDS, aggregation="sequence_mean", num_tokens=40, num_sequences=30)
    assert weights[1].item() == pytest.approx(1 / 30)
    weights = loss_weights(MASK, IDS, aggregation="token_mean", num_tokens=40, num_sequences=30)
    assert weights[1].item() == pytest.approx(1 / 40)


def test_an_empty_micro_batch_has_no_weights():
    nothing = torch.zeros(0, dtype=torch.int64)
    for aggregation in AGGREGATIONS:
        weights = loss_weights(
            nothing.bool(),
            nothing,
            aggregation=aggregation,
            num_tokens=4,
            num_sequences=3,
            max_response_length=8,
        )
        assert weights.shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"aggregation": "mean"}, "unknown; choose from"),
        ({"num_tokens": 0}, "nothing to train on"),
        ({"num_sequences": 0}, "nothing to train on"),
        ({"aggregation": "fixed_length"}, "set it to the longest response"),
    ],
)
def test_errors(change, message):
    arguments = {"aggregation": "token_mean", "num_tokens": 4, "num_sequences": 3} | change
    with pytest.raises(ValueError, match=message):
        loss_weights(MASK, IDS, **arguments)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    aggregation=st.sampled_from(AGGREGATIONS),
    loss=st.sampled_from([clipped_surrogate, gspo_surrogate, cispo_loss]),
    cut=st.integers(1, 5),
    order=st.permutations(range(6)),
)
def test_loss_and_gradient_are_the_same_under_any_micro_batching(seed, aggregation, loss, cut, order):
    bounds = ClipBounds(0.8, 1.2)
    batch = random_batch(seed)
    counts = {
        "num_tokens": max(int(batch.inputs.response_mask.sum()), 1),
        "num_sequences": 6,
        "max_response_length": 12,
    }

    def summed_loss(inputs):
        weights = loss_weights(inputs.response_mask, inputs.sequence_ids, aggregation=aggregation, **counts)
        return (weights * loss(inputs, bounds).token_loss).sum()

    log_probs = batch.inputs.log_probs
    whole = summed_loss(batch.inputs)
    (whole_gradient,) = torch.autograd.grad(whole, log_probs)
    micro_batches = [batch.part(list(order[:cut])), batch.part(list(order[cut:]))]
    split = sum(summed_loss(micro_batch.inputs) for micro_batch in micro_batches)
    (split_gradient,) = torch.autograd.grad(split, log_probs)

    torch.testing.assert_close(split, whole, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(split_gradient, whole_gradient, rtol=1e-9, atol=1e-12)
    assert (whole_gradient[~batch.inputs.response_mask] == 0).all()
