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
    return _emulate(x, scaling, dtype, {dim: reduce_amax}, out_dtype, dequantize=False)[0]


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
    _check_exact(scaling, out_dtype)
    return _emulate(x, scaling, dtype, {dim: reduce_amax}, out_dtype, dequantize=True)[0].codes


def fake_quantize_both(
    x: Tensor,
    scaling: Scaling,
    dtype: torch.dtype,
    *,
    reduce_amax: tuple[ReduceAmax | None, ReduceAmax | None] = (None, None),
    out_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Quantized, Quantized]:
    """`fake_quantize` for dim -1 and for dim 0, in one pass over `x`."""
    dims = dict(zip((-1, 0), reduce_amax, strict=True))
    last, first = _emulate(x, scaling, dtype, dims, out_dtype, dequantize=False)
    return last, first


def quantize_dequantize_both(
    x: Tensor,
    scaling: Scaling,
    dtype: torch.dtype,
    *,
    reduce_amax: tuple[ReduceAmax | None, ReduceAmax | None] = (None, None),
    out_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """`quantize_dequantize` for dim -1 and for dim 0, in one pass over `x`."""
    _check_exact(scaling, out_dtype)
    dims = dict(zip((-1, 0), reduce_amax, strict=True))
    last, first = _emulate(x, scaling, dtype, dims, out_dtype, dequantize=True)
    return last.codes, first.codes


def _check_exact(scaling: Scaling, out_dtype: torch.dtype) -> None:
    if out_dtype is torch.bfloat16 and not scaling.power_of_two:
        raise ValueError("BF16 cannot hold codes times such a scale; pass out_dtype=torch.float32")


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

    @property
    def padded_shape(self) -> tuple[int, int]:
        """Rows and columns of whole tiles."""
        return self.grid[0] * self.tile[0], self.grid[1] * self.tile[1]

    @property
    def rows_apart(self) -> int:
        """The matrix can be worked through in bands of a multiple of this many rows: 1 if tiles reach from top to bottom."""
        return self.tile[0] if self.grid[0] > 1 else 1

    def pad(self, x: Tensor, shape: tuple[int, int] | None = None) -> Tensor:
        """`x` as a contiguous matrix of whole tiles, or of a larger shape."""
        matrix = x.reshape(self.rows, self.cols)
        rows, cols = shape or self.padded_shape
        if (rows, cols) != matrix.shape:
            return nn.functional.pad(matrix, (0, cols - self.cols, 0, rows - self.rows))
        return matrix.contiguous()

    def crop(self, matrix: Tensor) -> Tensor:
        """Takes the padding off."""
        return matrix[: self.rows, : self.cols]

    def cut(self, band: Tensor) -> Tensor:
        """A band of rows as (tiles down, rows, tiles across, columns); one row a tile where tiles reach from top to bottom."""
        return band.view(-1, self.rows_apart, band.shape[1] // self.tile[1], self.tile[1])

    def amax(self, magnitude: Tensor) -> Tensor:
        """Largest element per tile of a padded, non-negative matrix, NaN if it has one: (m, k) float32."""
        return self.join_amaxes([self.amax_bits(magnitude)], magnitude.dtype)

    def amax_bits(self, magnitude: Tensor) -> Tensor:
        """The same for a band of rows, which may cut tiles that reach from top to bottom; as integers."""
        # Non-negative floats sort like their bits, NaN above infinity, and integers reduce much faster.
        bits = magnitude.view(torch.int16 if magnitude.dtype is torch.bfloat16 else torch.int32)
        tile_rows = len(bits) if self.grid[0] == 1 else self.tile[0]
        if tile_rows > 1:
            bits = bits.view(-1, tile_rows, bits.shape[1]).amax(1)
        if self.tile[1] > 1:
            bits = bits.view(len(bits), -1, self.tile[1]).amax(2)
        return bits

    def join_amaxes(self, bits: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """float32 amaxes from the `amax_bits` of all bands; `dtype` is that of the matrix."""
        joined = torch.cat(list(bits))
        if self.grid[0] == 1:
            joined = joined.amax(0, keepdim=True)
        return joined.view(dtype).float()


def _round_to_grid(
    magnitude: Tensor, dtype: torch.dtype, *, floor: Tensor | float, out: Tensor, scratch: Tensor
) -> None:
    """Rounds non-negative FP32 numbers to the nearest FP8 value, ties to even.

    Subtracting and adding back a number 2^20 times as large (E5M2: 2^21) leaves the leading 4 (3) bits of
    the smaller one, rounded by FP32 arithmetic itself. Below FP8's smallest normal the large number is
    constant, so that a multiple of FP8's smallest subnormal is left. Subtracting comes first: just below
    powers of two a sum would carry into the next binade and lose one bit more.

    Args:
        magnitude: codes, or codes times powers of two; not above FP8's largest.
        dtype: FP8 format.
        floor: a number in the binade of FP8's smallest normal, times the same powers of two.
        out: for the result; may be `magnitude`.
        scratch: another FP32 tensor of that size.
    """
    ratio = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
    torch.clamp(magnitude, min=floor, out=scratch)
    torch.sub(magnitude, scratch, alpha=ratio, out=out).add_(scratch, alpha=ratio)


class _Emulation:
    """One tensor's emulated quantisation along one dimension, band by band: scales first, then codes.

    Args:
        tiles: how the matrix is cut.
        amax: (m, k) float32.
        scaling: its rule.
        dtype: FP8 format.
        source: a tensor of the dtype and on the device of the matrix.
        dequantize: whether codes are multiplied by their inverse scales.
    """

    def __init__(
        self, tiles: _Tiles, amax: Tensor, scaling: Scaling, dtype: torch.dtype, source: Tensor, *, dequantize: bool
    ) -> None:
        self.tiles, self.dtype, self.dequantize = tiles, dtype, dequantize
        self.scale, self.inverse = scaling.scales(amax, dtype, source=source.dtype)
        fp8 = torch.finfo(dtype)
        # Only a stale (delayed) scale or a non-finite amax saturates. On a GPU asking would stall the stream.
        self.saturates = source.is_cuda or not bool((amax * self.scale <= fp8.max * (1 + 2**-8)).all())
        # Powers of two need not be multiplied in and out again: they only move the place where subnormals begin.
        self.rescales = self.saturates or not (dequantize and scaling.power_of_two and _is_moderate(self.scale))
        one = torch.ones_like(self.scale)
        self.floor = 1.5 * fp8.smallest_normal / (one if self.rescales else self.scale)

    def round(self, magnitude: Tensor, start: int, *, out: Tensor, scratch: Tensor) -> None:
        """Codes, or their products with the inverse scales, of a band of rows that begins with row `start`: all FP32."""
        magnitude, out, scratch = (self.tiles.cut(t) for t in (magnitude, out, scratch))
        first = start // self.tiles.rows_apart
        scale, inverse, floor = (
            (t if len(t) == 1 else t[first : first + len(magnitude)])[:, None, :, None]
            for t in (self.scale, self.inverse, self.floor)
        )
        if self.rescales:
            magnitude = torch.mul(magnitude, scale, out=out)
        if self.saturates:
            magnitude.clamp_(max=torch.finfo(self.dtype).max)
        _round_to_grid(magnitude, self.dtype, floor=floor, out=out, scratch=scratch)
        if self.rescales and self.dequantize:
            out.mul_(inverse)


def _is_moderate(scale: Tensor) -> bool:
    """Whether numbers that such scales bring into FP8's range are far from both ends of FP32's; not for NaN."""
    smallest, largest = scale.aminmax()
    return bool((smallest >= 2.0**-64) & (largest <= 2.0**64))


@torch.no_grad()
def _emulate(
    x: Tensor,
    scaling: Scaling,
    dtype: torch.dtype,
    dims: dict[int, ReduceAmax | None],
    out_dtype: torch.dtype,
    *,
    dequantize: bool,
) -> list[Quantized]:
    """Code values, or with `dequantize` their products with the inverse scales, in `out_dtype`, for each of `dims`.

    Eager torch reads and writes every intermediate, so memory traffic decides the speed: the matrix is worked
    through in bands of rows that stay in cache, all dimensions at once. Signs are restored last, which keeps those
    of zeros too.
    """
    tilings = [_Tiles.of(x, scaling, dim) for dim in dims]
    shape = max(t.padded_shape[0] for t in tilings), max(t.padded_shape[1] for t in tilings)
    matrix = tilings[0].pad(x, shape)
    rows_apart = max(t.rows_apart for t in tilings)
    band = shape[0] if x.is_cuda else max(CHUNK_NUMEL // (rows_apart * shape[1]), 1) * rows_apart
    amax_bits = [[t.amax_bits(magnitude) for t in tilings] for magnitude in (b.abs() for b in matrix.split(band))]
    emulations = []
    for tiles, reduce_amax, bits in zip(tilings, dims.values(), zip(*amax_bits, strict=True), strict=True):
        amax = tiles.join_amaxes(bits, x.dtype)
        amax = amax if reduce_amax is None else reduce_amax(amax)
        emulations.append(_Emulation(tiles, amax, scaling, dtype, matrix, dequantize=dequantize))

    results = [torch.empty_like(matrix, dtype=out_dtype) for _ in dims]
    buffers = torch.empty(3, min(band, shape[0]), shape[1], device=x.device)
    for start in range(0, shape[0], band):
        signed = matrix[start : start + band]
        magnitude, rounded, scratch = buffers[:, : len(signed)]
        magnitude.copy_(signed.abs())
        for emulation, result in zip(emulations, results, strict=True):
            emulation.round(magnitude, start, out=rounded, scratch=scratch)
            result[start : start + band].copy_(rounded).copysign_(signed)
    return [
        Quantized(t.crop(r).reshape(x.shape), e.inverse[: t.grid[0], : t.grid[1]], t.tile)
        for t, e, r in zip(tilings, emulations, results, strict=True)
    ]
