"""BAPO: clip bounds that are widened until positive tokens carry their share of the loss (arXiv 2510.18927).

What: a search for the bounds of one update, which then go into the ordinary clipped surrogate. Both bounds
start at the low ends of their ranges. While the share of the positive tokens in the policy loss is below the
target, the lower bound is raised, and once it is at its end, the upper bound. Order, steps and the measure of
the share are those of the authors' public recipe (github.com/WooooDyy/BAPO).

The share depends on the bounds only through one sum per candidate upper bound (positive tokens) and one per
candidate lower bound (negative tokens). So the search is split in two: `contribution_sums` yields a vector
that adds up over micro-batches and ranks, and `search_bounds` decides from the total, equally on every rank.

A property of the recipe's measure to know when reading results: the share counts clipped values, and raising
the lower bound RAISES max(r, L), the negative side. So the lower bound can only hurt the share, and whenever
the start misses the target it runs to the end of its range.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.ratio import masked


@dataclass(frozen=True)
class BAPOSettings:
    """Ranges and target of the search; the defaults are the paper's, the steps are the recipe's.

    Raises:
        ValueError: if the ranges do not enclose the ratio 1, a step is not positive, or the target is not
            inside (0, 1).
    """

    lower_start: float = 0.6
    lower_end: float = 0.9
    lower_step: float = 0.05
    upper_start: float = 1.2
    upper_end: float = 3.0
    upper_step: float = 0.05
    target_share: float = 0.5
    """rho_0: wanted share of the positive tokens in the policy loss."""

    def __post_init__(self) -> None:
        """Refuse ranges that the search cannot walk."""
        ClipBounds(self.lower_start, self.upper_start)
        ClipBounds(self.lower_end, self.upper_end)
        if self.lower_start > self.lower_end or self.upper_start > self.upper_end:
            raise ValueError("BAPO: a range starts above its end; choose start <= end")
        if self.lower_step <= 0 or self.upper_step <= 0:
            raise ValueError("BAPO: a step is not positive; choose for example 0.05")
        if not 0 < self.target_share < 1:
            raise ValueError(f"BAPO: target_share={self.target_share} is no share; choose inside (0, 1)")

    def lower_candidates(self) -> list[float]:
        """Lower bounds in the order of the search."""
        return _candidates(self.lower_start, self.lower_end, self.lower_step)

    def upper_candidates(self) -> list[float]:
        """Upper bounds in the order of the search."""
        return _candidates(self.upper_start, self.upper_end, self.upper_step)


@torch.no_grad()
def contribution_sums(
    ratio: Tensor, advantages: Tensor, weights: Tensor, response_mask: Tensor, *, settings: BAPOSettings
) -> Tensor:
    """What positive and negative tokens contribute to the policy loss, for every candidate bound.

    Args:
        ratio: [T], finite inside the mask.
        advantages: [T].
        weights: [T] >= 0, importance weight times aggregation weight.
        response_mask: bool [T].
        settings: the candidates.

    Returns:
        float64 [num_lower + num_upper]: sum of w * |A| * max(r, L) over A < 0 per lower candidate, then sum
        of w * A * min(r, H) over A > 0 per upper candidate. Add over micro-batches and ranks.
    """
    ratio = masked(ratio, response_mask, fill=1.0).double()
    mass = masked(advantages, response_mask).double() * masked(weights, response_mask).double()
    negative, positive = (-mass).clamp(min=0), mass.clamp(min=0)
    sums = [(negative * ratio.clamp(min=lower)).sum() for lower in settings.lower_candidates()]
    sums += [(positive * ratio.clamp(max=upper)).sum() for upper in settings.upper_candidates()]
    return torch.stack(sums)


def search_bounds(sums: Tensor, *, settings: BAPOSettings) -> ClipBounds:
    """Bounds of this update from the global sums.

    Args:
        sums: what `contribution_sums` returned, added over the mini-batch.
        settings: the same settings.

    Returns:
        The first bounds on the search path that reach the target share, or the ends of both ranges. Without
        negative tokens the start reaches it.
    """
    lowers, uppers = settings.lower_candidates(), settings.upper_candidates()
    negative, positive = sums[: len(lowers)].tolist(), sums[len(lowers) :].tolist()
    path = [(i, 0) for i in range(len(lowers))] + [(len(lowers) - 1, j) for j in range(1, len(uppers))]
    for i, j in path:
        if positive[j] >= settings.target_share * (positive[j] + negative[i]):
            return ClipBounds(lowers[i], uppers[j])
    return ClipBounds(lowers[-1], uppers[-1])


def _candidates(start: float, end: float, step: float) -> list[float]:
    """start, start + step, ..., end; rounded, so that 0.6 + 2 * 0.05 is 0.7 and not 0.7000000000000001."""
    num_steps = int(round((end - start) / step, 9))
    candidates = [round(start + k * step, 9) for k in range(num_steps + 1)]
    return candidates if candidates[-1] == end else [*candidates, end]
