"""CISPO: clip the importance weight, not the update (MiniMax-M1, arXiv 2506.13585).

What: REINFORCE whose weight is the clipped ratio without a gradient. Every token keeps a gradient, so this is
a baseline for the question whether clipping away gradients is what goes wrong. Left out on purpose: the
paper's unified variant with a token mask, which is PPO's mask again.
"""

from torch import zeros_like

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.policy_loss import LossInputs, LossOutput, token_log_ratio
from megatron_calclip.algorithms.ratio import bounded_exp, masked


def cispo_loss(inputs: LossInputs, bounds: ClipBounds, *, exact_on_policy: bool = False) -> LossOutput:
    """Token loss -w * sg(clip(r, lower, upper)) * A * log pi (arXiv 2506.13585, eq. 4 and 5).

    The value of the loss means nothing by itself; its gradient is the point. The clip masks of the result are
    all False, because no token loses its gradient.

    Args:
        inputs: the micro-batch.
        bounds: range of the weight. The paper sets no lower bound: lower = 0.
        exact_on_policy: see `policy_loss.token_log_ratio`.
    """
    mask = inputs.response_mask
    ratio = bounded_exp(token_log_ratio(inputs, exact_on_policy=exact_on_policy)).detach()
    advantages = masked(inputs.advantages, mask)
    weights = masked(inputs.importance_weights, mask).detach()
    clipped_weight = ratio.clamp(bounds.lower, bounds.upper)
    nothing = zeros_like(mask)
    return LossOutput(
        token_loss=-weights * clipped_weight * advantages * masked(inputs.log_probs, mask),
        ratio=ratio,
        clipped_low=nothing,
        clipped_high=nothing,
        clipped_dual=nothing,
    )
