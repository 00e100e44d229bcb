"""Weights that repair the mismatch between the sampler and the learner.

What: pi_old / mu per token or per sequence, truncated (TIS) or masked at a cap. Why: the rollout engine
samples from mu, with its own kernels, precision and, at staleness 1, older weights, while the loss assumes
pi_old. What it does not do: it leaves the ratio pi_theta / pi_old, and so the trust region, untouched.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_calclip.algorithms.ratio import bounded_exp, masked_log_ratio, sequence_mean, sequence_sum

ImportanceLevel = Literal["off", "token", "sequence_product", "sequence_geometric"]
ImportanceMode = Literal["truncate", "mask"]


@dataclass(frozen=True)
class ImportanceWeights:
    """Importance weights of a batch and which of them the cap changed."""

    weights: Tensor
    """float32 [T], detached, >= 0; 1 outside the mask."""
    truncated: Tensor
    """bool [T]: the raw weight lies above the cap; False outside the mask."""


def importance_weights(
    old_log_probs: Tensor,
    sampler_log_probs: Tensor,
    response_mask: Tensor,
    sequence_ids: Tensor,
    *,
    num_sequences: int,
    level: ImportanceLevel,
    cap: float = 2.0,
    mode: ImportanceMode = "truncate",
) -> ImportanceWeights:
    """Detached weights pi_old / mu with a cap.

    Levels, for d_t = log pi_old - log mu of token t:

    - `off`: 1.
    - `token`: exp(d_t). TIS (F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL
      training", 2025).
    - `sequence_product`: exp(sum of d_t), the unbiased weight of the whole sequence; its variance grows with
      the length, so that long sequences sit at the cap.
    - `sequence_geometric`: exp(mean of d_t), the same per token of the sequence as in GSPO (arXiv 2507.18071,
      eq. 7); biased, and comparable across lengths.

    Args:
        old_log_probs: [T] nats, the learner at the start of the step.
        sampler_log_probs: [T] nats, as the sampler reported them.
        response_mask: bool [T].
        sequence_ids: int64 [T].
        num_sequences: N, sequences of this batch; each must be whole for the two sequence levels.
        level: see above.
        cap: largest weight, at least 1.
        mode: `truncate` sets a weight above the cap to the cap, `mask` sets it to 0 (the token or the
            sequence does not train).

    Raises:
        ValueError: for an unknown level or mode, or a cap below 1.
    """
    if level not in get_args(ImportanceLevel):
        raise ValueError(f"importance level {level!r} is unknown; choose from {get_args(ImportanceLevel)}")
    if mode not in get_args(ImportanceMode):
        raise ValueError(f"importance mode {mode!r} is unknown; choose from {get_args(ImportanceMode)}")
    if not cap >= 1.0:
        raise ValueError(f"importance cap {cap} would reduce tokens without any mismatch; choose at least 1")
    if level == "off":
        ones = torch.ones(response_mask.shape, dtype=torch.float32, device=response_mask.device)
        return ImportanceWeights(weights=ones, truncated=torch.zeros_like(response_mask))

    log_weights = masked_log_ratio(old_log_probs.detach(), sampler_log_probs.detach(), response_mask)
    if level == "sequence_product":
        log_weights = sequence_sum(log_weights, sequence_ids, num_sequences=num_sequences)[sequence_ids]
    elif level == "sequence_geometric":
        log_weights = sequence_mean(log_weights, response_mask, sequence_ids, num_sequences=num_sequences)[sequence_ids]
    raw = bounded_exp(log_weights)
    truncated = response_mask & (raw > cap)
    capped = torch.where(truncated, cap if mode == "truncate" else 0.0, raw)
    weights = torch.where(response_mask, capped, 1.0).float()
    return ImportanceWeights(weights=weights, truncated=truncated)
