"""The clipped surrogate: hand cases, gradients against the plain formula, masks, extremes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_batches import loss_inputs, random_batch

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.policy_loss import clip_masks, clipped_surrogate, oracle_surrogate

PPO = ClipBounds(0.8, 1.2)


def gradient(output, inputs):
    return torch.autograd.grad(output.token_loss.sum(), inputs.log_probs)[0]


def test_reference_case_by_hand():
    # A = [1, -1, 2], r = [.5, 1, 1.5], eps .2: -min(.5, .8) = -.5; -min(-1, -1) = 1; -min(3, 2.4) = -2.4.
    inputs = loss_inputs(torch.tensor([0.5, 1.0, 1.5]).log(), torch.tensor([1.0, -1.0, 2.0]))
    output = clipped_surrogate(inputs, PPO)
    torch.testing.assert_close(output.token_loss, torch.tensor([-0.5, 1.0, -2.4]))
    assert output.token_loss.mean().item() == pytest.approx(-0.6333, abs=1e-4)
    torch.testing.assert_close(output.ratio, torch.tensor([0.5, 1.0, 1.5]))
    assert not output.ratio.requires_grad
    assert output.clipped_high.tolist() == [False, False, True]
    assert not output.clipped_low.any() and not output.clipped_dual.any()
    # d(-r A)/d(log pi) = -r A for the two that are kept.
    torch.testing.assert_close(gradient(output, inputs), torch.tensor([-0.5, 1.0, 0.0]))


def test_wide_upper_bound_keeps_the_token():
    # Ratio 2, A = 1, eps 2.1: upper bound 3.1, loss -2.
    inputs = loss_inputs(torch.tensor([math.log(2.0)]), torch.tensor([1.0]))
    assert clipped_surrogate(inputs, ClipBounds(0.0, 3.1)).token_loss.item() == pytest.approx(-2.0)


def test_only_clips_that_remove_a_gradient_count():
    # (r, A): (.5, -1) low; (1.5, 1) high; (.5, 1), (1.5, -1) and A = 0 keep what they have.
    log_ratio = torch.tensor([0.5, 1.5, 0.5, 1.5, 0.5, 1.5]).log()
    advantages = torch.tensor([-1.0, 1.0, 1.0, -1.0, 0.0, 0.0])
    inputs = loss_inputs(log_ratio, advantages)
    output = clipped_surrogate(inputs, PPO)
    assert output.clipped_low.tolist() == [True, False, False, False, False, False]
    assert output.clipped_high.tolist() == [False, True, False, False, False, False]
    torch.testing.assert_close(output.token_loss, torch.tensor([0.8, -1.2, -0.5, 1.5, 0.0, 0.0]))
    torch.testing.assert_close(gradient(output, inputs), torch.tensor([0.0, 0.0, -0.5, 1.5, 0.0, 0.0]))


def test_a_ratio_on_the_bound_is_clipped_and_has_no_gradient():
    inputs = loss_inputs(torch.zeros(2), torch.tensor([-1.0, 1.0]))
    bounds = ClipBounds(0.5, 2.0)
    on_bound = torch.tensor([0.5, 2.0])  # exact in floating point
    output = oracle_surrogate(inputs, bounds, reference_ratio=on_bound)
    assert output.clipped_low.tolist() == [True, False]
    assert output.clipped_high.tolist() == [False, True]
    assert gradient(output, inputs).tolist() == [0.0, 0.0]


def test_importance_weights_scale_loss_and_gradient_and_get_no_gradient():
    weights = torch.tensor([0.0, 0.5, 2.0], requires_grad=True)
    inputs = loss_inputs(torch.zeros(3), torch.tensor([1.0, -1.0, 2.0]), weights=weights)
    output = clipped_surrogate(inputs, PPO)
    torch.testing.assert_close(output.token_loss, torch.tensor([0.0, 0.5, -4.0]))
    torch.testing.assert_close(gradient(output, inputs), torch.tensor([0.0, 0.5, -4.0]))
    output = clipped_surrogate(inputs, PPO)
    output.token_loss.sum().backward()
    assert weights.grad is None


def test_dual_clip_by_hand():
    # c = 3. A = -2: r = 2 loses 4, r = 5 is held at 3 * 2 = 6 without gradient; A = +2 is untouched by c.
    inputs = loss_inputs(torch.tensor([2.0, 5.0, 1.1]).log(), torch.tensor([-2.0, -2.0, 2.0]))
    output = clipped_surrogate(inputs, PPO, dual_clip=3.0)
    torch.testing.assert_close(output.token_loss, torch.tensor([4.0, 6.0, -2.2]))
    assert output.clipped_dual.tolist() == [False, True, False]
    assert not output.clipped_low.any() and not output.clipped_high.any()
    torch.testing.assert_close(gradient(output, inputs), torch.tensor([4.0, 0.0, -2.2]))
    with pytest.raises(ValueError, match="choose a value above 1"):
        clipped_surrogate(inputs, PPO, dual_clip=1.0)


def plain_ppo(log_probs, old, advantages, weights, bounds, dual_clip):
    """Textbook formula with torch's own min, clamp and max."""
    ratio = (log_probs - old).exp()
    surrogate = torch.min(ratio * advantages, ratio.clamp(bounds.lower, bounds.upper) * advantages)
    if dual_clip is not None:
        held = torch.max(surrogate, dual_clip * advantages)
        surrogate = torch.where(advantages < 0, held, surrogate)
    return -weights * surrogate


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    lower=st.floats(0.3, 0.95),
    upper=st.floats(1.05, 2.5),
    dual_clip=st.one_of(st.none(), st.floats(1.1, 4.0)),
)
def test_value_and_gradient_match_the_plain_formula(seed, lower, upper, dual_clip):
    inputs = random_batch(seed, sigma=0.8).inputs
    bounds = ClipBounds(lower, upper)
    output = clipped_surrogate(inputs, bounds, dual_clip=dual_clip)
    mask = inputs.response_mask
    log_probs = inputs.log_probs.detach()[mask].requires_grad_()
    expected = plain_ppo(
        log_probs,
        inputs.old_log_probs[mask],
        inputs.advantages[mask],
        inputs.importance_weights[mask],
        bounds,
        dual_clip,
    )
    torch.testing.assert_close(output.token_loss[mask], expected)
    computed = gradient(output, inputs)
    torch.testing.assert_close(computed[mask], torch.autograd.grad(expected.sum(), log_probs)[0])
    clipped = output.clipped_low | output.clipped_high | output.clipped_dual
    assert (computed[clipped | ~mask] == 0).all()
    assert (computed[mask & ~clipped] != 0).all()


def test_what_is_outside_the_mask_has_no_influence():
    clean, dirty = random_batch(3, dirty=False).inputs, random_batch(3, dirty=True).inputs
    mask = clean.response_mask
    assert not mask.all() and not torch.isfinite(dirty.log_probs[~mask]).any()
    for kwargs in ({}, {"exact_on_policy": True}, {"dual_clip": 1.5}):
        a, b = clipped_surrogate(clean, PPO, **kwargs), clipped_surrogate(dirty, PPO, **kwargs)
        assert torch.equal(a.token_loss, b.token_loss)
        assert torch.equal(gradient(a, clean), gradient(b, dirty))
        assert (b.token_loss[~mask] == 0).all() and (b.ratio[~mask] == 1).all()
        for name in ("clipped_low", "clipped_high", "clipped_dual"):
            assert torch.equal(getattr(a, name), getattr(b, name))
            assert not getattr(b, name)[~mask].any()


def test_extreme_log_ratios_stay_finite():
    log_ratio = torch.tensor([1e4, -1e4, 1e4, -1e4])
    inputs = loss_inputs(log_ratio, torch.tensor([1.0, 1.0, -1.0, -1.0]))
    output = clipped_surrogate(inputs, PPO)
    # A > 0: -1.2 and -e^-20; A < 0: e^20 and 0.8. Beyond +-20 no gradient, clipped or not.
    expected = torch.tensor([-1.2, -math.exp(-20), math.exp(20), 0.8])
    torch.testing.assert_close(output.token_loss, expected)
    assert gradient(output, inputs).tolist() == [0.0] * 4


def test_half_precision_inputs_are_computed_in_float32():
    inputs = loss_inputs(torch.tensor([0.0], dtype=torch.bfloat16), torch.tensor([1.0], dtype=torch.bfloat16))
    output = clipped_surrogate(inputs, PPO)
    assert output.token_loss.dtype == torch.float32 and output.ratio.dtype == torch.float32


def test_exact_on_policy_has_ratio_one_and_the_policy_gradient():
    inputs = loss_inputs(torch.tensor([0.5, -0.7, 1e4]), torch.tensor([3.0, -2.0, 1.0]))
    output = clipped_surrogate(inputs, PPO, exact_on_policy=True)
    assert output.ratio.tolist() == [1.0, 1.0, 1.0]
    assert output.token_loss.tolist() == [-3.0, 2.0, -1.0]
    assert gradient(output, inputs).tolist() == [-3.0, 2.0, -1.0]
    assert not output.clipped_low.any() and not output.clipped_high.any()


def test_oracle_clips_by_the_reference_and_steps_by_its_own_ratio():
    # A = -1 throughout, lower bound .8. Own ratios .5, .5, 1, 1.1; reference .9, .7, .7, 1.
    inputs = loss_inputs(torch.tensor([0.5, 0.5, 1.0, 1.1]).log(), torch.full((4,), -1.0))
    reference = torch.tensor([0.9, 0.7, 0.7, 1.0])
    output = oracle_surrogate(inputs, PPO, reference_ratio=reference)
    assert output.clipped_low.tolist() == [False, True, True, False]
    torch.testing.assert_close(output.token_loss, torch.tensor([0.5, 0.8, 0.8, 1.1]))
    torch.testing.assert_close(gradient(output, inputs), torch.tensor([0.5, 0.0, 0.0, 1.1]))
    torch.testing.assert_close(output.ratio, torch.tensor([0.5, 0.5, 1.0, 1.1]))


def test_oracle_with_its_own_ratio_is_the_ordinary_surrogate():
    inputs = random_batch(11).inputs
    ordinary = clipped_surrogate(inputs, PPO, dual_clip=1.5)
    oracle = oracle_surrogate(inputs, PPO, reference_ratio=ordinary.ratio, dual_clip=1.5)
    assert torch.equal(oracle.token_loss, ordinary.token_loss)
    assert torch.equal(gradient(oracle, inputs), gradient(ordinary, inputs))


def test_clip_masks_follow_the_sign_and_the_mask():
    mask = torch.tensor([True, True, False])
    low, high = clip_masks(torch.tensor([0.8, 1.2, 0.1]), torch.tensor([-1.0, 1.0, -1.0]), PPO, response_mask=mask)
    assert low.tolist() == [True, False, False]
    assert high.tolist() == [False, True, False]
