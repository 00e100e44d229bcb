"""Calibrated clipping: clip bounds under which FP8 ratios are clipped as BF16 ratios would be.

What: `ClipCalibrator` turns the ratio statistics of a step into the bounds of the next steps, by the method
of "Towards Full Pipeline FP8 Reinforcement Learning for LLMs" (arXiv 2609.22870):

1. The lower bound L is the quantile of the FP8 ratios of A < 0 tokens at the share of them that BF16 clips.
2. The upper bound H restores BF16's balance between the positive and the negative update that survive.
3. Both move a limited way per calibration.

Why with rules on top (preset `robust`): tails are a few tokens, the balance is nearly flat in H and at the
mercy of outliers, and a bound chosen from noise is worse than the bound one has. Every rule that holds a
bound says so in the report.

Left out on purpose: where ratios come from, and the all-reduce of the statistics, which the caller does
between `new_statistics` and `calibrate` so that all ranks decide alike.
"""

import logging
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_calclip.algorithms.bootstrap import percentile_interval
from megatron_calclip.algorithms.bound_search import (
    BalanceSearch,
    Search,
    balance,
    search_lower,
    search_upper,
    sequence_candidates,
)
from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.calibration_report import BoundReport, CalibrationReport
from megatron_calclip.algorithms.calibration_settings import BoundGrid, CalibrationSettings
from megatron_calclip.algorithms.statistics import Precision, Quantity, RatioStatistics, Side

__all__ = ["BoundReport", "CalibrationReport", "CalibrationSettings", "ClipCalibrator"]

logger = logging.getLogger(__name__)

_MIN_MEAN_WEIGHT = 2**10
"""Mean weight of a token, in units of 2^-28, below which truncation would cost more than 0.1%."""


class ClipCalibrator:
    """Chooses clip bounds from ratio statistics; holds the bounds, the schedule and the pool.

    A calibration step of the caller::

        statistics = calibrator.new_statistics(weight_scale=num_response_tokens_per_minibatch)
        for minibatch in minibatches:
            statistics.update(ratio8, ratio16, ...)
        torch.distributed.all_reduce(statistics.state())
        report = calibrator.calibrate(statistics, step)

    Args:
        settings: constants of the method.
    """

    def __init__(self, settings: CalibrationSettings) -> None:
        self.settings = settings
        self._bounds = settings.start
        self._lower_grid, self._upper_grid = settings.grids(self._bounds)
        self._interval = settings.interval
        self._next_step = settings.start_step
        self._last_gap: float | None = None
        self._pool: list[Tensor] = []

    @property
    def bounds(self) -> ClipBounds:
        """The bounds that the loss has to use now."""
        return self._bounds

    def due(self, step: int) -> bool:
        """Whether a training step (counted from 1) calibrates."""
        settings = self.settings
        if step < settings.start_step:
            return False
        return step % settings.interval == 0 if settings.schedule == "every" else step >= self._next_step

    def describe(self) -> tuple[str, ...]:
        """Sentences for the start of a run: grids, conventions, and what the start values cost."""
        lines = []
        for name, rule, grid, bound in (
            ("lower", "A < 0 is clipped at r <= L", self._lower_grid, self._bounds.lower),
            ("upper", "A > 0 is clipped at r >= H", self._upper_grid, self._bounds.upper),
        ):
            first, last = (grid.edges[grid.candidates[end]] for end in (0, -1))
            reference = grid.edges[grid.reference]
            cost = grid.num_calibrations(bound, reference)
            lines.append(
                f"{name} bound: {rule}; {len(grid.candidates)} candidates from {first:.6g} to {last:.6g}; "
                f"from {bound:.6g} to the reference {reference:.6g} it takes {cost} calibrations"
            )
        lines.append(f"no calibration before step {self.settings.start_step}: the first updates are not typical")
        return tuple(lines)

    def new_statistics(self, *, weight_scale: float = 1.0, device: torch.device | str = "cpu") -> RatioStatistics:
        """Empty statistics with the edges that `calibrate` needs.

        Args:
            weight_scale: brings the mean of the loss weights near 1 (see `RatioStatistics`).
            device: where the tokens will be.
        """
        settings = self.settings
        return RatioStatistics(
            self._lower_grid.edges,
            self._upper_grid.edges,
            ratio_cap=settings.balance_ratio_cap,
            use_loss_weights=settings.weighting == "loss",
            with_weights=settings.balance == "surrogate",
            weight_scale=weight_scale,
            num_replicates=settings.num_replicates,
            device=device,
        )

    def calibrate(self, statistics: RatioStatistics, step: int) -> CalibrationReport:
        """Choose new bounds. Ranks that pass the same, all-reduced statistics get the same report.

        Args:
            statistics: made by `new_statistics`, holding the global tokens of this step.
            step: the present training step; the new bounds hold from the next one on.
        """
        assert statistics.lower_edges == self._lower_grid.edges, "statistics of other grids"
        assert statistics.upper_edges == self._upper_grid.edges, "statistics of other grids"
        problem = _unusable(statistics)
        if problem:
            report = self._hold_both(statistics, step, problem)
        else:
            report = self._solve(*self._pooled(statistics), step=step)
            self._remember(statistics)
        self._bounds = report.after
        if not problem:
            self._stretch_or_shrink(statistics, report)
        self._next_step = report.step + self._interval
        return replace(report, interval=self._interval)

    def state_dict(self) -> dict[str, Any]:
        """Numbers, lists of numbers, and int64 tensors (CPU) for a checkpoint."""
        return {
            "bounds": [self._bounds.lower, self._bounds.upper],
            "interval": self._interval,
            "next_step": self._next_step,
            "last_gap": self._last_gap,
            "edges": [list(self._lower_grid.edges), list(self._upper_grid.edges)],
            "pool": [state.clone() for state in self._pool],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken, also under changed settings.

        Raises:
            ValueError: when the saved bounds lie outside the present grids.
        """
        bounds = ClipBounds(*state["bounds"])
        try:
            self._lower_grid, self._upper_grid = self.settings.grids(bounds)
        except ValueError as error:
            raise ValueError(
                f"the checkpoint's clip bounds [{bounds.lower}, {bounds.upper}] do not fit the present grids "
                f"({error}); widen calibration.grid_lower or calibration.grid_upper"
            ) from None
        self._bounds = bounds
        if self.settings.schedule == "drift":
            self._interval = state["interval"]
        self._next_step = state["next_step"]
        self._last_gap = state["last_gap"]
        size = self.new_statistics().state().shape
        same_edges = state["edges"] == [list(self._lower_grid.edges), list(self._upper_grid.edges)]
        usable = [pooled for pooled in state["pool"] if same_edges and pooled.shape == size]
        if len(usable) < len(state["pool"]):
            logger.warning("calibration: the pool of the checkpoint is dropped, its grids or replicates differ")
        self._pool = [pooled.cpu().clone() for pooled in usable]

    def _pooled(self, statistics: RatioStatistics) -> tuple[RatioStatistics, int]:
        """The statistics, with as many of the last calibrations' as the tail needs; how many in all."""
        pooled = self.new_statistics()
        pooled.load(statistics.state())
        num_pooled = 1
        for state in reversed(self._pool):
            if self._num_tail_tokens(pooled) >= self.settings.min_tail_tokens:
                break
            pooled.add(state)
            num_pooled += 1
        return pooled, num_pooled

    def _remember(self, statistics: RatioStatistics) -> None:
        pool = [*self._pool, statistics.state().cpu().clone()]
        self._pool = pool[max(len(pool) - (self.settings.pool - 1), 0) :]

    def _num_tail_tokens(self, statistics: RatioStatistics) -> int:
        tail = statistics.below(Quantity.COUNT, precision=Precision.BF16, side=Side.NEGATIVE)
        return int(tail[0, self._lower_grid.reference])

    def _hold_both(self, statistics: RatioStatistics, step: int, problem: str) -> CalibrationReport:
        lower, upper = self._bounds.lower, self._bounds.upper
        return CalibrationReport(
            step=step,
            lower=BoundReport(lower, lower, "held", problem),
            upper=BoundReport(upper, upper, "held", problem),
            num_negative=_num_tokens(statistics, Side.NEGATIVE),
            num_positive=_num_tokens(statistics, Side.POSITIVE),
            num_tail_tokens=self._num_tail_tokens(statistics),
            num_pooled=1,
            num_unmoved_weights=statistics.num_unmoved_weights,
            num_unmoved_weights_off_one=statistics.num_unmoved_weights_off_one,
        )

    def _solve(self, statistics: RatioStatistics, num_pooled: int, *, step: int) -> CalibrationReport:
        """Both steps of the method, on statistics with tokens on both sides."""
        kind = self.settings.balance
        lower_grid, upper_grid = self._lower_grid, self._upper_grid
        old_lower, old_upper = lower_grid.index(self._bounds.lower), upper_grid.index(self._bounds.upper)

        num_tail_tokens = self._num_tail_tokens(statistics)
        candidates = self._candidates(statistics, Side.NEGATIVE)
        quantile = search_lower(statistics, lower_grid, candidates=candidates, present=old_lower)
        reason = self._why_hold_lower(quantile, candidates, num_tail_tokens, num_pooled)
        lower = _bound_report(statistics, Side.NEGATIVE, lower_grid, old_lower, quantile, hold=reason)
        new_lower = lower_grid.index(lower.after)

        candidates = self._candidates(statistics, Side.POSITIVE)
        rebalance = search_upper(
            statistics,
            candidates=candidates,
            present=old_upper,
            lower=new_lower,
            reference=(lower_grid.reference, upper_grid.reference),
            kind=kind,
        )
        reason = self._why_hold_upper(rebalance, candidates, statistics)
        upper = _bound_report(statistics, Side.POSITIVE, upper_grid, old_upper, rebalance, hold=reason)

        uppers = [rebalance.choice, upper_grid.index(upper.after)]
        new = balance(statistics, Precision.FP8, lower=new_lower, uppers=uppers, kind=kind)
        old = balance(statistics, Precision.FP8, lower=old_lower, uppers=[old_upper], kind=kind)
        tail = statistics.below(Quantity.COUNT, precision=Precision.BF16, side=Side.NEGATIVE).double()
        total = statistics.total(Quantity.COUNT, precision=Precision.BF16, side=Side.NEGATIVE).double()
        return CalibrationReport(
            step=step,
            lower=lower,
            upper=upper,
            num_negative=_num_tokens(statistics, Side.NEGATIVE),
            num_positive=_num_tokens(statistics, Side.POSITIVE),
            num_tail_tokens=num_tail_tokens,
            num_pooled=num_pooled,
            alpha_interval=percentile_interval((tail[:, lower_grid.reference] / total)[1:]),
            balance_target=_finite(rebalance.target),
            balance_before=_finite(float(old[0, 0])),
            balance_choice=_finite(float(new[0, 0])),
            balance_after=_finite(float(new[0, 1])),
            balance_range=(rebalance.curve[0], rebalance.curve[-1]) if rebalance.is_defined else None,
            num_unmoved_weights=statistics.num_unmoved_weights,
            num_unmoved_weights_off_one=statistics.num_unmoved_weights_off_one,
        )

    def _candidates(self, statistics: RatioStatistics, side: Side) -> tuple[int, ...]:
        settings = self.settings
        if settings.mode == "sequence":
            quantile, width = settings.sequence_grid_quantile, settings.sequence_grid_width
            return sequence_candidates(statistics, side, quantile=quantile, width=width)
        return (self._lower_grid if side is Side.NEGATIVE else self._upper_grid).candidates

    def _why_hold_lower(
        self, search: Search, candidates: tuple[int, ...], num_tail_tokens: int, num_pooled: int
    ) -> str:
        """The rule that forbids to act on the search for L, or an empty string."""
        settings = self.settings
        if num_tail_tokens < settings.min_tail_tokens:
            return (
                f"{num_tail_tokens} BF16 tail tokens in {num_pooled} calibration(s) are fewer than "
                f"{settings.min_tail_tokens}, a share of so few says nothing"
            )
        return self._why_uncertain(search, candidates)

    def _why_hold_upper(self, search: BalanceSearch, candidates: tuple[int, ...], statistics: RatioStatistics) -> str:
        """The rule that forbids to act on the search for H, or an empty string."""
        settings = self.settings
        for side in Side:
            total = statistics.total(Quantity.WEIGHTED_RATIO, precision=Precision.BF16, side=side)
            if int(total[0]) < _MIN_MEAN_WEIGHT * _num_tokens(statistics, side):
                return "weights are too small for fixed point; raise weight_scale until their mean is near 1"
        if search.beyond and (settings.hold_unsolvable or not search.is_defined):
            return f"no solution, {search.beyond}"
        if search.relative_range < settings.min_balance_range:
            return f"the balance varies by only {search.relative_range:.2%} over the grid"
        return self._why_uncertain(search, candidates)

    def _why_uncertain(self, search: Search, candidates: tuple[int, ...]) -> str:
        share = search.spans(candidates)
        if share > self.settings.max_interval_share:
            return f"the interval of the choice covers {share:.0%} of the grid and says nothing"
        return ""

    def _stretch_or_shrink(self, statistics: RatioStatistics, report: CalibrationReport) -> None:
        """Schedule `drift` (our choice): rest stretches the interval, a move of the clip gap shrinks it."""
        settings = self.settings
        gap, share16 = _clip_gap(statistics, self._lower_grid.reference)
        last = self._last_gap
        if settings.schedule == "drift":
            moved = last is not None and abs(gap - last) > settings.drift_tolerance * max(abs(last), share16)
            rests = report.before == report.after and report.lower.status != "held"
            if moved:
                self._interval = max(self._interval // 2, settings.interval // settings.drift_stretch, 1)
            elif rests:
                self._interval = min(self._interval * 2, settings.interval * settings.drift_stretch)
        self._last_gap = gap


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _num_tokens(statistics: RatioStatistics, side: Side) -> int:
    return int(statistics.total(Quantity.COUNT, precision=Precision.FP8, side=side)[0])


def _unusable(statistics: RatioStatistics) -> str:
    """Why nothing can be learned from these statistics, or an empty string."""
    if statistics.num_nonfinite:
        return f"{statistics.num_nonfinite:,} response tokens have a NaN or inf"
    if statistics.is_saturated:
        return "a sum exceeded the range of fixed point; lower weight_scale"
    num_negative, num_positive = (_num_tokens(statistics, side) for side in Side)
    if num_negative == 0 and num_positive == 0:
        return "no token has an advantage: all groups have equal rewards"
    if num_negative == 0 or num_positive == 0:
        return f"no token has A {'<' if num_negative == 0 else '>'} 0"
    if statistics.num_moved == 0:
        return (
            "every ratio is exactly 1, so nothing is clipped: the weights did not move between pi_old and "
            "pi_theta; use at least two mini-batches or epochs per rollout"
        )
    return ""


def _clip_gap(statistics: RatioStatistics, reference: int) -> tuple[float, float]:
    """Share of A < 0 tokens clipped at the lower reference: FP8 minus BF16, and BF16."""
    num_tokens = max(_num_tokens(statistics, Side.NEGATIVE), 1)
    clipped8, clipped16 = (
        int(statistics.below(Quantity.COUNT, precision=precision, side=Side.NEGATIVE)[0, reference]) / num_tokens
        for precision in Precision
    )
    return clipped8 - clipped16, clipped16


def _bound_report(
    statistics: RatioStatistics, side: Side, grid: BoundGrid, present: int, search: Search, *, hold: str
) -> BoundReport:
    """Smooth the choice of a search, or hold the present bound for a reason."""
    after = present
    if not hold:
        after += max(-grid.max_move, min(grid.max_move, search.choice - present))
    num_tokens = _num_tokens(statistics, side)
    below8, below16 = (
        statistics.below(Quantity.COUNT, precision=precision, side=side)[0].tolist() for precision in Precision
    )

    def share(below: list[int], edge: int) -> float:
        clipped = below[edge] if side is Side.NEGATIVE else num_tokens - below[edge]
        return clipped / num_tokens

    choice = grid.edges[search.choice]
    ends = [grid.edges[edge] for edge in search.interval or ()]
    return BoundReport(
        before=grid.edges[present],
        after=grid.edges[after],
        status="held" if hold else "edge" if search.beyond else "moved" if after != present else "unchanged",
        reason=hold or search.beyond,
        choice=choice,
        interval=(ends[0], ends[1]) if ends else None,
        num_calibrations_left=0 if hold else grid.num_calibrations(grid.edges[after], choice),
        share8_reference=share(below8, grid.reference),
        share16_reference=share(below16, grid.reference),
        share8_after=share(below8, after),
    )
