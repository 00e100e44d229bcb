"""Emulated quantisation of a CPU matrix in two loops: amaxes of its tiles, then its rounded codes.

They do what `quantize.quantize` does in torch operations, which is the definition; tests compare the two bit for bit.

Legend: an (M, K) matrix has m x k tiles; the last of each kind may be cut short.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_calclip.compiled import Values, bits_of, compiled, from_bits, load, store, unsigned

_SIGN, _MAGNITUDE, _EXPONENT = np.uint32(0x80000000), np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)


@compiled
def amaxes(matrix: Values, tile_rows: int, tile_cols: int, out: NDArray[np.int32]) -> None:
    """Largest magnitude per tile, NaN if it has one: non-negative floats sort like their bits, NaN above infinity.

    Args:
        matrix: (M, K).
        tile_rows: rows of a tile.
        tile_cols: columns of a tile.
        out: (m, k) zeros, for the bits of float32 numbers.
    """
    rows, cols = unsigned(matrix.shape[0]), unsigned(matrix.shape[1])
    height, width = unsigned(tile_rows), unsigned(tile_cols)
    for i in range(rows):
        if tile_cols == 1:
            for j in range(cols):
                magnitude = np.int32(bits_of(load(matrix, (i, j))) & _MAGNITUDE)
                out[i // height, j] = max(out[i // height, j], magnitude)
        else:
            for tile in range(unsigned(out.shape[1])):
                amax = out[i // height, tile]
                for j in range(tile * width, min((tile + unsigned(1)) * width, cols)):
                    magnitude = np.int32(bits_of(load(matrix, (i, j))) & _MAGNITUDE)
                    amax = magnitude if magnitude > amax else amax  # `max` is not vectorised here
                out[i // height, tile] = amax


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
    rows, cols = unsigned(matrix.shape[0]), unsigned(matrix.shape[1])
    height, width = unsigned(tile_rows), unsigned(tile_cols)
    for i in range(rows):
        if tile_cols == 1:
            for j in range(cols):
                scale, factor = scales[i // height, j], factors[i // height, j]
                store(_round(load(matrix, (i, j)), scale, factor, largest, floor, ratio), out, (i, j))
        else:
            for tile in range(unsigned(scales.shape[1])):
                scale, factor = scales[i // height, tile], factors[i // height, tile]
                for j in range(tile * width, min((tile + unsigned(1)) * width, cols)):
                    store(_round(load(matrix, (i, j)), scale, factor, largest, floor, ratio), out, (i, j))
