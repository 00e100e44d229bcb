"""FP8 codes against torchao (where its rule is the same) and torch's own cast; emulated codes against real ones."""

import math
from itertools import product

import pytest
import torch
from fp8_matrices import EVERY_SCALING, FORMATS, bits, e8m0, matrices, same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from megatron_calclip.precision.quantize import E4M3, E5M2, Quantized, emulate, quantize
from megatron_calclip.precision.scaling import (
    BlockScaling,
    DelayedScaling,
    MXScaling,
    RowScaling,
    Scaling,
    TensorScaling,
)


def torchao_codes(x: Tensor, dtype: torch.dtype, dim: int | None, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """torchao's scale and codes: tensorwise for `dim=None`, else rowwise along `dim`."""
    granularity = ScalingGranularity.TENSORWISE if dim is None else ScalingGranularity.AXISWISE
    scale = tensor_to_scale(
        x, dtype, scaling_granularity=granularity, axiswise_dim=dim, round_scales_to_power_of_2=power_of_two
    )
    return to_fp8_saturated(x.float() * scale, dtype), scale.reciprocal()


# torchao as the oracle


@FORMATS
@given(x=matrices(finite=False), dim=st.sampled_from([-1, 0]), power_of_two=st.booleans())
@settings(max_examples=60)
def test_rowwise_is_torchao(x: Tensor, dim: int, power_of_two: bool, dtype: torch.dtype) -> None:
    """Also for infinite and NaN inputs, where torchao's scale is 0 or NaN."""
    ours = quantize(x, RowScaling(power_of_two=power_of_two), dtype, dim=dim)
    codes, inverse = torchao_codes(x, dtype, dim, power_of_two)
    assert torch.equal(bits(ours.codes), bits(codes))
    assert same(ours.inverse_scale, inverse)


@FORMATS
@pytest.mark.parametrize("exponent", range(-40, 41, 8))
def test_rowwise_is_torchao_near_powers_of_two(exponent: int, dtype: torch.dtype) -> None:
    """Scales some ulp below a power of two, where torchao's logarithm and a mantissa mask differ."""
    amax = torch.tensor(torch.finfo(dtype).max * 2.0**exponent).view(torch.int32)
    x = (amax + torch.arange(-20, 21, dtype=torch.int32)).view(torch.float32)[:, None]
    ours = quantize(x, RowScaling(), dtype)
    codes, inverse = torchao_codes(x, dtype, -1, True)
    assert torch.equal(bits(ours.codes), bits(codes)) and torch.equal(ours.inverse_scale, inverse)


@FORMATS
@given(x=matrices(), power_of_two=st.booleans())
@settings(max_examples=60)
def test_tensorwise_is_torchao(x: Tensor, power_of_two: bool, dtype: torch.dtype) -> None:
    """Where torchao's lower bound of 1e-12 on amax does not act, which TransformerEngine does not have."""
    if x.abs().max() < 1e-12:
        x = x + 1
    ours = quantize(x, TensorScaling(power_of_two=power_of_two), dtype)
    codes, inverse = torchao_codes(x, dtype, None, power_of_two)
    ratio = torch.finfo(dtype).max / x.abs().max().double().item()
    if power_of_two and math.frexp(ratio)[0] > 1 - 2**-16:
        return  # torchao's logarithm, see above: here TransformerEngine's mask is the rule
    assert torch.equal(bits(ours.codes), bits(codes))
    assert torch.equal(ours.inverse_scale.view(()), inverse)


@FORMATS
@given(x=matrices(cols=64, finite=False))
@settings(max_examples=60)
def test_mxfp8_is_torchao_rceil(x: Tensor, dtype: torch.dtype) -> None:
    ours = quantize(x, MXScaling(), dtype)
    scale, codes = to_mx(x, dtype, 32, ScaleCalculationMode.RCEIL)
    # torchao takes an FP32 logarithm, which may miss that an amax is some ulp above a power of two.
    amax = x.view(len(x), 2, 32).abs().amax(-1).double() / torch.finfo(dtype).max
    mantissa = torch.frexp(amax)[0]
    exact = (mantissa <= 0.5) | (mantissa > 0.5 + 2**-16) | mantissa.isnan()
    assert torch.equal(e8m0(ours)[exact], scale.view(torch.uint8)[exact])
    exact = exact.repeat_interleave(32, 1)
    assert torch.equal(bits(ours.codes)[exact], bits(codes)[exact])


# Rounding and the fast path


def assert_rounding_is_the_cast(x: Tensor, dtype: torch.dtype) -> None:
    """At scale 1: of delayed scaling, which begins with it, and where the largest number is the largest code."""
    largest = torch.finfo(dtype).max
    emulated = emulate(x.view(1, -1), DelayedScaling(dtype), dtype)
    assert same(emulated.codes.float().flatten(), x.float().clamp(-largest, largest).to(dtype).float())
    x = torch.cat([x[x.abs() <= largest], x.new_tensor([largest])])
    scaling = TensorScaling(power_of_two=True)
    emulated = emulate(x.view(1, -1), scaling, dtype, out_dtype=x.dtype, dequantize=True)
    assert same(emulated.codes.flatten().float(), x.to(dtype).float())


@FORMATS
def test_rounding_is_the_cast_for_every_bf16(dtype: torch.dtype) -> None:
    """All 65536 bit patterns: both signs, zeros, subnormals, infinities, NaNs."""
    assert_rounding_is_the_cast(torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16), dtype)


@FORMATS
def test_rounding_is_the_cast_near_every_boundary(dtype: torch.dtype) -> None:
    """FP32 numbers within 64 ulp of every FP8 value and of every midpoint between two; some saturate."""
    grid = torch.arange(0, 128, dtype=torch.uint8).view(dtype).float()
    grid = grid[grid.isfinite()]
    centres = torch.cat([grid, (grid[1:] + grid[:-1]) / 2])
    offsets = torch.arange(-64, 65, dtype=torch.int32)
    x = (centres.view(torch.int32)[:, None] + offsets).clamp(min=0).view(torch.float32).flatten()
    assert_rounding_is_the_cast(torch.cat([x, -x]), dtype)


def assert_emulated_is_real(x: Tensor, scaling: Scaling, dtype: torch.dtype) -> None:
    """Both dimensions; codes, and their products with the inverse scales."""
    for dim, out_dtype in product((-1, 0), (torch.bfloat16, torch.float32)):
        real = quantize(x, scaling, dtype, dim=dim)
        emulated = emulate(x, scaling, dtype, dim=dim, out_dtype=out_dtype)
        assert emulated.codes.dtype is out_dtype and same(emulated.codes.float(), real.codes.float())
        assert same(emulated.inverse_scale, real.inverse_scale) and emulated.tile == real.tile
        if out_dtype is torch.bfloat16 and not scaling.power_of_two:
            continue
        products = emulate(x, scaling, dtype, dim=dim, out_dtype=out_dtype, dequantize=True)
        assert same(products.codes, real.dequantize(out_dtype))
        assert same(products.dequantize(out_dtype), products.codes)  # what is left to multiply in is 1


@pytest.mark.parametrize("scaling", EVERY_SCALING, ids=str)
@given(x=matrices(finite=False), dtype=st.sampled_from([E4M3, E5M2]))
@settings(max_examples=40)
def test_emulated_is_real(scaling: Scaling, x: Tensor, dtype: torch.dtype) -> None:
    assert_emulated_is_real(x, scaling, dtype)


@pytest.mark.parametrize("scaling", [*EVERY_SCALING, BlockScaling(block_size=1)], ids=str)
@pytest.mark.parametrize("shape", [(1100, 300), (2, 70_001), (70_001, 2)], ids=str)
def test_emulated_is_real_for_large_matrices(shape: tuple[int, int], scaling: Scaling) -> None:
    """Long enough for vector instructions and their remainders."""
    assert_emulated_is_real(torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16(), scaling, E4M3)


@FORMATS
@pytest.mark.parametrize("scaling", EVERY_SCALING, ids=str)
def test_emulated_is_real_at_the_edge_of_the_exponents(scaling: Scaling, dtype: torch.dtype) -> None:
    """Where products are subnormal BF16 numbers, which hold fewer bits than codes, and every NaN that FP32 has."""
    smallest = torch.linspace(-1, 1, 257).mul_(2.0**-120).float()[None]
    assert_emulated_is_real(smallest, scaling, dtype)
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    assert_emulated_is_real(torch.cat([nans, torch.ones(60)])[None], scaling, dtype)


@FORMATS
def test_stale_scale_saturates_in_both_forms(dtype: torch.dtype) -> None:
    """A delayed scale of 1 meets numbers of 3e38, which the rounding trick alone would turn into NaN."""
    x = torch.tensor([[1e5, -3e38, 1.0, -(2.0**-20)]])
    states = [DelayedScaling(dtype), DelayedScaling(dtype)]
    real = quantize(x, states[0], dtype)
    emulated = emulate(x, states[1], dtype)
    largest = torch.finfo(dtype).max
    assert emulated.codes.float()[0, :3].tolist() == [largest, -largest, 1.0]
    assert same(emulated.codes.float(), real.codes.float())  # also the sign of the last one's zero
    assert states[0].amax_history[0] == states[1].amax_history[0] == torch.tensor(3e38)


# Interface


@pytest.mark.parametrize("function", [quantize, emulate])
@pytest.mark.parametrize("scaling", EVERY_SCALING, ids=str)
def test_reduced_amax_gives_the_codes_of_the_whole(scaling: Scaling, function: type) -> None:
    """Two ranks hold halves of the contracted dimension, max-reduce, and get the whole matrix's codes."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    x[:, 40] *= 100
    halves = x[:, :32], x[:, 32:]
    seen: list[Tensor] = []
    for half in halves:
        function(half, scaling, E4M3, reduce_amax=lambda amax: seen.append(amax) or amax)
    whole = function(x, scaling, E4M3)
    reduce_amax = (lambda amax: torch.maximum(*seen)) if whole.inverse_scale.shape == seen[0].shape else None
    parts = [function(half, scaling, E4M3, reduce_amax=reduce_amax) for half in halves]
    assert torch.equal(torch.cat([p.codes.float() for p in parts], 1), whole.codes.float())


@pytest.mark.parametrize("scaling", EVERY_SCALING, ids=str)
def test_shapes_and_layout(scaling: Scaling) -> None:
    """Leading dimensions are flattened, strides do not matter, inputs are left alone, empty tensors pass."""
    x = torch.randn(5, 3, 40, generator=torch.Generator().manual_seed(0)).transpose(0, 1)
    before = x.clone()
    parameter = torch.nn.Parameter(x.contiguous())
    assert same(emulate(parameter, scaling, E4M3).codes, emulate(x, scaling, E4M3).codes)
    for dim in (-1, 0):
        ours = emulate(x, scaling, E4M3, dim=dim)
        flat = emulate(x.reshape(15, 40), scaling, E4M3, dim=dim)
        assert ours.codes.shape == x.shape and torch.equal(ours.codes.reshape(15, 40), flat.codes)
        assert torch.equal(ours.inverse_scale, flat.inverse_scale)
        for function in (quantize, emulate):
            empty = function(x[:0], scaling, E4M3, dim=dim)
            assert empty.codes.shape == (0, 5, 40) and empty.dequantize().shape == (0, 5, 40)
    assert torch.equal(x, before)


def test_dequantize_expands_cut_tiles_by_hand() -> None:
    codes = torch.ones(3, 5)
    inverse = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    expected = [[1, 1, 2, 2, 3], [1, 1, 2, 2, 3], [4, 4, 5, 5, 6]]
    assert Quantized(codes, inverse, (2, 2)).dequantize().tolist() == expected


def test_wrong_use_is_refused() -> None:
    x = torch.ones(2, 2)
    with pytest.raises(ValueError, match="BF16 or FP32"):
        quantize(x.double(), TensorScaling(), E4M3)
    with pytest.raises(ValueError, match="dim is 1"):
        emulate(x, TensorScaling(), E4M3, dim=1)
