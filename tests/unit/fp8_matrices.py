"""Matrices and comparisons that the tests of FP8 codes and scales share. Fixtures only."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from megatron_calclip.precision.quantize import E4M3, E5M2, Quantized
from megatron_calclip.precision.scaling import (
    BlockScaling,
    MXScaling,
    RowScaling,
    Scaling,
    TensorScaling,
)


def e8m0(quantized: Quantized) -> Tensor:
    """(m, k) uint8, the inverse scales, powers of two, as E8M0 bytes: the exponent field of FP32."""
    return (quantized.inverse_scale.view(torch.int32) >> 23).to(torch.uint8)


FORMATS = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
EVERY_SCALING: list[Scaling] = [
    TensorScaling(),
    TensorScaling(power_of_two=True),
    RowScaling(),
    RowScaling(power_of_two=False),
    BlockScaling(block_size=16),
    BlockScaling(block_size=16, power_of_two=False),
    BlockScaling(block_size=16, two_dimensional=True),
    MXScaling(),
]
SPECIAL = [0.0, -0.0, 1e-45, -3e-39, 1.17e-38, 2.6e-36, 1e-12, 448.0, 464.0, -57344.0, 3.3e38, -3.4028e38]
NON_FINITE = [math.inf, -math.inf, math.nan]


@st.composite
def matrices(draw: st.DrawFn, *, rows: int | None = None, cols: int | None = None, finite: bool = True) -> Tensor:
    """BF16 or FP32 matrices: normal, log-normal, outliers, tiny, huge, zero rows, special values put in."""
    rows = rows or draw(st.integers(1, 40))
    cols = cols or draw(st.integers(1, 70))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    x = torch.randn(rows, cols, generator=generator)
    kind = draw(st.sampled_from(["normal", "log-normal", "outlier", "wide"]))
    if kind == "log-normal":
        x = x.sign() * (3 * torch.randn(rows, cols, generator=generator)).exp()
    elif kind == "outlier":
        x[:, draw(st.integers(0, cols - 1))] *= 1000
    elif kind == "wide":  # every row of another magnitude
        x *= torch.exp2(40 * torch.randn(rows, 1, generator=generator))
    x *= 2.0 ** draw(st.sampled_from([0, 0, 0, -20, -100, -126, -140, 20, 100]))
    values = SPECIAL if finite else SPECIAL + NON_FINITE
    for value in draw(st.lists(st.sampled_from(values), max_size=4)):
        x[draw(st.integers(0, rows - 1)), draw(st.integers(0, cols - 1))] = value
    if draw(st.booleans()):
        x[draw(st.integers(0, rows - 1))] = 0
    x = x.clamp(-3.4e38, 3.4e38) if finite else x
    return x.to(draw(st.sampled_from([torch.bfloat16, torch.float32]))).nan_to_num() if finite else x


def bits(x: Tensor) -> Tensor:
    """Codes as bytes; NaNs of either sign are one."""
    codes = x.view(torch.uint8)
    return torch.where(x.float().isnan(), 255, codes)


def same(left: Tensor, right: Tensor) -> bool:
    """Equal with NaN = NaN and -0 != 0."""
    nan = left.isnan()
    equal = left.eq(right) & left.signbit().eq(right.signbit())
    return torch.equal(nan, right.isnan()) and bool((equal | nan).all())


def fp32(value: Fraction) -> float:
    """The nearest FP32 number: quotients of FP32 numbers lie too far from ties for float64 to matter."""
    return torch.tensor(float(value), dtype=torch.float64).float().item()
