"""What FP8 does to token probabilities and importance ratios: the numbers of `megatron-calclip diagnose`.

A learner in FP8 computes log p8 where BF16 computes log p16, both on the same weights. Over one update these errors
enter the ratio r = p(new) / p(old) twice, and a clip range of 20% sees them. What: errors of probabilities and of
ratios, and who is clipped, from log-probabilities alone. The definitions are those of "Towards Full Pipeline FP8
Reinforcement Learning for LLMs" (arXiv 2609.22870): NMAE(x) = mean |x8 - x16| / mean x16 over response tokens, and
amplification = NMAE(r) / NMAE(p).

Left out on purpose: where the log-probabilities come from (`diagnosis_passes`), and how they are shown
(`commands/diagnose`).

Legend: n response tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.ratio import bounded_exp

TAIL = 0.95
"""Quantile that stands for the tail of the errors."""


@dataclass(frozen=True)
class ProbabilityNoise:
    """FP8 against BF16 on the same weights, or BF16 against itself."""

    mean_abs_dlogp: float
    """Mean of |log p8 - log p16|, nats."""
    p95_abs_dlogp: float
    """95% of the tokens have no larger one, nats."""
    nmae_p: float
    """NMAE of the token probabilities."""


@dataclass(frozen=True)
class ClipShares:
    """Shares of tokens whose ratio lies outside the clip range; NaN where there are no such tokens.

    The loss cuts the gradient of `low_negative` and of `high_positive`; the other two are outside, and keep it.
    """

    low_negative: float
    """r <= L, among the tokens with A < 0: their penalty is lost."""
    low_positive: float
    """r <= L, among the tokens with A > 0."""
    high_negative: float
    """r >= H, among the tokens with A < 0."""
    high_positive: float
    """r >= H, among the tokens with A > 0: their reward is lost."""
    outside: float
    """r <= L or r >= H, among all."""
    clipped: float
    """Of them those of the right sign, among all: tokens whose gradient the loss cuts."""


@dataclass(frozen=True)
class RatioNoise:
    """Importance ratios of one update, in FP8 and in BF16."""

    lr: float
    """Learning rate of the update."""
    nmae_p: float
    """NMAE of the probabilities after it."""
    nmae_r: float
    """NMAE of the ratios."""
    amplification: float
    """NMAE of the ratios over that of the probabilities."""
    fp8: ClipShares
    """Tokens outside the clip range by their FP8 ratio."""
    bf16: ClipShares
    """Tokens outside it by their BF16 ratio."""


@dataclass(frozen=True)
class LayerNoise:
    """Where the noise comes from, on some of the sequences."""

    mean_abs_dlogp: float
    """Of all layers together, nats."""
    one_layer: list[float]
    """The same with a single layer in FP8, for each layer."""
    edges_bf16: float
    """The same with the first and the last layer in BF16."""


@dataclass(frozen=True)
class RecipeReport:
    """What one recipe does."""

    recipe: str
    """Its name, with the settings that differ from its own."""
    unmoved: ProbabilityNoise
    """Against BF16, at the first weights."""
    floor: ClipShares
    """Ratios of unmoved weights with learning rate 0, when the second pass has micro-batches of half the size."""
    repeated: ClipShares
    """The same over the very same micro-batches, as the learner trains: 0 but for delayed scaling."""
    updates: list[RatioNoise]
    """After updates of several sizes."""
    seconds: float
    """One forward pass over all tokens."""
    layers: LayerNoise | None
    """None where it was not asked for."""


@dataclass(frozen=True)
class Report:
    """All recipes on one model and batch."""

    num_sequences: int
    num_tokens: int
    """n."""
    bounds: tuple[float, float]
    """L and H."""
    bf16_nll: float
    """Mean negative log-probability of the tokens, nats."""
    bf16_floor: ClipShares
    """BF16's own floor in other micro-batches."""
    bf16_seconds: float
    """One forward pass over all tokens."""
    recipes: list[RecipeReport]


def nmae(x8: Tensor, x16: Tensor) -> float:
    """Normalised mean absolute error: mean |x8 - x16| / mean x16, summed in float64.

    Args:
        x8: [n], not negative.
        x16: [n], the reference.
    """
    return float((x8.double() - x16.double()).abs().sum() / x16.double().sum())


def probability_noise(log_probs8: Tensor, log_probs16: Tensor) -> ProbabilityNoise:
    """Errors of token probabilities.

    Args:
        log_probs8: float32 [n] nats, n at least 1.
        log_probs16: float32 [n] nats.
    """
    difference = (log_probs8 - log_probs16).abs()
    tail = difference.kthvalue(math.ceil(TAIL * difference.numel())).values
    return ProbabilityNoise(
        mean_abs_dlogp=float(difference.double().mean()),
        p95_abs_dlogp=float(tail),
        nmae_p=nmae(log_probs8.exp(), log_probs16.exp()),
    )


def clip_shares(ratio: Tensor, is_positive: Tensor, bounds: ClipBounds) -> ClipShares:
    """Who lies outside the clip range.

    Args:
        ratio: [n].
        is_positive: bool [n]: whether the token's advantage is positive; the others count as negative.
        bounds: L and H.
    """
    low, high = ratio <= bounds.lower, ratio >= bounds.upper

    def share(of: Tensor, among: Tensor) -> float:
        return float((of & among).sum() / among.sum())  # 0 / 0 is NaN

    return ClipShares(
        low_negative=share(low, ~is_positive),
        low_positive=share(low, is_positive),
        high_negative=share(high, ~is_positive),
        high_positive=share(high, is_positive),
        outside=float((low | high).double().mean()),
        clipped=float(torch.where(is_positive, high, low).double().mean()),
    )


@dataclass(frozen=True)
class LogProbPair:
    """Log-probabilities of the same tokens before and after one update."""

    old: Tensor
    """float32 [n] nats."""
    new: Tensor
    """float32 [n] nats."""

    @property
    def ratio(self) -> Tensor:
        """float32 [n]: r = p(new) / p(old), bounded as the loss bounds it."""
        return bounded_exp(self.new - self.old)


def ratio_noise(
    fp8: LogProbPair, bf16: LogProbPair, is_positive: Tensor, *, bounds: ClipBounds, lr: float
) -> RatioNoise:
    """Errors of the importance ratios of one update.

    Args:
        fp8: both passes in FP8.
        bf16: both passes in BF16, at the same weights.
        is_positive: bool [n]: whether the token's advantage is positive.
        bounds: the clip range.
        lr: the update's learning rate, for the report.

    Returns:
        the errors. Where FP8 equals BF16, amplification is NaN.
    """
    nmae_p = nmae(fp8.new.exp(), bf16.new.exp())
    nmae_r = nmae(fp8.ratio, bf16.ratio)
    return RatioNoise(
        lr=lr,
        nmae_p=nmae_p,
        nmae_r=nmae_r,
        amplification=nmae_r / nmae_p if nmae_p else math.nan,
        fp8=clip_shares(fp8.ratio, is_positive, bounds),
        bf16=clip_shares(bf16.ratio, is_positive, bounds),
    )


@torch.no_grad()
def between_boundaries(weight: Tensor, generator: torch.Generator) -> Tensor:
    """FP32 masters of a BF16 weight, spread over what rounds to it.

    A fresh FP32 copy of a BF16 weight lies in the middle of its rounding interval: an update smaller than half of that
    changes no weight at all. Weights that were decoded from a 4-bit file may lie exactly on boundaries: then any update
    flips millions of them at once. Masters in the middle of training are spread between the boundaries, and so are these:
    uniformly over the interval, but for the few that would round to a neighbour (at powers of two), which stay.

    Args:
        weight: any floating type; rounded to BF16 first.
        generator: of the offsets.

    Returns:
        float32 of its shape, with the same BF16 rounding.
    """
    rounded = weight.to(torch.bfloat16)
    center = rounded.float()
    _, exponent = torch.frexp(center)  # magnitude in [2^(e-1), 2^e)
    unit = torch.ldexp(torch.full_like(center, torch.finfo(torch.bfloat16).eps), exponent - 1)
    offset = torch.rand(center.shape, generator=generator) - 0.5
    spread = torch.where(center == 0, center, center + offset * unit)
    return torch.where(spread.to(torch.bfloat16) == rounded, spread, center)
