"""FP8 W8A8 inference, emulated: what vLLM's online quantisation makes of a BF16 model.

The decoder's linears quantise their weights once, when weights are loaded, and their inputs at every call; the GEMM
multiplies exact codes, accumulates in FP32 and applies the scales afterwards. The output layer, embeddings, norms,
attention and its cache stay in the engine's dtype.

| scheme | weight scale | input scale |
|---|---|---|
| fp8_per_tensor | one per tensor; q, k and v share one, gate and up share one, as vLLM's fused layers do | one per token |
| fp8_per_channel | one per output channel | one per token |
| fp8_per_block | one per 128 x 128 block | one per token and 128 inputs |
| mxfp8 | E8M0, one per output channel and 32 inputs | E8M0, one per token and 32 inputs |

Scales are amax / 448 (MXFP8: the rule of `precision.scaling.MXScaling`) with vLLM's lower bounds. Rules: vLLM,
`quantization/online/fp8.py`, `fp8_utils.py`, `utils/deep_gemm.py` and `csrc/.../fp8/common.cuh`. vLLM multiplies by the
reciprocal of the scale of a tensor and of a block of weights, and divides by all others. `tests/vllm/test_codes.py`
compares all but the per-tensor scheme with vLLM's own code, bit for bit; where vLLM does otherwise without a GPU (it
multiplies inputs by the reciprocal of a token's scale), its GPU kernel is the rule.

Left out on purpose: static input scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from megatron_calclip.precision.linear import Operand, gemm
from megatron_calclip.precision.quantize import E4M3, emulate
from megatron_calclip.precision.scaling import MXScaling

Scheme = Literal["fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "mxfp8"]

LARGEST = torch.finfo(E4M3).max
MIN_SCALE = 1.0 / (LARGEST * 512)
"""Smallest scale of a channel or token."""
MIN_INPUT_AMAX, MIN_WEIGHT_AMAX = 1e-10, 1e-4
"""Smallest amax of a block of inputs, and of weights."""
BLOCK = 128
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linears that vLLM stacks into one layer, and so gives one scale per tensor."""


def _codes(x: Tensor) -> Tensor:
    """FP8 codes of scaled values, saturated."""
    return x.clamp(-LARGEST, LARGEST).to(E4M3)


def quantize_tensor(weight: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """One scale for all: codes [N, K] and the scale, float32 [1, 1].

    Args:
        weight: [N, K].
        amax: float32 [], of all tensors that share the scale.
    """
    scale = (amax / torch.full_like(amax, LARGEST)).view(1, 1)
    inverse = torch.where(scale > 0, scale.reciprocal(), 1.0)
    return _codes(weight.float() * inverse), scale


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """One scale per row: codes [M, K] and scales float32 [M, 1], of channels of a weight or tokens of an input."""
    values = x.float()
    amax = values.abs().amax(-1, keepdim=True)
    scale = (amax / torch.full_like(amax, LARGEST)).clamp(min=MIN_SCALE)
    return _codes(values / scale), scale


def quantize_blocks(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """One scale per block: codes [M, K] and scales float32 [M / rows, K / 128], sizes rounded up.

    Args:
        x: [M, K]; the last block may be smaller.
        rows: of a block: 128 for a weight, 1 for an input.
    """
    m, k = x.shape
    padded = nn.functional.pad(x.float(), (0, -k % BLOCK, 0, -m % rows))
    tiles = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // BLOCK, BLOCK)
    amax = tiles.abs().amax((1, 3)).clamp(min=MIN_INPUT_AMAX if rows == 1 else MIN_WEIGHT_AMAX)
    scale = amax / torch.full_like(amax, LARGEST)
    spread = scale[:, None, :, None]
    codes = _codes(tiles / spread if rows == 1 else tiles * spread.reciprocal())
    return codes.view(padded.shape)[:m, :k], scale


def _dequantized_blocks(x: Tensor, rows: int) -> Tensor:
    codes, scale = quantize_blocks(x, rows)
    spread = scale.repeat_interleave(rows, 0)[: x.shape[0]].repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
    return codes.float() * spread


class Fp8Linear(nn.Linear):
    """A linear in W8A8; `weight` keeps what was loaded, `codes` is what is multiplied.

    Args:
        linear: the layer whose parameters this one takes over.
        scheme: how it is quantised.
    """

    def __init__(self, linear: nn.Linear, scheme: Scheme) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias, self.scheme = linear.weight, linear.bias, scheme
        self.codes: Operand | None = None

    @torch.no_grad()
    def quantize_weight(self, fused: Sequence[Tensor]) -> None:
        """Make the codes anew after the weight was loaded.

        Args:
            fused: the weights, this one among them, that share a scale with fp8_per_tensor.
        """
        if self.scheme == "fp8_per_tensor":
            amax = torch.stack([weight.float().abs().amax() for weight in fused]).amax()
            codes, scale = quantize_tensor(self.weight, amax)
            self.codes = Operand(codes.to(torch.bfloat16), scale)
        else:
            self.codes = self._operand(self.weight, rows=BLOCK)

    def _operand(self, x: Tensor, *, rows: int) -> Operand:
        """Quantised along the inputs; `rows` are those of a block with fp8_per_block."""
        if self.scheme == "fp8_per_block":
            return Operand(_dequantized_blocks(x, rows), None)
        if self.scheme == "mxfp8":
            return Operand(emulate(x, MXScaling(), E4M3, dequantize=True).codes, None)
        codes, scale = quantize_rows(x)
        return Operand(codes.to(torch.bfloat16), scale)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features] in the dtype of x."""
        assert self.codes is not None, "weights were never loaded"
        inputs = self._operand(x.reshape(-1, x.shape[-1]), rows=1)
        y = gemm(inputs, self.codes, dtype=x.dtype, backend="emulated")
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], self.out_features)


def convert(model: nn.Module, scheme: Scheme) -> None:
    """Replace the linears of a transformers model's decoder, in place; parameters keep their names.

    Raises:
        ValueError: for an unknown scheme.
    """
    if scheme not in get_args(Scheme):
        raise ValueError(f"FP8 scheme {scheme!r} is unknown; choose from {', '.join(get_args(Scheme))}")
    for parent, name, linear in list(_decoder_linears(model)):
        setattr(parent, name, Fp8Linear(linear, scheme))


def quantize_weights(model: nn.Module) -> None:
    """Make the codes of a converted model from its present weights."""
    for parent in model.modules():
        layers = {name: child for name, child in parent.named_children() if isinstance(child, Fp8Linear)}
        for name, layer in layers.items():
            fused = next((names for names in _FUSED if name in names), (name,))
            layer.quantize_weight([layers[other].weight for other in fused])


def _decoder_linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Parent, name and layer of every linear but the output layer."""
    output = model.get_output_embeddings()  # type: ignore[operator]
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear) and child is not output:
                yield parent, name, child
