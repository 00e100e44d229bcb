"""CISPO: a clipped weight, never a lost gradient."""

import torch
from packed_batches import loss_inputs, random_batch

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.cispo import cispo_loss


def gradient(inputs, bounds, **kwargs):
    return torch.autograd.grad(cispo_loss(inputs, bounds, **kwargs).token_loss.sum(), inputs.log_probs)[0]


def test_by_hand():
    # eps_high = 1: r = 3 weighs 2, r = 1.5 weighs 1.5; r = .2 weighs .2, or .5 with a lower bound of .5.
    inputs = loss_inputs(torch.tensor([3.0, 1.5, 0.2]).log(), torch.tensor([1.0, -2.0, 1.0]))
    torch.testing.assert_close(gradient(inputs, ClipBounds(0.0, 2.0)), torch.tensor([-2.0, 3.0, -0.2]))
    torch.testing.assert_close(gradient(inputs, ClipBounds(0.5, 2.0)), torch.tensor([-2.0, 3.0, -0.5]))


def test_no_token_is_reported_as_clipped_and_ratios_are_not_clipped():
    inputs = loss_inputs(torch.tensor([3.0, 0.1]).log(), torch.tensor([1.0, -1.0]))
    output = cispo_loss(inputs, ClipBounds(0.8, 1.2))
    assert not (output.clipped_low | output.clipped_high | output.clipped_dual).any()
    torch.testing.assert_close(output.ratio, torch.tensor([3.0, 0.1]))


def test_importance_weights_masks_and_extremes():
    inputs = loss_inputs(
        torch.tensor([1e4, -1e4, float("nan"), 0.0]),
        torch.tensor([1.0, 1.0, float("inf"), 1.0]),
        weights=torch.tensor([1.0, 1.0, float("nan"), 0.25]),
        mask=torch.tensor([True, True, False, True]),
    )
    torch.testing.assert_close(gradient(inputs, ClipBounds(0.5, 2.0)), torch.tensor([-2.0, -0.5, 0.0, -0.25]))
    assert cispo_loss(inputs, ClipBounds(0.5, 2.0)).token_loss[2].item() == 0.0


def test_inside_the_bounds_the_gradient_is_that_of_the_unclipped_surrogate():
    inputs = random_batch(2, sigma=0.1).inputs
    mask = inputs.response_mask
    ratio = (inputs.log_probs - inputs.old_log_probs).detach().exp()[mask]
    expected = -(inputs.importance_weights * inputs.advantages)[mask] * ratio
    torch.testing.assert_close(gradient(inputs, ClipBounds(0.1, 10.0))[mask], expected)


def test_exact_on_policy():
    inputs = loss_inputs(torch.tensor([3.0]).log(), torch.tensor([1.0]))
    assert gradient(inputs, ClipBounds(0.8, 1.2), exact_on_policy=True).item() == -1.0
