"""Per-token estimators of a KL divergence from samples: K1, K2, K3 (J. Schulman, "Approximating KL
Divergence", 2020).

What: estimators of KL(pi || reference) for tokens that were sampled from pi; a penalty against a reference
model, and the formula under the KL metrics. Left out on purpose: the coefficient, the average, and the exact
KL over the vocabulary, which needs all logits.
"""

from typing import Literal, get_args

from torch import Tensor

from megatron_calclip.algorithms.ratio import MAX_LOG_RATIO, masked_log_ratio

KLKind = Literal["k1", "k2", "k3"]


def kl_penalty(log_probs: Tensor, reference_log_probs: Tensor, *, response_mask: Tensor, kind: KLKind) -> Tensor:
    """KL(pi || reference) per sampled token, differentiable in both arguments.

    With d = log_probs - reference_log_probs:

    - `k1`: d. Unbiased, of either sign. As a term of the loss its expected gradient is 0 (the mean of the
      score function), so it only makes sense inside the reward.
    - `k2`: d^2 / 2. Biased in value; its gradient as a loss is, on policy, that of the reverse KL.
    - `k3`: exp(-d) + d - 1. Unbiased, never negative; GRPO's choice (arXiv 2402.03300, eq. 4).

    K3's exponent is bounded by MAX_LOG_RATIO from above; beyond it (the policy has almost lost a token that
    the reference knows) the whole term is a constant. Value and gradient are finite for log-ratios of +-1e4.

    Args:
        log_probs: [T] nats.
        reference_log_probs: [T] nats.
        response_mask: bool [T].
        kind: see above.

    Returns:
        [T] nats, 0 outside the mask.

    Raises:
        ValueError: for an unknown kind.
    """
    if kind not in get_args(KLKind):
        raise ValueError(f"KL estimator {kind!r} is unknown; choose from {get_args(KLKind)}")
    difference = masked_log_ratio(log_probs, reference_log_probs, response_mask)
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    # Bound the argument, not the result: the backward of a bounded exp(1e4) is inf * 0 = NaN. Bounding the
    # exponential alone would leave the linear term's gradient, which points away from the reference.
    exponent = (-difference).clamp(max=MAX_LOG_RATIO)
    return exponent.exp() - exponent - 1.0
