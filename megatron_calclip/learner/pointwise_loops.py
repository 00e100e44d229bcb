"""RMSNorm and SwiGLU of `pointwise` for CPU tensors, compiled: each row goes through the whole chain while it is in cache.

Rows are float32 or BF16 (see `compiled`), all arithmetic is float32.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from megatron_calclip.compiled import Values, bits_of, compiled, from_bits, load, rounded, store

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
def _sum_of_squares(x: Values) -> np.float32:
    total = np.float32(0)
    for j in range(len(x)):
        value = load(x, j)
        total += value * value
    return total


@functools.partial(compiled, reassociate=True)
def _sum_of_products(a: Values, b: Values, c: FP32) -> np.float32:
    total = np.float32(0)
    for j in range(len(c)):
        total += load(a, j) * load(b, j) * c[j]
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
    for i in range(len(x)):
        row, result = x[i], out[i]
        r = _ONE / np.sqrt(_sum_of_squares(row) / size + eps)
        scale[i] = r
        for j in range(len(row)):
            store(load(row, j) * r * weight[j], result, j)


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
    for i in range(len(x)):
        row, g, result, r = x[i], grad[i], grad_x[i], scale[i]
        factor = r * r * _sum_of_products(g, row, weight) / size
        for j in range(len(weight)):
            value, upstream = load(row, j), load(g, j)
            grad_weight[j] += upstream * value * r
            store((upstream * weight[j] - value * factor) * r, result, j)


@compiled
def swiglu(x: Values, out: Values) -> None:
    """Forward. As by torch's two operations, silu is rounded before the product.

    Args:
        x: [t, 2 f].
        out: [t, f].
    """
    size = out.shape[1]
    for i in range(len(x)):
        gate, up, result = x[i, :size], x[i, size:], out[i]
        for j in range(len(result)):
            a = load(gate, j)
            store(rounded(a / (_ONE + _exp(-a)), result) * load(up, j), result, j)


@compiled
def swiglu_backward(x: Values, grad: Values, grad_x: Values) -> None:
    """Backward, with the roundings of torch's operations.

    Args:
        x: [t, 2 f].
        grad: [t, f], of the result.
        grad_x: [t, 2 f].
    """
    size = grad.shape[1]
    for i in range(len(x)):
        gate, up, g, grad_gate, grad_up = x[i, :size], x[i, size:], grad[i], grad_x[i, :size], grad_x[i, size:]
        for j in range(len(g)):
            a, upstream = load(gate, j), load(g, j)
            sigmoid = _ONE / (_ONE + _exp(-a))
            store(upstream * rounded(a * sigmoid, g), grad_up, j)
            store(rounded(upstream * load(up, j), g) * (sigmoid * (_ONE + a * (_ONE - sigmoid))), grad_gate, j)
