"""Emulated quantisation of a CPU matrix in two loops: amaxes of its tiles, then its rounded codes.

They do what `quantize.quantize` does in torch operations, which is the definition; tests compare the two bit for bit.
Rows are passed on as slices: of these numba knows that no index is negative, and vectorises.

Legend: bits are those of numbers in BF16 (uint16) or FP32 (uint32). An (M, K) matrix has m x k tiles; the last of each
kind may be cut short.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numba import types
from numba.extending import overload
from numpy.typing import NDArray

from megatron_calclip.compiled import compiled

Bits: TypeAlias = NDArray[np.unsignedinteger[Any]]

_SIGN, _MAGNITUDE, _EXPONENT = np.uint32(0x80000000), np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
_NAN = np.uint32(0x7FC00000)


def _widened(bits: np.unsignedinteger[Any]) -> np.uint32:
    """Bits in FP32 of a number in BF16 or FP32. Loops call what numba builds for the type."""
    raise NotImplementedError


@overload(_widened, strict=False)
def _build_widened(bits: Any) -> Callable[..., Any]:
    if bits is types.uint16:
        return lambda bits: np.uint32(np.uint32(bits) << 16)
    return lambda bits: bits


def _store(value: np.uint32, out: Bits, j: int) -> None:
    """A number's bits in FP32, rounded to the format of `out`, ties to even. Loops call what numba builds for the type."""
    raise NotImplementedError


@overload(_store, strict=False)
def _build_store(value: Any, out: Any, j: Any) -> Callable[..., Any]:
    if out.dtype is types.uint16:

        def store(value, out, j):  # type: ignore[no-untyped-def]
            out[j] = np.uint32(value + 0x7FFF + ((value >> 16) & 1)) >> 16

    else:

        def store(value, out, j):  # type: ignore[no-untyped-def]
            out[j] = value

    return store


@compiled
def _amax_of_row(amax: np.int32, bits: Bits) -> np.int32:
    for j in range(len(bits)):
        magnitude = np.int32(_widened(bits[j]) & _MAGNITUDE)
        amax = magnitude if magnitude > amax else amax  # `max` is not vectorised here
    return amax


@compiled
def _amax_of_columns(amax: NDArray[np.int32], bits: Bits) -> None:
    for j in range(len(bits)):
        amax[j] = max(amax[j], np.int32(_widened(bits[j]) & _MAGNITUDE))


@compiled
def amaxes(bits: Bits, tile_rows: int, tile_cols: int, out: NDArray[np.int32]) -> None:
    """Largest magnitude per tile, NaN if it has one: non-negative floats sort like their bits, NaN above infinity.

    Args:
        bits: (M, K).
        tile_rows: rows of a tile.
        tile_cols: columns of a tile.
        out: (m, k) zeros, for the bits of FP32 numbers.
    """
    for i in range(len(bits)):
        amax = out[i // tile_rows]
        if tile_cols == 1:
            _amax_of_columns(amax, bits[i])
        else:
            for tile in range(len(amax)):
                amax[tile] = _amax_of_row(amax[tile], bits[i, tile * tile_cols : (tile + 1) * tile_cols])


@compiled
def _rounded(
    bits: np.uint32, scale: np.float32, factor: np.float32, largest: np.float32, floor: np.uint32, ratio: np.float32
) -> np.uint32:
    """Bits of `factor` times the FP8 value nearest to a number times `scale`, ties to even, saturated; all in FP32.

    Adding a large number and subtracting it again leaves a multiple of the large one's last bit. Here that is the last
    of the 4 (E5M2: 3) leading bits of the scaled number x, because the large number is x's own power of two times the
    ratio of the two formats' precisions; times 1.5, so that x of either sign does not carry it into another binade.
    Below FP8's smallest normal it is constant, so that multiples of FP8's smallest subnormal are left.
    """
    x = np.float32(np.uint32(bits).view(np.float32) * scale)
    x = largest if x > largest else x
    x = -largest if x < -largest else x
    power = max(np.uint32(np.float32(x).view(np.uint32) & _EXPONENT), floor)
    large = np.float32(np.uint32(power).view(np.float32) * ratio)
    code = np.float32(np.float32(x + large) - large)
    product = np.float32(code * factor).view(np.uint32)
    value = np.uint32((product & _MAGNITUDE) | (bits & _SIGN))  # zeros have lost their sign
    # Rounding other NaNs to BF16 could overflow.
    return _NAN if np.uint32(value & _MAGNITUDE) > _EXPONENT else value


@compiled
def _round_row(
    bits: Bits,
    scale: NDArray[np.float32],
    factor: NDArray[np.float32],
    largest: np.float32,
    floor: np.uint32,
    ratio: np.float32,
    out: Bits,
) -> None:
    for j in range(len(bits)):
        _store(_rounded(_widened(bits[j]), scale[j], factor[j], largest, floor, ratio), out, j)


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
    bits: Bits,
    tile_rows: int,
    tile_cols: int,
    scales: NDArray[np.float32],
    factors: NDArray[np.float32],
    largest: np.float32,
    floor: np.uint32,
    ratio: np.float32,
    out: Bits,
) -> None:
    """Codes of a matrix times a factor per tile: 1, or the inverse scale.

    Args:
        bits: (M, K).
        tile_rows: rows of a tile.
        tile_cols: columns of a tile.
        scales: (m, k), multiplied in before rounding.
        factors: (m, k), multiplied in after it.
        largest: FP8's largest value.
        floor: bits of FP8's smallest normal, in FP32.
        ratio: 1.5 times FP8's epsilon over FP32's.
        out: (M, K), for the bits of the results.
    """
    rows, cols = bits.shape
    scale, factor = np.empty(cols, np.float32), np.empty(cols, np.float32)
    for i in range(rows):
        if i % tile_rows == 0:
            _spread(scales[i // tile_rows], tile_cols, scale)
            _spread(factors[i // tile_rows], tile_cols, factor)
        _round_row(bits[i], scale, factor, largest, floor, ratio, out[i])
