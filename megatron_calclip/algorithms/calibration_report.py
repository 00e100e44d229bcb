"""What one calibration saw and did, as an immutable record that can be logged, tabulated and compared.

What: numbers first; the sentences of the log (`CalibrationReport.log_lines`) and the flat row of a table
(`as_row`) are derived from them. Left out on purpose: any decision (`calibration` makes them all).
"""

from dataclasses import dataclass
from typing import Literal

from megatron_calclip.algorithms.bounds import ClipBounds

Status = Literal["moved", "unchanged", "edge", "held"]


@dataclass(frozen=True)
class BoundReport:
    """One bound in one calibration. None where a number is undefined."""

    before: float
    """The bound that the step's loss used."""
    after: float
    """The bound from the next step on."""
    status: Status
    """`moved`, `unchanged` (the choice is the present bound), `edge` (the target lies beyond the grid, whose
    end is chosen), `held` (no choice could be made, or none that says anything)."""
    reason: str = ""
    """Why, for `edge` and `held`."""
    choice: float | None = None
    """The raw choice L* or H*, before smoothing."""
    interval: tuple[float, float] | None = None
    """Bootstrap interval of the choice."""
    num_calibrations_left: int = 0
    """Further calibrations that smoothing takes to the choice."""
    share8_reference: float | None = None
    """Share of the side's tokens that the reference bound clips in FP8."""
    share16_reference: float | None = None
    """The same in BF16: the target. For the lower bound this is alpha."""
    share8_after: float | None = None
    """Share that the new bound clips in FP8."""

    @property
    def overclip_multiple(self) -> float | None:
        """FP8 clips over BF16 clips at the reference bound."""
        if self.share8_reference is None or not self.share16_reference:
            return None
        return self.share8_reference / self.share16_reference


@dataclass(frozen=True)
class CalibrationReport:
    """One calibration. Token counts are global, and pooled over `num_pooled` calibrations."""

    step: int
    """Training step whose tokens were used."""
    lower: BoundReport
    upper: BoundReport
    num_negative: int
    """Tokens with A < 0 (sequences, in mode `sequence`)."""
    num_positive: int
    """Tokens with A > 0."""
    num_tail_tokens: int
    """k: tokens with A < 0 that BF16 clips at the lower reference."""
    num_pooled: int
    """Calibrations whose tokens were added up."""
    alpha_interval: tuple[float, float] | None = None
    """Bootstrap interval of alpha."""
    balance_target: float | None = None
    """p_ref: the balance of BF16 at the reference bounds."""
    balance_before: float | None = None
    """p of FP8 at the old bounds."""
    balance_choice: float | None = None
    """p of FP8 at the new lower bound and H*."""
    balance_after: float | None = None
    """p of FP8 at the new bounds."""
    balance_range: tuple[float, float] | None = None
    """Smallest and largest p of FP8 over the upper grid, at the new lower bound."""
    num_unmoved_weights: int = 0
    """Tokens of the first mini-batch, in which r = 1 is expected. They count in both precisions."""
    num_unmoved_weights_off_one: int = 0
    """Those of them whose FP8 ratio is not 1."""
    interval: int = 0
    """Steps between calibrations from now on."""

    @property
    def alpha(self) -> float | None:
        """Share of A < 0 tokens that BF16 clips at the lower reference."""
        return self.lower.share16_reference

    @property
    def before(self) -> ClipBounds:
        """Bounds of this step."""
        return ClipBounds(self.lower.before, self.upper.before)

    @property
    def after(self) -> ClipBounds:
        """Bounds from the next step on."""
        return ClipBounds(self.lower.after, self.upper.after)

    @property
    def log_lines(self) -> tuple[str, ...]:
        """The calibration in sentences."""
        lines = [self._lower_line(), self._upper_line()]
        if self.num_unmoved_weights:
            total = self.num_unmoved_weights
            lines.append(f"{total:,} tokens of the first mini-batch count with r = 1 in both precisions")
        if self.num_unmoved_weights_off_one:
            share = self.num_unmoved_weights_off_one / self.num_unmoved_weights
            lines.append(
                f"the FP8 ratio is not 1 on {share:.1%} of the first mini-batch's tokens although no weight "
                "has moved: pi_old saw other scales; compute it with the micro-batches that training uses"
            )
        return tuple(f"calibration at step {self.step}: {line}" for line in lines)

    def _lower_line(self) -> str:
        line = _bound_line("lower bound", self.lower, "L*")
        if self.alpha is None:
            return line
        pooled = f" in {self.num_pooled} calibrations" if self.num_pooled > 1 else ""
        return (
            f"{line}; alpha = {self.alpha:.4%}{_interval(self.alpha_interval, '.4%')} from "
            f"{self.num_tail_tokens:,} tail tokens of {self.num_negative:,} with A < 0{pooled}"
        )

    def _upper_line(self) -> str:
        line = _bound_line("upper bound", self.upper, "H*")
        if self.balance_target is None or self.balance_choice is None:
            return line
        return f"{line}; balance {self.balance_choice:.4f} there, {self.balance_target:.4f} in BF16"

    def as_row(self) -> dict[str, float | int | str | None]:
        """A flat row of plain numbers and strings, for tables, metrics and JSON."""
        row: dict[str, float | int | str | None] = {"step": self.step}
        for name, bound in (("lower", self.lower), ("upper", self.upper)):
            low, high = bound.interval or (None, None)
            row |= {
                f"{name}_before": bound.before,
                f"{name}_after": bound.after,
                f"{name}_status": bound.status,
                f"{name}_reason": bound.reason,
                f"{name}_choice": bound.choice,
                f"{name}_choice_low": low,
                f"{name}_choice_high": high,
                f"{name}_share8_reference": bound.share8_reference,
                f"{name}_share16_reference": bound.share16_reference,
                f"{name}_share8_after": bound.share8_after,
                f"{name}_overclip_multiple": bound.overclip_multiple,
            }
        alpha_low, alpha_high = self.alpha_interval or (None, None)
        return row | {
            "alpha": self.alpha,
            "alpha_low": alpha_low,
            "alpha_high": alpha_high,
            "num_tail_tokens": self.num_tail_tokens,
            "num_negative": self.num_negative,
            "num_positive": self.num_positive,
            "num_pooled": self.num_pooled,
            "balance_target": self.balance_target,
            "balance_before": self.balance_before,
            "balance_choice": self.balance_choice,
            "balance_after": self.balance_after,
            "num_unmoved_weights": self.num_unmoved_weights,
            "num_unmoved_weights_off_one": self.num_unmoved_weights_off_one,
            "interval": self.interval,
        }


def _interval(interval: tuple[float, float] | None, form: str) -> str:
    return f" ({interval[0]:{form}} to {interval[1]:{form}})" if interval else ""


def _bound_line(name: str, bound: BoundReport, symbol: str) -> str:
    if bound.status == "held":
        return f"{name} held at {bound.before:.6g}: {bound.reason}"
    moved = bound.after != bound.before
    line = f"{name} {bound.before:.6g} -> {bound.after:.6g}" if moved else f"{name} stays at {bound.after:.6g}"
    line += f", {symbol} = {bound.choice:.6g}{_interval(bound.interval, '.6g')}"
    if bound.num_calibrations_left:
        line += f", {bound.num_calibrations_left} more to get there"
    return f"{line}, at the edge: {bound.reason}" if bound.status == "edge" else line
