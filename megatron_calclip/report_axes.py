"""Axes of a plot: the range that shows all values, round ticks, and labels of as few digits as tell the ticks apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_calclip.report_charts import Chart, Form

NUM_TICKS = 4
"""About as many on each axis."""
_PADDING = 0.05
"""Share of the range left free at each end."""
_ROUND = (1, 2, 5, 10)
_MAX_POWERS = 6
_SMALLEST_SPAN = 1e-12
"""Of the values' size; closer ones count as equal."""
_SMALLEST = 1e-300
"""Spans below it leave floating point when they are divided into ticks."""
_LOG_FACTOR = 5
"""Of the ends of a logarithmic axis; a longer one has at least two of 1, 2 and 5 times a power of ten on it."""
_DECADES = 305
"""Powers of ten that a logarithmic axis ends at."""


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` along `start` to `end` pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Where a value lies, in pixels; beyond the ends outside them."""
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def value_range(chart: Chart) -> tuple[float, float]:
    """The range of a chart's values, intervals and reference; shares and counts near 0 start there.

    Args:
        chart: with at least one value.
    """
    values = [value for line in chart.lines for _, value in line.points if value is not None]
    values += [value for line in chart.lines for bar in line.bars for value in (bar.low, bar.high)]
    values += [mark.value for line in chart.lines for mark in line.marks]
    if chart.log:
        return _log_range([value for value in values if value > 0])
    if chart.reference is not None:
        values.append(chart.reference)
    if not any(values):
        return 0.0, 0.01 if chart.form == "percent" else 1.0
    low, high = _widened(min(values), max(values))
    # A share's size is read from 0; a bound's or a mean's changes would be lost there.
    starts_at_zero = low >= 0 and (chart.form == "percent" or low <= 0.25 * high)
    pad = _PADDING * (high - low)
    return (0.0 if starts_at_zero else low - pad), high + pad


def value_ticks(chart: Chart, low: float, high: float) -> tuple[list[float], list[str]]:
    """Ticks of a chart's values within a range, and their labels."""
    log = chart.log and high > _LOG_FACTOR * low
    values = log_ticks(low, high) if log else ticks(low, high, count=NUM_TICKS)
    return values, tick_labels(values, form=chart.form, log=log)


def step_range(charts: Iterable[Chart]) -> tuple[float, float]:
    """The steps of all charts, so that they line up."""
    steps = [step for chart in charts for line in chart.lines for step, _ in line.points] or [0]
    return _widened(min(steps), max(steps))


def _widened(low: float, high: float) -> tuple[float, float]:
    """A range that is wide enough to divide by."""
    if high - low > _SMALLEST_SPAN * max(abs(low), abs(high)) and high - low > _SMALLEST:
        return low, high
    half = 0.1 * max(abs(low), abs(high)) or 0.5
    return low - half, high + half


def _log_range(values: Sequence[float]) -> tuple[float, float]:
    low, high = math.log10(min(values)), math.log10(max(values))
    pad = max(_PADDING * (high - low), 0.05)
    return 10 ** max(low - pad, -_DECADES), 10 ** min(high + pad, _DECADES)


def ticks(low: float, high: float, *, count: int) -> list[float]:
    """Round values within a range: steps of 1, 2 or 5 times a power of ten, whichever gives most nearly `count`."""
    power = 10.0 ** math.floor(math.log10((high - low) / count))
    step = min((factor * power for factor in _ROUND), key=lambda step: abs((high - low) / step - count))
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten within a range of more than a factor 5; of fewer than two, 2 and 5 times them as well."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = math.ceil(len(exponents) / _MAX_POWERS)
    powers = [10.0**exponent for exponent in exponents if exponent % every == 0]
    if len(inside := [power for power in powers if low <= power <= high]) >= 2:
        return inside
    finer = [factor * 10.0**exponent for exponent in exponents for factor in _ROUND[:-1]]
    return [value for value in finer if low <= value <= high]


def tick_labels(values: Sequence[float], *, form: Form, log: bool = False) -> list[str]:
    """The ticks as text."""
    scale, unit = (100, "%") if form == "percent" else (1, "")
    scaled = [value * scale for value in values]
    if log or len(scaled) < 2:
        return [f"{value:,.0f}{unit}" if 1000 <= value < 1e6 else f"{value:.3g}{unit}" for value in scaled]
    step, largest = scaled[1] - scaled[0], max(map(abs, scaled))
    if step < 1e-4 or largest >= 1e6:
        digits = min(15, max(0, math.floor(math.log10(largest)) - math.floor(math.log10(step))))
        return [f"{value:.{digits}e}{unit}" if value else f"0{unit}" for value in scaled]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{value + 0.0:,.{decimals}f}{unit}" for value in scaled]
