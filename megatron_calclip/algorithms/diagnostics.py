"""Instruments of every training step, as sums that add up over micro-batches and ranks.

What: one small object per micro-batch, merged over the step, reduced once over the ranks, then turned into
named numbers. Why sums: a mean of means is wrong as soon as micro-batches differ in size, and the minimum of
a ratio is not an average. Every metric states its reduction:

| metric | is | reduction |
|---|---|---|
| clip/low_negative | share of A<0 response tokens that the lower bound robs of their gradient | sum / sum |
| clip/high_positive | the same for A>0 and the upper bound | sum / sum |
| clip/dual_negative | share of A<0 response tokens at the dual clip | sum / sum |
| ratio/mean, ratio/std | of pi_theta / pi_old as the loss used it, population std | sums / sum |
| ratio/min, ratio/max | extremes of the same | min, max |
| entropy | mean entropy of the policy, nats per response token | sum / sum |
| kl/k3 | K3 estimate of KL(pi_old, pi_theta), nats per response token | sum / sum |
| mismatch/mean_abs_dlogp | mean of abs(log pi_old - log mu), nats | sum / sum |
| mismatch/max_abs_dlogp | maximum of the same | max |
| mismatch/k3 | K3 estimate of KL(mu, pi_old), nats per response token | sum / sum |
| mismatch/token_mult_prob_error | mean of exp(abs(log pi_old - log mu)), NeMo-RL's; 1 = none | sum / sum |
| importance/truncated | share of response tokens whose importance weight lies above the cap | sum / sum |
| importance/ess | effective sample size (sum w)^2 / (n * sum w^2), 1 = equal weights | sums |

A metric whose denominator is 0 (no token with A<0, say) is left out of the result, never reported as 0.

Left out on purpose: the collective. `pack` gives the three tensors for a SUM, a MIN and a MAX all-reduce.
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from megatron_calclip.algorithms.importance import ImportanceWeights
from megatron_calclip.algorithms.kl import kl_penalty
from megatron_calclip.algorithms.policy_loss import LossInputs, LossOutput
from megatron_calclip.algorithms.ratio import bounded_exp, masked, masked_log_ratio

SUM_NAMES = (
    "num_tokens",
    "num_negative",
    "num_positive",
    "num_clipped_low",
    "num_clipped_high",
    "num_clipped_dual",
    "ratio_offset",
    "ratio_offset_squared",
    "entropy",
    "kl_k3",
    "abs_dlogp",
    "exp_abs_dlogp",
    "mismatch_k3",
    "num_truncated",
    "importance",
    "importance_squared",
)
"""Order of `PolicyMetricSums.sums`. Offsets are r - 1: the ratios of GSPO differ from 1 by 1e-4, and the
variance from plain squares would cancel."""


@dataclass(frozen=True)
class PolicyMetricSums:
    """Sums, minima and maxima over response tokens; see the table of the module."""

    sums: Tensor
    """float64 [len(SUM_NAMES)]."""
    minima: Tensor
    """float64 [1]: the ratio; +inf without tokens."""
    maxima: Tensor
    """float64 [2]: the ratio, |log pi_old - log mu|; -inf without tokens."""

    @classmethod
    def empty(cls) -> Self:
        """The sums of no tokens: what `merge` leaves unchanged."""
        return cls(
            sums=torch.zeros(len(SUM_NAMES), dtype=torch.float64),
            minima=torch.full((1,), math.inf, dtype=torch.float64),
            maxima=torch.full((2,), -math.inf, dtype=torch.float64),
        )

    @property
    def num_tokens(self) -> int:
        """Response tokens in these sums."""
        return int(self.sums[SUM_NAMES.index("num_tokens")])

    def cpu(self) -> Self:
        """The same sums on the CPU."""
        return type(self)(self.sums.cpu(), self.minima.cpu(), self.maxima.cpu())

    def merge(self, other: Self) -> Self:
        """Both together, as if computed on the union of the tokens."""
        return type(self)(
            sums=self.sums + other.sums,
            minima=torch.minimum(self.minima, other.minima),
            maxima=torch.maximum(self.maxima, other.maxima),
        )

    def pack(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tensors for a SUM, a MIN and a MAX all-reduce; `PolicyMetricSums(*packed)` puts them back."""
        return self.sums, self.minima, self.maxima

    def finalize(self) -> dict[str, float]:
        """Metrics by name, from global sums. Undefined ones are left out; without any token, all are."""
        total = dict(zip(SUM_NAMES, self.sums.tolist(), strict=True))
        num_tokens = total["num_tokens"]
        if num_tokens == 0:
            return {}
        offset = total["ratio_offset"] / num_tokens
        variance = total["ratio_offset_squared"] / num_tokens - offset**2
        return {
            "ratio/mean": 1.0 + offset,
            "ratio/std": math.sqrt(max(variance, 0.0)),
            "ratio/min": self.minima[0].item(),
            "ratio/max": self.maxima[0].item(),
            "mismatch/max_abs_dlogp": self.maxima[1].item(),
            **defined_quotients(
                {
                    "clip/low_negative": (total["num_clipped_low"], total["num_negative"]),
                    "clip/high_positive": (total["num_clipped_high"], total["num_positive"]),
                    "clip/dual_negative": (total["num_clipped_dual"], total["num_negative"]),
                    "entropy": (total["entropy"], num_tokens),
                    "kl/k3": (total["kl_k3"], num_tokens),
                    "mismatch/mean_abs_dlogp": (total["abs_dlogp"], num_tokens),
                    "mismatch/token_mult_prob_error": (total["exp_abs_dlogp"], num_tokens),
                    "mismatch/k3": (total["mismatch_k3"], num_tokens),
                    "importance/truncated": (total["num_truncated"], num_tokens),
                    "importance/ess": (
                        total["importance"] ** 2,
                        num_tokens * total["importance_squared"],
                    ),
                }
            ),
        }


@torch.no_grad()
def policy_metric_sums(
    inputs: LossInputs,
    output: LossOutput,
    *,
    entropy: Tensor,
    sampler_log_probs: Tensor,
    importance: ImportanceWeights,
) -> PolicyMetricSums:
    """Instruments of one micro-batch.

    Args:
        inputs: what the loss got.
        output: what the loss returned.
        entropy: [T] nats, of the policy's next-token distribution.
        sampler_log_probs: [T] nats, log mu.
        importance: the weights in `inputs`, with their truncation mask.
    """
    mask = inputs.response_mask
    advantages = masked(inputs.advantages, mask)
    ratio = masked(output.ratio, mask, fill=1.0).double()
    weights = masked(inputs.importance_weights, mask).double()
    abs_dlogp = masked_log_ratio(inputs.old_log_probs, sampler_log_probs, mask).abs().double()
    kl_k3 = kl_penalty(inputs.old_log_probs, inputs.log_probs, response_mask=mask, kind="k3")
    mismatch_k3 = kl_penalty(sampler_log_probs, inputs.old_log_probs, response_mask=mask, kind="k3")
    per_token = {
        "num_tokens": mask,
        "num_negative": advantages < 0,
        "num_positive": advantages > 0,
        "num_clipped_low": output.clipped_low,
        "num_clipped_high": output.clipped_high,
        "num_clipped_dual": output.clipped_dual,
        "ratio_offset": ratio - 1.0,
        "ratio_offset_squared": (ratio - 1.0).square(),
        "entropy": masked(entropy, mask),
        "kl_k3": kl_k3,
        "abs_dlogp": abs_dlogp,
        "exp_abs_dlogp": torch.where(mask, bounded_exp(abs_dlogp), 0.0),
        "mismatch_k3": mismatch_k3,
        "num_truncated": importance.truncated,
        "importance": weights,
        "importance_squared": weights.square(),
    }
    lowest = torch.where(mask, ratio, math.inf)
    highest = torch.where(mask, torch.stack([ratio, abs_dlogp]), -math.inf)
    # The appended value keeps the extremes defined for a micro-batch without tokens.
    return PolicyMetricSums(
        sums=torch.stack([per_token[name].sum(dtype=torch.float64) for name in SUM_NAMES]),
        minima=torch.cat([lowest, lowest.new_full((1,), math.inf)]).amin(dim=0, keepdim=True),
        maxima=torch.cat([highest, highest.new_full((2, 1), -math.inf)], dim=1).amax(dim=1),
    )


def defined_quotients(terms: dict[str, tuple[float, float]]) -> dict[str, float]:
    """numerator / denominator by name, without the names whose denominator is 0."""
    return {name: top / bottom for name, (top, bottom) in terms.items() if bottom != 0}
