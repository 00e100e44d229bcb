"""Randomness that every rank can compute by itself: Poisson bootstrap weights, and samples of sequences.

What: a hash of the global sequence id replaces a random generator, so that the same sequence gets the same
bootstrap weights on any rank, in any order, in any micro-batch, and after a resume. Left out on purpose: the
bootstrap's sums (`statistics` carries the replicates beside the plain sums), and any other random number of
the project.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from megatron_calclip.counter_random import GOLDEN_GAMMA, shift_right, splitmix64

COVERAGE = 0.95
"""Nominal coverage of every interval."""
MAX_POISSON = 8
"""Largest bootstrap weight: probabilities are rounded to multiples of 2^-16, which leaves 1 of them to 8."""

_POISSON_BITS = 16


def poisson_weights(sequence_ids: Tensor, *, num_replicates: int) -> Tensor:
    """How often each sequence occurs in each bootstrap replicate.

    Whole sequences are resampled, which keeps the dependence between their tokens. Independent Poisson(1)
    counts replace the multinomial ones of the classical bootstrap, so that ranks need not know each other's
    sequences (Chamandy et al., "Estimating uncertainty for massive data streams", 2012).

    Args:
        sequence_ids: int64 [S], global ids.
        num_replicates: R.

    Returns:
        int64 [S, R] in 0..MAX_POISSON. Column j comes from output j of a SplitMix64 stream that is seeded
        with the hashed id.
    """
    replicates = torch.arange(num_replicates, dtype=torch.int64, device=sequence_ids.device)
    streams = splitmix64(sequence_ids).unsqueeze(1) + replicates * GOLDEN_GAMMA
    uniform = shift_right(splitmix64(streams), 64 - _POISSON_BITS)
    return _poisson_table(sequence_ids.device).index_select(0, uniform.flatten()).view_as(uniform)


@lru_cache
def _poisson_table(device: torch.device) -> Tensor:
    """int64 [2^16]: the inverse of the Poisson(1) distribution function, far faster than a search in it."""
    cdf, thresholds = 0.0, []
    for k in range(MAX_POISSON):
        cdf += math.exp(-1) / math.factorial(k)
        thresholds.append(round(cdf * 2**_POISSON_BITS))
    counts = torch.bucketize(torch.arange(2**_POISSON_BITS), torch.tensor(thresholds), right=True)
    return counts.to(device)


def sample_sequences(sequence_ids: Tensor, *, fraction: float, seed: int) -> Tensor:
    """A sample of the sequences on which every rank agrees, for shadow passes on a part of the tokens.

    Args:
        sequence_ids: int64, any shape, global ids.
        fraction: expected share of the sequences, in (0, 1]. A sample is contained in every larger one.
        seed: another seed (the training step, say) draws another sample.

    Returns:
        bool of the same shape: True for the sequences drawn.
    """
    seeds = torch.tensor(seed, dtype=torch.int64, device=sequence_ids.device)
    bits = splitmix64(splitmix64(sequence_ids) ^ splitmix64(seeds))
    return shift_right(bits, 32) < round(fraction * 2**32)


def percentile_interval(replicates: Tensor) -> tuple[float, float] | None:
    """The percentile interval of a statistic from its bootstrap replicates (Efron, 1979).

    Args:
        replicates: [R], NaN where a replicate leaves the statistic undefined.

    Returns:
        Two order statistics that enclose `COVERAGE` of the defined replicates; None without any.
    """
    values = replicates[~replicates.isnan()].sort().values.tolist()
    if not values:
        return None
    tail = math.floor((1 - COVERAGE) / 2 * (len(values) - 1))
    return values[tail], values[len(values) - 1 - tail]
