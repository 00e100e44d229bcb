"""FP8 scales of every recipe, and the codes under them: exact arithmetic, and worked cases."""

import math
from fractions import Fraction
from itertools import product

import pytest
import torch
from fp8_matrices import FORMATS, bits, e8m0, fp32, matrices
from hypothesis import given, settings
from torch import Tensor

from megatron_calclip.precision.quantize import E4M3, quantize
from megatron_calclip.precision.scaling import (
    BlockScaling,
    MXScaling,
    RowScaling,
    Scaling,
    TensorScaling,
)

# The rules themselves, in exact arithmetic


def scale_by_rule(amax: float, largest: float, power_of_two: bool, overflow: float) -> float:
    """TransformerEngine's rule in exact rationals."""
    if not math.isfinite(amax) or amax == 0:
        return 1.0
    scale = fp32(Fraction(largest) / Fraction(amax))
    scale = overflow if math.isinf(scale) else scale
    return 2.0 ** (math.frexp(scale)[1] - 1) if power_of_two else scale


def tiles_of(x: Tensor, tile_rows: int, tile_cols: int) -> dict[tuple[int, int], tuple[slice, slice]]:
    starts = product(range(0, x.shape[0], tile_rows), range(0, x.shape[1], tile_cols))
    return {
        (row // tile_rows, col // tile_cols): (slice(row, row + tile_rows), slice(col, col + tile_cols))
        for row, col in starts
    }


@FORMATS
@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("tile", ["tensor", "1xB", "Bx1", "BxB"])
@given(x=matrices(finite=False))
@settings(max_examples=10)
def test_tensor_and_block_rule(x: Tensor, tile: str, power_of_two: bool, dtype: torch.dtype) -> None:
    """Tile by tile, last tiles cut short, by the rule in exact arithmetic and torch's own cast."""
    largest = torch.finfo(dtype).max
    scaling: Scaling = BlockScaling(16, two_dimensional=tile == "BxB", power_of_two=power_of_two)
    tile_rows, tile_cols = {"1xB": (1, 16), "Bx1": (16, 1), "BxB": (16, 16), "tensor": tuple(x.shape)}[tile]
    overflow = torch.finfo(x.dtype).max
    if tile == "tensor":
        scaling, overflow = TensorScaling(power_of_two), torch.finfo(torch.float32).max
    ours = quantize(x, scaling, dtype, dim=0 if tile == "Bx1" else -1)
    tiles = tiles_of(x, tile_rows, tile_cols)
    assert ours.inverse_scale.numel() == len(tiles)
    for index, where in tiles.items():
        amax = x[where].abs().amax().item()
        scale = torch.tensor(scale_by_rule(amax, largest, power_of_two, overflow), dtype=torch.float32)
        assert ours.inverse_scale[index] == 1 / scale
        codes = (x[where].float() * scale).clamp(-largest, largest).to(dtype)
        assert torch.equal(bits(ours.codes[where]), bits(codes))
    if power_of_two:
        assert torch.all(ours.inverse_scale.view(torch.int32) & 0x3FFFFF == 0)  # 2^-127 has one bit set above


def e8m0_by_rule(amax: float, dtype: torch.dtype) -> int:
    """Smallest e in [0, 254] with fl32(amax * fl32(1 / largest)) <= 2^(e - 127)."""
    if math.isnan(amax):
        return 255
    value = (torch.tensor(amax) * torch.tensor(1 / torch.finfo(dtype).max)).item()
    return next((e for e in range(254) if value <= 2.0 ** (e - 127)), 254)


@FORMATS
@pytest.mark.parametrize("dim", [-1, 0])
@given(x=matrices(finite=False))
@settings(max_examples=15)
def test_mxfp8_rule(x: Tensor, dim: int, dtype: torch.dtype) -> None:
    """Any size, both dimensions; the multiplier is 2^(127 - e), but 1 for e = 0."""
    largest = torch.finfo(dtype).max
    ours = quantize(x, MXScaling(), dtype, dim=dim)
    for index, where in tiles_of(x, *((1, 32) if dim == -1 else (32, 1))).items():
        exponent = e8m0_by_rule(x[where].abs().amax().item(), dtype)
        assert e8m0(ours)[index] == exponent
        scale = math.nan if exponent == 255 else 2.0 ** (127 - exponent) if exponent else 1.0
        codes = (x[where].float() * torch.tensor(scale)).clamp(-largest, largest).to(dtype)
        assert torch.equal(bits(ours.codes[where]), bits(codes))


@pytest.mark.parametrize("ulps", range(-3, 4))
@pytest.mark.parametrize("exponent", [-130, -127, -126, -100, -20, 0, 30, 119])
def test_mxfp8_rounds_up_at_powers_of_two(exponent: int, ulps: int) -> None:
    amax = (torch.tensor(448 * 2.0**exponent).view(torch.int32) + ulps).view(torch.float32)
    assert e8m0(quantize(amax.view(1, 1), MXScaling(), E4M3)).item() == e8m0_by_rule(amax.item(), E4M3)


# Worked by hand


def test_tensorwise_by_hand() -> None:
    """amax 3: scale 448/3 = 149.33; 1 -> 149.33 -> 144 (grid 144, 160); 0.01 -> 1.4933 -> 1.5; -3 -> -448."""
    ours = quantize(torch.tensor([[1.0, 0.01, -3.0]]), TensorScaling(), E4M3)
    assert ours.codes.float().tolist() == [[144.0, 1.5, -448.0]]
    assert ours.inverse_scale.item() == pytest.approx(3 / 448, rel=1e-7)
    assert ours.dequantize().tolist()[0] == pytest.approx([144 * 3 / 448, 1.5 * 3 / 448, -3.0], rel=1e-6)


def test_power_of_two_by_hand() -> None:
    """448/3 = 149.33 rounds down to 128: 1 -> 128, 0.01 -> 1.28 -> 1.25, -3 -> -384."""
    ours = quantize(torch.tensor([[1.0, 0.01, -3.0]]), TensorScaling(power_of_two=True), E4M3)
    assert ours.codes.float().tolist() == [[128.0, 1.25, -384.0]]
    assert ours.inverse_scale.item() == 1 / 128


def test_mxfp8_by_hand() -> None:
    """amax 3: 3/448 = 0.0067 rounds up to 2^-7 (e = 120), so codes are x * 128; amax 4: 2^-6 (e = 121)."""
    ours = quantize(torch.tensor([[1.0, -3.0], [4.0, 0.01]]), MXScaling(), E4M3)
    assert e8m0(ours).tolist() == [[120], [121]]
    assert ours.codes.float().tolist() == [
        [128.0, -384.0],
        [256.0, 0.625],
    ]  # 0.64 -> 0.625 (grid 0.625, 0.6875)


def test_zero_and_non_finite_amax_by_hand() -> None:
    zeros = torch.zeros(2, 4)
    assert quantize(zeros, TensorScaling(), E4M3).inverse_scale.item() == 1
    assert quantize(zeros, BlockScaling(2), E4M3).inverse_scale.tolist() == [[1, 1], [1, 1]]
    assert e8m0(quantize(zeros, MXScaling(), E4M3)).tolist() == [[0], [0]]
    assert quantize(zeros, RowScaling(), E4M3).inverse_scale.tolist() == [[2.0**-48]] * 2  # 448e12 >= 2^48

    infinite = torch.tensor([[math.inf, 500.0, -1.0]])
    current = quantize(infinite, TensorScaling(), E4M3)  # scale 1, saturated
    assert current.inverse_scale.item() == 1 and current.codes.float().tolist() == [[448, 448, -1]]
    assert e8m0(quantize(infinite, MXScaling(), E4M3)).item() == 254
    assert quantize(infinite, RowScaling(), E4M3).dequantize().isnan().all()
    for nan_bits in (0x7FC0, 0xFFC0 - 0x10000):  # of either sign
        nan = torch.tensor([[0x3F80, nan_bits]], dtype=torch.int16).view(torch.bfloat16)
        assert e8m0(quantize(nan, MXScaling(), E4M3)).item() == 255
        current = quantize(nan, TensorScaling(), E4M3).codes.float()  # scale 1
        assert current[0, 0] == 1 and current[0, 1].isnan()


def test_subnormal_amax_by_hand() -> None:
    """448 / 2^-130 exceeds FP32: the scale is FP32's largest number, or BF16's for blocks of BF16."""
    tiny = torch.tensor([[2.0**-130]])
    fp32_max, bf16_max = torch.finfo(torch.float32).max, torch.finfo(torch.bfloat16).max
    f32_blocks = BlockScaling(power_of_two=False)
    assert quantize(tiny, TensorScaling(), E4M3).inverse_scale == 1 / torch.tensor(fp32_max)
    assert quantize(tiny.bfloat16(), f32_blocks, E4M3).inverse_scale == 1 / torch.tensor(bf16_max)
    # Powers of two: 2^127 either way; 2^-130 * 2^127 = 0.125, an E4M3 number.
    block = quantize(tiny.bfloat16(), BlockScaling(), E4M3)
    assert block.inverse_scale.item() == 2.0**-127 and block.codes.float().item() == 0.125
