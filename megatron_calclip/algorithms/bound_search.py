"""The two searches of calibrated clipping: a lower bound by quantile, an upper bound by balance.

What: pure functions from ratio statistics to a chosen edge, its bootstrap interval, and whether the target
lies beyond the grid (arXiv 2609.22870; our choices are marked). Left out on purpose: smoothing, and the rules
that decide whether a choice is acted on (`calibration`).

Ties go to the candidate nearest the present bound (our choice), and among two equally near ones to the
smaller: with few tokens whole stretches of a grid are equally good, and a plain argmin would run to their
end.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_calclip.algorithms.bootstrap import percentile_interval
from megatron_calclip.algorithms.calibration_settings import Balance, BoundGrid
from megatron_calclip.algorithms.statistics import Precision, Quantity, RatioStatistics, Side


@dataclass(frozen=True)
class Search:
    """Outcome of a search. Bounds are indices into the edges of their grid."""

    choice: int
    """The chosen candidate, before smoothing."""
    interval: tuple[int, int] | None
    """Bootstrap interval of the choice; None without replicates."""
    beyond: str
    """Why no candidate meets the target, or an empty string."""

    def spans(self, candidates: Sequence[int]) -> float:
        """Width of the interval as a share of the candidates' range; 0 without an interval."""
        if self.interval is None or len(candidates) < 2:
            return 0.0
        return (self.interval[1] - self.interval[0]) / (candidates[-1] - candidates[0])


@dataclass(frozen=True)
class BalanceSearch(Search):
    """Outcome of the search for the upper bound."""

    target: float
    """p_ref, the balance of BF16 at the reference bounds."""
    curve: tuple[float, ...]
    """The balance of FP8 at the new lower bound and each candidate; it never falls along the grid."""

    @property
    def is_defined(self) -> bool:
        """False when no negative update survives, in FP8 or in BF16, to be balanced."""
        return math.isfinite(self.target) and math.isfinite(self.curve[0])

    @property
    def relative_range(self) -> float:
        """How far the balance moves over the grid, as a share of the target."""
        return (self.curve[-1] - self.curve[0]) / self.target if self.target > 0 else math.inf


def search_lower(statistics: RatioStatistics, grid: BoundGrid, *, candidates: Sequence[int], present: int) -> Search:
    """The candidate L at which FP8 clips as many A < 0 tokens as BF16 does at the reference.

    L* = argmin over the grid of |F8(L) - alpha| with alpha = F16(L_ref), the F being shares of A < 0 tokens.
    Both have the same denominator, so that counts are compared, exactly.

    Args:
        statistics: with A < 0 tokens.
        grid: of the lower bound.
        candidates: edges to choose from, ascending.
        present: edge of the present bound.
    """
    clipped8 = statistics.below(Quantity.COUNT, precision=Precision.FP8, side=Side.NEGATIVE)[:, list(candidates)]
    tail16 = statistics.below(Quantity.COUNT, precision=Precision.BF16, side=Side.NEGATIVE)[:, grid.reference]
    num_tokens = statistics.total(Quantity.COUNT, precision=Precision.BF16, side=Side.NEGATIVE)
    chosen = _nearest((clipped8 - tail16.unsqueeze(1)).abs(), candidates=candidates, present=present)
    beyond = ""
    if clipped8[0, 0] > tail16[0]:
        beyond = "FP8 clips more than BF16 on the whole grid"
    elif clipped8[0, -1] < tail16[0]:
        beyond = "FP8 clips less than BF16 on the whole grid"
    return Search(int(chosen[0]), _interval(chosen, defined=num_tokens > 0), beyond)


def balance(
    statistics: RatioStatistics, precision: Precision, *, lower: int, uppers: Sequence[int], kind: Balance
) -> Tensor:
    """Positive over negative update that survives a pair of bounds.

    `gradient`: sum over A > 0, r < H of w * A * r, over the sum over A < 0, r > L of w * |A| * r. `surrogate`
    (our choice): sums of the clipped surrogate itself, w * A * min(r, H) over all A > 0, and w * |A| * max(r,
    L) over all A < 0. w includes the loss weight, r is capped as the statistics were told.

    Args:
        statistics: of the tokens.
        precision: whose ratios.
        lower: edge of L.
        uppers: edges of the values of H.
        kind: see above.

    Returns:
        float64 [1 + R, len(uppers)]; inf or NaN where no negative update survives.
    """
    edges = list(uppers)
    ratio, weight = Quantity.WEIGHTED_RATIO, Quantity.WEIGHT
    kept = statistics.below(ratio, precision=precision, side=Side.POSITIVE)[:, edges].double()
    clipped = statistics.below(ratio, precision=precision, side=Side.NEGATIVE)[:, lower]
    penalty = (statistics.total(ratio, precision=precision, side=Side.NEGATIVE) - clipped).double()
    if kind == "surrogate":
        below = statistics.below(weight, precision=precision, side=Side.POSITIVE)[:, edges]
        beyond = statistics.total(weight, precision=precision, side=Side.POSITIVE).unsqueeze(1) - below
        upper_bounds = torch.tensor([statistics.upper_edges[edge] for edge in edges], dtype=torch.float64)
        kept = kept + upper_bounds * beyond.double()
        below = statistics.below(weight, precision=precision, side=Side.NEGATIVE)[:, lower]
        penalty = penalty + statistics.lower_edges[lower] * below.double()
    return kept / penalty.unsqueeze(1)


def search_upper(
    statistics: RatioStatistics,
    *,
    candidates: Sequence[int],
    present: int,
    lower: int,
    reference: tuple[int, int],
    kind: Balance,
) -> BalanceSearch:
    """The candidate H at which FP8's balance is nearest to that of BF16 at the reference bounds.

    H* = argmin over the grid of |p(r; L, H) - p(r16; L_ref, H_ref)|, L being the smoothed new lower bound.

    Args:
        statistics: with tokens on both sides.
        candidates: edges to choose from, ascending.
        present: edge of the present upper bound.
        lower: edge of the new lower bound.
        reference: edges of the lower and the upper reference.
        kind: which balance.
    """
    lower_reference, upper_reference = reference
    target = balance(statistics, Precision.BF16, lower=lower_reference, uppers=[upper_reference], kind=kind)
    curve = balance(statistics, Precision.FP8, lower=lower, uppers=candidates, kind=kind)
    distance = (curve - target).abs()
    defined = distance.isfinite().all(dim=1)
    chosen = _nearest(distance.nan_to_num(nan=math.inf), candidates=candidates, present=present)
    beyond = ""
    if not defined[0]:
        beyond = "no token with A < 0 survives the lower bound"
    elif target[0, 0] < curve[0, 0]:
        beyond = "the balance of BF16 is below that of FP8 on the whole grid"
    elif target[0, 0] > curve[0, -1]:
        beyond = "the balance of BF16 is above that of FP8 on the whole grid"
    return BalanceSearch(
        choice=int(chosen[0]),
        interval=_interval(chosen, defined=defined),
        beyond=beyond,
        target=float(target[0, 0]),
        curve=tuple(curve[0].tolist()),
    )


def sequence_candidates(statistics: RatioStatistics, side: Side, *, quantile: float, width: float) -> tuple[int, ...]:
    """Candidates around the spread of BF16's sequence ratios (our choice; the paper leaves sequences open).

    The spread s is |log r16| at the edge next to the quantile, of r16 over A < 0, of 1 / r16 over A > 0. The
    scale of a mean log-ratio depends on model, length and step size, and FP8's noise may exceed it manifold,
    so no fixed grid can be right.

    Args:
        statistics: with tokens on this side.
        side: which bound.
        quantile: in (0, 0.5).
        width: the candidates have s / width <= |log edge| <= s * width.

    Returns:
        Edges, ascending.
    """
    below = statistics.below(Quantity.COUNT, precision=Precision.BF16, side=side)[0]
    total = int(statistics.total(Quantity.COUNT, precision=Precision.BF16, side=side)[0])
    edges = statistics.lower_edges if side is Side.NEGATIVE else statistics.upper_edges
    share = quantile if side is Side.NEGATIVE else 1 - quantile
    num_short = int((below < share * total).sum())
    spread = abs(math.log(edges[min(num_short, len(edges) - 1)]))
    inside = (spread / width <= abs(math.log(edge)) <= spread * width for edge in edges)
    return tuple(index for index, fits in enumerate(inside) if fits)


def _nearest(distance: Tensor, *, candidates: Sequence[int], present: int) -> Tensor:
    """int64 [1 + R]: in each row of distances [1 + R, C] the nearest candidate, ties as the module says."""
    order = sorted(range(len(candidates)), key=lambda index: (abs(candidates[index] - present), index))
    # argmin returns the first of equal values.
    best = distance[:, order].argmin(dim=1)
    return torch.tensor([candidates[index] for index in order])[best]


def _interval(chosen: Tensor, *, defined: Tensor) -> tuple[int, int] | None:
    replicates = torch.where(defined, chosen.double(), math.nan)[1:]
    interval = percentile_interval(replicates)
    return (int(interval[0]), int(interval[1])) if interval else None
