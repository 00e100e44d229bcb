"""Two clip bounds for a loss that knows one epsilon.

Why: NeMo-Aligner 0.7.0 clamps PPO's ratio to `1.0 - ratio_eps` and `1.0 + ratio_eps` in the middle of its loss. A number
that answers the two operations differently leaves that loss as it is.
"""

from __future__ import annotations

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.integrations.controller import epsilons


class ClipRange(float):
    """The epsilon of a symmetric clip that gives two bounds: `1.0 - x` is the lower one, `1.0 + x` the upper one.

    Args:
        bounds: the two bounds. The number's own value is the mean distance from 1.
    """

    def __new__(cls, bounds: ClipBounds) -> ClipRange:
        """A number, so that whatever else looks at the setting finds one."""
        return super().__new__(cls, sum(epsilons(bounds)) / 2)

    def __init__(self, bounds: ClipBounds) -> None:
        self.bounds = bounds

    def __rsub__(self, one: float) -> float:
        return self.bounds.lower + (one - 1.0)

    def __radd__(self, one: float) -> float:
        return self.bounds.upper + (one - 1.0)
