"""Which backend computes FP8 GEMMs on this machine, and the combinations that are known to be wrong, by name.

Everything that depends on the device is decided here, before a model is built.
"""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch

from megatron_calclip.config import Config, PrecisionConfig
from megatron_calclip.errors import UserError

# Compute capability from which tensor cores multiply FP8, and from which MXFP8's scales are in hardware.
_FP8_CAPABILITY = (8, 9)
_MXFP8_CAPABILITY = (10, 0)
_BLOCKWISE_CAPABILITY = (9, 0)
# torch._scaled_mm takes one scale a tensor or one a row.
_SCALED_MM_RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise")


def transformer_engine_present() -> bool:
    """Whether TransformerEngine is installed and has a GPU to run on."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def choose(precision: PrecisionConfig) -> Literal["te", "scaled_mm", "emulated"]:
    """The backend for this process.

    Raises:
        UserError: when the one asked for is not there, or cannot do the recipe on this device.
    """
    wanted, recipe = precision.backend, precision.recipe
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if wanted == "auto":
        dialled = precision.emulation.channel_outlier > 1 or precision.emulation.first_token_outlier > 1
        if dialled:
            return "emulated"
        if transformer_engine_present():
            wanted = "te"
        elif recipe in _SCALED_MM_RECIPES and capability >= _FP8_CAPABILITY:
            return "scaled_mm"
        else:
            return "emulated"
    if wanted == "te":
        if not transformer_engine_present():
            raise UserError(
                "precision.backend",
                "te needs TransformerEngine and a GPU: pip install 'megatron-calclip[gpu]', or use emulated",
            )
        if recipe == "mxfp8" and capability < _MXFP8_CAPABILITY:
            raise UserError("precision.recipe", "mxfp8 needs a Blackwell GPU with te; use blockwise, or backend: emulated")
        if recipe == "blockwise" and capability < _BLOCKWISE_CAPABILITY:
            raise UserError("precision.recipe", "blockwise needs a Hopper GPU with te; use tensorwise")
    if wanted == "scaled_mm" and recipe not in _SCALED_MM_RECIPES:
        raise UserError(
            "precision.backend", f"torch._scaled_mm has no {recipe} scales; use {', '.join(_SCALED_MM_RECIPES)}, or emulated"
        )
    return wanted


def check(config: Config, *, sizes: dict[str, int]) -> None:
    """Refuse what is known to go wrong on real hardware.

    Args:
        config: the run's configuration.
        sizes: widths of the model's linears per tensor-parallel shard, by name.

    Raises:
        UserError: naming the setting.
    """
    precision = config.precision
    if precision.recipe == "bf16":
        return
    backend = choose(precision)
    multiple = {"blockwise": 128, "mxfp8": 32}.get(precision.recipe, 16)
    if backend != "emulated":  # emulation pads the last block
        for name, size in sizes.items():
            if size % multiple:
                raise UserError(
                    "precision.recipe",
                    f"{precision.recipe} needs widths that are multiples of {multiple}; {name} is {size} per "
                    "tensor-parallel rank; use another recipe or parallel.tp",
                )
    if backend == "te" and precision.recipe == "mxfp8" and precision.fp8_param and not config.parallel.overlap_param_gather:
        raise UserError("precision.fp8_param", "mxfp8 parameters go NaN in Megatron without parallel.overlap_param_gather: true")
    if backend == "te" and precision.recipe == "blockwise" and precision.fp8_param and config.parallel.tp > 2:
        raise UserError("precision.fp8_param", "blockwise parameters go NaN in Megatron with parallel.tp > 2; switch it off")
