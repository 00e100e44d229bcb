"""The three GEMMs of a linear layer in FP8: forward, gradient of the input, gradient of the weight.

    y  = x  W^T      contracts K (inputs)     x and W quantised along K
    dx = dy W        contracts N (outputs)    dy and W quantised along N
    dW = dy^T x      contracts M (tokens)     dy and x quantised along M

Each operand is quantised from its BF16 source along the dimension that its GEMM contracts, as the recipes demand;
where one scale covers the whole tensor the same codes serve both of its GEMMs. A pass without gradients (log-probs,
the first pass of recomputation) makes the forward's copies only.

The `emulated` backend multiplies the exact code values. Scales that are powers of two go into the operands, which
stay exact in BF16; any other scale is applied to the FP32 result. Accumulation is FP32, in the order of the
device's own GEMM: codes and scales are bit-exact, sums are not claimed to be a tensor core's. The `scaled_mm`
backend hands real FP8 codes to `torch._scaled_mm`.

Left out on purpose: communication (`learner/parallel_linear.py`), and fusing quantisation into neighbouring kernels.

Legend: M tokens, K inputs, N outputs of this rank's shard.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megatron_calclip.precision.quantize import E4M3, Quantized, emulate, quantize
from megatron_calclip.precision.recipes import Recipe
from megatron_calclip.precision.scaling import BlockScaling, DelayedScaling, ReduceAmax, RowScaling, Scaling

Backend = Literal["emulated", "scaled_mm"]
Kind = Literal["input", "weight", "gradient"]

# cuBLAS multiplies FP8 only along contracted dimensions that are multiples of this.
_SCALED_MM_MULTIPLE = 16


@dataclass(frozen=True)
class Operand:
    """One side of a GEMM, its contracted dimension last: values [rows, contracted] and what is still to be multiplied in."""

    values: Tensor
    """Exact codes, or exact codes times their scales; FP8 for scaled_mm."""
    scale: Tensor | None
    """float32 [1, 1] or [rows, 1] inverse scales for the result; None when they are in the values."""

    def times(self, factor: Tensor) -> Operand:
        """The values times powers of two that broadcast to them: exact, in the values' own dtype."""
        return replace(self, values=self.values * factor.to(self.values.dtype))


@dataclass(frozen=True)
class WeightCodes:
    """An FP8 weight [N, K], for one pass or held between steps (`precision.fp8_param`)."""

    forward: Operand
    """Along K."""
    backward: Operand | None
    """Along N, for the input's gradient; None without gradients."""


@contextlib.contextmanager
def _bf16_kernels_for_fp32() -> Iterator[None]:
    """Let CPU matmuls of FP32 tensors multiply in BF16, accumulate in FP32 and return FP32: exact for FP8 code values.

    The setting is the process's: no other thread may multiply meanwhile.
    """
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
        self.channel_outlier: Tensor | None
        self.register_buffer("channel_outlier", None, persistent=False)
        self.first_token_outlier = 1.0
        if recipe.delayed is not None:
            self.input_scaling = recipe.delayed_scaling(E4M3)
            self.weight_scaling = recipe.delayed_scaling(E4M3)
            self.gradient_scaling = recipe.delayed_scaling(recipe.gradient_dtype)

    def scaling(self, kind: Kind) -> Scaling:
        """The rule of an operand."""
        if self.recipe.delayed is not None:
            state: DelayedScaling = getattr(self, f"{kind}_scaling")
            return state
        rules = {"input": self.recipe.activation, "weight": self.recipe.weight, "gradient": self.recipe.gradient}
        rule = rules[kind]
        assert rule is not None
        return rule

    def _reduction(self, dim: int, sharded_dim: int | None) -> ReduceAmax | None:
        """How amaxes are reduced: where tiles cross shards, as one scale a tensor does, and a row that the shard cuts."""
        cut = self.recipe.per_tensor or (isinstance(self.recipe.activation, RowScaling) and dim == sharded_dim)
        return self.reduce_amax if cut and sharded_dim is not None else None

    def _operands(
        self, x: Tensor, kind: Kind, *, sharded_dim: int | None, both: bool
    ) -> tuple[Operand, Operand | None]:
        """Quantise a matrix for the GEMM over its last dimension and, with `both`, for the one over its first.

        Args:
            x: [rows, columns] BF16 or FP32.
            kind: what it is.
            sharded_dim: the dimension that tensor parallelism cuts, -1 or 0; None if it is whole.
            both: whether the second operand is wanted, in which the first dimension becomes the last.
        """
        scaling, dtype = self.scaling(kind), self.recipe.gradient_dtype if kind == "gradient" else E4M3
        same_codes = self.recipe.per_tensor or (kind == "weight" and isinstance(scaling, BlockScaling))
        dims = {dim: self._reduction(dim, sharded_dim) for dim in ((-1, 0) if both and not same_codes else (-1,))}
        # Powers of two go into BF16 values exactly. FP32 scales of blocks vary along the contracted dimension.
        in_values = self.backend == "emulated" and (scaling.power_of_two or isinstance(scaling, BlockScaling))
        quantizer: Callable[..., Quantized] = quantize
        if self.backend == "emulated":
            out_dtype = torch.float32 if in_values and not scaling.power_of_two else torch.bfloat16
            quantizer = functools.partial(emulate, out_dtype=out_dtype, dequantize=in_values)
        results = [quantizer(x, scaling, dtype, dim=dim, reduce_amax=reduce) for dim, reduce in dims.items()]
        values, scales = ([q.codes for q in results], [None if in_values else q.inverse_scale for q in results])
        last = Operand(values[0], scales[0])
        if not both:
            return last, None
        return last, Operand(values[-1].t(), None if scales[-1] is None else scales[-1].t())

    def quantize_weight(self, weight: Tensor, *, both: bool = True) -> WeightCodes:
        """Codes of a weight [N, K]: along K for the forward GEMM and, with `both`, along N for the input's gradient."""
        sharded_dim = -1 if self.input_sharded else 0 if self.output_sharded else None
        factor = self.channel_outlier
        scaled = weight if factor is None else weight / factor.to(weight.dtype)
        forward, backward = self._operands(scaled, "weight", sharded_dim=sharded_dim, both=both)
        if factor is None:
            return WeightCodes(forward, backward)
        return WeightCodes(forward.times(factor), backward and backward.times(factor.t()))

    def quantize_input(
        self, x: Tensor, first_tokens: Tensor | None = None, *, both: bool = True
    ) -> tuple[Operand, Operand | None]:
        """Operands of an input [M, K]: along K for the forward GEMM and, with `both`, along M for the weight's gradient.

        Dialled-in outliers are multiplied in before quantising and divided out of the codes: powers of two, so exact.
        """
        sharded_dim = -1 if self.input_sharded else None
        factor = self._outliers(x, first_tokens)
        if factor is None:
            return self._operands(x, "input", sharded_dim=sharded_dim, both=both)
        forward, backward = self._operands(x * factor, "input", sharded_dim=sharded_dim, both=both)
        return forward.times(1 / factor), backward and backward.times(1 / factor.t())

    def quantize_gradient(self, dy: Tensor) -> tuple[Operand, Operand]:
        """Operands of a gradient [M, N]: along N for the input's gradient, along M for the weight's."""
        sharded_dim = -1 if self.output_sharded else None
        along_outputs, along_tokens = self._operands(dy, "gradient", sharded_dim=sharded_dim, both=True)
        assert along_tokens is not None
        return along_outputs, along_tokens

    def dial_channel(self, channel: int, num_inputs: int, *, device: torch.device) -> None:
        """Multiply one input channel by the recipe's `channel_outlier`, for the quantiser alone."""
        self.channel_outlier = torch.ones(1, num_inputs, device=device)
        self.channel_outlier[:, channel % num_inputs] = self.recipe.emulation.channel_outlier

    def _outliers(self, x: Tensor, first_tokens: Tensor | None) -> Tensor | None:
        """Dialled-in factors that broadcast to an input [M, K], in its dtype; None where nothing is dialled in."""
        factor = None if self.channel_outlier is None else self.channel_outlier.to(x.dtype)
        if first_tokens is None or self.first_token_outlier == 1.0:
            return factor
        rows = torch.ones_like(x[:, :1]).index_fill_(0, first_tokens, self.first_token_outlier)
        return rows if factor is None else rows * factor

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
        rows = x.reshape(-1, x.shape[-1])
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            y: Tensor = _Fp8Linear.apply(rows, weight, self, codes, first_tokens)
        else:
            codes = codes or self.quantize_weight(weight, both=False)
            along_inputs, _ = self.quantize_input(rows, first_tokens, both=False)
            y = gemm(along_inputs, codes.forward, dtype=x.dtype, backend=self.backend)
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
        assert codes.backward is not None and along_tokens is not None
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
