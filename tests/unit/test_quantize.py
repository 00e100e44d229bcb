"""FP8 codes and scales against torchao (where its rule is the same), exact arithmetic, and worked cases."""

import math
from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from megatron_calclip.precision.quantize import (
    E4M3,
    E5M2,
    BlockScaling,
    DelayedScaling,
    MXScaling,
    Quantized,
    RowScaling,
    Scaling,
    TensorScaling,
    fake_quantize,
    quantize,
    quantize_dequantize,
    update_delayed_scaling,
)

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
@settings(max_examples=60, deadline=None)
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
@settings(max_examples=60, deadline=None)
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
@settings(max_examples=60, deadline=None)
def test_mxfp8_is_torchao_rceil(x: Tensor, dtype: torch.dtype) -> None:
    ours = quantize(x, MXScaling(), dtype)
    scale, codes = to_mx(x, dtype, 32, ScaleCalculationMode.RCEIL)
    # torchao takes an FP32 logarithm, which may miss that an amax is some ulp above a power of two.
    amax = x.view(len(x), 2, 32).abs().amax(-1).double() / torch.finfo(dtype).max
    mantissa = torch.frexp(amax)[0]
    exact = (mantissa <= 0.5) | (mantissa > 0.5 + 2**-16) | mantissa.isnan()
    assert torch.equal(ours.e8m0[exact], scale.view(torch.uint8)[exact])
    exact = exact.repeat_interleave(32, 1)
    assert torch.equal(bits(ours.codes)[exact], bits(codes)[exact])


# The rules themselves, in exact arithmetic


def fp32(value: Fraction) -> float:
    """The nearest FP32 number: quotients of FP32 numbers lie too far from ties for float64 to matter."""
    return torch.tensor(float(value), dtype=torch.float64).float().item()


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
@settings(max_examples=10, deadline=None)
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
@settings(max_examples=15, deadline=None)
def test_mxfp8_rule(x: Tensor, dim: int, dtype: torch.dtype) -> None:
    """Any size, both dimensions; the multiplier is 2^(127 - e), but 1 for e = 0."""
    largest = torch.finfo(dtype).max
    ours = quantize(x, MXScaling(), dtype, dim=dim)
    for index, where in tiles_of(x, *((1, 32) if dim == -1 else (32, 1))).items():
        exponent = e8m0_by_rule(x[where].abs().amax().item(), dtype)
        assert ours.e8m0[index] == exponent
        scale = math.nan if exponent == 255 else 2.0 ** (127 - exponent) if exponent else 1.0
        codes = (x[where].float() * torch.tensor(scale)).clamp(-largest, largest).to(dtype)
        assert torch.equal(bits(ours.codes[where]), bits(codes))


@pytest.mark.parametrize("ulps", range(-3, 4))
@pytest.mark.parametrize("exponent", [-130, -127, -126, -100, -20, 0, 30, 119])
def test_mxfp8_rounds_up_at_powers_of_two(exponent: int, ulps: int) -> None:
    amax = (torch.tensor(448 * 2.0**exponent).view(torch.int32) + ulps).view(torch.float32)
    assert quantize(amax.view(1, 1), MXScaling(), E4M3).e8m0.item() == e8m0_by_rule(amax.item(), E4M3)


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
    assert ours.e8m0.tolist() == [[120], [121]]
    assert ours.codes.float().tolist() == [
        [128.0, -384.0],
        [256.0, 0.625],
    ]  # 0.64 -> 0.625 (grid 0.625, 0.6875)


def test_zero_and_non_finite_amax_by_hand() -> None:
    zeros = torch.zeros(2, 4)
    assert quantize(zeros, TensorScaling(), E4M3).inverse_scale.item() == 1
    assert quantize(zeros, BlockScaling(2), E4M3).inverse_scale.tolist() == [[1, 1], [1, 1]]
    assert quantize(zeros, MXScaling(), E4M3).e8m0.tolist() == [[0], [0]]
    assert quantize(zeros, RowScaling(), E4M3).inverse_scale.tolist() == [[2.0**-48]] * 2  # 448e12 >= 2^48

    infinite = torch.tensor([[math.inf, 500.0, -1.0]])
    current = quantize(infinite, TensorScaling(), E4M3)  # scale 1, saturated
    assert current.inverse_scale.item() == 1 and current.codes.float().tolist() == [[448, 448, -1]]
    assert quantize(infinite, MXScaling(), E4M3).e8m0.item() == 254
    assert quantize(infinite, RowScaling(), E4M3).dequantize().isnan().all()
    for nan_bits in (0x7FC0, 0xFFC0 - 0x10000):  # of either sign
        nan = torch.tensor([[0x3F80, nan_bits]], dtype=torch.int16).view(torch.bfloat16)
        assert quantize(nan, MXScaling(), E4M3).e8m0.item() == 255
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


# Rounding and the fast path


def assert_rounding_is_the_cast(x: Tensor, dtype: torch.dtype) -> None:
    """At scale 1, which is what delayed scaling starts with."""
    largest = torch.finfo(dtype).max
    fake = fake_quantize(x.view(1, -1), DelayedScaling(dtype), dtype).codes.float().flatten()
    assert same(fake, x.float().clamp(-largest, largest).to(dtype).float())


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


def assert_fake_is_real(x: Tensor, scaling: Scaling, dtype: torch.dtype, dim: int) -> None:
    real = quantize(x, scaling, dtype, dim=dim)
    fakes = [fake_quantize(x, scaling, dtype, dim=dim, out_dtype=d) for d in (torch.bfloat16, torch.float32)]
    for fake in fakes:
        assert same(fake.codes.float(), real.codes.float())
        assert same(fake.inverse_scale, real.inverse_scale) and fake.tile == real.tile
    whole = quantize_dequantize(x, scaling, dtype, dim=dim, out_dtype=torch.float32)
    assert same(whole, real.dequantize())
    if scaling.power_of_two:
        assert same(quantize_dequantize(x, scaling, dtype, dim=dim), real.dequantize(torch.bfloat16))


@pytest.mark.parametrize("scaling", EVERY_SCALING, ids=str)
@given(x=matrices(finite=False), dim=st.sampled_from([-1, 0]), dtype=st.sampled_from([E4M3, E5M2]))
@settings(max_examples=15, deadline=None)
def test_fake_is_real(scaling: Scaling, x: Tensor, dim: int, dtype: torch.dtype) -> None:
    assert_fake_is_real(x, scaling, dtype, dim)


@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("scaling", EVERY_SCALING, ids=str)
def test_fake_is_real_in_several_pieces(scaling: Scaling, dim: int) -> None:
    """500 x 300 is cut into pieces of which the last is shorter; 3 x 70000 has rows longer than a piece."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((500, 300), (3, 70_000)):
        assert_fake_is_real(torch.randn(shape, generator=generator).bfloat16(), scaling, E4M3, dim)


@FORMATS
def test_stale_scale_saturates_in_both_forms(dtype: torch.dtype) -> None:
    """A delayed scale of 1 meets numbers of 3e38, which the rounding trick alone would turn into NaN."""
    x = torch.tensor([[1e5, -3e38, 1.0, -(2.0**-20)]])
    states = [DelayedScaling(dtype), DelayedScaling(dtype)]
    real, fake = quantize(x, states[0], dtype), fake_quantize(x, states[1], dtype)
    largest = torch.finfo(dtype).max
    assert fake.codes.float()[0, :3].tolist() == [largest, -largest, 1.0]
    assert same(fake.codes.float(), real.codes.float())  # also the sign of the last one's zero
    assert states[0].amax_history[0] == states[1].amax_history[0] == torch.tensor(3e38)


# Delayed scaling


def delayed_by_rule(steps: list[list[float]], length: int, algorithm: str, margin: int) -> list[float]:
    """The scale after each step, in plain Python: a list that rolls left, its slot 0 collecting maxima."""
    history, scale, scales = [0.0] * length, 1.0, []
    for amaxes in steps:
        for amax in amaxes:
            history[0] = max(history[0], amax)
        if history[0] != 0:
            amax = max(history) if algorithm == "max" else history[0]
            if math.isfinite(amax) and amax > 0:
                scale = fp32(Fraction(448) / 2**margin / Fraction(amax))
                scale = torch.finfo(torch.float32).max if math.isinf(scale) else scale
            history = [*history[1:], history[0]]
            history[0] = 0.0
        scales.append(scale)
    return scales


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize(("length", "margin"), [(1, 0), (2, 1), (7, 0), (16, 2), (1024, 0)])
def test_delayed_scaling_over_50_steps(algorithm: str, length: int, margin: int) -> None:
    """Two tensors recorded in most steps; some steps record nothing, zeros, an infinity or a subnormal."""
    generator = torch.Generator().manual_seed(length)
    state = DelayedScaling(E4M3, history_length=length, amax_compute_algo=algorithm, margin=margin)
    steps, scales = [], []
    for step in range(50):
        xs = [torch.randn(4, 8, generator=generator) * 2.0 ** (step % 9 - 4) for _ in range(2)]
        if step % 10 == 3:
            xs = []
        elif step % 10 == 5:
            xs = [torch.zeros(4, 8)]
        elif step == 20:
            xs[1][2, 3] = -math.inf
        elif step == 30:
            xs = [torch.full((4, 8), 1e-42)]
        for x in xs:
            before = state.scale.clone()
            ours = quantize(x, state, E4M3)
            assert ours.inverse_scale == 1 / before and state.scale == before
        update_delayed_scaling([state])
        steps.append([x.abs().max().item() for x in xs])
        scales.append(state.scale.item())
    assert scales == delayed_by_rule(steps, length, algorithm, margin)


def test_delayed_history_by_hand() -> None:
    """Slot 0 collects 2, then 6; the roll by -1 puts it last."""
    state = DelayedScaling(E4M3, history_length=3)
    for amax in (2.0, 6.0):
        quantize(torch.full((2, 2), amax), state, E4M3)
    assert state.amax_history.tolist() == [6, 0, 0] and state.scale == 1
    update_delayed_scaling([state])
    assert state.amax_history.tolist() == [0, 0, 6] and state.scale == torch.tensor(448 / 6)
    update_delayed_scaling([state])  # nothing recorded: nothing changes
    assert state.amax_history.tolist() == [0, 0, 6] and state.scale == torch.tensor(448 / 6)


def test_delayed_reduction_covers_all_states_at_once() -> None:
    states = [DelayedScaling(E4M3, amax_compute_algo="most_recent") for _ in range(2)]
    for state, amax in zip(states, (2.0, 7.0), strict=True):
        quantize(torch.full((2, 2), amax), state, E4M3)
    other_rank = torch.tensor([4.0, 3.5])
    update_delayed_scaling(states, reduce_amax=lambda amax: torch.maximum(amax, other_rank))
    assert [state.scale.item() for state in states] == [112.0, 64.0]  # 448/4, 448/7
    assert [state.amax_history[-1].item() for state in states] == [4.0, 7.0]


def test_delayed_state_is_checkpointed_and_stays_fp32() -> None:
    model = torch.nn.ModuleDict({"x": DelayedScaling(E4M3, history_length=4)})
    quantize(torch.full((1, 1), 1.1), model["x"], E4M3)
    update_delayed_scaling([model["x"]])
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    assert set(saved) == {"x.amax_history", "x.scale"}
    model.bfloat16()
    for name, value in model.state_dict().items():
        assert value.dtype is torch.float32 and torch.equal(value, saved[name])
    fresh = torch.nn.ModuleDict({"x": DelayedScaling(E4M3, history_length=4)})
    fresh.load_state_dict(saved)
    assert fresh["x"].scale == torch.tensor(448.0) / torch.tensor(1.1)


# Interface


@pytest.mark.parametrize("function", [quantize, fake_quantize])
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
    for dim in (-1, 0):
        ours = fake_quantize(x, scaling, E4M3, dim=dim)
        flat = fake_quantize(x.reshape(15, 40), scaling, E4M3, dim=dim)
        assert ours.codes.shape == x.shape and torch.equal(ours.codes.reshape(15, 40), flat.codes)
        assert torch.equal(ours.inverse_scale, flat.inverse_scale)
        for function in (quantize, fake_quantize):
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
        fake_quantize(x, TensorScaling(), E4M3, dim=1)
    with pytest.raises(ValueError, match="out_dtype"):
        quantize_dequantize(x, TensorScaling(), E4M3)
    with pytest.raises(ValueError, match="history_length"):
        DelayedScaling(E4M3, history_length=0)
    with pytest.raises(ValueError, match="most_recent"):
        DelayedScaling(E4M3, amax_compute_algo="mean")
