"""How far sampler and learner are apart on one step's samples, token by token and sequence by sequence.

Means over tokens (`diagnostics.py`) hide what matters here: a few sequences that the engine computed differently
(another cache, a stale scale, an expert that routing chose otherwise) drown in thousands that it did not.

Left out on purpose: the correction, which is `importance.py`'s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

OUTLIER_MULTIPLE = 5.0
OUTLIER_NATS = 0.1
"""A sequence is an outlier when its mean |dlogp| is above both: so many times the median sequence's, and so many nats."""


@dataclass(frozen=True)
class Mismatch:
    """|log pi_old - log mu| of a batch, nats."""

    p95: float
    """Its 95th percentile over response tokens (the smallest value that 95% do not exceed)."""
    sequence_mean: Tensor
    """float32 [N]: mean over each sequence's response tokens, 0 without any."""
    sequence_max: Tensor
    """float32 [N]: maximum over the same."""
    outliers: Tensor
    """int64: indices of the sequences that are outliers, the worst first."""


def mismatch(old_log_probs: Tensor, sampler_log_probs: Tensor, response_mask: Tensor, lengths: Tensor) -> Mismatch:
    """Compare both sides' log-probabilities.

    Args:
        old_log_probs: [T], log pi_old.
        sampler_log_probs: [T], log mu.
        response_mask: bool [T], tokens that the policy wrote; at least one.
        lengths: int64 [N], tokens of each sequence; they sum to T.

    Raises:
        ValueError: without response tokens.
    """
    if not response_mask.any():
        raise ValueError("mismatch needs at least one response token")
    num_sequences = lengths.numel()
    sequences = torch.repeat_interleave(torch.arange(num_sequences), lengths)[response_mask]
    distance = (old_log_probs - sampler_log_probs).abs()[response_mask]
    zeros = torch.zeros(num_sequences)
    counts = zeros.index_add(0, sequences, torch.ones_like(distance))
    mean = zeros.index_add(0, sequences, distance) / counts.clamp(min=1)
    largest = zeros.scatter_reduce(0, sequences, distance, "amax")
    limit = max(OUTLIER_MULTIPLE * float(mean[counts > 0].median()), OUTLIER_NATS)
    worst_first = mean.argsort(descending=True)
    return Mismatch(
        p95=float(distance.kthvalue(math.ceil(0.95 * distance.numel())).values),
        sequence_mean=mean,
        sequence_max=largest,
        outliers=worst_first[mean[worst_first] > limit],
    )
