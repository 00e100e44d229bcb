"""From the `calibration` section to the calibrator's settings: a preset with what the configuration changes.

Imports no torch, so that values that do not go together are found with the configuration.
"""

from __future__ import annotations

import math
from typing import Any

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.calibration_settings import Algorithm, CalibrationSettings
from megatron_calclip.config import Config
from megatron_calclip.errors import UserError


def calibration_settings(config: Config) -> CalibrationSettings:
    """The preset for this algorithm with what the configuration changes.

    Raises:
        UserError: for values that do not go together.
    """
    c, a = config.calibration, config.algorithm
    plain = (
        "schedule interval start_step grid_lower grid_upper delta_lower delta_upper minibatches token_fraction balance "
        "balance_ratio_cap weighting min_tail_tokens pool hold_unsolvable min_balance_range max_interval_share "
        "num_replicates sequence_grid_width"
    )
    changes: dict[str, Any] = {name: getattr(c, name) for name in plain.split() if getattr(c, name) is not None}
    if c.balance_ratio_cap == math.inf:
        changes["balance_ratio_cap"] = None  # of the settings: nowhere
    changes |= {name: ClipBounds(*getattr(c, name)) for name in ("start", "reference") if getattr(c, name) is not None}
    algorithm: Algorithm = "gspo" if a.loss == "gspo" else "dapo" if a.aggregation == "token_mean" else "grpo"
    preset = CalibrationSettings.paper if c.preset == "paper" else CalibrationSettings.robust
    try:
        return preset(algorithm, **changes)
    except ValueError as error:
        where, _, problem = str(error).partition(": ")
        raise UserError(where, problem) from None
