"""Per-step instruments: hand values, reductions, additivity."""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_batches import Batch, loss_inputs, random_batch

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.diagnostics import PolicyMetricSums, policy_metric_sums
from megatron_calclip.algorithms.gspo import gspo_surrogate
from megatron_calclip.algorithms.importance import importance_weights
from megatron_calclip.algorithms.policy_loss import clipped_surrogate

PPO = ClipBounds(0.8, 1.2)


def measure(batch: Batch, loss=clipped_surrogate) -> PolicyMetricSums:
    i = batch.inputs
    importance = importance_weights(
        i.old_log_probs,
        batch.sampler_log_probs,
        i.response_mask,
        i.sequence_ids,
        num_sequences=i.num_sequences,
        level="token",
        cap=1.2,
    )
    return policy_metric_sums(
        i,
        loss(i, PPO),
        entropy=batch.entropy,
        sampler_log_probs=batch.sampler_log_probs,
        importance=importance,
    )


def test_by_hand():
    # Ratios .5, 1.5, .5, 2 and one masked token; A = -1, 1, -1, 1; entropies 1, 2, 3, 4.
    # pi_old / mu: 2, 1, 1/4, 1; weights 1.2 (capped), 1, .25, 1.
    nan = float("nan")
    inputs = loss_inputs(
        torch.tensor([0.5, 1.5, 0.5, 2.0, nan]).log(),
        torch.tensor([-1.0, 1.0, -1.0, 1.0, -1.0]),
        weights=torch.tensor([1.2, 1.0, 0.25, 1.0, nan]),
        mask=torch.tensor([True, True, True, True, False]),
    )
    sampler = inputs.old_log_probs - torch.tensor([2.0, 1.0, 0.25, 1.0, nan]).log()
    metrics = measure(Batch(inputs, sampler, torch.tensor([1.0, 2.0, 3.0, 4.0, nan]))).finalize()
    log2 = math.log(2)
    # K3 terms: r - 1 - log r = .193147, .094535, .193147, .306853.
    # K3(mu, old) terms for 2 and 1/4: 1 - log 2 and -3/4 + 2 log 2.
    assert metrics == pytest.approx(
        {
            "clip/low_negative": 1.0,
            "clip/high_positive": 1.0,
            "clip/dual_negative": 0.0,
            "ratio/mean": 4.5 / 4,
            "ratio/std": math.sqrt((0.25 + 2.25 + 0.25 + 4) / 4 - 1.125**2),
            "ratio/min": 0.5,
            "ratio/max": 2.0,
            "entropy": 2.5,
            "kl/k3": (0.193147 + 0.094535 + 0.193147 + 0.306853) / 4,
            "mismatch/mean_abs_dlogp": 3 * log2 / 4,
            "mismatch/max_abs_dlogp": 2 * log2,
            "mismatch/token_mult_prob_error": (2 + 1 + 4 + 1) / 4,
            "mismatch/k3": (1 - log2 - 0.75 + 2 * log2) / 4,
            "importance/truncated": 1 / 4,
            "importance/ess": 3.45**2 / (4 * (1.44 + 1 + 0.0625 + 1)),
        },
        abs=1e-5,
    )


def test_clip_shares_are_over_the_tokens_of_their_sign():
    # A<0: ratios .5, 1, 1 -> 1/3 clipped low. A>0: 1.5, .5 -> 1/2 clipped high; its low ratio does not count.
    inputs = loss_inputs(
        torch.tensor([0.5, 1.0, 1.0, 1.5, 0.5, 0.5]).log(), torch.tensor([-1.0, -1.0, -1.0, 1.0, 1.0, 0.0])
    )
    metrics = measure(Batch(inputs, inputs.old_log_probs, torch.zeros(6))).finalize()
    assert metrics["clip/low_negative"] == pytest.approx(1 / 3)
    assert metrics["clip/high_positive"] == pytest.approx(1 / 2)
    assert metrics["importance/ess"] == 1.0


def test_dual_clip_is_reported_apart():
    inputs = loss_inputs(torch.tensor([5.0, 1.0]).log(), torch.tensor([-1.0, -1.0]))
    loss = functools.partial(clipped_surrogate, dual_clip=3.0)
    metrics = measure(Batch(inputs, inputs.old_log_probs, torch.zeros(2)), loss).finalize()
    assert metrics["clip/dual_negative"] == 0.5 and metrics["clip/low_negative"] == 0.0


def test_masked_tokens_do_not_enter_the_extremes():
    for ratio in (1.5, 0.5):
        inputs = loss_inputs(torch.tensor([ratio, 1.0]).log(), torch.ones(2), mask=torch.tensor([True, False]))
        metrics = measure(Batch(inputs, inputs.old_log_probs, torch.zeros(2))).finalize()
        assert metrics["ratio/min"] == metrics["ratio/max"] == pytest.approx(ratio)


def test_undefined_metrics_are_left_out():
    inputs = loss_inputs(torch.zeros(1), torch.ones(1))
    metrics = measure(Batch(inputs, inputs.old_log_probs, torch.zeros(1))).finalize()
    assert "clip/low_negative" not in metrics and metrics["clip/high_positive"] == 0.0
    masked = loss_inputs(torch.zeros(1), torch.ones(1), mask=torch.zeros(1, dtype=torch.bool))
    nothing = measure(Batch(masked, masked.old_log_probs, torch.zeros(1)))
    assert nothing.finalize() == {}


def test_a_micro_batch_without_response_tokens_is_neutral():
    full = measure(random_batch(1))
    masked = loss_inputs(torch.zeros(1), torch.ones(1), mask=torch.zeros(1, dtype=torch.bool))
    empty = measure(Batch(masked, masked.old_log_probs, torch.zeros(1)))
    for merged in (full.merge(empty), empty.merge(full)):
        assert all(torch.equal(a, b) for a, b in zip(merged.pack(), full.pack(), strict=True))


def test_the_spread_of_gspo_ratios_does_not_cancel():
    # Two sequences at s = exp(+-1e-4): std 1e-4. In float32 squares it would be lost.
    ids = torch.tensor([0, 0, 1, 1])
    log_ratio = torch.tensor([1e-4, 1e-4, -1e-4, -1e-4], dtype=torch.float64)
    inputs = loss_inputs(log_ratio, torch.ones(4), sequence_ids=ids)
    metrics = measure(Batch(inputs, inputs.old_log_probs, torch.zeros(4)), gspo_surrogate).finalize()
    assert metrics["ratio/std"] == pytest.approx(1e-4, rel=1e-6)


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), cut=st.integers(1, 5), order=st.permutations(range(6)))
def test_sums_are_the_same_under_any_micro_batching(seed, cut, order):
    batch = random_batch(seed)
    whole = measure(batch)
    parts = [measure(batch.part(list(order[:cut]))), measure(batch.part(list(order[cut:])))]
    merged = parts[0].merge(parts[1])
    for a, b in zip(merged.pack(), whole.pack(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    # What three all-reduces over two ranks would give.
    packed = [part.pack() for part in parts]
    reduced = PolicyMetricSums(
        packed[0][0] + packed[1][0],
        torch.minimum(packed[0][1], packed[1][1]),
        torch.maximum(packed[0][2], packed[1][2]),
    )
    assert reduced.finalize() == merged.finalize()


def test_what_is_outside_the_mask_has_no_influence():
    clean, dirty = measure(random_batch(3, dirty=False)), measure(random_batch(3, dirty=True))
    assert all(torch.equal(a, b) for a, b in zip(clean.pack(), dirty.pack(), strict=True))
    assert torch.isfinite(clean.sums).all()
