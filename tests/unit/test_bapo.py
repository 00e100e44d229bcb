"""BAPO: candidates, the search by hand and against a plain loop, additivity."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_batches import random_batch

from megatron_calclip.algorithms.bapo import BAPOSettings, contribution_sums, search_bounds
from megatron_calclip.algorithms.bounds import ClipBounds

SMALL = BAPOSettings(lower_start=0.6, lower_end=0.8, lower_step=0.1, upper_start=1.2, upper_end=2.0, upper_step=0.4)


def bounds_for(ratio, advantages, config):
    ratio, advantages = torch.tensor(ratio), torch.tensor(advantages)
    ones = torch.ones_like(ratio)
    return search_bounds(contribution_sums(ratio, advantages, ones, ones.bool(), settings=config), settings=config)


def test_default_candidates():
    defaults = BAPOSettings()
    assert defaults.lower_candidates() == [0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9]
    assert defaults.upper_candidates() == [hundredths / 100 for hundredths in range(120, 301, 5)]
    uneven = BAPOSettings(upper_start=1.2, upper_end=1.31, upper_step=0.05)
    assert uneven.upper_candidates() == [1.2, 1.25, 1.3, 1.31]


def test_sums_by_hand():
    # A<0: r = .5, |A| = 2: 2 * max(.5, L) = 1.2, 1.4, 1.6. A>0: r = 3, A = 1: min(3, H) = 1.2, 1.6, 2.
    sums = contribution_sums(
        torch.tensor([0.5, 3.0, float("nan")]),
        torch.tensor([-2.0, 1.0, float("nan")]),
        torch.tensor([1.0, 1.0, float("inf")]),
        torch.tensor([True, True, False]),
        settings=SMALL,
    )
    torch.testing.assert_close(sums, torch.tensor([1.2, 1.4, 1.6, 1.2, 1.6, 2.0], dtype=torch.float64))


def test_search_by_hand():
    # Balanced at the start: 1.2 against 1.2, share exactly one half.
    assert bounds_for([0.5, 3.0], [-2.0, 1.0], SMALL) == ClipBounds(0.6, 1.2)
    # |A| = 2.5: negative side 1.5, 1.75, 2.0; the start 1.2 misses it, so the lower bound runs to .8 (2.0),
    # then the upper bound to 2.0, where the positive side reaches 2.0.
    assert bounds_for([0.5, 3.0], [-2.5, 1.0], SMALL) == ClipBounds(0.8, 2.0)
    # r = .9 is above every lower bound: 1.35 against 1.2 throughout, until the upper bound reaches 1.6.
    assert bounds_for([0.9, 3.0], [-1.5, 1.0], SMALL) == ClipBounds(0.8, 1.6)
    # |A| = 2 at a target of .51:
    stricter = BAPOSettings(**{**SMALL.__dict__, "target_share": 0.51})
    # lower .8: 1.6; upper 1.6: share 1.6 / 3.2 = .5 < .51; upper 2: 2 / 3.6 = .556.
    assert bounds_for([0.5, 3.0], [-2.0, 1.0], stricter) == ClipBounds(0.8, 2.0)


def test_one_sided_batches():
    assert bounds_for([0.5], [-1.0], SMALL) == ClipBounds(0.8, 2.0)
    assert bounds_for([3.0], [1.0], SMALL) == ClipBounds(0.6, 1.2)


def plain_search(ratio, advantages, weights, config):
    """The recipe's two loops, written out for lists."""

    def share(lower, upper):
        positive = sum(w * a * min(r, upper) for r, a, w in zip(ratio, advantages, weights, strict=True) if a > 0)
        negative = sum(-w * a * max(r, lower) for r, a, w in zip(ratio, advantages, weights, strict=True) if a < 0)
        return positive / (positive + negative)

    lower, upper = config.lower_start, config.upper_start
    while share(lower, upper) < config.target_share and lower < config.lower_end - 1e-9:
        lower = min(lower + config.lower_step, config.lower_end)
    while share(lower, upper) < config.target_share and upper < config.upper_end - 1e-9:
        upper = min(upper + config.upper_step, config.upper_end)
    return lower, upper


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), target=st.sampled_from([0.3, 0.45, 0.5, 0.6]), cut=st.integers(1, 5))
def test_agrees_with_a_plain_loop_and_adds_up_over_micro_batches(seed, target, cut):
    config = BAPOSettings(target_share=target)
    batch = random_batch(seed, sigma=0.8)

    def sums(inputs):
        ratio = (inputs.log_probs - inputs.old_log_probs).detach().exp()
        return contribution_sums(
            ratio, inputs.advantages, inputs.importance_weights, inputs.response_mask, settings=config
        )

    whole = sums(batch.inputs)
    parts = [batch.part(list(range(cut))), batch.part(list(range(cut, 6)))]
    torch.testing.assert_close(sums(parts[0].inputs) + sums(parts[1].inputs), whole)

    i, mask = batch.inputs, batch.inputs.response_mask
    if not mask.any():
        return
    ratio = (i.log_probs - i.old_log_probs).detach().exp()[mask].tolist()
    lower, upper = plain_search(ratio, i.advantages[mask].tolist(), i.importance_weights[mask].tolist(), config)
    bounds = search_bounds(whole, settings=config)
    assert (bounds.lower, bounds.upper) == (pytest.approx(lower), pytest.approx(upper))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lower_end": 1.1}, "enclose"),
        ({"lower_start": 0.95}, "starts above its end"),
        ({"upper_step": 0.0}, "not positive"),
        ({"target_share": 1.0}, "no share"),
    ],
)
def test_errors(change, message):
    with pytest.raises(ValueError, match=message):
        BAPOSettings(**change)
