"""The three GEMMs of a linear layer in FP8: forward, gradient of the input, gradient of the weight.

    y  = x  W^T      contracts K (inputs)     x and W quantised along K
    dx = dy W        contracts N (outputs)    dy and W quantised along N
    dW = dy^T x      contracts M (tokens)     dy and x quantised along M

Each operand is quantised from its BF16 source along the dimension that its GEMM contracts, as the recipes demand;
where one scale covers the whole tensor the same codes serve both of its GEMMs.

The `emulated` backend multiplies the exact code values. Scales that are powers of two go into the operands, which
stay exact in BF16; any other scale is applied to the FP32 result. Accumulation is FP32, in the order of the
device's own GEMM: codes and scales are bit-exact, sums are not claimed to be a tensor core's. The `scaled_mm`
backend hands real FP8 codes to `torch._scaled_mm`.

Left out on purpose: communication (`learner/parallel_linear.py`), and fusing quantisation into neighbouring kernels.

Legend: M tokens, K inputs, N outputs of this rank's shard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megatron_calclip.precision.quantize import (
    E4M3,
    BlockScaling,
    DelayedScaling,
    Quantized,
    ReduceAmax,
    RowScaling,
    Scaling,
    fake_quantize,
    fake_quantize_both,
    quantize,
    quantize_dequantize,
    quantize_dequantize_both,
)
from megatron_calclip.precision.recipes import Recipe

Backend = Literal["emulated", "scaled_mm"]

# cuBLAS multiplies FP8 only along contracted dimensions that are multiples of this.
_SCALED_MM_MULTIPLE = 16


@dataclass(frozen=True)
class Operand:
    """One side of a GEMM, its contracted dimension last: values [rows, contracted] and what is still to be multiplied in."""

    values: Tensor
    """Exact codes, or exact codes times their scales; FP8 for scaled_mm."""
    scale: Tensor | None
    """float32 [1, 1] or [rows, 1] inverse scales for the result; None when they are in the values."""

    def transposed(self) -> Operand:
        """The same codes for a GEMM over the other dimension; needs one scale for all."""
        assert self.scale is None or self.scale.numel() == 1
        return replace(self, values=self.values.t())

    def times(self, factor: Tensor) -> Operand:
        """The values times powers of two that broadcast to them: exact, in the values' own dtype."""
        return replace(self, values=self.values * factor.to(self.values.dtype))


@dataclass(frozen=True)
class WeightCodes:
    """FP8 weights held between steps (`precision.fp8_param`): what the forward and the backward GEMM take."""

    forward: Operand
    backward: Operand


@contextlib.contextmanager
def _bf16_kernels_for_fp32() -> Iterator[None]:
    """Let CPU matmuls of FP32 tensors multiply in BF16, accumulate in FP32 and return FP32: exact for FP8 code values."""
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b.T in FP32 for BF16 values, without rounding the result to BF16."""
    if a.is_cuda:
        return torch.mm(a, b.t(), out_dtype=torch.float32)
    with _bf16_kernels_for_fp32():
        return torch.mm(a.float(), b.float().t())


def _padded(codes: Tensor) -> Tensor:
    """FP8 codes, contiguous, with zeros up to the next multiple that cuBLAS takes: a batch may have any number of tokens."""
    missing = -codes.shape[-1] % _SCALED_MM_MULTIPLE
    return nn.functional.pad(codes.view(torch.uint8), (0, missing)).view(codes.dtype).contiguous()


def _is_scalar(operand: Operand) -> bool:
    return operand.scale is not None and operand.scale.numel() == 1


def gemm(a: Operand, b: Operand, *, dtype: torch.dtype, backend: Backend) -> Tensor:
    """a @ b.T with all scales applied.

    Args:
        a: [rows of the result, contracted].
        b: [columns of the result, contracted].
        dtype: of the result, BF16 or FP32.
        backend: who multiplies.
    """
    if backend == "scaled_mm":
        assert a.scale is not None and b.scale is not None
        if not (a.values.numel() and b.values.numel()):  # no tokens, so no scales of theirs
            return a.values.new_zeros(len(a.values), len(b.values), dtype=dtype)
        # cuBLAS wants the second operand column-major, scales with strides of 1, and results of row-wise scales in BF16.
        return torch._scaled_mm(
            _padded(a.values),
            _padded(b.values).t(),
            scale_a=a.scale.flatten()[:, None],
            scale_b=b.scale.flatten()[None, :],
            out_dtype=torch.bfloat16,
        ).to(dtype)
    if a.values.dtype is torch.float32:  # FP32 block scales along the contracted dimension: dequantised
        return torch.mm(a.values, b.values.t()).to(dtype)
    if a.scale is None and b.scale is None:
        return a.values @ b.values.t() if dtype is torch.bfloat16 else _product(a.values, b.values)
    if dtype is torch.bfloat16 and not a.values.is_cuda and _is_scalar(a) and _is_scalar(b):
        # One scale for the whole result: the CPU's GEMM applies it to its FP32 sums, before the one rounding to BF16.
        alpha = float(a.scale * b.scale)  # type: ignore[operator]
        return torch.addmm(a.values.new_zeros(1), a.values, b.values.t(), beta=0, alpha=alpha)
    product = _product(a.values, b.values)
    for scale in (a.scale, b.scale.t() if b.scale is not None else None):
        if scale is not None:
            product.mul_(scale)
    return product.to(dtype)


class Fp8Gemms(nn.Module):
    """Quantisers and GEMMs of one linear layer; holds delayed scaling's histories where the recipe has them.

    Args:
        recipe: what is quantised how.
        backend: who multiplies.
        input_sharded: whether tensor parallelism cuts the inputs K (row-parallel).
        output_sharded: whether it cuts the outputs N (column-parallel).
        reduce_amax: max-reduces amaxes over the tensor-parallel group; used for sharded operands when the recipe
            says so.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        backend: Backend,
        input_sharded: bool = False,
        output_sharded: bool = False,
        reduce_amax: ReduceAmax | None = None,
    ) -> None:
        super().__init__()
        self.recipe, self.backend = recipe, backend
        self.input_sharded, self.output_sharded = input_sharded, output_sharded
        self.reduce_amax = reduce_amax if recipe.reduces_amax else None
        self.register_buffer("channel_outlier", None, persistent=False)
        self.first_token_outlier = 1.0
        if recipe.delayed is not None:
            self.input_scaling = recipe.delayed_scaling(E4M3)
            self.weight_scaling = recipe.delayed_scaling(E4M3)
            self.gradient_scaling = recipe.delayed_scaling(recipe.gradient_dtype)

    def scaling(self, operand: Literal["input", "weight", "gradient"]) -> Scaling:
        """The rule of an operand."""
        if self.recipe.delayed is not None:
            state: DelayedScaling = getattr(self, f"{operand}_scaling")
            return state
        rules = {"input": self.recipe.activation, "weight": self.recipe.weight, "gradient": self.recipe.gradient}
        rule = rules[operand]
        assert rule is not None
        return rule

    def operand(self, x: Tensor, scaling: Scaling, dtype: torch.dtype, *, dim: int, sharded: bool) -> Operand:
        """Quantise a matrix for the GEMM that contracts `dim` (-1 or 0), which becomes the last dimension.

        Args:
            x: [rows, columns] BF16 or FP32.
            scaling: its rule.
            dtype: FP8 format.
            dim: contracted dimension.
            sharded: whether tensor parallelism cuts what one scale covers, so that its amax may need reducing.
        """
        reduce_amax = self.reduce_amax if sharded else None

        def turn(values: Tensor) -> Tensor:
            return values if dim == -1 else values.t()

        if self.backend == "scaled_mm":
            result = quantize(x, scaling, dtype, dim=dim, reduce_amax=reduce_amax)
            return Operand(turn(result.codes), turn(result.inverse_scale))
        if scaling.power_of_two:  # code times scale is exact in BF16
            exact = quantize_dequantize(x, scaling, dtype, dim=dim, reduce_amax=reduce_amax)
            return Operand(turn(exact), None)
        if isinstance(scaling, BlockScaling):  # FP32 scales that vary along the contracted dimension
            exact = quantize_dequantize(x, scaling, dtype, dim=dim, reduce_amax=reduce_amax, out_dtype=torch.float32)
            return Operand(turn(exact), None)
        fake: Quantized = fake_quantize(x, scaling, dtype, dim=dim, reduce_amax=reduce_amax)
        return Operand(turn(fake.codes), turn(fake.inverse_scale))

    def _reducible(self, dim: int, sharded_dim: int | None) -> bool:
        """Whether a scale's tile crosses shards: always for one scale a tensor, for rows when the shard cuts along them."""
        if sharded_dim is None:
            return False
        return self.recipe.per_tensor or (isinstance(self.recipe.activation, RowScaling) and dim == sharded_dim)

    def _pair(
        self, x: Tensor, kind: Literal["input", "weight", "gradient"], dtype: torch.dtype, sharded_dim: int | None
    ) -> tuple[Operand, Operand]:
        """An operand for the GEMM over its last dimension and for the one over its first."""
        scaling = self.scaling(kind)
        if self.recipe.per_tensor or (kind == "weight" and isinstance(scaling, BlockScaling)):
            last = self.operand(x, scaling, dtype, dim=-1, sharded=self._reducible(-1, sharded_dim))
            return last, replace(last, values=last.values.t())
        if self.backend == "scaled_mm":
            return (
                self.operand(x, scaling, dtype, dim=-1, sharded=self._reducible(-1, sharded_dim)),
                self.operand(x, scaling, dtype, dim=0, sharded=self._reducible(0, sharded_dim)),
            )
        return self._emulated_both(x, scaling, dtype, sharded_dim)

    def _emulated_both(
        self, x: Tensor, scaling: Scaling, dtype: torch.dtype, sharded_dim: int | None
    ) -> tuple[Operand, Operand]:
        """Both copies from one pass over the source."""
        last, first = (self.reduce_amax if self._reducible(dim, sharded_dim) else None for dim in (-1, 0))
        reduce = (last, first)
        if scaling.power_of_two or isinstance(scaling, BlockScaling):
            a, b = quantize_dequantize_both(
                x,
                scaling,
                dtype,
                reduce_amax=reduce,
                out_dtype=torch.bfloat16 if scaling.power_of_two else torch.float32,
            )
            return Operand(a, None), Operand(b.t(), None)
        rows, columns = fake_quantize_both(x, scaling, dtype, reduce_amax=reduce)
        return Operand(rows.codes, rows.inverse_scale), Operand(columns.codes.t(), columns.inverse_scale.t())

    def quantize_weight(self, weight: Tensor) -> WeightCodes:
        """Both copies of a weight [N, K]: along K for the forward GEMM, along N for the input's gradient."""
        sharded_dim = -1 if self.input_sharded else 0 if self.output_sharded else None
        if self.channel_outlier is None:
            return WeightCodes(*self._pair(weight, "weight", E4M3, sharded_dim))
        factor = self.channel_outlier
        forward, backward = self._pair(weight / factor.to(weight.dtype), "weight", E4M3, sharded_dim)
        return WeightCodes(forward.times(factor), backward.times(factor[:, None]))

    def quantize_input(self, x: Tensor, first_tokens: Tensor | None = None) -> tuple[Operand, Operand]:
        """Both copies of an input [M, K]: along K for the forward GEMM, along M for the weight's gradient.

        Dialled-in outliers are multiplied in before quantising and divided out of the codes: powers of two, so exact.
        """
        sharded_dim = -1 if self.input_sharded else None
        factor: Tensor | None = None
        if self.channel_outlier is not None:
            factor = self.channel_outlier.to(x.dtype).expand_as(x)
        if first_tokens is not None and self.first_token_outlier != 1.0:
            factor = torch.ones_like(x[:, :1]).index_fill_(0, first_tokens, self.first_token_outlier).expand_as(x)
        if factor is None:
            return self._pair(x, "input", E4M3, sharded_dim)
        along_inputs, along_tokens = self._pair(x * factor, "input", E4M3, sharded_dim)
        return along_inputs.times(1 / factor), along_tokens.times(1 / factor.t())

    def dial_channel(self, channel: int, num_inputs: int, *, device: torch.device) -> None:
        """Multiply one input channel by the recipe's `channel_outlier`, for the quantiser alone."""
        outlier = torch.ones(num_inputs, device=device)
        outlier[channel % num_inputs] = self.recipe.emulation.channel_outlier
        self.channel_outlier = outlier

    def quantize_gradient(self, dy: Tensor) -> tuple[Operand, Operand]:
        """Both copies of a gradient [M, N]: along N for the input's gradient, along M for the weight's."""
        return self._pair(dy, "gradient", self.recipe.gradient_dtype, -1 if self.output_sharded else None)

    def forward(
        self, x: Tensor, weight: Tensor, codes: WeightCodes | None = None, *, first_tokens: Tensor | None = None
    ) -> Tensor:
        """x @ weight.T in FP8, with FP8 gradients.

        Args:
            x: [..., K] in BF16 or FP32.
            weight: [N, K]; receives the gradient.
            codes: its codes, where they are kept between steps; None quantises it now.
            first_tokens: int64 rows of x that begin a sequence, for the dial `first_token_outlier`.

        Returns:
            [..., N] in the dtype of x.
        """
        y: Tensor = _Fp8Linear.apply(x.reshape(-1, x.shape[-1]), weight, self, codes, first_tokens)
        return y.view(*x.shape[:-1], weight.shape[0])


class _Fp8Linear(torch.autograd.Function):
    """See the module's docstring for the three GEMMs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        gemms: Fp8Gemms,
        codes: WeightCodes | None,
        first_tokens: Tensor | None,
    ) -> Tensor:
        codes = codes or gemms.quantize_weight(weight)
        along_inputs, along_tokens = gemms.quantize_input(x, first_tokens)
        ctx.gemms, ctx.dtypes = gemms, (x.dtype, weight.dtype)
        ctx.scales = codes.backward.scale, along_tokens.scale
        ctx.save_for_backward(codes.backward.values, along_tokens.values)
        return gemm(along_inputs, codes.forward, dtype=x.dtype, backend=gemms.backend)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        gemms: Fp8Gemms = ctx.gemms
        weight_values, input_values = ctx.saved_tensors
        weight, tokens = Operand(weight_values, ctx.scales[0]), Operand(input_values, ctx.scales[1])
        along_outputs, along_tokens = gemms.quantize_gradient(gradients[0].contiguous())
        x_dtype, weight_dtype = ctx.dtypes
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        dx = gemm(along_outputs, weight, dtype=x_dtype, backend=gemms.backend) if needs_input else None
        dw = gemm(along_tokens, tokens, dtype=weight_dtype, backend=gemms.backend) if needs_weight else None
        return dx, dw, None, None, None
