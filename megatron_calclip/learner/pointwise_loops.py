"""RMSNorm and SwiGLU of `pointwise` for CPU tensors, compiled: each row goes through the whole chain while it is in cache.

Rows are float32 or BF16 (see `compiled`), all arithmetic is float32.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from megatron_calclip.compiled import Values, bits_of, compiled, from_bits, load, rounded, store, unsigned

FP32 = NDArray[np.float32]

_ONE, _ONE_BITS = np.float32(1), np.uint32(0x3F800000)
# A number added to it is rounded to an integer, in the last bits of the sum.
_TO_INTEGER = np.float32(1.5 * 2**23)
# e^x for |x| below this is finite and normal; the sigmoid is 0 or 1 to all of float32's digits well before.
_LARGEST_EXPONENT = np.float32(87)
# Of Cephes' expf: 1 / ln 2; ln 2 in two parts, of which the first times a small integer is exact; and the polynomial P
# in e^r = 1 + r + r^2 P(r) for |r| <= ln 2 / 2.
_LOG2E, _LN2_HIGH, _LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
_P0, _P1, _P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_P3, _P4, _P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


@compiled
def _exp(x: np.float32) -> np.float32:
    """e^x to about 1 ulp for |x| up to `_LARGEST_EXPONENT`, and that of the nearest such number beyond; 1/0 never."""
    x = _LARGEST_EXPONENT if x > _LARGEST_EXPONENT else x
    x = -_LARGEST_EXPONENT if x < -_LARGEST_EXPONENT else x
    shifted = x * _LOG2E + _TO_INTEGER
    n = shifted - _TO_INTEGER
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
    power_of_two = from_bits(np.uint32(np.uint32(bits_of(shifted) << 23) + _ONE_BITS))
    return (p * r * r + r + _ONE) * power_of_two


@functools.partial(compiled, reassociate=True)
def _sum_of_squares(x: Values, row: int) -> np.float32:
    total = np.float32(0)
    for j in range(unsigned(x.shape[1])):
        value = load(x, (row, j))
        total += value * value
    return total


@functools.partial(compiled, reassociate=True)
def _sum_of_products(a: Values, b: Values, c: FP32, row: int) -> np.float32:
    total = np.float32(0)
    for j in range(unsigned(len(c))):
        total += load(a, (row, j)) * load(b, (row, j)) * c[j]
    return total


@compiled
def rms_norm(x: Values, weight: FP32, eps: np.float32, out: Values, scale: FP32) -> None:
    """Forward.

    Args:
        x: [t, h].
        weight: [h].
        eps: added to the mean square.
        out: [t, h].
        scale: [t], for 1 / root mean square.
    """
    size = np.float32(x.shape[1])
    for i in range(unsigned(x.shape[0])):
        r = _ONE / np.sqrt(_sum_of_squares(x, i) / size + eps)
        scale[i] = r
        for j in range(unsigned(x.shape[1])):
            store(load(x, (i, j)) * r * weight[j], out, (i, j))


@compiled
def rms_norm_backward(x: Values, weight: FP32, scale: FP32, grad: Values, grad_x: Values, grad_weight: FP32) -> None:
    """Backward.

    Args:
        x: [t, h].
        weight: [h].
        scale: [t], of the forward pass.
        grad: [t, h], of the result.
        grad_x: [t, h].
        grad_weight: [h], is added to.
    """
    size = np.float32(x.shape[1])
    for i in range(unsigned(x.shape[0])):
        r = scale[i]
        factor = r * r * _sum_of_products(grad, x, weight, i) / size
        for j in range(unsigned(x.shape[1])):
            value, upstream = load(x, (i, j)), load(grad, (i, j))
            grad_weight[j] += upstream * value * r
            store((upstream * weight[j] - value * factor) * r, grad_x, (i, j))


@compiled
def swiglu(x: Values, out: Values) -> None:
    """Forward. As by torch's two operations, silu is rounded before the product.

    Args:
        x: [t, 2 f].
        out: [t, f].
    """
    size = unsigned(out.shape[1])
    for i in range(unsigned(out.shape[0])):
        for j in range(size):
            a, b = load(x, (i, j)), load(x, (i, size + j))
            store(rounded(a / (_ONE + _exp(-a)), out) * b, out, (i, j))


@compiled
def swiglu_backward(x: Values, grad: Values, grad_x: Values) -> None:
    """Backward, with the roundings of torch's operations.

    Args:
        x: [t, 2 f].
        grad: [t, f], of the result.
        grad_x: [t, 2 f].
    """
    size = unsigned(grad.shape[1])
    for i in range(unsigned(grad.shape[0])):
        for j in range(size):
            a, b, upstream = load(x, (i, j)), load(x, (i, size + j)), load(grad, (i, j))
            sigmoid = _ONE / (_ONE + _exp(-a))
            grad_a = rounded(upstream * b, grad) * (sigmoid * (_ONE + a * (_ONE - sigmoid)))
            store(grad_a, grad_x, (i, j))
            store(upstream * rounded(a * sigmoid, grad), grad_x, (i, size + j))
