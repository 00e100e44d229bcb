"""Instruments of a calibration step: what FP8 does to the clip, token by token, against BF16.

What: with the ratio of every response token in both precisions, how much the clip differs, in which
direction, what it costs and where it comes from. Everything is a sum over tokens that adds up over
micro-batches and ranks (a SUM all-reduce each), finalised from the global total:

| metric, `low` (A<0, lower bound) or `high` (A>0, upper bound) | is |
|---|---|
| clip_fp8/low, clip_bf16/low | share of the side's tokens that each precision clips |
| clip_fp8/num_low, clip_bf16/num_low | those tokens, so that shares can be pooled over steps |
| overclip/low | clipped by FP8 over clipped by BF16, 1 = no over-clipping |
| false_clip/low | P(FP8 clips given that BF16 keeps) |
| missed_clip/low | P(FP8 keeps given that BF16 clips) |
| lost_penalty/mass | sum of w * abs(A) * r16 over A<0 tokens that only FP8 clips: BF16's push on them |
| lost_penalty/share | the same over the sum of all A<0 tokens that BF16 keeps |
| nmae/ratio, nmae/probability | mean abs(x8 - x16) / mean x16 over response tokens |
| nmae/amplification | nmae/ratio over nmae/probability: what the quotient adds to the noise |

A metric whose denominator is 0 is left out. Left out on purpose: the collective, and how bounds follow from
the ratios (`calibration`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.diagnostics import defined_quotients
from megatron_calclip.algorithms.policy_loss import ClipMasks, clip_masks
from megatron_calclip.algorithms.ratio import masked, sequence_sum

ENTROPY_EDGES = (0.25, 0.5, 1.0, 1.5, 2.0)
"""Nats. The FP8 paper (arXiv 2609.22870) splits at 1.0."""
PROBABILITY_EDGES = (0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99)
LENGTH_EDGES = (64.0, 256.0, 1024.0, 4096.0, 16384.0)
"""Tokens, for positions and sequence lengths."""

SUM_NAMES = (
    "low_both",
    "low_fp8_only",
    "low_bf16_only",
    "low_neither",
    "high_both",
    "high_fp8_only",
    "high_bf16_only",
    "high_neither",
    "lost_penalty",
    "kept_penalty",
    "ratio_error",
    "ratio_bf16",
    "probability_error",
    "probability_bf16",
)
"""Order of `OverclipSums.sums`. Both error sums run over the same tokens, so their number cancels."""

ATTRIBUTION_COUNTS = ("false_low", "kept_low", "negative", "false_high", "kept_high", "positive")
"""Columns of `attribution_sums`: at the lower bound false clips, A < 0 tokens that BF16 keeps and all of them; at the upper bound
the same for A > 0."""


@dataclass(frozen=True)
class PairedRatios:
    """The same response tokens in both precisions, flat and packed, and the bounds each is clipped with."""

    ratio8: Tensor
    """[T]: pi_theta / pi_old in the learner's training precision."""
    ratio16: Tensor
    """[T]: the same from the BF16 shadow passes."""
    advantages: Tensor
    """[T]."""
    response_mask: Tensor
    """bool [T]."""
    bounds8: ClipBounds
    """Bounds in force for the FP8 ratio."""
    bounds16: ClipBounds
    """Reference bounds for the BF16 ratio."""

    def clipped(self) -> tuple[ClipMasks, ClipMasks]:
        """Clip masks of FP8 and of BF16."""
        advantages = masked(self.advantages, self.response_mask)
        return (
            clip_masks(self.ratio8, advantages, self.bounds8, response_mask=self.response_mask),
            clip_masks(self.ratio16, advantages, self.bounds16, response_mask=self.response_mask),
        )


@dataclass(frozen=True)
class OverclipSums:
    """Sums over response tokens; see the table of the module."""

    sums: Tensor
    """float64 [len(SUM_NAMES)]; add over micro-batches, and over ranks with a SUM all-reduce."""

    @classmethod
    def empty(cls) -> Self:
        """The sums of no tokens: what `merge` leaves unchanged."""
        return cls(torch.zeros(len(SUM_NAMES), dtype=torch.float64))

    def merge(self, other: Self) -> "OverclipSums":
        """Both together, as if computed on the union of the tokens."""
        return OverclipSums(self.sums + other.sums)

    def finalize(self) -> dict[str, float]:
        """Metrics by name, from global sums. Undefined ones are left out."""
        total = dict(zip(SUM_NAMES, self.sums.tolist(), strict=True))
        terms: dict[str, tuple[float, float]] = {}
        for side in ("low", "high"):
            both, neither = total[f"{side}_both"], total[f"{side}_neither"]
            fp8_only, bf16_only = total[f"{side}_fp8_only"], total[f"{side}_bf16_only"]
            num_tokens = both + fp8_only + bf16_only + neither
            terms |= {
                f"clip_fp8/{side}": (both + fp8_only, num_tokens),
                f"clip_bf16/{side}": (both + bf16_only, num_tokens),
                f"clip_fp8/num_{side}": (both + fp8_only, 1.0),
                f"clip_bf16/num_{side}": (both + bf16_only, 1.0),
                f"overclip/{side}": (both + fp8_only, both + bf16_only),
                f"false_clip/{side}": (fp8_only, fp8_only + neither),
                f"missed_clip/{side}": (bf16_only, both + bf16_only),
            }
        terms |= {
            "lost_penalty/mass": (total["lost_penalty"], 1.0),
            "lost_penalty/share": (total["lost_penalty"], total["kept_penalty"]),
            "nmae/ratio": (total["ratio_error"], total["ratio_bf16"]),
            "nmae/probability": (total["probability_error"], total["probability_bf16"]),
            "nmae/amplification": (
                total["ratio_error"] * total["probability_bf16"],
                total["ratio_bf16"] * total["probability_error"],
            ),
        }
        return defined_quotients(terms)


@torch.no_grad()
def overclip_sums(
    pairs: PairedRatios,
    *,
    weights: Tensor,
    log_probs8: Tensor | None = None,
    log_probs16: Tensor | None = None,
) -> OverclipSums:
    """Instruments of one micro-batch of a calibration step.

    Args:
        pairs: the tokens in both precisions.
        weights: [T] >= 0, importance weight, times the aggregation weight if masses are to be the loss's.
        log_probs8: [T] nats, log pi_theta in FP8, for the error of a probability; without it, left out.
        log_probs16: [T] nats, the same in BF16; both or none.
    """
    mask = pairs.response_mask
    advantages = masked(pairs.advantages, mask)
    fp8, bf16 = pairs.clipped()
    sums: dict[str, Tensor] = {}
    sides = (("low", advantages < 0, fp8.low, bf16.low), ("high", advantages > 0, fp8.high, bf16.high))
    for side, on_side, by_fp8, by_bf16 in sides:
        sums[f"{side}_both"] = by_fp8 & by_bf16
        sums[f"{side}_fp8_only"] = by_fp8 & ~by_bf16
        sums[f"{side}_bf16_only"] = by_bf16 & ~by_fp8
        sums[f"{side}_neither"] = on_side & ~by_fp8 & ~by_bf16

    ratio8, ratio16 = masked(pairs.ratio8, mask).double(), masked(pairs.ratio16, mask).double()
    penalty = masked(weights, mask).double() * (-advantages).clamp(min=0) * ratio16
    sums["lost_penalty"] = torch.where(fp8.low & ~bf16.low, penalty, 0.0)
    sums["kept_penalty"] = torch.where(bf16.low, 0.0, penalty)
    sums["ratio_error"] = (ratio8 - ratio16).abs()
    sums["ratio_bf16"] = ratio16

    assert (log_probs8 is None) == (log_probs16 is None), "log-probabilities of one precision only"
    if log_probs8 is not None and log_probs16 is not None:
        # exp of -inf is 0: tokens outside the mask have no probability in either sum.
        probability8 = masked(log_probs8, mask, fill=-math.inf).double().exp()
        probability16 = masked(log_probs16, mask, fill=-math.inf).double().exp()
        sums["probability_error"] = (probability8 - probability16).abs()
        sums["probability_bf16"] = probability16
    else:
        sums["probability_error"] = sums["probability_bf16"] = torch.zeros_like(ratio16)
    return OverclipSums(torch.stack([sums[name].sum(dtype=torch.float64) for name in SUM_NAMES]))


@dataclass(frozen=True)
class AttributionRow:
    """False clips (FP8 clips, BF16 keeps) of one bucket lower <= covariate < upper. None where undefined."""

    lower: float
    upper: float
    num_low: int
    """False clips at the lower bound (A < 0)."""
    num_high: int
    """False clips at the upper bound (A > 0)."""
    num_negative: int
    """A < 0 tokens of the bucket."""
    num_positive: int
    """A > 0 tokens of the bucket."""
    rate_low: float | None
    """P(FP8 clips given that BF16 keeps) among the A < 0 tokens of the bucket."""
    rate_high: float | None
    """The same for A > 0."""
    share_low: float | None
    """The bucket's part of all false clips at the lower bound."""
    share_high: float | None
    """The same at the upper bound."""


@torch.no_grad()
def attribution_sums(pairs: PairedRatios, covariate: Tensor, *, edges: Sequence[float]) -> Tensor:
    """Where false clips come from: counts by bucket of a covariate.

    Args:
        pairs: the tokens in both precisions.
        covariate: [T], for example entropy, probability, `response_positions` or `response_lengths`.
        edges: ascending; the buckets are (-inf, edges[0]), [edges[0], edges[1]), ..., [edges[-1], inf).

    Returns:
        int64 [len(edges) + 1, 6], its columns those of `ATTRIBUTION_COUNTS`. Add over micro-batches and ranks.
    """
    mask = pairs.response_mask
    advantages = masked(pairs.advantages, mask)
    fp8, bf16 = pairs.clipped()
    negative, positive = advantages < 0, advantages > 0
    counted = {
        "false_low": fp8.low & ~bf16.low,
        "kept_low": negative & ~bf16.low,
        "negative": negative,
        "false_high": fp8.high & ~bf16.high,
        "kept_high": positive & ~bf16.high,
        "positive": positive,
    }
    values = masked(covariate, mask)
    bucket = torch.bucketize(values, values.new_tensor(edges), right=True)
    counts = torch.stack([counted[name] for name in ATTRIBUTION_COUNTS], dim=1).long()
    return no_attribution(edges).to(counts.device).index_add(0, bucket, counts)


def no_attribution(edges: Sequence[float]) -> Tensor:
    """The sums of `attribution_sums` over no tokens."""
    return torch.zeros(len(edges) + 1, len(ATTRIBUTION_COUNTS), dtype=torch.int64)


def attribution_table(sums: Tensor, *, edges: Sequence[float]) -> list[AttributionRow]:
    """Rates and shares by bucket, from the global sums of `attribution_sums` and the same edges."""
    total = dict(zip(ATTRIBUTION_COUNTS, sums.sum(dim=0).tolist(), strict=True))
    rows = []
    for (lower, upper), counts in zip(pairwise([-math.inf, *edges, math.inf]), sums.tolist(), strict=True):
        found = dict(zip(ATTRIBUTION_COUNTS, counts, strict=True))
        low, high = found["false_low"], found["false_high"]
        rows.append(
            AttributionRow(
                lower=lower,
                upper=upper,
                num_low=low,
                num_high=high,
                num_negative=found["negative"],
                num_positive=found["positive"],
                rate_low=low / found["kept_low"] if found["kept_low"] else None,
                rate_high=high / found["kept_high"] if found["kept_high"] else None,
                share_low=low / total["false_low"] if total["false_low"] else None,
                share_high=high / total["false_high"] if total["false_high"] else None,
            )
        )
    return rows


def response_lengths(response_mask: Tensor, sequence_ids: Tensor, *, num_sequences: int) -> Tensor:
    """Response tokens of each token's sequence, int64 [T]; each sequence must be whole."""
    return sequence_sum(response_mask.long(), sequence_ids, num_sequences=num_sequences)[sequence_ids]


def response_positions(response_mask: Tensor, sequence_ids: Tensor, *, num_sequences: int) -> Tensor:
    """Index of each response token within its response, from 0; int64 [T].

    Args:
        response_mask: bool [T].
        sequence_ids: int64 [T]; the tokens of a sequence are in order, sequences may be interleaved.
        num_sequences: N.
    """
    order = torch.argsort(sequence_ids, stable=True)
    lengths = sequence_sum(response_mask.long(), sequence_ids, num_sequences=num_sequences)
    start = (lengths.cumsum(0) - lengths)[sequence_ids]
    count = response_mask[order].long().cumsum(0)
    positions = torch.empty_like(count).index_copy(0, order, count) - 1 - start
    return torch.where(response_mask, positions, 0)
