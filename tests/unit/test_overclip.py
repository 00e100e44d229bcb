"""Instruments of a calibration step: hand values, attribution, additivity."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_batches import random_batch

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.overclip import (
    ENTROPY_EDGES,
    PairedRatios,
    attribution_sums,
    attribution_table,
    overclip_sums,
    response_lengths,
    response_positions,
)

REFERENCE = ClipBounds(0.8, 1.24)
NAN = float("nan")
# A<0: clipped by both, by FP8 only (twice), by BF16 only, by neither (three times).
# A>0: clipped by both, by FP8 only, by neither. Then A = 0 and a masked token.
RATIO8 = torch.tensor([0.7, 0.5, 0.8, 0.9, 1.0, 1.1, 2.0, 1.5, 1.24, 1.0, 0.1, NAN])
RATIO16 = torch.tensor([0.6, 0.9, 1.0, 0.8, 1.0, 1.0, 1.5, 1.3, 1.2, 0.9, 9.0, NAN])
ADVANTAGES = torch.tensor([-1.0, -2.0, -1.0, -1.0, -1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 0.0, -1.0])
WEIGHTS = torch.tensor([1.0, 0.5, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, NAN])
MASK = torch.tensor([True] * 11 + [False])
PAIRS = PairedRatios(RATIO8, RATIO16, ADVANTAGES, MASK, REFERENCE, REFERENCE)


def test_clip_tables_by_hand():
    metrics = overclip_sums(PAIRS, weights=WEIGHTS).finalize()
    assert metrics["clip_fp8/low"] == pytest.approx(3 / 7)
    assert metrics["clip_bf16/low"] == pytest.approx(2 / 7)
    assert (metrics["clip_fp8/num_low"], metrics["clip_bf16/num_low"]) == (3, 2)
    assert metrics["overclip/low"] == pytest.approx(3 / 2)
    assert metrics["false_clip/low"] == pytest.approx(2 / 5)
    assert metrics["missed_clip/low"] == pytest.approx(1 / 2)
    assert metrics["clip_fp8/high"] == pytest.approx(2 / 3)
    assert metrics["clip_bf16/high"] == pytest.approx(1 / 3)
    assert (metrics["clip_fp8/num_high"], metrics["clip_bf16/num_high"]) == (2, 1)
    assert metrics["overclip/high"] == pytest.approx(2.0)
    assert metrics["false_clip/high"] == pytest.approx(1 / 2)
    assert metrics["missed_clip/high"] == 0.0


def test_lost_penalty_by_hand():
    # Only FP8 clips tokens 1 and 2: .5 * 2 * .9 + 2 * 1 * 1 = 2.9.
    # BF16 keeps these and tokens 4, 5, 6: 2.9 + 1 + 1 + 1.5 = 6.4.
    metrics = overclip_sums(PAIRS, weights=WEIGHTS).finalize()
    assert metrics["lost_penalty/mass"] == pytest.approx(2.9)
    assert metrics["lost_penalty/share"] == pytest.approx(2.9 / 6.4)


def test_errors_and_amplification_by_hand():
    # p16 = .5, .25 and a masked token; p8 = .6, .2: (.1 + .05) / .75 = .2.
    # r16 = 1, 1; r8 = 1.5, .7: (.5 + .3) / 2 = .4, twice as much.
    mask = torch.tensor([True, True, False])
    pairs = PairedRatios(
        torch.tensor([1.5, 0.7, NAN]),
        torch.tensor([1.0, 1.0, NAN]),
        torch.tensor([1.0, -1.0, NAN]),
        mask,
        REFERENCE,
        REFERENCE,
    )
    metrics = overclip_sums(
        pairs,
        weights=torch.ones(3),
        log_probs8=torch.tensor([0.6, 0.2, NAN]).log(),
        log_probs16=torch.tensor([0.5, 0.25, NAN]).log(),
    ).finalize()
    assert metrics["nmae/probability"] == pytest.approx(0.2, rel=1e-6)
    assert metrics["nmae/ratio"] == pytest.approx(0.4, rel=1e-6)
    assert metrics["nmae/amplification"] == pytest.approx(2.0, rel=1e-6)
    without = overclip_sums(pairs, weights=torch.ones(3)).finalize()
    assert "nmae/ratio" in without
    assert "nmae/probability" not in without and "nmae/amplification" not in without


def test_equal_ratios_have_a_multiple_of_exactly_one():
    ratio = random_batch(4, sigma=0.8).inputs
    r = (ratio.log_probs - ratio.old_log_probs).detach().exp()
    pairs = PairedRatios(r, r, ratio.advantages, ratio.response_mask, REFERENCE, REFERENCE)
    metrics = overclip_sums(pairs, weights=ratio.importance_weights).finalize()
    assert metrics["overclip/low"] == 1.0 and metrics["overclip/high"] == 1.0
    for side in ("low", "high"):
        assert metrics[f"false_clip/{side}"] == 0.0 and metrics[f"missed_clip/{side}"] == 0.0
    assert metrics["lost_penalty/mass"] == 0.0 and metrics["nmae/ratio"] == 0.0


def test_each_precision_has_its_own_bounds():
    wide = PairedRatios(RATIO8, RATIO16, ADVANTAGES, MASK, ClipBounds(0.5, 1.24), REFERENCE)
    # At lower bound .5 FP8 clips only its token at .5; BF16 clips two as before.
    metrics = overclip_sums(wide, weights=WEIGHTS).finalize()
    assert metrics["clip_fp8/low"] == pytest.approx(1 / 7)
    assert metrics["clip_bf16/low"] == pytest.approx(2 / 7)


def test_a_multiple_without_bf16_clips_is_left_out():
    pairs = PairedRatios(
        torch.tensor([0.5]),
        torch.tensor([1.0]),
        torch.tensor([-1.0]),
        torch.tensor([True]),
        REFERENCE,
        REFERENCE,
    )
    metrics = overclip_sums(pairs, weights=torch.ones(1)).finalize()
    assert "overclip/low" not in metrics and metrics["clip_fp8/low"] == 1.0
    assert (metrics["clip_fp8/num_low"], metrics["clip_bf16/num_low"]) == (1, 0)
    assert not any(name.endswith("/high") for name in metrics)


def test_attribution_by_hand():
    # Edges 1 and 2; an entropy on an edge belongs to the bucket above it.
    entropy = torch.tensor([0.0, 1.0, 5.0, 0.0, 0.5, 1.5, 2.0, 0.0, 0.5, 0.5, 0.0, NAN])
    sums = attribution_sums(PAIRS, entropy, edges=(1.0, 2.0))
    # False low clips: token 1 (middle), 2 (top). BF16 keeps 1, 2, 4, 5, 6 of 0 to 6. False high: 8; BF16 keeps 8, 9 of 7 to 9.
    # A token with A = 0 (10) and one outside the mask (11) are in no column.
    assert sums.tolist() == [[0, 1, 3, 1, 2, 3], [1, 2, 2, 0, 0, 0], [1, 2, 2, 0, 0, 0]]
    bottom, middle, top = attribution_table(sums, edges=(1.0, 2.0))
    assert (bottom.lower, bottom.upper) == (-math.inf, 1.0)
    assert (top.lower, top.upper) == (2.0, math.inf)
    assert (bottom.rate_low, bottom.share_low, bottom.rate_high, bottom.share_high) == (0.0, 0.0, 0.5, 1.0)
    assert (middle.num_low, middle.rate_low, middle.share_low) == (1, 0.5, 0.5)
    assert (bottom.num_negative, middle.num_negative, bottom.num_positive, top.num_positive) == (3, 2, 3, 0)
    assert middle.rate_high is None and middle.share_high == 0.0


def test_positions_and_lengths_by_hand():
    # Two interleaved sequences with masked tokens.
    ids = torch.tensor([1, 0, 1, 0, 1, 1, 0])
    mask = torch.tensor([True, False, False, True, True, True, True])
    assert response_lengths(mask, ids, num_sequences=2).tolist() == [3, 2, 3, 2, 3, 3, 2]
    assert response_positions(mask, ids, num_sequences=2).tolist() == [0, 0, 0, 0, 1, 2, 1]


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), cut=st.integers(1, 5))
def test_sums_add_up_and_ignore_what_is_outside_the_mask(seed, cut):
    def measure(batch):
        i = batch.inputs
        log_probs16 = i.log_probs.detach() + 0.1
        pairs = PairedRatios(
            (i.log_probs.detach() - i.old_log_probs).exp(),
            (log_probs16 - i.old_log_probs).exp(),
            i.advantages,
            i.response_mask,
            ClipBounds(0.6, 1.8),
            REFERENCE,
        )
        sums = overclip_sums(pairs, weights=i.importance_weights, log_probs8=i.log_probs, log_probs16=log_probs16)
        return sums, attribution_sums(pairs, batch.entropy, edges=ENTROPY_EDGES)

    batch = random_batch(seed)
    whole, whole_table = measure(batch)
    (a, a_table), (b, b_table) = (measure(batch.part(part)) for part in (list(range(cut)), list(range(cut, 6))))
    torch.testing.assert_close(a.merge(b).sums, whole.sums)
    assert torch.equal(a_table + b_table, whole_table)
    clean, clean_table = measure(random_batch(seed, dirty=False))
    assert torch.equal(clean.sums, whole.sums) and torch.equal(clean_table, whole_table)
    assert torch.isfinite(whole.sums).all()
    assert whole_table[:, 0].sum() == whole.sums[1]
