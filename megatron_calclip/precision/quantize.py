"""FP8 codes of a matrix under given scales, bit for bit: as FP8, and as numbers that a CPU multiplies fast.

Every element is multiplied by its tile's scale (`scaling.py`) in FP32, rounded to nearest even on the FP8 grid, and
saturated. Between the amaxes and the scales there is a seam, where tensor parallelism max-reduces the amaxes.

`quantize` makes real FP8 tensors, for FP8 GEMMs, storage and comparison with other systems. `emulate` makes the code
values in BF16, which holds every E4M3 and E5M2 value exactly, for emulated training: on a CPU, where casts from FP8 are
slow, by compiled loops (`kernels.py`). Both agree bit for bit.

Left out on purpose: stochastic rounding, scale layouts of single GEMM kernels, and autograd (`linear.py` says what is
quantised when).

Legend: a tensor (..., K) is treated as the matrix (M, K), leading dimensions flattened. It has m x k tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from megatron_calclip.compiled import memory_of
from megatron_calclip.precision import kernels
from megatron_calclip.precision.scaling import ReduceAmax, Scaling

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2


@dataclass(frozen=True)
class Quantized:
    """Codes and the factors that undo the scaling: the tensor is about codes * inverse_scale."""

    codes: Tensor
    """(..., K): FP8 from `quantize`; numbers in BF16 or FP32 from `emulate`."""
    inverse_scale: Tensor
    """(m, k) float32, one per tile; where it is 1 x 1, M x 1 or 1 x K it broadcasts as it is."""
    tile: tuple[int, int]
    """Rows and columns of a tile."""

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
    tiled = tiles.cut(x)
    amax = tiled.abs().amax((1, 3)).float()
    scale, inverse = scaling.scales(amax if reduce_amax is None else reduce_amax(amax), dtype, source=x.dtype)
    largest = torch.finfo(dtype).max
    # Clamped first: not every torch version and device saturates in casts to FP8.
    codes = (tiled.float() * scale[:, None, :, None]).clamp_(-largest, largest).to(dtype)
    return Quantized(tiles.join(codes).reshape(x.shape), inverse, tiles.tile)


@torch.no_grad()
def emulate(
    x: Tensor,
    scaling: Scaling,
    dtype: torch.dtype,
    *,
    dim: int = -1,
    reduce_amax: ReduceAmax | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    dequantize: bool = False,
) -> Quantized:
    """`quantize` with codes that are numbers in `out_dtype`.

    Args:
        x: (..., K) BF16 or FP32.
        scaling: the recipe's rule.
        dtype: `E4M3` or `E5M2`.
        dim: see `quantize`.
        reduce_amax: see `quantize`.
        out_dtype: BF16 or FP32, of the result.
        dequantize: multiply codes by their inverse scales: for scales that vary along the contracted dimension.
            What is left as inverse scale is 1.

    Raises:
        ValueError: as `quantize`; and for BF16 products with scales that are no powers of two, which would be rounded
            a second time.
    """
    if dequantize and out_dtype is torch.bfloat16 and not scaling.power_of_two:
        raise ValueError("BF16 cannot hold codes times such a scale; pass out_dtype=torch.float32")
    if x.device.type == "cpu":
        quantized = _emulate_on_cpu(x, scaling, dtype, dim, reduce_amax, out_dtype=out_dtype, dequantize=dequantize)
    else:
        quantized = quantize(x, scaling, dtype, dim=dim, reduce_amax=reduce_amax)
        values = quantized.dequantize(out_dtype) if dequantize else quantized.codes.to(out_dtype)
        quantized = replace(quantized, codes=values)
    if dequantize:
        whole = x.numel() // max(x.shape[-1], 1), x.shape[-1]
        return Quantized(quantized.codes, torch.ones_like(quantized.inverse_scale[:1, :1]), whole)
    return quantized


def _emulate_on_cpu(
    x: Tensor,
    scaling: Scaling,
    dtype: torch.dtype,
    dim: int,
    reduce_amax: ReduceAmax | None,
    *,
    out_dtype: torch.dtype,
    dequantize: bool,
) -> Quantized:
    """See `emulate`; the inverse scales are returned also where they are multiplied in."""
    tiles = _Tiles.of(x, scaling, dim)
    matrix, out = x.reshape(tiles.shape).contiguous(), torch.empty(tiles.shape, dtype=out_dtype)
    amax = torch.zeros(tiles.grid)
    kernels.amaxes(memory_of(matrix), *tiles.tile, memory_of(amax.view(torch.int32)))
    scale, inverse = scaling.scales(amax if reduce_amax is None else reduce_amax(amax), dtype, source=x.dtype)
    factor = inverse if dequantize else torch.ones_like(inverse)
    fp8 = torch.finfo(dtype)
    kernels.round_to_fp8(
        memory_of(matrix),
        *tiles.tile,
        memory_of(scale.contiguous()),
        memory_of(factor.contiguous()),
        np.float32(fp8.max),
        np.float32(fp8.smallest_normal).view(np.uint32),
        np.float32(1.5 * fp8.eps / torch.finfo(torch.float32).eps),
        memory_of(out),
    )
    return Quantized(out.view(x.shape), inverse, tiles.tile)


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
    def shape(self) -> tuple[int, int]:
        """Of the matrix."""
        return self.rows, self.cols

    def cut(self, x: Tensor) -> Tensor:
        """A tensor of the matrix's elements as (tiles down, rows, tiles across, columns), zeros for what is missing."""
        (tiles_down, tiles_across), (tile_rows, tile_cols) = self.grid, self.tile
        padding = (0, tiles_across * tile_cols - self.cols, 0, tiles_down * tile_rows - self.rows)
        padded = nn.functional.pad(x.reshape(self.shape), padding)
        return padded.view(tiles_down, tile_rows, tiles_across, tile_cols)

    def join(self, tiled: Tensor) -> Tensor:
        """The matrix that `cut` has cut."""
        return tiled.flatten(2).flatten(0, 1)[: self.rows, : self.cols]
