"""Megatron-Bridge: this project's precision recipes on a `ConfigContainer`, as its own recipe functions return it.

What: names of Megatron-Bridge's mixed-precision recipes for ours, with what differs set on top, so that a model is trained
in the FP8 that calibration was tuned for. Left out on purpose: everything else of a container; its training loop has no
policy-gradient step.
"""

from __future__ import annotations

from typing import Any

from megatron_calclip.config import PrecisionConfig
from megatron_calclip.errors import UserError
from megatron_calclip.integrations import require
from megatron_calclip.precision.recipes import megatron_fields

BASE_RECIPES = {
    "bf16": "bf16_mixed",
    "tensorwise_delayed": "bf16_with_fp8_delayed_scaling_mixed",
    "tensorwise": "bf16_with_fp8_current_scaling_mixed",
    "blockwise": "bf16_with_fp8_subchannel_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
}
"""`precision.recipe` -> a function of `megatron.bridge.training.mixed_precision`. Rowwise has none: it is `custom`."""


def set_precision(container: Any, precision: PrecisionConfig) -> Any:
    """Set a precision recipe on a container, in place.

    Args:
        container: a `ConfigContainer`.
        precision: ours; `recipe`, `format`, `fp8_param`, `first_last_layers_bf16` and the amax history are used.

    Returns:
        The container.

    Raises:
        ImportError: when Megatron-Bridge is missing.
        UserError: for a recipe that Megatron-Bridge cannot express.
    """
    how = "pip install megatron-bridge"
    recipes = require("megatron.bridge.training.mixed_precision", framework="Megatron-Bridge", how=how)
    name = BASE_RECIPES.get(precision.recipe)
    if name is None:
        raise UserError(
            "precision.recipe",
            f"Megatron-Bridge's MixedPrecisionConfig cannot name a quantiser, which {precision.recipe} needs; "
            f"choose among {', '.join(BASE_RECIPES)}",
        )
    mixed = recipes.MIXED_PRECISION_RECIPES[name]()
    # Theirs leave the first and last layers in BF16 and keep the weights in FP8; ours say so for themselves.
    mixed.first_last_layers_bf16 = False
    mixed.num_layers_at_start_in_bf16 = mixed.num_layers_at_end_in_bf16 = 0
    for field, value in megatron_fields(precision).items():
        setattr(mixed, field, value)
    if not precision.fp8_param:
        mixed.reuse_grad_buf_for_mxfp8_param_ag = False
    container.mixed_precision = mixed
    return container
