"""Emulated quantisation of a CPU matrix in two loops: amaxes of its tiles, then its rounded codes.

They do what `quantize.quantize` does in torch operations, which is the definition; tests compare the two bit for bit.

Legend: an (M, K) matrix has m x k tiles; the last of each kind may be cut short.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_calclip.compiled import Values, bits_of, compiled, from_bits, load, store

_SIGN, _MAGNITUDE, _EXPONENT = np.uint32(0x80000000), np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)


@compiled
def _amax_of_row(amax: np.int32, row: Values) -> np.int32:
    for j in range(len(row)):
        magnitude = np.int32(bits_of(load(row, j)) & _MAGNITUDE)
        amax = magnitude if magnitude > amax else amax  # `max` is not vectorised here
    return amax


@compiled
def amaxes(matrix: Values, tile_rows: int, tile_cols: int, out: NDArray[np.int32]) -> None:
    """Largest magnitude per tile, NaN if it has one: non-negative floats sort like their bits, NaN above infinity.

    Args:
        matrix: (M, K).
        tile_rows: rows of a tile.
        tile_cols: columns of a tile.
        out: (m, k) zeros, for the bits of float32 numbers.
    """
    for i in range(len(matrix)):
        row, amax = matrix[i], out[i // tile_rows]
        if tile_cols == 1:
            for j in range(len(row)):
                amax[j] = max(amax[j], np.int32(bits_of(load(row, j)) & _MAGNITUDE))
        else:
            for tile in range(len(amax)):
                amax[tile] = _amax_of_row(amax[tile], row[tile * tile_cols : (tile + 1) * tile_cols])


@compiled
def _round(
    value: np.float32, scale: np.float32, factor: np.float32, largest: np.float32, floor: np.uint32, ratio: np.float32
) -> np.float32:
    """`factor` times the FP8 value nearest to a number times `scale`, ties to even, saturated; all in float32.

    Adding a large number and subtracting it again leaves a multiple of the large one's last bit. Here that is the last
    of the 4 (E5M2: 3) leading bits of the scaled number x, because the large number is x's own power of two times the
    ratio of the two formats' precisions; times 1.5, so that x of either sign does not carry it into another binade.
    Below FP8's smallest normal it is constant, so that multiples of FP8's smallest subnormal are left.
    """
    x = value * scale
    x = largest if x > largest else x
    x = -largest if x < -largest else x
    large = from_bits(max(np.uint32(bits_of(x) & _EXPONENT), floor)) * ratio
    product = ((x + large) - large) * factor
    return from_bits((bits_of(product) & _MAGNITUDE) | (bits_of(value) & _SIGN))  # zeros have lost their sign


@compiled
def _round_row(
    row: Values,
    scale: NDArray[np.float32],
    factor: NDArray[np.float32],
    largest: np.float32,
    floor: np.uint32,
    ratio: np.float32,
    out: Values,
) -> None:
    for j in range(len(row)):
        store(_round(load(row, j), scale[j], factor[j], largest, floor, ratio), out, j)


@compiled
def _fill(value: np.float32, out: NDArray[np.float32]) -> None:
    for j in range(len(out)):
        out[j] = value


@compiled
def _spread(values: NDArray[np.float32], tile_cols: int, out: NDArray[np.float32]) -> None:
    for tile in range(len(values)):
        if tile_cols == 1:
            out[tile] = values[tile]
        else:
            _fill(values[tile], out[tile * tile_cols : (tile + 1) * tile_cols])


@compiled
def round_to_fp8(
    matrix: Values,
    tile_rows: int,
    tile_cols: int,
    scales: NDArray[np.float32],
    factors: NDArray[np.float32],
    largest: np.float32,
    floor: np.uint32,
    ratio: np.float32,
    out: Values,
) -> None:
    """Codes of a matrix times a factor per tile: 1, or the inverse scale.

    Args:
        matrix: (M, K).
        tile_rows: rows of a tile.
        tile_cols: columns of a tile.
        scales: (m, k), multiplied in before rounding.
        factors: (m, k), multiplied in after it.
        largest: FP8's largest value.
        floor: bits of FP8's smallest normal, in float32.
        ratio: 1.5 times FP8's epsilon over float32's.
        out: (M, K).
    """
    rows, cols = matrix.shape
    scale, factor = np.empty(cols, np.float32), np.empty(cols, np.float32)
    for i in range(rows):
        if i % tile_rows == 0:
            _spread(scales[i // tile_rows], tile_cols, scale)
            _spread(factors[i // tile_rows], tile_cols, factor)
        _round_row(matrix[i], scale, factor, largest, floor, ratio, out[i])
