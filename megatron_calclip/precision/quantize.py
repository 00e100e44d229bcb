"""FP8 quantisers of every recipe: which elements share a scale, the scale, and the codes, bit for bit.

A quantiser is two steps with a seam between them. A `Scaling` cuts a matrix into tiles and turns the largest
magnitude (amax) of each tile into its scale; then every element is multiplied by its tile's scale in FP32,
rounded to nearest even on the FP8 grid, and saturated. Tensor parallelism max-reduces the amax at the seam.

The codes come in two forms. `quantize` makes real FP8 tensors, for FP8 GEMMs, storage and comparison with
other systems. `fake_quantize` makes the code values in BF16, which holds every E4M3 and E5M2 value exactly,
several times faster on a CPU, where casts from FP8 are slow: for emulated training. Both agree bit for bit.

Rules: TransformerEngine 2.x (`recipe_common.cuh`, `delayed_scaling.cu`, `ptx.cuh`) for per-tensor, delayed,
blockwise and MXFP8 scaling; torchao 0.18 (`float8_utils.py`) for rowwise scaling.

Left out on purpose: stochastic rounding, TransformerEngine's lower bound on amax (by default it has none),
scale layouts of single GEMM kernels, and autograd (`linear.py` says what is quantised when).

Legend: a tensor (..., K) is treated as the matrix (M, K), leading dimensions flattened. It has m x k tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

ReduceAmax = Callable[[Tensor], Tensor]
"""Maps this rank's amaxes (float32, any shape) to the group's: a max all-reduce that returns its result."""

FP32_MAX = torch.finfo(torch.float32).max
FP32_MANTISSA_BITS = 23
FP32_MANTISSA_MASK = (1 << FP32_MANTISSA_BITS) - 1
E8M0_BIAS = 127
E8M0_NAN = 255
TWO_TO_MINUS_127 = 1 << 22  # bits of that FP32 number, a subnormal
TORCHAO_EPS = 1e-12  # torchao's lower bound on a row's amax
_ROUNDING_FLOOR = 1.5  # well inside the binade of FP8's smallest normal, see `_round_to_grid_`
CHUNK_NUMEL = 1 << 16  # two FP32 buffers of this size (512 KiB) stay in a core's L2 cache


class Scaling(Protocol):
    """Which elements share a scale, and how an amax becomes one."""

    @property
    def power_of_two(self) -> bool:
        """Whether every scale is a power of two, so that dequantised codes are exact in BF16."""
        ...

    def tile(self, rows: int, cols: int, *, dim: int) -> tuple[int, int]:
        """Rows and columns of a tile, in a (rows, cols) matrix of which a GEMM contracts `dim`, -1 or 0."""
        ...

    def scales(self, amax: Tensor, dtype: torch.dtype, *, source: torch.dtype) -> tuple[Tensor, Tensor]:
        """Scales and inverse scales, both (m, k) float32.

        Args:
            amax: (m, k) float32, largest magnitude per tile.
            dtype: FP8 format of the codes.
            source: dtype of the tensor that is quantised.
        """
        ...


def _scale_from_amax(amax: Tensor, largest: float, *, power_of_two: bool = False, overflow: float = FP32_MAX) -> Tensor:
    """largest / amax, or 1 where amax is 0, infinite or NaN (TransformerEngine's `compute_scale_from_amax`).

    `power_of_two` clears the mantissa, which rounds down; `overflow` stands in for a scale beyond FP32.
    """
    # A tensor numerator: torch computes number / tensor as number * reciprocal, often 1 ulp off.
    scale = torch.div(torch.full_like(amax, largest), amax)
    scale = torch.where(torch.isinf(scale), overflow, scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & ~FP32_MANTISSA_MASK).view(torch.float32)
    return torch.where(torch.isfinite(amax) & (amax > 0), scale, 1.0)


def _e8m0_from_amax(amax: Tensor, largest: float) -> Tensor:
    """Biased exponents of amax / largest rounded UP to a power of two (TransformerEngine's `float_to_e8m0`).

    They are int32: 0..254, or 255 where amax is NaN.
    """
    bits = (amax * (1.0 / largest)).view(torch.int32)
    # Any mantissa bit carries into the exponent, except in subnormals, where 0 stands for 2^-127.
    exponent = (bits + FP32_MANTISSA_MASK) >> FP32_MANTISSA_BITS
    exponent = torch.where(bits <= TWO_TO_MINUS_127, 0, exponent)
    return torch.where(torch.isnan(amax), E8M0_NAN, exponent.clamp(max=2 * E8M0_BIAS))


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float32 for int32 exponents in [-127, 127], built from bits: exact on every device."""
    bits = (exponent + E8M0_BIAS) << FP32_MANTISSA_BITS
    return torch.where(exponent == -E8M0_BIAS, TWO_TO_MINUS_127, bits).view(torch.float32)


@dataclass(frozen=True)
class TensorScaling:
    """One scale per tensor from its present amax (TransformerEngine's Float8CurrentScaling)."""

    power_of_two: bool = False

    def tile(self, rows: int, cols: int, *, dim: int) -> tuple[int, int]:
        """The whole matrix."""
        return rows, cols

    def scales(self, amax: Tensor, dtype: torch.dtype, *, source: torch.dtype) -> tuple[Tensor, Tensor]:
        """See `_scale_from_amax`."""
        scale = _scale_from_amax(amax, torch.finfo(dtype).max, power_of_two=self.power_of_two)
        return scale, scale.reciprocal()


@dataclass(frozen=True)
class RowScaling:
    """One scale per vector along the contracted dimension (torchao's rowwise recipe).

    An infinite or NaN amax is not hidden: its vector dequantises to NaN, as in torchao.
    """

    power_of_two: bool = True

    def tile(self, rows: int, cols: int, *, dim: int) -> tuple[int, int]:
        """A row for `dim=-1`, a column for `dim=0`."""
        return (1, cols) if dim == -1 else (rows, 1)

    def scales(self, amax: Tensor, dtype: torch.dtype, *, source: torch.dtype) -> tuple[Tensor, Tensor]:
        """Largest code / amax, then rounded down to a power of two.

        torchao divides in float64 and rounds to FP32, which gives the FP32 quotient.
        """
        scale = torch.div(torch.full_like(amax, torch.finfo(dtype).max), amax.clamp(min=TORCHAO_EPS))
        if self.power_of_two:
            # No mantissa mask: torchao's logarithm lifts a scale some ulp below a power of two up to it.
            scale = torch.exp2(torch.floor(torch.log2(scale)))
        return scale, scale.reciprocal()


@dataclass(frozen=True)
class BlockScaling:
    """One scale per block of B (TransformerEngine's Float8BlockScaling).

    1 x B for activations and gradients, B x B (`two_dimensional`) for weights. TransformerEngine wants sizes
    that are multiples of B; here the last block may be smaller, as if padded with zeros.
    """

    block_size: int = 128
    two_dimensional: bool = False
    power_of_two: bool = True

    def tile(self, rows: int, cols: int, *, dim: int) -> tuple[int, int]:
        """B x B, or a vector of B along the contracted dimension."""
        if self.two_dimensional:
            return self.block_size, self.block_size
        return (1, self.block_size) if dim == -1 else (self.block_size, 1)

    def scales(self, amax: Tensor, dtype: torch.dtype, *, source: torch.dtype) -> tuple[Tensor, Tensor]:
        """See `_scale_from_amax`; a scale beyond FP32 becomes the largest number of the source's dtype."""
        largest, overflow = torch.finfo(dtype).max, torch.finfo(source).max
        scale = _scale_from_amax(amax, largest, power_of_two=self.power_of_two, overflow=overflow)
        return scale, scale.reciprocal()


@dataclass(frozen=True)
class MXScaling:
    """One E8M0 scale per 32 elements of the contracted dimension (TransformerEngine's MXFP8BlockScaling).

    The last block may be shorter, as if padded with zeros.
    """

    block_size: int = 32
    power_of_two: Literal[True] = True

    def tile(self, rows: int, cols: int, *, dim: int) -> tuple[int, int]:
        """A vector along the contracted dimension."""
        return (1, self.block_size) if dim == -1 else (self.block_size, 1)

    def scales(self, amax: Tensor, dtype: torch.dtype, *, source: torch.dtype) -> tuple[Tensor, Tensor]:
        """2^(127 - e) and 2^(e - 127) for the biased exponent e of `_e8m0_from_amax`.

        Exponent 0 multiplies by 1, as in TransformerEngine's `exp2f_rcp` and torchao: a block whose amax is
        at most 448 * 2^-127 becomes zeros.
        """
        exponent = _e8m0_from_amax(amax, torch.finfo(dtype).max)
        scale = torch.where(exponent == 0, 1.0, _power_of_two(E8M0_BIAS - exponent))
        inverse = _power_of_two(exponent - E8M0_BIAS)
        is_nan = exponent == E8M0_NAN
        return scale.masked_fill(is_nan, torch.nan), inverse.masked_fill(is_nan, torch.nan)


class DelayedScaling(nn.Module):
    """One scale per tensor from the amaxes of earlier steps (TransformerEngine's DelayedScaling).

    Quantising takes the scale as it stands and records the tensor's amax; `update_delayed_scaling` ends a
    step. One object is one tensor's state: two buffers, saved and moved with the module that owns it.

    Args:
        dtype: FP8 format that the scale is for.
        history_length: number of steps whose amaxes are kept, this one included.
        amax_compute_algo: `max` of the history, or the `most_recent` amax.
        margin: the scale is 2^-margin of what would map amax to the largest code.

    Raises:
        ValueError: for a history that holds nothing or an unknown algorithm.
    """

    power_of_two: Literal[False] = False
    amax_history: Tensor
    """(history_length,) float32; slot 0 accumulates this step's amax."""
    scale: Tensor
    """() float32, 1 before the first update."""

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        history_length: int = 1024,
        amax_compute_algo: Literal["max", "most_recent"] = "max",
        margin: int = 0,
    ) -> None:
        super().__init__()
        if history_length < 1:
            raise ValueError(f"history_length is {history_length}; it must be at least 1")
        if amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(f"amax_compute_algo is {amax_compute_algo!r}; choose max or most_recent")
        self.amax_compute_algo = amax_compute_algo
        self.largest = torch.finfo(dtype).max * 2.0**-margin
        self.register_buffer("amax_history", torch.zeros(history_length))
        self.register_buffer("scale", torch.ones(()))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DelayedScaling:
        """Moves the buffers but keeps them FP32: `model.bfloat16()` must not round a scale."""
        self.amax_history = self.amax_history.to(fn(self.amax_history).device)
        self.scale = self.scale.to(fn(self.scale).device)
        return self

    def tile(self, rows: int, cols: int, *, dim: int) -> tuple[int, int]:
        """The whole matrix."""
        return rows, cols

    def scales(self, amax: Tensor, dtype: torch.dtype, *, source: torch.dtype) -> tuple[Tensor, Tensor]:
        """Records `amax` and returns the scale of earlier steps."""
        self.amax_history[0] = torch.maximum(self.amax_history[0], amax.view(()))
        scale = self.scale.expand_as(amax)
        return scale, scale.reciprocal()

    def _update(self) -> None:
        """See `update_delayed_scaling`."""
        recorded = self.amax_history[0] != 0
        amax = self.amax_history.amax() if self.amax_compute_algo == "max" else self.amax_history[0]
        usable = recorded & torch.isfinite(amax) & (amax > 0)
        self.scale.copy_(torch.where(usable, _scale_from_amax(amax, self.largest), self.scale))
        rolled = self.amax_history.roll(-1)
        rolled[0] = 0
        self.amax_history.copy_(torch.where(recorded, rolled, self.amax_history))


@torch.no_grad()
def update_delayed_scaling(states: Sequence[DelayedScaling], *, reduce_amax: ReduceAmax | None = None) -> None:
    """Ends a step of delayed scaling: reduces the amaxes of all tensors at once, then updates every scale.

    The new scale is largest / amax; an amax that is 0, infinite or NaN keeps the old one. Then the history
    rolls. A tensor that recorded nothing keeps both. TransformerEngine does this when the outermost autocast
    exits with gradients enabled (inputs, weights), and after the backward pass (gradients).

    Args:
        states: the tensors' states, in the same order on every rank of the group.
        reduce_amax: max-reduces (len(states),) amaxes over a process group; None without one.
    """
    if reduce_amax is not None and states:
        reduced = reduce_amax(torch.stack([state.amax_history[0] for state in states]))
        for state, amax in zip(states, reduced, strict=True):
            state.amax_history[0] = amax
    for state in states:
        state._update()


@dataclass(frozen=True)
class Quantized:
    """Codes and the factors that undo the scaling: the tensor is about codes * inverse_scale."""

    codes: Tensor
    """(..., K): FP8 from `quantize`; the same values as BF16 or FP32 from `fake_quantize`."""
    inverse_scale: Tensor
    """(m, k) float32, one per tile; where it is 1 x 1, M x 1 or 1 x K it broadcasts as it is."""
    tile: tuple[int, int]
    """Rows and columns of a tile."""

    @property
    def e8m0(self) -> Tensor:
        """(m, k) uint8, the inverse scales as E8M0 bytes, for scales that are powers of two."""
        return (self.inverse_scale.view(torch.int32) >> FP32_MANTISSA_BITS).to(torch.uint8)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """codes * inverse_scale, multiplied in FP32: (..., K) in `dtype`."""
        matrix = self.codes.reshape(-1, self.codes.shape[-1])
        inverse = self.inverse_scale
        for axis, size in enumerate(self.tile):
            if inverse.shape[axis] > 1:
                inverse = inverse.repeat_interleave(size, axis).narrow(axis, 0, matrix.shape[axis])
        return (matrix.float() * inverse).to(dtype).view(self.codes.shape)


@torch.no_grad()
def quantize(
    x: Tensor, scaling: Scaling, dtype: torch.dtype, *, dim: int = -1, reduce_amax: ReduceAmax | None = None
) -> Quantized:
    """Quantises to real FP8 codes.

    Args:
        x: (..., K) BF16 or FP32.
        scaling: the recipe's rule.
        dtype: `E4M3` or `E5M2`.
        dim: dimension that the GEMM contracts: -1, or 0 for the leading dimensions together.
        reduce_amax: max-reduces the (m, k) amaxes over a process group; None without one.

    Raises:
        ValueError: for another dtype of `x` or another dimension.
    """
    tiles = _Tiles.of(x, scaling, dim)
    matrix = tiles.pad(x)
    amax = tiles.amax(matrix.abs())
    scale, inverse = scaling.scales(amax if reduce_amax is None else reduce_amax(amax), dtype, source=x.dtype)
    largest = torch.finfo(dtype).max
    # Clamped first: not every torch version and device saturates in casts to FP8.
    tiled = matrix.float().view(tiles.grid[0], tiles.tile[0], tiles.grid[1], tiles.tile[1])
    codes = (tiled * scale[:, None, :, None]).clamp_(-largest, largest).to(dtype).view(matrix.shape)
    return Quantized(tiles.crop(codes).reshape(x.shape), inverse, tiles.tile)


def fake_quantize(
    x: Tensor,
    scaling: Scaling,
    dtype: torch.dtype,
    *,
    dim: int = -1,
    reduce_amax: ReduceAmax | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Quantized:
    """`quantize` with the same code values in `out_dtype` (BF16 or FP32) instead of FP8."""
    return _emulate(x, scaling, dtype, dim, reduce_amax, out_dtype, dequantize=False)


def quantize_dequantize(
    x: Tensor,
    scaling: Scaling,
    dtype: torch.dtype,
    *,
    dim: int = -1,
    reduce_amax: ReduceAmax | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """`quantize(...).dequantize(out_dtype)` in one go, for scales that vary along the contracted dimension.

    Raises:
        ValueError: for BF16 results of scales that are no powers of two: they would be rounded a second time.
    """
    if out_dtype is torch.bfloat16 and not scaling.power_of_two:
        raise ValueError("BF16 cannot hold codes times such a scale; pass out_dtype=torch.float32")
    return _emulate(x, scaling, dtype, dim, reduce_amax, out_dtype, dequantize=True).codes


@dataclass(frozen=True)
class _Tiles:
    """How a (rows, cols) matrix is cut. Zeros fill it up to whole tiles, and to one tile if it is empty."""

    rows: int
    cols: int
    tile: tuple[int, int]
    grid: tuple[int, int]

    @classmethod
    def of(cls, x: Tensor, scaling: Scaling, dim: int) -> _Tiles:
        """Checks the arguments that all quantisers share."""
        if x.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"cannot quantise {x.dtype}; convert it to BF16 or FP32 first")
        if dim not in (-1, 0):
            raise ValueError(f"dim is {dim}; choose -1, or 0 for the leading dimensions")
        cols = x.shape[-1]
        rows = x.numel() // max(cols, 1)
        tile_rows, tile_cols = (max(size, 1) for size in scaling.tile(rows, cols, dim=dim))
        grid = max(-(-rows // tile_rows), 1), max(-(-cols // tile_cols), 1)
        return cls(rows, cols, (tile_rows, tile_cols), grid)

    def pad(self, x: Tensor) -> Tensor:
        """`x` as a contiguous matrix of whole tiles."""
        missing_rows = self.grid[0] * self.tile[0] - self.rows
        missing_cols = self.grid[1] * self.tile[1] - self.cols
        matrix = x.reshape(self.rows, self.cols)
        if missing_rows or missing_cols:
            return nn.functional.pad(matrix, (0, missing_cols, 0, missing_rows))
        return matrix.contiguous()

    def crop(self, matrix: Tensor) -> Tensor:
        """Takes the padding off."""
        return matrix[: self.rows, : self.cols]

    def amax(self, magnitude: Tensor) -> Tensor:
        """Largest element per tile of a padded, non-negative matrix, NaN if it has one: (m, k) float32."""
        # Non-negative floats sort like their bits, NaN above infinity, and integers reduce much faster.
        bits = magnitude.view(torch.int16 if magnitude.dtype is torch.bfloat16 else torch.int32)
        if self.tile[0] > 1:
            bits = bits.view(self.grid[0], self.tile[0], -1).amax(1)
        if self.tile[1] > 1:
            bits = bits.view(*self.grid, self.tile[1]).amax(2)
        return bits.view(magnitude.dtype).float()


def _round_to_grid_(magnitude: Tensor, scratch: Tensor, dtype: torch.dtype, *, floor: Tensor | float) -> None:
    """Rounds non-negative FP32 numbers to the nearest FP8 value, ties to even, in place.

    Subtracting and adding back a number 2^20 times as large (E5M2: 2^21) leaves the leading 4 (3) bits of
    the smaller one, rounded by FP32 arithmetic itself. Below FP8's smallest normal the large number is
    constant, so that a multiple of FP8's smallest subnormal is left. Subtracting comes first: just below
    powers of two a sum would carry into the next binade and lose one bit more.

    Args:
        magnitude: codes, or codes times a power of two; not above FP8's largest.
        scratch: as large.
        dtype: FP8 format.
        floor: `_ROUNDING_FLOOR` times FP8's smallest normal, times the same power of two.
    """
    ratio = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
    large = torch.clamp(magnitude, min=floor, out=scratch)
    magnitude.sub_(large, alpha=ratio).add_(large, alpha=ratio)


@torch.no_grad()
def _emulate(
    x: Tensor,
    scaling: Scaling,
    dtype: torch.dtype,
    dim: int,
    reduce_amax: ReduceAmax | None,
    out_dtype: torch.dtype,
    *,
    dequantize: bool,
) -> Quantized:
    """Code values, or with `dequantize` their products with the inverse scales, in `out_dtype`.

    Eager torch reads and writes every intermediate, so memory traffic decides the speed: the matrix is worked
    through in bands of rows that stay in cache. Signs are restored last, which keeps those of zeros too.
    """
    tiles = _Tiles.of(x, scaling, dim)
    signed = tiles.pad(x)
    magnitude = signed.abs()
    amax = tiles.amax(magnitude)
    scale, inverse = scaling.scales(amax if reduce_amax is None else reduce_amax(amax), dtype, source=x.dtype)
    fp8 = torch.finfo(dtype)
    # Only a stale (delayed) scale or a non-finite amax saturates. On a GPU asking would stall the stream.
    saturates = x.is_cuda or not bool((amax * scale <= fp8.max * (1 + 2**-8)).all())
    # Powers of two need not be multiplied in and out again: they only move the place where subnormals begin.
    in_place = dequantize and scaling.power_of_two and not saturates and _is_moderate(scale)
    floor = _ROUNDING_FLOOR * fp8.smallest_normal / (scale if in_place else torch.ones_like(scale))

    out = magnitude if out_dtype is x.dtype else torch.empty_like(magnitude, dtype=out_dtype)
    tile_rows = tiles.tile[0]
    per_tile: tuple[Tensor, ...] = (scale, inverse, floor)
    if tiles.grid[0] == 1:  # as many tiles of one row that share their scales, so that it can be cut anywhere
        tile_rows, per_tile = 1, tuple(t.expand(len(magnitude), -1) for t in per_tile)
    per_element = (t.view(-1, tile_rows, tiles.grid[1], tiles.tile[1]) for t in (magnitude, out, signed))
    operands = [*per_element, *(t[:, None, :, None] for t in per_tile)]
    num_bands = 1 if x.is_cuda else -(-magnitude.numel() // CHUNK_NUMEL)
    bands = [t.split(-(-len(t) // num_bands)) for t in operands]
    work_buffer = torch.empty_like(bands[0][0], dtype=torch.float32)
    scratch_buffer = torch.empty_like(work_buffer)
    for source, target, signs, factor, divisor, smallest in zip(*bands, strict=True):
        work, scratch = work_buffer[: len(source)], scratch_buffer[: len(source)]
        work.copy_(source)
        if not in_place:
            work.mul_(factor)
        if saturates:
            work.clamp_(max=fp8.max)
        _round_to_grid_(work, scratch, dtype, floor=smallest)
        if dequantize and not in_place:
            work.mul_(divisor)
        target.copy_(work).copysign_(signs)
    return Quantized(tiles.crop(out).reshape(x.shape), inverse, tiles.tile)


def _is_moderate(scale: Tensor) -> bool:
    """Whether numbers that such scales bring into FP8's range are far from both ends of FP32's; not for NaN."""
    smallest, largest = scale.aminmax()
    return bool((smallest >= 2.0**-64) & (largest <= 2.0**64))
