"""FP8 recipes by name: one table from `precision.recipe` to what is quantised how, and to Megatron's and TE's settings.

| recipe | activations | weights | gradients | TransformerEngine |
|---|---|---|---|---|
| tensorwise_delayed | one scale, from the amax history | the same | the same, E5M2 | DelayedScaling |
| tensorwise | one scale, from the present amax | the same | the same, E5M2 | Float8CurrentScaling |
| rowwise | one scale per row of each GEMM operand | the same | the same, E4M3 | CustomRecipe with our quantiser |
| blockwise | 1 x 128 | 128 x 128 | 1 x 128, E4M3 | Float8BlockScaling |
| mxfp8 | 1 x 32, E8M0 | 1 x 32 | 1 x 32, E4M3 | MXFP8BlockScaling |

Formats are each recipe's default and can be set. A `Recipe` serves the `emulated` and `scaled_mm` backends; the
`te` backend gets `megatron_fields`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_calclip.config import EmulationConfig, PrecisionConfig
from megatron_calclip.precision.quantize import E4M3, E5M2
from megatron_calclip.precision.scaling import (
    BlockScaling,
    DelayedScaling,
    MXScaling,
    RowScaling,
    Scaling,
    TensorScaling,
)

BLOCK_SIZE = 128
MX_BLOCK_SIZE = 32

# precision.recipe -> Megatron-Core's `fp8_recipe`
_MEGATRON_RECIPES = {
    "tensorwise_delayed": "delayed",
    "tensorwise": "tensorwise",
    "rowwise": "custom",
    "blockwise": "blockwise",
    "mxfp8": "mxfp8",
}
ROWWISE_FACTORIES = {
    "e4m3": "megatron_calclip.precision.te_rowwise.e4m3_factory",
    "hybrid": "megatron_calclip.precision.te_rowwise.hybrid_factory",
}
"""Where Megatron finds our quantisers for TransformerEngine's CustomRecipe, by format."""


@dataclass(frozen=True)
class Recipe:
    """What is quantised how, for one linear."""

    name: str
    activation: Scaling | None
    """Rule of inputs; None for delayed scaling, whose state belongs to each layer."""
    weight: Scaling | None
    gradient: Scaling | None
    gradient_dtype: torch.dtype
    """FP8 format of gradients; inputs and weights are E4M3."""
    delayed: PrecisionConfig | None
    """Settings of the amax history, for delayed scaling."""
    reduces_amax: bool
    """Whether the amax of a sharded operand is max-reduced over tensor parallelism (`amax_group: global`)."""
    emulation: EmulationConfig

    @property
    def per_tensor(self) -> bool:
        """One scale a tensor: the same codes serve all GEMMs that an operand takes part in."""
        return self.delayed is not None or isinstance(self.activation, TensorScaling)

    def delayed_scaling(self, dtype: torch.dtype) -> DelayedScaling:
        """A new history for one tensor."""
        assert self.delayed is not None
        return DelayedScaling(
            dtype,
            history_length=self.delayed.amax_history_length,
            amax_compute_algo=self.delayed.amax_compute_algo,
            margin=self.delayed.margin,
        )


def gradient_format(precision: PrecisionConfig) -> str:
    """`hybrid` or `e4m3`, the recipe's own default resolved."""
    if precision.format != "auto":
        return precision.format
    return "hybrid" if precision.recipe in ("tensorwise", "tensorwise_delayed") else "e4m3"


def resolve(precision: PrecisionConfig) -> Recipe | None:
    """The recipe that a configuration names; None for bf16."""
    if precision.recipe == "bf16":
        return None
    power_of_two = precision.power_of_two_scales
    activation: Scaling | None
    weight: Scaling | None
    if precision.recipe == "tensorwise_delayed":
        activation = weight = None
    elif precision.recipe == "tensorwise":
        activation = weight = TensorScaling(power_of_two=bool(power_of_two))
    elif precision.recipe == "rowwise":
        activation = weight = RowScaling(power_of_two=power_of_two is not False)
    elif precision.recipe == "blockwise":
        size = precision.emulation.block_size or BLOCK_SIZE
        activation = BlockScaling(size, power_of_two=power_of_two is not False)
        weight = BlockScaling(size, two_dimensional=True, power_of_two=power_of_two is not False)
    else:
        activation = weight = MXScaling(precision.emulation.block_size or MX_BLOCK_SIZE)
    return Recipe(
        name=precision.recipe,
        activation=activation,
        weight=weight,
        gradient=activation,
        gradient_dtype=E5M2 if gradient_format(precision) == "hybrid" else E4M3,
        delayed=precision if precision.recipe == "tensorwise_delayed" else None,
        reduces_amax=precision.amax_group == "global",
        emulation=precision.emulation,
    )


def megatron_fields(precision: PrecisionConfig) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig for the `te` backend. Not yet run on a GPU."""
    if precision.recipe == "bf16":
        return {}
    fields: dict[str, Any] = {
        "fp8": gradient_format(precision),
        "fp8_recipe": _MEGATRON_RECIPES[precision.recipe],
        "fp8_param": precision.fp8_param,
    }
    if precision.recipe == "rowwise":
        # A cached weight would be lost in the first backward pass; `te_rowwise` says why.
        fields |= {
            "fp8_quantizer_factory": ROWWISE_FACTORIES[gradient_format(precision)],
            "disable_parameter_transpose_cache": True,
        }
    if precision.recipe == "tensorwise_delayed":
        fields |= {
            "fp8_margin": precision.margin,
            "fp8_amax_history_len": precision.amax_history_length,
            "fp8_amax_compute_algo": precision.amax_compute_algo,
        }
    if precision.first_last_layers_bf16:
        fields |= {
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": precision.first_last_layers_bf16,
            "num_layers_at_end_in_bf16": precision.first_last_layers_bf16,
        }
    return fields
