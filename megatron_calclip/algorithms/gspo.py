"""Group Sequence Policy Optimization: one importance ratio per sequence (arXiv 2507.18071).

What: the geometric mean of the token ratios takes the place of each of them, so that whole sequences are kept
or clipped. Its usual clip range is a few 1e-4 wide. Left out on purpose: calibration of that range, which
works on `sequence_level`.
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.policy_loss import LossInputs, LossOutput, surrogate, token_log_ratio
from megatron_calclip.algorithms.ratio import bounded_exp, sequence_mean

GSPOVariant = Literal["sequence", "token"]


class SequenceLevel(NamedTuple):
    """Sequences as GSPO's clip sees them, each as one token; all float32 [N]."""

    ratio8: Tensor
    ratio16: Tensor
    advantages: Tensor
    importance_weights: Tensor
    loss_weights: Tensor


def sequence_level(
    *,
    ratio8: Tensor,
    ratio16: Tensor,
    advantages: Tensor,
    importance_weights: Tensor,
    loss_weights: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
) -> SequenceLevel:
    """Whole sequences in place of their tokens, for calibration: what the loss makes of them is unchanged.

    Ratios are geometric means. The loss adds loss weight times importance weight times surrogate over the tokens, and the last
    is one number for a sequence: so loss weights add up, and importance weights are averaged by them.

    Args:
        ratio8: [T]; a sequence's own ratio on each of its tokens gives that ratio again.
        ratio16: [T].
        advantages: [T], constant within a sequence.
        importance_weights: [T].
        loss_weights: [T].
        sequence_ids: int64 [T], below N; each sequence whole and with a token at least.
        num_sequences: N.
    """

    def total(values: Tensor) -> Tensor:
        zeros = torch.zeros(num_sequences, dtype=torch.float64)
        return zeros.index_add_(0, sequence_ids, values.double())

    lengths, weights = total(torch.ones_like(ratio8)), total(loss_weights)

    def mean(values: Tensor) -> Tensor:
        return total(values) / lengths

    importance = torch.where(weights > 0, total(importance_weights * loss_weights) / weights, mean(importance_weights))
    return SequenceLevel(
        ratio8=mean(ratio8.double().log()).exp().float(),
        ratio16=mean(ratio16.double().log()).exp().float(),
        advantages=mean(advantages).float(),
        importance_weights=importance.float(),
        loss_weights=weights.float(),
    )


def gspo_surrogate(
    inputs: LossInputs,
    bounds: ClipBounds,
    *,
    variant: GSPOVariant = "sequence",
    dual_clip: float | None = None,
    exact_on_policy: bool = False,
) -> LossOutput:
    """Token loss -w * min(s_i * A, clip(s_i, lower, upper) * A), s_i being the ratio of the token's sequence.

    - `sequence` (eq. 5): the gradient of s_i itself, which spreads evenly over the tokens of the sequence.
    - `token` (GSPO-token, eq. 13 and 14): sg(s_i) * pi_t / sg(pi_t), the value of s_i with the gradient of
      the token's own log-probability, so that advantages may differ between tokens.

    Both have the same gradient where advantage, importance weight and aggregation weight are constant within
    a sequence. `sequence_mean` aggregation gives the paper's average.

    Args:
        inputs: the micro-batch, each of its sequences whole.
        bounds: clip bounds of the sequence ratio, for example [1 - 3e-4, 1 + 4e-4].
        variant: see above.
        dual_clip: see `policy_loss.clipped_surrogate`.
        exact_on_policy: see `policy_loss.token_log_ratio`.

    Raises:
        ValueError: for an unknown variant or a dual_clip that is not above 1.
    """
    if variant not in get_args(GSPOVariant):
        raise ValueError(f"GSPO variant {variant!r} is unknown; choose from {get_args(GSPOVariant)}")
    mask, sequence_ids = inputs.response_mask, inputs.sequence_ids
    log_ratio = token_log_ratio(inputs, exact_on_policy=exact_on_policy)
    mean_log_ratio = sequence_mean(log_ratio, mask, sequence_ids, num_sequences=inputs.num_sequences)
    ratio = bounded_exp(mean_log_ratio)[sequence_ids]
    if variant == "token":
        ratio = ratio.detach() * token_log_ratio(inputs, exact_on_policy=True).exp()
    ratio = torch.where(mask, ratio, 1.0)
    return surrogate(inputs, bounds, ratio=ratio, deciding_ratio=ratio, dual_clip=dual_clip)
