"""HF checkpoints with block-quantised FP8 weights, as DeepSeek-V3 publishes them and vLLM loads them.

A quantised linear has its codes as `....weight` (E4M3) and beside them `....weight_scale_inv` (FP32, one factor for
each 128 x 128 block, row and column of blocks rounded up); the weight is about code x factor. `config.json` says so in
`quantization_config`. Activations are quantised by the server as it runs.

Quantised are the linears of attention, MLP and experts. Embedding, output layer, norms, biases and routers stay as they
are. So do linears with a size that is no multiple of 128: servers fuse q, k and v, and gate and up, and then need whole
blocks of each, so the tensors that share one fused linear are quantised together or not at all.

Left out on purpose: per-tensor and per-channel formats, which servers make themselves from BF16 weights, and FP8
checkpoints with static activation scales. Not yet loaded by a GPU vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_calclip.errors import UserError
from megatron_calclip.precision.quantize import E4M3, Quantized, quantize
from megatron_calclip.precision.scaling import BlockScaling
from megatron_calclip.weights.layouts import COLUMNS, GATE_UP, QKV
from megatron_calclip.weights.load import HFSource
from megatron_calclip.weights.mapping import ModelShape, mapped_tensors

BLOCK_SIZE = 128
SCALE_SUFFIX = "_scale_inv"
"""Added to a weight's name: the factors that undo its scaling."""

_LINEARS = (QKV, COLUMNS, GATE_UP)


@dataclass(frozen=True)
class BlockQuantization:
    """How the weights of one model become block-quantised ones.

    Args:
        shape: the model.
        power_of_two: round scales down to powers of two, as TransformerEngine's Float8BlockScaling does by default
            (and `precision.recipe: blockwise` of the learner); else FP32 scales, as DeepSeek-V3 has.
    """

    shape: ModelShape
    power_of_two: bool = True

    def names(self) -> set[str]:
        """The HF tensors that are quantised."""
        return {
            hf.name
            for tensor in mapped_tensors(self.shape)
            if tensor.layout in _LINEARS
            and all(len(hf.shape) == 2 and not any(size % BLOCK_SIZE for size in hf.shape) for hf in tensor.hf)
            for hf in tensor.hf
        }

    def config(self) -> dict[str, Any]:
        """`quantization_config` of the checkpoint's `config.json`.

        Raises:
            UserError: when no linear has sizes that can be quantised.
        """
        quantized = self.names()
        if not quantized:
            raise UserError(
                "--fp8-recipe", f"no linear of this model has sizes that are multiples of {BLOCK_SIZE}; export BF16"
            )
        left = [
            hf.name.removesuffix(".weight")
            for tensor in mapped_tensors(self.shape)
            for hf in tensor.hf
            if len(hf.shape) == 2 and hf.name not in quantized and "embed_tokens" not in hf.name
        ]
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK_SIZE, BLOCK_SIZE],
            "modules_to_not_convert": left,
        }

    def specs(self, specs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Meta tensors of the quantised checkpoint from those of the plain one."""
        quantized = self.names()
        result: dict[str, Tensor] = {}
        for name, spec in specs.items():
            result[name] = spec.to(E4M3) if name in quantized else spec
            if name in quantized:
                grid = [-(-size // BLOCK_SIZE) for size in spec.shape]
                result[name + SCALE_SUFFIX] = torch.empty(grid, dtype=torch.float32, device="meta")
        return result

    def stream(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Quantise a stream of HF tensors (of `stream_hf`, say), each scale right behind its codes.

        Weights that were dequantised from codes with power-of-two scales come out with the same values.
        """
        quantized = self.names()
        scaling = BlockScaling(BLOCK_SIZE, two_dimensional=True, power_of_two=self.power_of_two)
        for name, value in stream:
            if name not in quantized:
                yield name, value
                continue
            result = quantize(value if value.dtype is torch.bfloat16 else value.float(), scaling, E4M3)
            yield name, result.codes
            yield name + SCALE_SUFFIX, result.inverse_scale


def dequantized(source: HFSource, hf_config: Mapping[str, Any], *, dtype: torch.dtype = torch.bfloat16) -> HFSource:
    """A checkpoint with plain weights: the same source, or a view that dequantises block-quantised ones as it reads.

    Args:
        source: a HF checkpoint.
        hf_config: its configuration, of which `quantization_config` is read.
        dtype: type of dequantised weights; code x factor is computed in FP32 and rounded once.

    Raises:
        UserError: for another quantised format, or codes without their factors.
    """
    settings = hf_config.get("quantization_config")
    if settings is None:
        return source
    block = settings.get("weight_block_size")
    if settings.get("quant_method") != "fp8" or not block:
        raise UserError(
            source.where,
            f"is quantised as {settings.get('quant_method')!r} without FP8 blocks, which cannot be imported; "
            "give a BF16 checkpoint, or an FP8 one with weight_block_size",
        )
    codes = {name for name, spec in source.specs.items() if spec.dtype is E4M3}
    for name in sorted(codes):
        _check_factors(source, name, block)

    def read(name: str) -> Tensor:
        value = source.read(name)
        if name not in codes:
            return value
        return Quantized(value, source.read(name + SCALE_SUFFIX).float(), tuple(block)).dequantize().to(dtype)

    factors = {name + SCALE_SUFFIX for name in codes}
    specs = {name: spec.to(dtype) if name in codes else spec for name, spec in source.specs.items()}
    return HFSource(source.where, specs={name: spec for name, spec in specs.items() if name not in factors}, read=read)


def _check_factors(source: HFSource, name: str, block: list[int]) -> None:
    factors = source.specs.get(name + SCALE_SUFFIX)
    if factors is None:
        raise UserError(source.where, f"tensor {name + SCALE_SUFFIX!r} is missing; give a complete FP8 checkpoint")
    expected = [-(-size // edge) for size, edge in zip(source.specs[name].shape, block, strict=True)]
    if list(factors.shape) != expected:
        raise UserError(
            source.where,
            f"tensor {name + SCALE_SUFFIX!r} has shape {list(factors.shape)}, but blocks of {block} make {expected}; "
            "correct weight_block_size in config.json",
        )
