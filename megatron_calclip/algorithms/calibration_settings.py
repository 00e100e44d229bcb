"""Settings of calibrated clipping, and the grids of bounds that follow from them.

What: every constant of the method in one frozen dataclass, with the presets `paper` (the paper's method,
nothing of ours) and `robust` (our rules for fragile points on top), and `BoundGrid`: the bounds a calibration
chooses from, and the edges that its statistics need. Why integers: a grid summed up in floating point misses
its own points (ten steps of 0.02 above 0.5 are 0.7000000000000002), so edges are made from whole thousandths,
or from tabulated mantissas.

Left out on purpose: parsing and units of a configuration file (`config`), and how a bound is chosen
(`calibration`).
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from megatron_calclip.algorithms.bounds import ClipBounds

Algorithm = Literal["grpo", "dapo", "gspo"]
Mode = Literal["token", "sequence"]
Balance = Literal["gradient", "surrogate"]
Weighting = Literal["loss", "token"]
Schedule = Literal["every", "drift"]
Minibatches = Literal["all", "last"]

REFERENCES: dict[Algorithm, ClipBounds] = {
    "grpo": ClipBounds(0.8, 1.24),
    "dapo": ClipBounds(0.8, 1.28),
    "gspo": ClipBounds(1 - 3e-4, 1 + 4e-4),
}
"""Bounds that BF16 trains with. GRPO, DAPO: arXiv 2609.22870; GSPO: arXiv 2507.18071, section 5.1."""

START = ClipBounds(0.6, 1.8)
"""Bounds before the first calibration of GRPO and DAPO, arXiv 2609.22870."""

_E24 = (10, 11, 12, 13, 15, 16, 18, 20, 22, 24, 27, 30, 33, 36, 39, 43, 47, 51, 56, 62, 68, 75, 82, 91)
"""Mantissas (times 10) of the E24 series of preferred numbers, IEC 60063: 24 steps of about 10% per decade,
the relative step of a grid of 0.02 around a distance of 0.2 to 1."""
_SEQUENCE_DECADES = range(-5, -1)
"""Edges of the sequence mode lie at |log r| from 1e-5, where float32 still resolves a step, to 0.091."""


@dataclass(frozen=True)
class BoundGrid:
    """Possible values of one bound; everything else refers to them by index."""

    edges: tuple[float, ...]
    """Ascending ratios: candidates, reference, start, and all bounds that smoothing can reach from them."""
    candidates: tuple[int, ...]
    """Edges that a calibration may choose, ascending."""
    reference: int
    """The edge of the bound for BF16."""
    max_move: int
    """Most edges that a bound moves in one calibration."""

    def index(self, bound: float) -> int:
        """The edge of a bound.

        Raises:
            ValueError: when the bound is not an edge.
        """
        if bound not in self.edges:
            raise ValueError(f"bound {bound} is not among the {len(self.edges)} edges of this grid")
        return self.edges.index(bound)

    def num_calibrations(self, start: float, stop: float) -> int:
        """Calibrations that smoothing takes from one bound to another."""
        return math.ceil(abs(self.index(stop) - self.index(start)) / self.max_move)


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings:
    """Constants of a calibration. The defaults are the preset `robust` for GRPO.

    Raises:
        ValueError: for a value out of range, naming it as `calibration.<field>`.
    """

    reference: ClipBounds = REFERENCES["grpo"]
    """Bounds that the BF16 ratios are clipped at: the target."""
    start: ClipBounds = START
    """Bounds before the first calibration."""
    grid_lower: tuple[float, float, float] = (0.5, 0.9, 0.02)
    """First, last, step of the lower bound's candidates (mode `token`)."""
    grid_upper: tuple[float, float, float] = (1.2, 2.0, 0.02)
    """First, last, step of the upper bound's candidates (mode `token`)."""
    delta_lower: float = 0.05
    """Most that the lower bound moves per calibration (mode `token`)."""
    delta_upper: float = 0.1
    """Most that the upper bound moves per calibration (mode `token`)."""
    mode: Mode = "token"
    """Ratios of tokens, or one ratio per sequence (GSPO) with bounds on a logarithmic grid."""
    sequence_grid_quantile: float = 0.1
    """Mode `sequence`: the spread s of BF16 is |log r16| at this quantile (of r16 over A < 0, and of 1/r16
    over A > 0)."""
    sequence_grid_width: float = 16.0
    """Mode `sequence`: the candidates have s / width <= |log bound| <= s * width."""
    sequence_max_move: int = 3
    """Mode `sequence`: most grid steps (10% of the distance to 1 each) that a bound moves per calibration."""

    schedule: Schedule = "every"
    """`every`: at multiples of `interval`. `drift`: the interval doubles while the bounds rest, and halves
    when the gap between the FP8 and BF16 clip shares moves."""
    interval: int = 20
    """Training steps between calibrations; where `drift` begins."""
    start_step: int = 5
    """No calibration before this step (steps count from 1): Adam's first updates are not typical."""
    drift_stretch: int = 8
    """`drift` keeps the interval within interval / stretch and interval * stretch."""
    drift_tolerance: float = 0.25
    """`drift`: a change of the gap by this share of it counts as a move."""

    minibatches: Minibatches = "all"
    """Mini-batches of a step whose tokens are counted. The caller feeds them."""
    token_fraction: float = 1.0
    """Share of the sequences that shadow passes run on. The caller draws them
    (`bootstrap.sample_sequences`)."""
    balance: Balance = "gradient"
    """What steps in for the update that survives the clip: sums of w * |A| * r over kept tokens, or the sums
    of the clipped surrogate over all tokens."""
    balance_ratio_cap: float | None = 2.0
    """Ratios are capped here in the balance, in both precisions; None for no cap. A < 0 has no upper clip,
    and a single FP8 ratio of 800 would decide the balance."""
    weighting: Weighting = "loss"
    """In the balance each token weighs what the loss's aggregation gives it, or 1."""

    min_tail_tokens: int = 8
    """A lower bound needs as many BF16 tail tokens (A < 0, r16 <= reference); never fewer than 1."""
    pool: int = 4
    """With too few tail tokens, up to this many of the last calibrations are added up, newest first."""
    hold_unsolvable: bool = True
    """An upper bound whose target lies out of the balance's range is held instead of going to the grid's
    end."""
    min_balance_range: float = 0.005
    """An upper bound is held when the balance varies over the grid by less than this share of its target."""
    max_interval_share: float = 0.5
    """A bound is held when its interval is wider than this share of the grid: it says nothing then."""
    num_replicates: int = 100
    """Bootstrap replicates behind every interval; 0 for no intervals."""

    @classmethod
    def robust(cls, algorithm: Algorithm = "grpo", **changes: Any) -> Self:
        """The paper's method with our rules for fragile points, for one algorithm's references."""
        values: dict[str, Any] = {"reference": REFERENCES[algorithm]}
        if algorithm == "gspo":
            # The wide start of the token bounds has no known counterpart here.
            values |= {"mode": "sequence", "start": REFERENCES[algorithm]}
        return cls(**values | changes)

    @classmethod
    def paper(cls, algorithm: Algorithm = "grpo", **changes: Any) -> Self:
        """The method of arXiv 2609.22870 with nothing added (intervals are computed and decide nothing)."""
        values: dict[str, Any] = {
            "start_step": 1,
            "balance_ratio_cap": None,
            "weighting": "token",
            "min_tail_tokens": 1,
            "pool": 1,
            "hold_unsolvable": False,
            "min_balance_range": 0.0,
            "max_interval_share": 1.0,
        }
        return cls.robust(algorithm, **values | changes)

    def __post_init__(self) -> None:
        """Refuse what no calibration can work with."""

        def check(name: str, valid: bool, allowed: str) -> None:
            _check(name, getattr(self, name), valid, allowed)

        choices = {
            "mode": Mode,
            "schedule": Schedule,
            "minibatches": Minibatches,
            "balance": Balance,
            "weighting": Weighting,
        }
        for name, kind in choices.items():
            check(name, getattr(self, name) in get_args(kind), f"one of {get_args(kind)}")
        for name in ("interval", "start_step", "drift_stretch", "min_tail_tokens", "pool"):
            check(name, getattr(self, name) >= 1, "at least 1")
        for name in ("num_replicates", "drift_tolerance", "min_balance_range"):
            check(name, getattr(self, name) >= 0, "0 or more")
        for name in ("token_fraction", "max_interval_share"):
            check(name, 0 < getattr(self, name) <= 1, "in (0, 1]")
        check("sequence_grid_quantile", 0 < self.sequence_grid_quantile < 0.5, "in (0, 0.5)")
        check("sequence_grid_width", self.sequence_grid_width >= 1.5, "at least 1.5")
        check("sequence_max_move", self.sequence_max_move >= 1, "at least 1")
        last = self.grids(self.start)[1].edges[-1]
        cap = self.balance_ratio_cap
        check("balance_ratio_cap", cap is None or cap >= last, f"null, or at least the largest bound {last}")

    def grids(self, present: ClipBounds) -> tuple[BoundGrid, BoundGrid]:
        """Grids of the lower and the upper bound that hold the present bounds.

        Raises:
            ValueError: when the present bounds lie outside the grids.
        """
        reference, start = self.reference, self.start
        lower = (reference.lower, start.lower, present.lower)
        upper = (reference.upper, start.upper, present.upper)
        if self.mode == "sequence":
            max_move = self.sequence_max_move
            return _log_grid(-1, lower, max_move=max_move), _log_grid(1, upper, max_move=max_move)
        return (
            _linear_grid("lower", self.grid_lower, self.delta_lower, lower),
            _linear_grid("upper", self.grid_upper, self.delta_upper, upper),
        )


def _check(name: str, value: object, valid: bool, allowed: str) -> None:
    if not valid:
        raise ValueError(f"calibration.{name}: {value} is not allowed; choose {allowed}")


def _thousandths(name: str, value: float) -> int:
    _check(name, value, abs(value) < 1e6, "a multiple of 0.001 below a million")
    whole = round(value * 1000)
    _check(name, value, abs(value * 1000 - whole) < 1e-6, "a multiple of 0.001")
    return whole


def _linear_grid(
    side: str, grid: tuple[float, float, float], delta: float, bounds: tuple[float, float, float]
) -> BoundGrid:
    """Edges on a lattice of thousandths that smoothing never leaves: the same edges all run.

    `bounds` are the reference, which may lie anywhere, the start and the present bound.
    """
    first, last, step = (_thousandths(f"grid_{side}", value) for value in grid)
    right_side = last < 1000 if side == "lower" else first > 1000
    steps = 0 < first < last and step > 0 and (last - first) % step == 0
    _check(f"grid_{side}", grid, steps and right_side, "first < last in whole steps, on its side of 1")
    move = _thousandths(f"delta_{side}", delta)
    _check(f"delta_{side}", delta, move > 0, "at least 0.001")
    reference = _thousandths("reference", bounds[0])
    inside = [_thousandths("start", bound) for bound in bounds[1:]]
    for bound, whole in zip(bounds[1:], inside, strict=True):
        _check("start", bound, first <= whole <= last, f"{grid[0]} to {grid[1]} for the {side} bound")
    spacing = math.gcd(step, move, *(whole - first for whole in [reference, *inside]))
    edges = sorted({*range(first, last + 1, spacing), reference})
    return BoundGrid(
        edges=tuple(edge / 1000 for edge in edges),
        candidates=tuple(edges.index(edge) for edge in range(first, last + 1, step)),
        reference=edges.index(reference),
        max_move=move // spacing,
    )


def _log_grid(sign: int, bounds: tuple[float, float, float], *, max_move: int) -> BoundGrid:
    """Edges exp(sign * m), m in the E24 series; the given bounds, reference first, replace neighbours."""
    given = {math.log(bound) * sign: bound for bound in bounds}
    magnitudes = [mantissa * 10.0 ** (decade - 1) for decade in _SEQUENCE_DECADES for mantissa in _E24]
    # An edge within a fifth of a step of a given bound would differ from it by little more than rounding.
    kept = [m for m in magnitudes if all(abs(math.log(m / g)) > 0.02 for g in given)]
    edges = sorted({math.exp(sign * m) for m in kept} | set(given.values()))
    return BoundGrid(
        edges=tuple(edges),
        candidates=tuple(range(len(edges))),
        reference=edges.index(bounds[0]),
        max_move=max_move,
    )
