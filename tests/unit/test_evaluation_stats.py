"""pass@k, majorities and intervals against hand-computed numbers, enumeration and known distributions."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_calclip.evaluation_stats import (
    NUM_REPLICATES,
    bootstrap_means,
    ks_of,
    majority_score,
    mean_over_sets,
    pass_at_k,
    set_estimates,
)


@given(n=st.integers(1, 9), data=st.data())
def test_pass_at_k_counts_the_draws_without_a_solution(n: int, data: st.DataObject) -> None:
    solved, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    draws = list(itertools.combinations([True] * solved + [False] * (n - solved), k))
    assert pass_at_k(n, solved, k) == pytest.approx(float(Fraction(sum(map(any, draws)), len(draws))), abs=1e-12)


def test_pass_at_k_of_many_samples() -> None:
    exact = 1 - Fraction(math.comb(1990, 1000), math.comb(2000, 1000))
    assert pass_at_k(2000, 10, 1000) == pytest.approx(float(exact), abs=1e-12)
    assert pass_at_k(5, 2, 1) == pytest.approx(0.4) and pass_at_k(5, 2, 3) == pytest.approx(0.9)
    assert pass_at_k(5, 0, 5) == 0.0 and pass_at_k(5, 1, 5) == 1.0


@pytest.mark.parametrize(("n", "ks"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (32, [1, 2, 4, 8, 16, 32])])
def test_ks(n: int, ks: list[int]) -> None:
    assert ks_of(n) == ks


@pytest.mark.parametrize(
    ("votes", "scores", "expected"),
    [
        (["7", "7", "8"], [1, 1, 0], 1.0),
        (["7", "8", "8"], [1, 0, 0], 0.0),
        (["7", None, None, None], [1, 0, 0, 0], 1.0),  # no answer is no vote
        ([None, None], [0, 0], 0.0),
        (["7", "8"], [1, 0], 0.5),  # a tie, drawn at random
        (["7", "7", "8", "8", "9"], [1, 1, 0, 0, 0], 0.5),
        (["7", "7"], [1.0, 0.5], 0.75),  # one answer, two scores: partial credit
    ],
)
def test_majority(votes: list[str | None], scores: list[float], expected: float) -> None:
    assert majority_score(votes, scores) == expected


def test_bootstrap_has_the_spread_of_a_mean() -> None:
    # 400 problems, half of them solved: the mean has a standard deviation of sqrt(0.25 / 400) = 0.025.
    values = np.array([[0.0, 1.0] * 200, [1.0, 0.0] * 200])
    means = bootstrap_means(values, seed=0, name="set")
    assert means.shape == (2, NUM_REPLICATES)
    assert means[0].mean() == pytest.approx(0.5, abs=0.003) and means[0].std() == pytest.approx(0.025, rel=0.1)
    assert np.allclose(means.sum(0), 1.0)  # the same problems for all numbers
    assert (bootstrap_means(values, seed=0, name="set") == means).all()
    for seed, name in ((1, "set"), (0, "other")):
        other = bootstrap_means(values, seed=seed, name=name)
        assert abs(np.corrcoef(other[0], means[0])[0, 1]) < 0.1


def test_bootstrap_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(12.0)[None]
    whole = bootstrap_means(values, seed=3, name="set")
    monkeypatch.setattr("megatron_calclip.evaluation_stats._CHUNK", 12 * 7)
    assert (bootstrap_means(values, seed=3, name="set") == whole).all()


def test_intervals_of_a_set_and_of_the_mean() -> None:
    one = set_estimates({"avg@1": np.array([0.0, 1.0] * 200)}, seed=0, name="one")
    found = one.estimates["avg@1"]
    assert found.low is not None and found.high is not None
    # 1.96 standard deviations of 0.025 on either side.
    assert found.value == 0.5 and (found.low, found.high) == pytest.approx((0.451, 0.549), abs=0.006)
    other = set_estimates({"avg@1": np.ones(100), "maj@1": np.ones(100)}, seed=0, name="other")
    means = mean_over_sets([one, other])
    assert list(means) == ["avg@1"]  # what only one set has, has no mean
    both = means["avg@1"]
    assert both.low is not None and both.high is not None
    assert both.value == 0.75 and (both.low, both.high) == pytest.approx((0.7255, 0.7745), abs=0.003)


def test_no_interval_where_problems_do_not_differ() -> None:
    same = set_estimates({"avg@1": np.zeros(4), "pass@1": np.ones(4)}, seed=0, name="one")
    assert {(one.value, one.low) for one in same.estimates.values()} == {(0.0, None), (1.0, None)}
    other = set_estimates({"avg@1": np.array([0.0, 1.0])}, seed=0, name="two")
    mean = mean_over_sets([same, other])["avg@1"]
    assert (mean.value, mean.low, mean.high) == (0.25, 0.0, 0.5)


def test_no_interval_for_a_single_problem() -> None:
    single = set_estimates({"avg@1": np.array([0.25])}, seed=0, name="one")
    assert (single.estimates["avg@1"].value, single.estimates["avg@1"].low) == (0.25, None)
    many = set_estimates({"avg@1": np.array([0.0, 0.5])}, seed=0, name="two")
    mean = mean_over_sets([single, many])["avg@1"]
    assert (mean.value, mean.low, mean.high) == (0.25, None, None)


@pytest.mark.parametrize(("value", "count"), [(1 / 3, 7), (0.7, 30), (0.0, 3), (1.0, 3)])
def test_problems_that_are_alike_have_no_interval(value: float, count: int) -> None:
    found = set_estimates({"avg": np.full(count, value)}, seed=0, name="x").estimates["avg"]
    assert found.value == pytest.approx(value) and found.low is None and found.high is None
