"""Log-ratios that stay finite, and sums per sequence: the two primitives under every loss.

What: masked, bounded log-ratios between two log-probabilities, and their per-sequence sums. Why here: the
loss, the importance weights and the KL need the same care, in the same order: mask first (a NaN that is only
removed at the end still poisons the backward), bound next, exponentiate last.
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are bounded to +-20 before `exp`: e^20 = 4.9e8 is far outside every clip range, and its square
still fits float32. Beyond it the gradient is 0."""


def masked(values: Tensor, response_mask: Tensor, *, fill: float = 0.0) -> Tensor:
    """Values inside the mask, `fill` (with a zero gradient) outside; at least float32.

    Args:
        values: [T], any floating type.
        response_mask: bool [T].
        fill: what to put outside the mask.

    Returns:
        [T], float32 or wider.
    """
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return torch.where(response_mask, values, fill)


def masked_log_ratio(numerator: Tensor, denominator: Tensor, response_mask: Tensor) -> Tensor:
    """log(numerator / denominator) from two log-probabilities; 0 outside the mask; not bounded yet.

    Both are widened before the difference is taken.

    Args:
        numerator: log-probabilities [T], in nats.
        denominator: log-probabilities [T], in nats.
        response_mask: bool [T].

    Returns:
        [T], in nats.
    """
    return masked(numerator, response_mask) - masked(denominator, response_mask)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp with its argument bounded to +-MAX_LOG_RATIO: finite value and gradient for any finite argument."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_sum(values: Tensor, sequence_ids: Tensor, *, num_sequences: int) -> Tensor:
    """Sum of token values per sequence, differentiable.

    Args:
        values: [T], already 0 outside the mask.
        sequence_ids: int64 [T], below num_sequences.
        num_sequences: N, sequences of this batch.

    Returns:
        [N].
    """
    return values.new_zeros(num_sequences).index_add(0, sequence_ids, values)


def sequence_mean(values: Tensor, response_mask: Tensor, sequence_ids: Tensor, *, num_sequences: int) -> Tensor:
    """Mean of token values over the response tokens of each sequence, differentiable; 0 for an empty one.

    Args:
        values: [T], already 0 outside the mask.
        response_mask: bool [T].
        sequence_ids: int64 [T], below num_sequences.
        num_sequences: N, sequences of this batch.

    Returns:
        [N].
    """
    lengths = sequence_sum(response_mask.to(values.dtype), sequence_ids, num_sequences=num_sequences)
    return sequence_sum(values, sequence_ids, num_sequences=num_sequences) / lengths.clamp(min=1)
