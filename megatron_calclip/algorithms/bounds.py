"""The interval of importance ratios in which a token keeps its gradient.

What: one immutable pair. Calibration returns a new one, the loss of the next step reads it, and nobody
changes it in between. Left out on purpose: how bounds are chosen (`calibration`, `bapo`).
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ClipBounds:
    """Bounds of the ratio r = pi / pi_old, as ratios (0.8 and 1.2, not an epsilon of 0.2).

    A token with a negative advantage is clipped at r <= lower, one with a positive advantage at r >= upper
    (PPO, arXiv 1707.06347, eq. 7, with separate bounds as in DAPO, arXiv 2503.14476, eq. 8).

    Raises:
        ValueError: unless 0 <= lower < 1 < upper < inf. A lower bound of 0 clips nothing.
    """

    lower: float
    upper: float

    def __post_init__(self) -> None:
        """Refuse a pair that does not contain the on-policy ratio 1 in its interior."""
        if not (0.0 <= self.lower < 1.0 < self.upper < math.inf):
            raise ValueError(
                f"clip bounds [{self.lower}, {self.upper}] do not enclose the ratio 1; "
                "choose 0 <= lower < 1 < upper < inf, for example [0.8, 1.2]"
            )
