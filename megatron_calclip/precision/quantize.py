"""FP8 codes of a matrix under given scales, bit for bit: as FP8, and as numbers that a CPU multiplies fast.

Every element is multiplied by its tile's scale (`scaling.py`) in FP32, rounded to nearest even on the FP8 grid, and
saturated. Between the amaxes and the scales there is a seam, where tensor parallelism max-reduces the amaxes.

`quantize` makes real FP8 tensors, for FP8 GEMMs, storage and comparison with other systems. `emulate` makes the code
values in BF16, which holds every E4M3 and E5M2 value exactly, several times faster on a CPU, where casts from FP8 are
slow: for emulated training. Both agree bit for bit.

Left out on purpose: stochastic rounding, scale layouts of single GEMM kernels, and autograd (`linear.py` says what is
quantised when).

Legend: a tensor (..., K) is treated as the matrix (M, K), leading dimensions flattened. It has m x k tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_calclip.precision.scaling import FP32_MANTISSA_BITS, ReduceAmax, Scaling

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

# Two buffers of this size and a band's result stay in a core's L2 cache; smaller ones cost more calls.
CHUNK_BYTES = 1 << 19
_INTEGERS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
_EXPONENT_BITS = {torch.bfloat16: 0x7F80, torch.float32: 0x7F800000}


@dataclass(frozen=True)
class Quantized:
    """Codes and the factors that undo the scaling: the tensor is about codes * inverse_scale."""

    codes: Tensor
    """(..., K): FP8 from `quantize`; numbers in BF16 or FP32 from `emulate`."""
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


@torch.no_grad()
def emulate(
    x: Tensor,
    scaling: Scaling,
    dtype: torch.dtype,
    dims: Mapping[int, ReduceAmax | None],
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    dequantize: bool = False,
) -> list[Quantized]:
    """`quantize` for one or both dimensions in one pass over `x`, with codes that are numbers in `out_dtype`.

    Eager torch reads and writes every intermediate, so memory traffic decides the speed: the matrix is worked
    through in bands of rows that stay in cache, all dimensions at once.

    Args:
        x: (..., K) BF16 or FP32.
        scaling: the recipe's rule.
        dtype: `E4M3` or `E5M2`.
        dims: dimensions that GEMMs contract (see `quantize`), each with the reduction of its amaxes or None.
        out_dtype: BF16 or FP32, of the results.
        dequantize: multiply codes by their inverse scales: for scales that vary along the contracted dimension.
            What is left as inverse scale is 1.

    Returns:
        One result for each of `dims`, in their order.

    Raises:
        ValueError: as `quantize`; and for BF16 products with scales that are no powers of two, which would be rounded
            a second time.
    """
    if dequantize and out_dtype is torch.bfloat16 and not scaling.power_of_two:
        raise ValueError("BF16 cannot hold codes times such a scale; pass out_dtype=torch.float32")
    tilings = [_Tiles.of(x, scaling, dim) for dim in dims]
    shape = max(t.padded_shape[0] for t in tilings), max(t.padded_shape[1] for t in tilings)
    matrix = tilings[0].pad(x, shape)
    rows_apart = max(t.rows_apart for t in tilings)
    in_source_dtype = dequantize and scaling.power_of_two  # see _Emulation
    chunk = CHUNK_BYTES // (x.dtype if in_source_dtype else torch.float32).itemsize
    band = shape[0] if x.is_cuda else max(chunk // (rows_apart * shape[1]), 1) * rows_apart
    buffers = torch.empty(2, min(band, shape[0]) * shape[1], device=x.device)
    magnitudes = buffers.view(x.dtype).flatten()
    amax_bits = [
        [tiles.amax_bits(torch.abs(part, out=magnitudes[: part.numel()].view(part.shape))) for tiles in tilings]
        for part in matrix.split(band)
    ]
    emulations = []
    for tiles, reduce_amax, bits in zip(tilings, dims.values(), zip(*amax_bits, strict=True), strict=True):
        amax = tiles.join_amaxes(bits, x.dtype)
        amax = amax if reduce_amax is None else reduce_amax(amax)
        emulations.append(_Emulation(tiles, amax, scaling, dtype, matrix, dequantize=dequantize))

    results = [torch.empty_like(matrix, dtype=out_dtype) for _ in dims]
    for start in range(0, shape[0], band):
        for emulation, result in zip(emulations, results, strict=True):
            emulation.round(matrix[start : start + band], start, out=result[start : start + band], buffers=buffers)
    return [emulation.result(result, x.shape) for emulation, result in zip(emulations, results, strict=True)]


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
        """The same for a band of rows, which may cut tiles that reach from top to bottom; as integers in memory of their own."""
        # Non-negative floats sort like their bits, NaN above infinity, and integers reduce much faster.
        bits = magnitude.view(_INTEGERS[magnitude.dtype])
        tile_rows = len(bits) if self.grid[0] == 1 else self.tile[0]
        if tile_rows > 1:
            bits = bits.view(-1, tile_rows, bits.shape[1]).amax(1)
        if self.tile[1] > 1:
            bits = bits.view(len(bits), -1, self.tile[1]).amax(2)
        return bits.clone() if tile_rows == self.tile[1] == 1 else bits

    def join_amaxes(self, bits: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """float32 amaxes from the `amax_bits` of all bands; `dtype` is that of the matrix."""
        joined = torch.cat(list(bits))
        if self.grid[0] == 1:
            joined = joined.amax(0, keepdim=True)
        return joined.view(dtype).float()


def _round_to_grid(x: Tensor, dtype: torch.dtype, *, floor: Tensor, out: Tensor, scratch: Tensor) -> None:
    """Rounds FP32 or BF16 numbers to the nearest FP8 value, ties to even, by additions in their own dtype.

    Adding a large number and subtracting it again leaves a multiple of the large one's last bit. Here that is the last
    of the 4 (E5M2: 3) leading bits of x, because the large number is x's own power of two times the ratio of the two
    formats' precisions; times 1.5, so that x of either sign does not carry it into another binade. Below FP8's smallest
    normal it is constant, so that multiples of FP8's smallest subnormal are left. BF16 sums are FP32 sums, rounded; in
    FP32 those of BF16 numbers are exact wherever they come near a tie.

    Args:
        x: codes, or codes times powers of two; magnitudes not above FP8's largest.
        dtype: FP8 format.
        floor: bits of FP8's smallest normal times the same powers of two, as integers of x's size; broadcasts to x.
        out: for the result, but for the sign of zeros; may be `x`.
        scratch: like `x`.
    """
    integers = _INTEGERS[x.dtype]
    bits = scratch.view(integers)
    torch.bitwise_and(x.view(integers), _EXPONENT_BITS[x.dtype], out=bits)
    torch.maximum(bits, floor, out=bits)
    ratio = 1.5 * torch.finfo(dtype).eps / torch.finfo(x.dtype).eps
    torch.add(x, scratch, alpha=ratio, out=out).sub_(scratch, alpha=ratio)


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
        self.saturates = source.is_cuda or not (amax * self.scale).max().item() <= fp8.max * (1 + 2**-8)
        # Powers of two need not be multiplied in and out again: they only move the place where subnormals begin.
        self.rescales = self.saturates or not (dequantize and scaling.power_of_two and _is_moderate(self.scale))
        self.work_dtype = torch.float32 if self.rescales else source.dtype
        floor = fp8.smallest_normal / (torch.ones_like(self.scale[:1, :1]) if self.rescales else self.scale)
        self.floor = floor.to(self.work_dtype).view(_INTEGERS[self.work_dtype])

    def round(self, source: Tensor, start: int, *, out: Tensor, buffers: Tensor) -> None:
        """Codes, or their products with the inverse scales, of a band of rows.

        Args:
            source: the band.
            start: its first row.
            out: for the result, BF16 or FP32.
            buffers: (2, at least the band's elements) float32, overwritten.
        """
        tiles, largest = self.tiles, torch.finfo(self.dtype).max
        spare, scratch = (t.view(self.work_dtype)[: source.numel()].view(source.shape) for t in buffers)
        rounded = out if out.dtype is self.work_dtype else spare
        x = tiles.cut(source)
        target = tiles.cut(rounded)
        first = start // tiles.rows_apart

        def of_band(values: Tensor) -> Tensor:
            return (values if len(values) == 1 else values[first : first + len(x)])[:, None, :, None]

        if self.rescales:
            rounded.copy_(source)
            x = target.mul_(of_band(self.scale))
        if self.saturates:
            x.clamp_(-largest, largest)
        _round_to_grid(x, self.dtype, floor=of_band(self.floor), out=target, scratch=tiles.cut(scratch))
        if self.rescales and self.dequantize:
            target.mul_(of_band(self.inverse))
        if rounded is not out:
            out.copy_(rounded)
        out.copysign_(source)  # zeros have lost theirs

    def result(self, values: Tensor, shape: torch.Size) -> Quantized:
        """All rounded bands together, without the padding."""
        tiles, values = self.tiles, self.tiles.crop(values).reshape(shape)
        if self.dequantize:
            return Quantized(values, torch.ones_like(self.inverse[:1, :1]), (tiles.rows, tiles.cols))
        return Quantized(values, self.inverse[: tiles.grid[0], : tiles.grid[1]], tiles.tile)


def _is_moderate(scale: Tensor) -> bool:
    """Whether numbers that such scales bring into FP8's range are far from both ends of FP32's; not for NaN."""
    smallest, largest = scale.aminmax()
    return bool((smallest >= 2.0**-64) & (largest <= 2.0**64))
