"""Loops over single elements as machine code, for CPU tensors: one way to write and compile them, with numba.

Eager torch reads and writes memory for every operation of a chain; a compiled loop does so once for all of them. It is
worth having where a definition in plain torch operations exists, runs on every device, and is what tests compare the
loop with.

NumPy has no BF16: loops get such a tensor as the bits of its numbers (uint16, see `memory_of`), read elements with
`load` and write them with `store`, whatever the dtype, and compute in float32. Indices are unsigned (`unsigned`): a
negative one would count from the end, and asking whether one does keeps a loop from being vectorised.

Left out on purpose: threads of its own (a rank has one, see `learner/runtime.py`), and devices, which have their
libraries' kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import numba
import numpy as np
import torch
from numba import types
from numba.extending import overload
from numpy.typing import NDArray

Loop = TypeVar("Loop", bound=Callable[..., Any])
Values: TypeAlias = NDArray[Any]
"""float32, or uint16 for BF16."""

_MAGNITUDE, _INFINITY, _NAN = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000), np.uint32(0x7FC00000)


def compiled(loop: Loop, *, reassociate: bool = False) -> Loop:
    """Compile `loop` at its first call; the machine code is kept on disk for the processes that follow.

    It takes NumPy arrays and scalars. Floating-point operations are those written down, in their order, but for sums
    with `reassociate`, which no vector instruction could do otherwise.
    """
    fastmath: Any = {"reassoc"} if reassociate else False
    try:
        return cast(Loop, numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=fastmath)(loop))
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return cast(Loop, numba.njit(nogil=True, error_model="numpy", fastmath=fastmath)(loop))


def memory_of(tensor: torch.Tensor) -> Values:
    """The memory of a CPU tensor as an array: changes of one show in the other. BF16 is seen as uint16."""
    tensor = tensor.detach()
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def load(values: Values, index: Any) -> np.float32:
    """An element, inside a compiled loop."""
    raise NotImplementedError("only compiled loops call this")


def rounded(value: np.float32, values: Values) -> np.float32:
    """The number as `values` would hold it, ties to even, inside a compiled loop."""
    raise NotImplementedError("only compiled loops call this")


def store(value: np.float32, values: Values, index: Any) -> None:
    """Round a number into an element, inside a compiled loop."""
    raise NotImplementedError("only compiled loops call this")


@compiled
def unsigned(number: int) -> np.uintp:
    """A size or an index. Arithmetic of it with a signed one would be done in float64."""
    return np.uintp(number)


@compiled
def bits_of(value: np.float32) -> np.uint32:
    """The bits of a number."""
    return np.float32(value).view(np.uint32)


@compiled
def from_bits(bits: np.uint32) -> np.float32:
    """The number that has these bits."""
    return np.uint32(bits).view(np.float32)


@compiled
def _from_bf16(bits: np.uint16) -> np.float32:
    return from_bits(np.uint32(np.uint32(bits) << 16))


@compiled
def _to_bf16(value: np.float32) -> np.uint16:
    bits = bits_of(value)
    # Rounding carries into the exponent, and would carry some NaNs beyond the sign.
    bits = _NAN if np.uint32(bits & _MAGNITUDE) > _INFINITY else bits
    return np.uint16(np.uint32(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


# What numba builds for arrays of either dtype.


@overload(load, strict=False)
def _build_load(values: Any, index: Any) -> Callable[..., Any]:
    if values.dtype is types.uint16:
        return lambda values, index: _from_bf16(values[index])
    return lambda values, index: values[index]


@overload(rounded, strict=False)
def _build_rounded(value: Any, values: Any) -> Callable[..., Any]:
    if values.dtype is types.uint16:
        return lambda value, values: _from_bf16(_to_bf16(value))
    return lambda value, values: value


@overload(store, strict=False)
def _build_store(value: Any, values: Any, index: Any) -> Callable[..., Any]:
    if values.dtype is types.uint16:

        def store_bf16(value, values, index):  # type: ignore[no-untyped-def]
            values[index] = _to_bf16(value)

        return store_bf16

    def store_fp32(value, values, index):  # type: ignore[no-untyped-def]
        values[index] = value

    return store_fp32
