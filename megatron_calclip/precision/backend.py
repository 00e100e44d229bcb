"""Which backend computes FP8 GEMMs on this machine, and the combinations that are known to be wrong, by name.

Everything that depends on the device is decided here, before a model is built.
"""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch

from megatron_calclip.config import Config, EmulationConfig, PrecisionConfig
from megatron_calclip.errors import UserError
from megatron_calclip.weights.mapping import ModelShape, hf_shapes

# Compute capability from which tensor cores multiply FP8, and from which MXFP8's scales are in hardware.
_FP8_CAPABILITY = (8, 9)
_MXFP8_CAPABILITY = (10, 0)
_BLOCKWISE_CAPABILITY = (9, 0)
# torch._scaled_mm takes one scale a tensor or one a row.
_SCALED_MM_RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise")
_WIDTH_MULTIPLES = {"blockwise": 128, "mxfp8": 32}
_GEMM_MULTIPLE = 16  # cuBLAS multiplies FP8 matrices of such sizes only


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
    if precision.emulation != EmulationConfig():
        if wanted in ("te", "scaled_mm"):
            raise UserError(
                "precision.emulation", f"{wanted} has no such dials; use backend: emulated, or leave them alone"
            )
        return "emulated"
    if wanted == "auto":
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
                "te needs TransformerEngine and a GPU; see docs/install.md, or use emulated",
            )
        if recipe != "bf16" and capability < _FP8_CAPABILITY:
            raise UserError(
                "precision.recipe", f"{recipe} with te needs an Ada GPU or newer; use bf16, or backend: emulated"
            )
        if recipe == "mxfp8" and capability < _MXFP8_CAPABILITY:
            raise UserError(
                "precision.recipe", "mxfp8 needs a Blackwell GPU with te; use blockwise, or backend: emulated"
            )
        if recipe == "blockwise" and capability < _BLOCKWISE_CAPABILITY:
            raise UserError("precision.recipe", "blockwise needs a Hopper GPU with te; use tensorwise")
    if wanted == "scaled_mm" and recipe not in _SCALED_MM_RECIPES:
        raise UserError(
            "precision.backend",
            f"torch._scaled_mm has no {recipe} scales; use {', '.join(_SCALED_MM_RECIPES)}, or emulated",
        )
    return wanted


def linear_widths(shape: ModelShape, tp: int) -> dict[str, int]:
    """Widths of a decoder layer's linears on one tensor-parallel rank, by name.

    Args:
        shape: the model.
        tp: tensor-parallel size.
    """
    return {
        "hidden_size": shape.hidden_size,
        "attention heads x head_dim": shape.q_size // tp,
        "query, key and value": (shape.q_size + 2 * shape.kv_size) // tp,
        "ffn_hidden_size": shape.ffn_size // tp,
    }


def token_multiple(precision: PrecisionConfig) -> int:
    """What TransformerEngine's FP8 modules need the number of tokens to be a multiple of, on each rank; 1 for the others.

    Tokens are the contracted dimension of a weight's gradient, so they come in whole blocks, too.
    """
    if precision.recipe == "bf16" or choose(precision) != "te":
        return 1
    return _WIDTH_MULTIPLES.get(precision.recipe, _GEMM_MULTIPLE)


def check(config: Config, shape: ModelShape) -> None:
    """Refuse what this device is known to do wrong; `config_check` has refused what no device can do.

    Args:
        config: the run's configuration, checked.
        shape: the model.

    Raises:
        UserError: naming the setting.
    """
    if config.precision.recipe == "bf16":
        return
    backend = choose(config.precision)
    if backend != "emulated":
        _check_hardware(config, shape, backend)


def _check_hardware(config: Config, shape: ModelShape, backend: Literal["te", "scaled_mm"]) -> None:
    """What only emulation can do."""
    precision, tp = config.precision, config.parallel.tp
    recipe = precision.recipe
    multiple = _WIDTH_MULTIPLES.get(recipe, _GEMM_MULTIPLE)
    for name, size in linear_widths(shape, tp).items():
        if size % multiple:
            raise UserError(
                "precision.recipe",
                f"{recipe} needs widths that are multiples of {multiple}; {name} is {size} per tensor-parallel rank; "
                "use another recipe or parallel.tp",
            )
    if precision.output_layer:
        raise UserError("precision.output_layer", f"{backend} cannot quantise it; use backend: emulated")
    if backend == "scaled_mm":
        return
    if precision.power_of_two_scales is not None:
        raise UserError("precision.power_of_two_scales", "Megatron has no such setting for te; leave it null")
    if precision.amax_group != "te":
        raise UserError("precision.amax_group", "TransformerEngine takes each shard's own amax; set it to te")
    if precision.first_last_layers_bf16 > shape.num_layers // config.parallel.pp:
        raise UserError(
            "precision.first_last_layers_bf16",
            f"Megatron wants at most a pipeline stage's {shape.num_layers // config.parallel.pp} layers; lower it",
        )
    if recipe == "rowwise":  # see `te_rowwise`
        if precision.fp8_param:
            raise UserError(
                "precision.fp8_param", "te cannot hold rowwise weights; use backend: scaled_mm, or switch it off"
            )
        if any(name.endswith(".bias") for name in hf_shapes(shape)):
            raise UserError("precision.recipe", "rowwise with te cannot train biases; use backend: scaled_mm")
    if recipe == "tensorwise_delayed" and precision.first_last_layers_bf16:
        raise UserError("precision.first_last_layers_bf16", "Megatron refuses it with delayed scaling; set it to 0")
    if recipe == "mxfp8" and precision.fp8_param and not config.parallel.overlap_param_gather:
        raise UserError(
            "precision.fp8_param",
            "mxfp8 parameters go NaN in Megatron without parallel.overlap_param_gather; switch that on, or this off",
        )
    if recipe == "blockwise" and precision.fp8_param and tp > 2:
        raise UserError(
            "precision.fp8_param", "blockwise parameters go NaN in Megatron with parallel.tp > 2; switch it off"
        )


def remarks(config: Config, shape: ModelShape) -> list[str]:
    """What a reader of the run's results should know about its precision: dialled-in noise, cut blocks.

    Args:
        config: the run's configuration, checked.
        shape: the model.
    """
    precision, dials = config.precision, config.precision.emulation
    if precision.recipe == "bf16" or choose(precision) != "emulated":
        return []
    lines = [
        f"DIALLED IN: precision.emulation.{name} = {getattr(dials, name):g}"
        for name in ("channel_outlier", "first_token_outlier")
        if getattr(dials, name) > 1
    ]
    block = (dials.block_size or _WIDTH_MULTIPLES[precision.recipe]) if precision.recipe in _WIDTH_MULTIPLES else 1
    cut = [name for name, size in linear_widths(shape, config.parallel.tp).items() if size % block]
    if cut:
        lines.append(
            f"{precision.recipe}: the last block of {block} is cut short in {', '.join(cut)}; hardware would refuse this, "
            "and results depend on parallel.tp"
        )
    return lines
