"""From token losses to one number: per-token weights with global denominators.

What: the three averages in use as weights [T], so that every loss is a plain weighted sum. Why: a mean taken
inside a micro-batch changes with gradient accumulation, data parallelism and packing; a sum over weights
whose denominators were counted once over the global mini-batch does not. Left out on purpose: the counting
itself, which needs an all-reduce and belongs to the learner.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]


def loss_weights(
    response_mask: Tensor,
    sequence_ids: Tensor,
    *,
    aggregation: Aggregation,
    num_tokens: int,
    num_sequences: int,
    max_response_length: int | None = None,
) -> Tensor:
    """Weights that turn token losses into the configured average over the global mini-batch.

    - `token_mean`: 1 / num_tokens. DAPO (arXiv 2503.14476, eq. 8).
    - `sequence_mean`: 1 / (response tokens of the sequence * num_sequences). GRPO (arXiv 2402.03300, eq. 3).
    - `fixed_length`: 1 / (num_sequences * max_response_length). Dr. GRPO (arXiv 2503.20783, section 3.2).

    The call must see each of its sequences whole: under context parallelism, compute the weights first and
    slice them afterwards. A sequence without response tokens adds 0 to the loss, and the caller decides
    whether it counts in `num_sequences`.

    Args:
        response_mask: bool [T].
        sequence_ids: int64 [T].
        aggregation: which average.
        num_tokens: response tokens of the global mini-batch.
        num_sequences: sequences of the global mini-batch.
        max_response_length: the constant length, in tokens, for `fixed_length` only.

    Returns:
        float32 [T], 0 outside the mask. The sum over the global mini-batch is 1 for the two means.

    Raises:
        ValueError: for an unknown aggregation or a count that is not positive.
    """
    if aggregation not in get_args(Aggregation):
        raise ValueError(f"aggregation {aggregation!r} is unknown; choose from {get_args(Aggregation)}")
    if num_tokens < 1 or num_sequences < 1:
        raise ValueError(
            f"num_tokens={num_tokens}, num_sequences={num_sequences}: nothing to train on; "
            "skip this step, or relax the filter that dropped its samples"
        )
    if aggregation == "sequence_mean":
        num_local = int(sequence_ids.max()) + 1 if sequence_ids.numel() else 0
        lengths = torch.zeros(num_local, dtype=torch.int64, device=sequence_ids.device)
        lengths = lengths.index_add(0, sequence_ids, response_mask.long())
        # clamp: a sequence without response tokens would divide by 0; the mask removes its tokens anyway.
        denominator = lengths.clamp(min=1)[sequence_ids].double() * num_sequences
        return response_mask.double().div(denominator).float()
    if aggregation == "fixed_length":
        if max_response_length is None or max_response_length < 1:
            raise ValueError(
                f"max_response_length={max_response_length}: aggregation 'fixed_length' divides by it; "
                "set it to the longest response in tokens"
            )
        return response_mask.double().div(num_sequences * max_response_length).float()
    return response_mask.double().div(num_tokens).float()
