"""Hashed randomness: known outputs of the generator, and the distribution of what is made from it."""

import math

import pytest
import torch

from megatron_calclip.algorithms.bootstrap import (
    MAX_POISSON,
    percentile_interval,
    poisson_weights,
    sample_sequences,
)
from megatron_calclip.counter_random import splitmix64

GAMMA = 0x9E3779B97F4A7C15
MASK64 = 2**64 - 1


def splitmix64_by_hand(state: int) -> int:
    state = (state + GAMMA) & MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK64
    return state ^ (state >> 31)


def signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def test_splitmix64_known_outputs():
    # The published outputs of the generator seeded with 1234567: the n-th is that of state seed + n * gamma.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    states = [signed((1234567 + n * GAMMA) & MASK64) for n in range(4)]
    assert splitmix64(torch.tensor(states)).tolist() == [signed(output) for output in published]
    assert [splitmix64_by_hand(1234567 + n * GAMMA) for n in range(4)] == published


def test_poisson_weights_follow_the_definition():
    ids = [0, 1, 7, -3, 2**40 + 5]
    weights = poisson_weights(torch.tensor(ids), num_replicates=5)
    for row, sequence_id in zip(weights.tolist(), ids, strict=True):
        stream = splitmix64_by_hand(sequence_id & MASK64)
        for replicate, weight in enumerate(row):
            uniform = splitmix64_by_hand((stream + replicate * GAMMA) & MASK64) >> 48
            cdf, expected = math.exp(-1), 0
            while uniform >= round(cdf * 2**16):
                expected += 1
                cdf += math.exp(-1) / math.factorial(expected)
            assert weight == expected


def test_poisson_weights_have_mean_and_variance_one():
    weights = poisson_weights(torch.arange(20_000), num_replicates=10).double()
    assert weights.mean().item() == pytest.approx(1, abs=0.01)
    assert weights.var().item() == pytest.approx(1, abs=0.03)
    assert weights.max() <= MAX_POISSON
    shares = torch.bincount(weights.long().flatten(), minlength=MAX_POISSON + 1) / weights.numel()
    for count in range(5):
        assert shares[count].item() == pytest.approx(math.exp(-1) / math.factorial(count), abs=0.005)
    # Neighbouring ids and neighbouring replicates are uncorrelated.
    centred = weights - 1
    assert abs((centred[1:] * centred[:-1]).mean()) < 0.01
    assert abs((centred[:, 1:] * centred[:, :-1]).mean()) < 0.01


def test_samples_are_nested_and_change_with_the_seed():
    ids = torch.arange(10_000)
    small, large = (sample_sequences(ids, fraction=fraction, seed=20) for fraction in (0.3, 0.5))
    assert bool((small <= large).all())
    assert large.double().mean().item() == pytest.approx(0.5, abs=0.02)
    other = sample_sequences(ids, fraction=0.5, seed=40)
    assert (large & other).double().mean().item() == pytest.approx(0.25, abs=0.02)
    assert bool(sample_sequences(ids, fraction=1.0, seed=20).all())


def test_percentile_interval():
    # 100 values: 2.5% of 99 steps is 2.475, so the third value from either end.
    values = torch.arange(100.0)[torch.randperm(100, generator=torch.Generator().manual_seed(0))]
    assert percentile_interval(values) == (2.0, 97.0)
    assert percentile_interval(torch.tensor([5.0, math.nan, 3.0])) == (3.0, 5.0)
    assert percentile_interval(torch.tensor([math.nan])) is None
    assert percentile_interval(torch.tensor([])) is None
