"""Avg@n, pass@k and maj@n of scored completions, with confidence intervals over problems.

What: pure arrays, a row for each problem. An estimate is a mean over problems of a number per problem, so that one bootstrap
over problems serves all of them; completions of a problem are not independent, problems are. Means over sets weigh sets
alike, as the tables of the literature do, and their intervals resample each set by itself.

Left out on purpose: intervals for a single problem, and for problems that all have one value. A bootstrap of those sees no
spread, and [0, 0] for a model that solved none of four would be a claim.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

COVERAGE = 0.95
"""Nominal coverage of every interval."""
NUM_REPLICATES = 2000
"""Bootstrap replicates: the percentiles then repeat to about a tenth of the interval's width."""
_CHUNK = 1 << 22
"""Weights drawn at once, 32 MiB of them."""


@dataclass(frozen=True)
class Estimate:
    """A mean over problems, with its percentile interval; None for both ends without one."""

    value: float
    low: float | None = None
    high: float | None = None


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Probability that of k completions at least one solves the problem, unbiased (Chen et al., arXiv 2107.03374, eq. 1).

    Args:
        num_samples: n completions of the problem.
        num_solved: c of them that solve it.
        k: at most n.

    Returns:
        1 - C(n - c, k) / C(n, k), as a product of n - c < k factors that does not overflow.
    """
    assert 0 <= num_solved <= num_samples and 1 <= k <= num_samples
    if num_samples - num_solved < k:
        return 1.0
    missed = 1.0 - k / np.arange(num_samples - num_solved + 1, num_samples + 1, dtype=np.float64)
    return float(1.0 - missed.prod())


def ks_of(num_samples: int) -> list[int]:
    """The k of pass@k that are worth a column: powers of two, and n itself."""
    powers = [1 << exponent for exponent in range(num_samples.bit_length())]
    return sorted({*(k for k in powers if k <= num_samples), num_samples})


def majority_score(votes: Sequence[Hashable | None], scores: Sequence[float]) -> float:
    """The score of the most frequent answer (Wang et al., self-consistency, arXiv 2203.11171).

    Args:
        votes: n normalised answers; None where a completion gives none, which is no vote.
        scores: of the n completions.

    Returns:
        the mean score of the completions that vote for it; over all that tie for the most votes the mean of those means, which
        is what choosing among them at random gives on average. 0 without votes.
    """
    counts = Counter(vote for vote in votes if vote is not None)
    if not counts:
        return 0.0
    most = max(counts.values())
    winners = [vote for vote, count in counts.items() if count == most]
    return sum(score for vote, score in zip(votes, scores, strict=True) if vote in set(winners)) / (most * len(winners))


def bootstrap_means(values: Values, *, seed: int, name: str) -> Values:
    """Means of resampled problems (Efron, 1979).

    Args:
        values: [M, P], M numbers for each of P problems, resampled together.
        seed: of the evaluation.
        name: of the set, so that sets are resampled independently and in any order alike.

    Returns:
        [M, R] with R = `NUM_REPLICATES`.
    """
    num_problems = values.shape[1]
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    means = []
    step = max(1, _CHUNK // num_problems)
    for start in range(0, NUM_REPLICATES, step):
        counts = random.multinomial(
            num_problems, np.full(num_problems, 1 / num_problems), size=min(step, NUM_REPLICATES - start)
        )
        means.append(values @ counts.T / num_problems)
    return np.concatenate(means, axis=1)


def estimate(value: float, replicates: Values | None) -> Estimate:
    """An estimate with the central interval of its replicates, where those differ."""
    if replicates is None or np.ptp(replicates) <= 1e-12:  # equal but for rounding
        return Estimate(value)
    low, high = np.quantile(replicates, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Estimate(value, float(low), float(high))


@dataclass(frozen=True)
class SetEstimates:
    """All estimates of one set, and their bootstrap replicates."""

    estimates: dict[str, Estimate]
    replicates: dict[str, Values]
    """Name -> [R]; empty for fewer than two problems."""


def set_estimates(per_problem: Mapping[str, Values], *, seed: int, name: str) -> SetEstimates:
    """Means over problems with intervals.

    Args:
        per_problem: name of an estimate -> [P], its value for each problem.
        seed: of the evaluation.
        name: of the set.
    """
    values = np.stack(list(per_problem.values()))
    if values.shape[1] < 2:
        return SetEstimates({key: Estimate(float(row.mean())) for key, row in per_problem.items()}, {})
    replicates = dict(zip(per_problem, bootstrap_means(values, seed=seed, name=name), strict=True))
    estimates = {key: estimate(float(row.mean()), replicates[key]) for key, row in per_problem.items()}
    return SetEstimates(estimates, replicates)


def mean_over_sets(sets: Sequence[SetEstimates]) -> dict[str, Estimate]:
    """For each estimate that all sets have, the mean of the sets' values, sets weighing alike."""
    shared = [key for key in sets[0].estimates if all(key in one.estimates for one in sets)]
    means: dict[str, Estimate] = {}
    for key in shared:
        value = sum(one.estimates[key].value for one in sets) / len(sets)
        replicates = None
        if all(one.replicates for one in sets):
            replicates = np.mean([one.replicates[key] for one in sets], axis=0)
        means[key] = estimate(value, replicates)
    return means
