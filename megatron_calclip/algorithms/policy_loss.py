"""The clipped surrogate of PPO, of which GRPO, DAPO and Dr. GRPO are settings.

What: token losses for given clip bounds, with dual clip, the exact on-policy ratio, and an oracle for
studies that clips by the ratios of another precision. Which tokens are clipped is decided first, by explicit
masks, and the loss follows from the masks: what is reported as clipped is exactly what got no gradient, at
equality too.

Left out on purpose: averaging (`aggregation`), advantages, where bounds come from, KL and entropy terms.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.ratio import bounded_exp, masked, masked_log_ratio


@dataclass(frozen=True)
class LossInputs:
    """What a policy loss needs of one micro-batch, flat and packed. Only `log_probs` carries a gradient."""

    log_probs: Tensor
    """[T] nats: log pi_theta of the present weights."""
    old_log_probs: Tensor
    """[T] nats: log pi_old, the learner at the start of the step, in the learner's training precision."""
    advantages: Tensor
    """[T], the sequence's advantage repeated over its tokens (or any per-token advantage)."""
    importance_weights: Tensor
    """[T] >= 0: detached weights that repair the sampler-learner mismatch; ones for none."""
    response_mask: Tensor
    """bool [T]: tokens the policy generated."""
    sequence_ids: Tensor
    """int64 [T]: 0..num_sequences-1 within this batch."""
    num_sequences: int
    """Sequences of this batch (not of the global mini-batch)."""


class ClipMasks(NamedTuple):
    """Tokens whose gradient the clip removes, by side; bool [T] each."""

    low: Tensor
    """A < 0 and r <= lower."""
    high: Tensor
    """A > 0 and r >= upper."""


@dataclass(frozen=True)
class LossOutput:
    """Token losses and what happened to each token. All but `token_loss` are detached."""

    token_loss: Tensor
    """[T], 0 outside the mask; importance weights are in it, aggregation weights are not."""
    ratio: Tensor
    """[T] the ratio that the loss used, 1 outside the mask."""
    clipped_low: Tensor
    """bool [T]: A < 0 and r <= lower; no gradient."""
    clipped_high: Tensor
    """bool [T]: A > 0 and r >= upper; no gradient."""
    clipped_dual: Tensor
    """bool [T]: A < 0 and r >= dual_clip; no gradient."""


def clip_masks(ratio: Tensor, advantages: Tensor, bounds: ClipBounds, *, response_mask: Tensor) -> ClipMasks:
    """Which tokens lose their gradient to the clip: A < 0 with r <= lower, A > 0 with r >= upper.

    A ratio outside the bounds on the other side (A > 0 with a small r, A < 0 with a large one) keeps its
    gradient under the minimum of PPO's surrogate, so it does not count.

    Args:
        ratio: [T].
        advantages: [T].
        bounds: the bounds in force.
        response_mask: bool [T].

    Returns:
        Two masks, False outside `response_mask`.
    """
    return ClipMasks(
        low=response_mask & (advantages < 0) & (ratio <= bounds.lower),
        high=response_mask & (advantages > 0) & (ratio >= bounds.upper),
    )


def token_log_ratio(inputs: LossInputs, *, exact_on_policy: bool = False) -> Tensor:
    """log pi_theta - log pi_old with the gradient of log pi_theta; 0 outside the mask.

    Args:
        inputs: the micro-batch.
        exact_on_policy: take the value 0 and keep the gradient. For weights that have not moved since pi_old
            was computed: kernels that do not repeat bit for bit would otherwise show up as ratios.

    Returns:
        [T] nats, not bounded.
    """
    old_log_probs = inputs.log_probs.detach() if exact_on_policy else inputs.old_log_probs
    return masked_log_ratio(inputs.log_probs, old_log_probs, inputs.response_mask)


def clipped_surrogate(
    inputs: LossInputs,
    bounds: ClipBounds,
    *,
    dual_clip: float | None = None,
    exact_on_policy: bool = False,
) -> LossOutput:
    """Token loss -w * min(r * A, clip(r, lower, upper) * A).

    PPO, arXiv 1707.06347, eq. 7; separate bounds: DAPO, arXiv 2503.14476, eq. 8. The log-ratio is bounded to
    +-MAX_LOG_RATIO before `exp`; beyond it the gradient is 0.

    Args:
        inputs: the micro-batch.
        bounds: clip bounds of the ratio.
        dual_clip: c > 1 bounds the loss of a token with A < 0 by c * |A| (arXiv 1912.09729); None: off.
        exact_on_policy: see `token_log_ratio`.

    Raises:
        ValueError: if dual_clip is not above 1.
    """
    ratio = bounded_exp(token_log_ratio(inputs, exact_on_policy=exact_on_policy))
    return surrogate(inputs, bounds, ratio=ratio, deciding_ratio=ratio, dual_clip=dual_clip)


def oracle_surrogate(
    inputs: LossInputs, bounds: ClipBounds, *, reference_ratio: Tensor, dual_clip: float | None = None
) -> LossOutput:
    """The clipped surrogate with its clip masks taken from other ratios: an upper limit for calibration.

    The masks come from `reference_ratio` (BF16 shadow passes), loss and gradient from the ratio of `inputs`
    (FP8). No choice of bounds on the FP8 ratio can match BF16's clipping better than that. For studies: it
    costs a shadow pass at every mini-batch.

    Args:
        inputs: the micro-batch.
        bounds: clip bounds, applied to `reference_ratio`.
        reference_ratio: [T], detached.
        dual_clip: see `clipped_surrogate`; its mask comes from `reference_ratio` too.

    Raises:
        ValueError: if dual_clip is not above 1.
    """
    ratio = bounded_exp(token_log_ratio(inputs))
    deciding_ratio = masked(reference_ratio, inputs.response_mask, fill=1.0)
    return surrogate(inputs, bounds, ratio=ratio, deciding_ratio=deciding_ratio, dual_clip=dual_clip)


def surrogate(
    inputs: LossInputs,
    bounds: ClipBounds,
    *,
    ratio: Tensor,
    deciding_ratio: Tensor,
    dual_clip: float | None = None,
) -> LossOutput:
    """The surrogate for any ratio, token or sequence level: the part that all clipped losses share.

    Args:
        inputs: the micro-batch.
        bounds: clip bounds.
        ratio: [T] that carries the gradient, finite, 1 outside the mask.
        deciding_ratio: [T] that is compared with the bounds.
        dual_clip: see `clipped_surrogate`.

    Raises:
        ValueError: if dual_clip is not above 1.
    """
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"dual_clip={dual_clip} would clip on-policy tokens; choose a value above 1, or None")
    mask = inputs.response_mask
    advantages = masked(inputs.advantages, mask)
    weights = masked(inputs.importance_weights, mask).detach()
    deciding_ratio = deciding_ratio.detach()

    low, high = clip_masks(deciding_ratio, advantages, bounds, response_mask=mask)
    dual = torch.zeros_like(mask)
    if dual_clip is not None:
        dual = mask & (advantages < 0) & (deciding_ratio >= dual_clip)

    # min(r * A, clip(r) * A) written with the masks: a clipped token is a constant, all others are r * A.
    # `torch.min` and `clamp` would split or pass the gradient at equality.
    effective = torch.where(low, bounds.lower, ratio)
    effective = torch.where(high, bounds.upper, effective)
    if dual_clip is not None:
        effective = torch.where(dual, dual_clip, effective)
    return LossOutput(
        token_loss=-weights * effective * advantages,
        ratio=ratio.detach(),
        clipped_low=low,
        clipped_high=high,
        clipped_dual=dual,
    )
