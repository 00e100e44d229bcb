"""GSPO: the sequence ratio, its clip, both gradients."""

import pytest
import torch
from packed_batches import loss_inputs, random_batch

from megatron_calclip.algorithms.aggregation import loss_weights
from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.gspo import gspo_surrogate, sequence_level

PPO = ClipBounds(0.8, 1.2)
VARIANTS = ["sequence", "token"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_reference_case_by_hand(variant):
    # r = .5, 1, 1.5: s = .75^(1/3) = .9086, not clipped; mean of -s * [1, -1, 2] = -.9086 * 2 / 3 = -.6057.
    inputs = loss_inputs(torch.tensor([0.5, 1.0, 1.5]).log(), torch.tensor([1.0, -1.0, 2.0]))
    output = gspo_surrogate(inputs, PPO, variant=variant)
    torch.testing.assert_close(output.ratio, torch.full((3,), 0.75 ** (1 / 3)))
    assert output.token_loss.mean().item() == pytest.approx(-0.6057, abs=1e-4)


def test_gradients_of_the_two_variants_by_hand():
    # Summed loss -s * (1 - 1 + 2). sequence: d s / d log pi_t = s / 3 for each t, so -2 s / 3 everywhere.
    # token: -s * A_t.
    inputs = loss_inputs(torch.tensor([0.5, 1.0, 1.5]).log(), torch.tensor([1.0, -1.0, 2.0]))
    s = 0.75 ** (1 / 3)
    expected = {"sequence": [-2 * s / 3] * 3, "token": [-s, s, -2 * s]}
    for variant in VARIANTS:
        loss = gspo_surrogate(inputs, PPO, variant=variant).token_loss.sum()
        (gradient,) = torch.autograd.grad(loss, inputs.log_probs)
        torch.testing.assert_close(gradient, torch.tensor(expected[variant]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_clipped_sequence_loses_all_its_gradients(variant):
    # Sequence 0: log-ratios -.5, -.1, mean -.3, s = .741 <= .8 although the second token alone is inside.
    # Sequence 1: .5, -.3, mean .1, s = 1.105 inside although its first token alone is outside.
    inputs = loss_inputs(
        torch.tensor([-0.5, -0.1, 0.5, -0.3]),
        torch.tensor([-1.0, -1.0, 1.0, 1.0]),
        sequence_ids=torch.tensor([0, 0, 1, 1]),
    )
    output = gspo_surrogate(inputs, PPO, variant=variant)
    assert output.clipped_low.tolist() == [True, True, False, False]
    assert not output.clipped_high.any()
    (gradient,) = torch.autograd.grad(output.token_loss.sum(), inputs.log_probs)
    s = 2.718281828**0.1
    torch.testing.assert_close(gradient, torch.tensor([0.0, 0.0, -s, -s]))


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean"])
def test_variants_agree_for_one_advantage_per_sequence(aggregation):
    inputs = random_batch(5).inputs
    # One importance weight per sequence as well.
    weights = torch.rand(6, generator=torch.Generator().manual_seed(0))[inputs.sequence_ids]
    inputs = loss_inputs(
        (inputs.log_probs - inputs.old_log_probs).detach(),
        inputs.advantages,
        weights=weights,
        mask=inputs.response_mask,
        sequence_ids=inputs.sequence_ids,
    )
    per_token = loss_weights(
        inputs.response_mask, inputs.sequence_ids, aggregation=aggregation, num_tokens=20, num_sequences=6
    )
    results = []
    for variant in VARIANTS:
        loss = (per_token * gspo_surrogate(inputs, PPO, variant=variant).token_loss).sum()
        results.append((loss, torch.autograd.grad(loss, inputs.log_probs)[0]))
    torch.testing.assert_close(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])
    assert results[0][1].abs().sum() > 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_masks_extremes_and_exact_on_policy(variant):
    mask = torch.tensor([True, False, True, False])
    log_ratio = torch.tensor([1e4, float("nan"), -1e4, float("inf")])
    ids = torch.tensor([0, 0, 1, 2])  # sequence 2 has no response token
    inputs = loss_inputs(log_ratio, torch.tensor([-1.0, 9.0, 1.0, float("nan")]), mask=mask, sequence_ids=ids)
    output = gspo_surrogate(inputs, PPO, variant=variant)
    (gradient,) = torch.autograd.grad(output.token_loss.sum(), inputs.log_probs)
    assert torch.isfinite(output.token_loss).all() and torch.isfinite(gradient).all()
    assert (output.token_loss[~mask] == 0).all() and (gradient[~mask] == 0).all()
    assert (output.ratio[~mask] == 1).all()
    exact = gspo_surrogate(inputs, PPO, variant=variant, exact_on_policy=True)
    assert (exact.ratio == 1).all()
    assert torch.autograd.grad(exact.token_loss.sum(), inputs.log_probs)[0].tolist() == [1.0, 0.0, -1.0, 0.0]


def test_sequences_as_tokens_by_hand():
    whole = sequence_level(
        ratio8=torch.tensor([4.0, 1.0, 3.0, 5.0]),
        ratio16=torch.tensor([1.0, 1.0, 1.0, 0.5]),
        advantages=torch.tensor([1.0, 1.0, 1.0, -2.0]),
        importance_weights=torch.tensor([2.0, 0.5, 1.0, 1.5]),
        loss_weights=torch.tensor([0.25, 0.5, 0.0, 0.0]),  # none at all: the importance weight does not matter
        sequence_ids=torch.tensor([0, 0, 1, 1]),
        num_sequences=2,
    )
    assert whole.ratio8.tolist() == pytest.approx([2.0, 15**0.5])
    assert whole.ratio16.tolist() == pytest.approx([1.0, 0.5**0.5])
    assert whole.advantages.tolist() == [1.0, -0.5]
    assert whole.loss_weights.tolist() == [0.75, 0.0]
    assert whole.importance_weights.tolist() == pytest.approx([(2 * 0.25 + 0.5 * 0.5) / 0.75, 1.25])


def test_sequences_as_tokens_leave_the_loss_as_it_is():
    """Importance weights of single tokens (`algorithm.importance.level: token`) included."""
    inputs = random_batch(3).inputs
    sequences, mask = inputs.sequence_ids, inputs.response_mask
    inputs = loss_inputs(
        (inputs.log_probs - inputs.old_log_probs).detach(),
        torch.linspace(-1, 1, 6, dtype=torch.float64)[sequences],
        sequence_ids=sequences,
        mask=mask,
        weights=torch.rand(sequences.numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float64),
    )
    weights = loss_weights(mask, sequences, aggregation="sequence_mean", num_tokens=int(mask.sum()), num_sequences=6)
    output = gspo_surrogate(inputs, ClipBounds(0.9, 1.1))
    loss = (weights * output.token_loss)[mask].sum()
    present, rows = torch.unique(sequences[mask], return_inverse=True)
    ratio = output.ratio[mask].detach()
    whole = sequence_level(
        ratio8=ratio,
        ratio16=ratio,
        advantages=inputs.advantages[mask],
        importance_weights=inputs.importance_weights[mask],
        loss_weights=weights[mask],
        sequence_ids=rows,
        num_sequences=len(present),
    )
    torch.testing.assert_close(whole.ratio8, whole.ratio16)
    advantages = whole.advantages
    clipped = torch.minimum(whole.ratio8 * advantages, whole.ratio8.clamp(0.9, 1.1) * advantages)
    expected = -(whole.loss_weights * whole.importance_weights * clipped).sum()
    torch.testing.assert_close(loss.float(), expected)


def test_unknown_variant():
    inputs = loss_inputs(torch.zeros(1), torch.ones(1))
    with pytest.raises(ValueError, match="unknown; choose from"):
        gspo_surrogate(inputs, PPO, variant="mean")
