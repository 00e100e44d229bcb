"""Alarms by rule over a run's metrics: entropy surges, in which FP8 runs die, and spikes of the loss.

A value is compared with the median of the last steps without an alarm, so that neither a slow drift nor one earlier spike
moves the yardstick. Rules work on rows of metrics alone, the same on every rank; what an alarm leads to (a line, the
end of the run, the last checkpoint) is the trainer's.

Left out on purpose: learned detectors. A rule that a reader can check by hand is worth more at three in the morning.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

from megatron_calclip.config import AlarmsConfig

MAD_TO_SIGMA = 1.4826
"""Median absolute deviation to the standard deviation of a normal distribution."""


class Alarms:
    """Watches rows of metrics.

    Args:
        config: the rules.
    """

    def __init__(self, config: AlarmsConfig) -> None:
        self.config = config
        self._entropy: deque[float] = deque(maxlen=config.window)
        self._loss: deque[float] = deque(maxlen=config.window)

    def check(self, row: dict[str, float]) -> dict[str, str]:
        """Compare a step with those before it.

        Args:
            row: the step's metrics.

        Returns:
            metric that rings, to what is wrong, in a line; empty mostly. A step that rings does not enter the yardstick.
        """
        found: dict[str, str] = {}
        entropy, loss = row.get("entropy"), row.get("loss")
        if entropy is not None and (problem := self._entropy_surge(entropy)):
            found["alarm/entropy"] = problem
        if loss is not None and (problem := self._loss_spike(loss)):
            found["alarm/loss"] = problem
        if not found:
            for history, value in ((self._entropy, entropy), (self._loss, loss)):
                if value is not None and math.isfinite(value):
                    history.append(value)
        return found

    def _entropy_surge(self, entropy: float) -> str | None:
        c = self.config
        if len(self._entropy) < c.window:
            return None
        usual = statistics.median(self._entropy)
        limit = max(c.entropy_factor * usual, usual + c.entropy_rise)
        if entropy <= limit:
            return None
        return f"entropy {entropy:.3g} nats, above {limit:.3g}; the median of the last {c.window} steps is {usual:.3g}"

    def _loss_spike(self, loss: float) -> str | None:
        c = self.config
        if not math.isfinite(loss):
            return f"loss {loss}"
        if len(self._loss) < c.window:
            return None
        usual = statistics.median(self._loss)
        spread = MAD_TO_SIGMA * statistics.median(abs(value - usual) for value in self._loss)
        distance = abs(loss - usual)
        if distance <= max(c.loss_deviations * spread, c.min_loss_distance):
            return None
        return f"loss {loss:.3g}, {distance / max(spread, 1e-12):.3g} deviations from the median {usual:.3g}"

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"entropy": list(self._entropy), "loss": list(self._loss)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        for history, values in ((self._entropy, state["entropy"]), (self._loss, state["loss"])):
            history.clear()
            history.extend(values)
