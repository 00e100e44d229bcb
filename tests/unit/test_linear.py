"""The three FP8 GEMMs of a linear against float64 products of the codes, torchao, and `torch._scaled_mm`."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from megatron_calclip.config import EmulationConfig, PrecisionConfig
from megatron_calclip.precision.linear import Backend, Fp8Gemms, Operand, gemm
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
    quantize,
    update_delayed_scaling,
)
from megatron_calclip.precision.recipes import resolve

BLOCK = 16
CHANNEL, FIRST_TOKENS = 5, torch.tensor([0, 7])

# (recipe, power_of_two_scales): everything that can be set, defaults as None.
RECIPES = [
    ("tensorwise", None),
    ("tensorwise", True),
    ("tensorwise_delayed", None),
    ("rowwise", None),
    ("rowwise", False),
    ("blockwise", None),
    ("blockwise", False),
    ("mxfp8", None),
]
SCALED_MM_RECIPES = [r for r in RECIPES if r[0] in ("tensorwise", "tensorwise_delayed", "rowwise")]
EVERY_RECIPE = pytest.mark.parametrize(("recipe", "power_of_two"), RECIPES)
EVERY_FORMAT = pytest.mark.parametrize("format", ["auto", "hybrid", "e4m3"])
BOTH_DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


def make_gemms(
    recipe: str,
    power_of_two: bool | None = None,
    *,
    format: str = "auto",
    backend: Backend = "emulated",
    channel_outlier: float = 1.0,
    first_token_outlier: float = 1.0,
) -> Fp8Gemms:
    """Blocks are small, so that tiny matrices have several."""
    emulation = EmulationConfig(
        block_size=BLOCK, channel_outlier=channel_outlier, first_token_outlier=first_token_outlier
    )
    precision = PrecisionConfig(
        recipe=recipe,
        power_of_two_scales=power_of_two,
        format=format,
        emulation=emulation,
    )
    resolved = resolve(precision)
    assert resolved is not None
    gemms = Fp8Gemms(resolved, backend=backend)
    gemms.first_token_outlier = first_token_outlier
    return gemms


def make_problem(m: int, k: int, n: int, dtype: torch.dtype, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x [m, k], weight [n, k], dy [m, n]: rows and columns of many magnitudes, some of them zero."""
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int) -> Tensor:
        x = torch.randn(rows, columns, generator=generator)
        x *= torch.exp2(2 * torch.randn(rows, 1, generator=generator))
        x *= torch.exp2(2 * torch.randn(1, columns, generator=generator))
        if rows > 2:
            x[rows // 2] = 0
        if columns > 2:
            x[:, columns // 3] = 0
        return x.to(dtype)

    return draw(m, k), draw(n, k), draw(m, n)


# The model: rules of the recipes, products in float64


def exact(q: Quantized) -> Tensor:
    """Codes times inverse scales in float64, which holds these products exactly."""
    inverse = q.inverse_scale.double()
    for axis, size in enumerate(q.tile):
        if inverse.shape[axis] > 1:
            inverse = inverse.repeat_interleave(size, axis).narrow(axis, 0, q.codes.shape[axis])
    return q.codes.double() * inverse


def scalings(recipe: str, power_of_two: bool | None) -> tuple[Scaling, Scaling]:
    """Rule of activations and gradients, and of weights."""
    if recipe == "rowwise":
        return (RowScaling(power_of_two is not False),) * 2
    if recipe == "blockwise":
        scale = power_of_two is not False
        return BlockScaling(BLOCK, power_of_two=scale), BlockScaling(BLOCK, two_dimensional=True, power_of_two=scale)
    if recipe == "mxfp8":
        return (MXScaling(BLOCK),) * 2
    return (TensorScaling(bool(power_of_two)),) * 2


def half_ulp(x: Tensor) -> Tensor:
    """Most by which rounding to BF16's 8 significant bits moves a number of this magnitude."""
    return torch.exp2(torch.frexp(x)[1].double() - 9)


class Model:
    """y, dx, dW in float64, and the same with magnitudes, which bound the rounding of FP32 sums."""

    def __init__(
        self,
        problem: tuple[Tensor, Tensor, Tensor],
        recipe: str,
        power_of_two: bool | None,
        format: str,
        *,
        delayed_scales: dict[str, float] | None = None,
    ) -> None:
        hybrid = format == "hybrid" or (format == "auto" and recipe.startswith("tensorwise"))
        activation, weight_rule = scalings(recipe, power_of_two)

        def values(x: Tensor, name: str, dim: int) -> Tensor:
            dtype = E5M2 if name == "dy" and hybrid else E4M3
            rule: Scaling = weight_rule if name == "w" else activation
            if delayed_scales is not None:
                rule = DelayedScaling(dtype)
                rule.scale.fill_(delayed_scales[name])
            return exact(quantize(x, rule, dtype, dim=dim))

        x, w, dy = problem
        k, n, m = -1, -1, 0  # contracted by y = x W^T, dx = dy W, dW = dy^T x
        self.pairs = {
            "y": (values(x, "x", k), values(w, "w", k).t()),
            "dx": (values(dy, "dy", n), values(w, "w", 0)),
            "dw": (values(dy, "dy", m).t(), values(x, "x", m)),
        }

    def assert_close(self, name: str, actual: Tensor, dtype: torch.dtype) -> None:
        """FP32 sums of exact products, in any order, then one rounding to `dtype`."""
        a, b = self.pairs[name]
        expected, magnitude = a @ b, a.abs() @ b.abs()
        assert actual.shape == expected.shape and actual.dtype == dtype
        steps = a.shape[1] + 4  # additions, and the roundings of up to three scale products
        tolerance = magnitude * steps * 2.0**-24
        if dtype is torch.bfloat16:
            tolerance += half_ulp(expected.abs() + tolerance)
        error = (actual.double() - expected).abs() - tolerance
        assert error.max() <= 2.0**-126, f"{name} is off by {error.max().item():.3g} beyond rounding"


def run(
    gemms: Callable[..., Tensor], problem: tuple[Tensor, Tensor, Tensor], *extra: Any, **keywords: Any
) -> dict[str, Tensor]:
    """Output and gradients."""
    x, w, dy = (t.clone().requires_grad_() for t in problem)
    y = gemms(x, w, *extra, **keywords)
    y.backward(dy.detach())
    assert x.grad is not None and w.grad is not None
    return {"y": y.detach(), "dx": x.grad, "dw": w.grad}


def assert_is_model(actual: dict[str, Tensor], model: Model, dtype: torch.dtype) -> None:
    for name, value in actual.items():
        model.assert_close(name, value, dtype)


@EVERY_RECIPE
@EVERY_FORMAT
@BOTH_DTYPES
def test_gemms_are_exact_products_of_the_codes(
    recipe: str, power_of_two: bool | None, format: str, dtype: torch.dtype
) -> None:
    """Sizes that are multiples of the block, that are not, that are below one block, and 1."""
    for m, k, n in [(32, 48, 64), (37, 41, 23), (5, 3, 7), (1, 1, 1), (64, 160, 96)]:
        problem = make_problem(m, k, n, dtype)
        delayed = dict.fromkeys(("x", "w", "dy"), 1.0) if recipe == "tensorwise_delayed" else None
        model = Model(problem, recipe, power_of_two, format, delayed_scales=delayed)
        assert_is_model(run(make_gemms(recipe, power_of_two, format=format), problem), model, dtype)


@EVERY_RECIPE
@given(
    m=st.integers(1, 40),
    k=st.integers(1, 40),
    n=st.integers(1, 40),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 2**32),
    exponent=st.sampled_from([0, -60, 20]),
)
@settings(max_examples=8, deadline=None)
def test_any_size_and_magnitude(
    recipe: str, power_of_two: bool | None, m: int, k: int, n: int, dtype: torch.dtype, seed: int, exponent: int
) -> None:
    x, w, dy = make_problem(m, k, n, dtype, seed=seed)
    problem = x * 2.0**exponent, w, dy
    delayed = dict.fromkeys(("x", "w", "dy"), 1.0) if recipe == "tensorwise_delayed" else None
    model = Model(problem, recipe, power_of_two, "auto", delayed_scales=delayed)
    assert_is_model(run(make_gemms(recipe, power_of_two), problem), model, dtype)


@BOTH_DTYPES
def test_one_product_by_hand(dtype: torch.dtype) -> None:
    """tensorwise e4m3, amax 3 and 7: scales 448/3 and 64.

    x = [1, -3] -> 149.33, -448 -> codes 144, -448; w = [7, 2.3] -> 448, 147.2 -> codes 448, 144.
    y = (144 * 448 - 448 * 144) * ... = 0, where exact arithmetic has 7 - 6.9 = 0.1.
    dy = 2 -> code 448, scale 224: dx = 2 * [7, 144/64 = 2.25], dW = 2 * [144 * 3/448, -3].
    """
    problem = torch.tensor([[1.0, -3.0]]), torch.tensor([[7.0, 2.3]]), torch.tensor([[2.0]])
    actual = run(make_gemms("tensorwise", format="e4m3"), tuple(t.to(dtype) for t in problem))
    assert actual["y"].item() == 0
    assert actual["dx"].float().tolist()[0] == pytest.approx([14.0, 4.5], rel=2**-22)
    assert actual["dw"].float().tolist()[0] == pytest.approx([2 * 144 * 3 / 448, -6.0], rel=2**-8)


@BOTH_DTYPES
def test_gradient_is_the_plain_one_where_quantising_is_exact(dtype: torch.dtype) -> None:
    """Small integers are E4M3 codes at power-of-two scales: autograd's own gradients, bit for bit."""
    generator = torch.Generator().manual_seed(0)
    m, k, n = 20, 24, 28
    x, w, dy = (torch.randint(-2, 3, size, generator=generator).to(dtype) for size in ((m, k), (n, k), (m, n)))
    expected = run(lambda x, w: x @ w.t(), (x, w, dy))
    for recipe, power_of_two in RECIPES:
        if power_of_two is None and recipe.startswith("tensorwise"):
            continue
        if power_of_two is not False:
            actual = run(make_gemms(recipe, power_of_two), (x, w, dy))
            assert all(torch.equal(actual[name], expected[name]) for name in expected), recipe


def test_leading_dimensions_and_the_gradients_that_are_asked_for() -> None:
    x, w, _ = make_problem(12, 16, 20, torch.bfloat16)
    gemms = make_gemms("rowwise")
    flat = gemms(x, w)
    assert torch.equal(gemms(x.view(3, 4, 16), w), flat.view(3, 4, 20))
    for x_needs, w_needs in itertools.product([False, True], repeat=2):
        inputs = x.clone().requires_grad_(x_needs), w.clone().requires_grad_(w_needs)
        y = gemms(*inputs)
        assert y.requires_grad == (x_needs or w_needs)
        if y.requires_grad:
            y.sum().backward()
        assert [t.grad is not None for t in inputs] == [x_needs, w_needs]


@pytest.mark.parametrize(
    ("recipe", "power_of_two", "backend"),
    [(*r, "emulated") for r in RECIPES] + [(*r, "scaled_mm") for r in SCALED_MM_RECIPES],
)
@BOTH_DTYPES
def test_no_tokens(recipe: str, power_of_two: bool | None, dtype: torch.dtype, backend: Backend) -> None:
    """A micro-batch without response tokens on this rank, or an expert without tokens."""
    x, w, dy = make_problem(0, 16, 32, dtype)
    actual = run(make_gemms(recipe, power_of_two, backend=backend), (x, w, dy))
    assert actual["y"].shape == (0, 32) and actual["dx"].shape == (0, 16)
    assert torch.equal(actual["dw"], torch.zeros(32, 16, dtype=dtype))


# Delayed scaling


def test_delayed_scales_of_earlier_steps() -> None:
    """Scales are those before this pass; amaxes of this pass are recorded, and set the next scales."""
    gemms = make_gemms("tensorwise_delayed")
    scales = dict.fromkeys(("x", "w", "dy"), 1.0)
    states = {"x": gemms.input_scaling, "w": gemms.weight_scaling, "dy": gemms.gradient_scaling}
    for step in range(4):
        problem = make_problem(24, 20, 28, torch.bfloat16, seed=step)
        model = Model(problem, "tensorwise_delayed", None, "hybrid", delayed_scales=scales)
        assert_is_model(run(gemms, problem), model, torch.bfloat16)
        amaxes = {name: t.float().abs().max() for name, t in zip(states, problem, strict=True)}
        assert all(states[name].amax_history[0] == amax for name, amax in amaxes.items())
        update_delayed_scaling(list(states.values()))
        for name, state in states.items():
            largest = 57344.0 if name == "dy" else 448.0
            amax = state.amax_history.max()
            assert amax >= amaxes[name] and state.scale == torch.tensor(largest) / amax
            scales[name] = state.scale.item()
    assert len(gemms.state_dict()) == 6  # history and scale of each


# Weights kept in FP8


@EVERY_RECIPE
@BOTH_DTYPES
def test_kept_codes_are_those_made_at_once(recipe: str, power_of_two: bool | None, dtype: torch.dtype) -> None:
    problem = make_problem(19, 40, 24, dtype)
    gemms = make_gemms(recipe, power_of_two)
    codes = gemms.quantize_weight(problem[1])
    at_once, kept = run(gemms, problem), run(gemms, problem, codes)
    junk = problem[0], torch.full_like(problem[1], torch.nan), problem[2]
    assert all(torch.equal(at_once[name], kept[name]) for name in at_once)
    if recipe != "tensorwise_delayed":  # whose scales move
        ignored = run(gemms, junk, codes)  # the live value plays no part
        assert all(torch.equal(kept[name], ignored[name]) for name in kept)


@EVERY_RECIPE
def test_codes_of_fp32_masters_serve_bf16_layers(recipe: str, power_of_two: bool | None) -> None:
    """Codes come from the master, not from its BF16 copy: the model with an FP32 weight, results in BF16."""
    x, w, dy = make_problem(19, 40, 24, torch.float32)
    x, dy = x.bfloat16(), dy.bfloat16()
    gemms = make_gemms(recipe, power_of_two)
    actual = run(gemms, (x, w.bfloat16(), dy), gemms.quantize_weight(w))
    delayed = dict.fromkeys(("x", "w", "dy"), 1.0) if recipe == "tensorwise_delayed" else None
    model = Model((x, w, dy), recipe, power_of_two, "auto", delayed_scales=delayed)
    assert_is_model(actual, model, torch.bfloat16)


# Dials


def without_quantising(monkeypatch: pytest.MonkeyPatch) -> None:
    def pair(self: Fp8Gemms, x: Tensor, *_: Any) -> tuple[Operand, Operand]:
        return Operand(x, None), Operand(x.t(), None)

    monkeypatch.setattr(Fp8Gemms, "_pair", pair)


def dialled(recipe: str, power_of_two: bool | None, *, channel: float, first_token: float) -> Callable[..., Tensor]:
    gemms = make_gemms(recipe, power_of_two, channel_outlier=channel, first_token_outlier=first_token)
    if channel > 1:
        gemms.dial_channel(CHANNEL, 32, device=torch.device("cpu"))
    return lambda x, w, codes=None: gemms(x, w, codes, first_tokens=FIRST_TOKENS)


DIALS = pytest.mark.parametrize(("channel", "first_token"), [(64.0, 1.0), (1.0, 64.0)])


@EVERY_RECIPE
@BOTH_DTYPES
@DIALS
def test_dials_multiply_what_is_quantised_and_nothing_else(
    recipe: str,
    power_of_two: bool | None,
    dtype: torch.dtype,
    channel: float,
    first_token: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_quantising(monkeypatch)
    problem = make_problem(21, 32, 24, dtype)
    plain = run(make_gemms(recipe, power_of_two), problem)
    turned = run(dialled(recipe, power_of_two, channel=channel, first_token=first_token), problem)
    assert all(torch.equal(turned[name], plain[name]) for name in plain)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("power_of_two", [None, False])
@BOTH_DTYPES
@DIALS
def test_dialled_outliers_by_the_model(
    recipe: str, power_of_two: bool | None, dtype: torch.dtype, channel: float, first_token: float
) -> None:
    """The GEMMs of the outlier matrices, the factor divided out again of what it was multiplied into."""
    x, w, dy = make_problem(21, 32, 24, dtype)
    columns, rows = torch.ones(32), torch.ones(21, 1)
    columns[CHANNEL] = channel
    rows[FIRST_TOKENS] = first_token
    noisy = (x * columns * rows).to(dtype), (w / columns).to(dtype), dy
    model = Model(noisy, recipe, power_of_two, "auto")
    factors = {
        "y": (columns * rows, columns[:, None]),
        "dx": (torch.ones(1), columns),
        "dw": (torch.ones(1), columns * rows),
    }
    for name, (of_a, of_b) in factors.items():
        a, b = model.pairs[name]
        model.pairs[name] = a / of_a, b * of_b if name != "dw" else b / of_b
    make = dialled(recipe, power_of_two, channel=channel, first_token=first_token)
    assert_is_model(run(make, (x, w, dy)), model, dtype)


def test_dials_raise_the_noise() -> None:
    """A channel or token 2^15 too large leaves subnormal codes to the others; E4M3 spans 2^17."""
    generator = torch.Generator().manual_seed(0)
    problem = tuple(torch.randn(size, generator=generator) for size in ((64, 32), (48, 32), (64, 48)))
    exact_result = run(lambda x, w: x @ w.t(), problem)

    def noise(channel: float, first_token: float) -> float:
        actual = run(dialled("tensorwise", None, channel=channel, first_token=first_token), problem)
        return (actual["y"] - exact_result["y"]).norm().item()

    plain = noise(1, 1)
    assert noise(2.0**15, 1) > 2 * plain and noise(1, 2.0**15) > 2 * plain


@BOTH_DTYPES
def test_dials_with_kept_codes_of_masters(dtype: torch.dtype) -> None:
    """FP32 masters, BF16 layer, dialled channel: the operands of a GEMM must have one dtype."""
    x, w, dy = make_problem(21, 32, 24, torch.float32)
    for recipe, power_of_two in RECIPES:
        gemms = make_gemms(recipe, power_of_two, channel_outlier=16.0)
        gemms.dial_channel(CHANNEL, 32, device=torch.device("cpu"))
        live = (x.to(dtype), w.to(dtype), dy.to(dtype))
        kept = run(gemms, live, gemms.quantize_weight(live[1].float()))
        fresh = run(make_like(gemms), live)
        assert all(torch.equal(kept[name], fresh[name]) for name in kept), recipe


def make_like(gemms: Fp8Gemms) -> Fp8Gemms:
    """The same without recorded amaxes."""
    fresh = copy.deepcopy(gemms)
    for state in fresh.modules():
        if isinstance(state, DelayedScaling):
            state.amax_history.zero_()
    return fresh


# Other implementations


@pytest.mark.parametrize(("recipe", "power_of_two"), SCALED_MM_RECIPES)
@EVERY_FORMAT
@BOTH_DTYPES
def test_scaled_mm_multiplies_the_same_codes(
    recipe: str, power_of_two: bool | None, format: str, dtype: torch.dtype
) -> None:
    """`torch._scaled_mm` on the CPU, token counts that are no multiple of 16 included; its results are BF16."""
    for m in (16, 21):
        problem = make_problem(m, 32, 48, dtype)
        emulated = make_gemms(recipe, power_of_two, format=format)
        real = make_gemms(recipe, power_of_two, format=format, backend="scaled_mm")
        delayed = dict.fromkeys(("x", "w", "dy"), 1.0) if recipe == "tensorwise_delayed" else None
        model = Model(problem, recipe, power_of_two, format, delayed_scales=delayed)
        ours, theirs = run(emulated, problem), run(real, problem)
        for name in ours:
            model.assert_close(name, theirs[name].bfloat16(), torch.bfloat16)
            same = (ours[name].bfloat16() == theirs[name].bfloat16()).float().mean()
            assert same > 0.99, (name, same)  # the rest: other orders of sums


def test_scaled_mm_gets_contracted_sizes_that_cublas_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """21 tokens are contracted by the weight's gradient: padded to 32 with zeros, contiguous, column-major."""
    seen: list[tuple[int, ...]] = []
    multiply = torch._scaled_mm

    def spy(a: Tensor, b: Tensor, **keywords: Any) -> Tensor:
        assert a.is_contiguous() and b.t().is_contiguous()
        assert keywords["scale_a"].stride() == (1, 1) and keywords["scale_b"].stride(1) == 1
        seen.append((*a.shape, b.shape[1]))
        return multiply(a, b, **keywords)

    monkeypatch.setattr(torch, "_scaled_mm", spy)
    run(make_gemms("rowwise", backend="scaled_mm"), make_problem(21, 32, 48, torch.bfloat16))
    assert seen == [(21, 32, 48), (21, 48, 32), (48, 32, 32)]


@BOTH_DTYPES
def test_rowwise_is_torchaos_linear(dtype: torch.dtype) -> None:
    """torchao's rowwise training linear, emulated by itself: the same codes, so equal but for the order of sums."""
    x, w, dy = make_problem(48, 32, 64, dtype)
    layer = nn.Sequential(nn.Linear(32, 64, bias=False, dtype=dtype))
    with torch.no_grad():
        layer[0].weight.copy_(w)
    config = Float8LinearConfig.from_recipe_name("rowwise")
    object.__setattr__(config, "emulate", True)
    theirs = convert_to_float8_training(layer, config=config)
    x_in = x.clone().requires_grad_()
    y = theirs(x_in)
    y.backward(dy)
    model = Model((x, w, dy), "rowwise", None, "e4m3")
    for name, value in {"y": y, "dx": x_in.grad, "dw": theirs[0].weight.grad}.items():
        assert value is not None
        model.assert_close(name, value.detach(), dtype)
    ours = run(make_gemms("rowwise"), (x, w, dy))
    for name, value in {"y": y, "dx": x_in.grad, "dw": theirs[0].weight.grad}.items():
        assert value is not None
        same = (ours[name] == value).float().mean()
        assert same > (0.98 if dtype is torch.bfloat16 else 0.2), (name, same)


# The GEMM itself


def test_one_rounding_for_every_layout() -> None:
    """One scale for all goes into the CPU's GEMM: it must meet the FP32 sums before BF16 does, whatever the strides."""
    generator = torch.Generator().manual_seed(0)
    for m, k, n in [(1, 1, 1), (5, 7, 3), (16, 16, 16), (64, 48, 80), (130, 200, 70)]:
        for a_turned, b_turned in itertools.product([False, True], repeat=2):
            a, b = (torch.randn(rows, k, generator=generator).to(E4M3).bfloat16() for rows in (m, n))
            scales = [torch.rand(1, 1, generator=generator) + 0.5 for _ in range(2)]
            operands = [
                Operand(x.t().contiguous().t() if turned else x, scale)
                for x, turned, scale in zip((a, b), (a_turned, b_turned), scales, strict=True)
            ]
            actual = gemm(*operands, dtype=torch.bfloat16, backend="emulated").double()
            factor = (scales[0] * scales[1]).double()
            expected = (a.double() @ b.double().t()) * factor
            bound = (a.double().abs() @ b.double().abs().t()) * factor * (k + 4) * 2.0**-24
            assert ((actual - expected).abs() <= bound + half_ulp(expected.abs() + bound)).all()


def test_matmul_precision_is_put_back() -> None:
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    run(make_gemms("rowwise"), make_problem(8, 8, 8, torch.float32))
    assert matmul.fp32_precision == before
    bad = Operand(torch.ones(2, 3, dtype=torch.bfloat16), None), Operand(torch.ones(2, 4, dtype=torch.bfloat16), None)
    with pytest.raises(RuntimeError):
        gemm(*bad, dtype=torch.float32, backend="emulated")
    assert matmul.fp32_precision == before


# Reduction over tensor parallelism


class Reducer:
    """Stands in for the group: remembers what was reduced."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, amax: Tensor) -> Tensor:
        self.shapes.append(tuple(amax.shape))
        return amax


# Recipe, linear -> shapes of the amaxes that `global` reduces, in the order weight, input, gradient.
M, K, N = 16, 32, 48
REDUCED = {
    ("tensorwise", "column"): [(1, 1), (1, 1)],  # weight, gradient
    ("tensorwise", "row"): [(1, 1), (1, 1)],  # weight, input
    ("rowwise", "column"): [(1, K), (M, 1)],  # weight along N, gradient along N
    ("rowwise", "row"): [(N, 1), (M, 1)],  # weight along K, input along K
    ("blockwise", "column"): [],
    ("blockwise", "row"): [],
    ("mxfp8", "column"): [],
    ("mxfp8", "row"): [],
}


@pytest.mark.parametrize("amax_group", ["te", "global"])
@pytest.mark.parametrize(("recipe", "kind"), REDUCED)
def test_which_amaxes_are_reduced(recipe: str, kind: str, amax_group: str) -> None:
    """Only scales whose tile is cut over ranks, and only if asked for."""
    reducer = Reducer()
    resolved = resolve(PrecisionConfig(recipe=recipe, amax_group=amax_group))
    assert resolved is not None
    gemms = Fp8Gemms(
        resolved,
        backend="emulated",
        input_sharded=kind == "row",
        output_sharded=kind == "column",
        reduce_amax=reducer,
    )
    run(gemms, make_problem(M, K, N, torch.bfloat16))
    assert reducer.shapes == (REDUCED[recipe, kind] if amax_group == "global" else [])


@pytest.mark.parametrize(("recipe", "power_of_two"), [("tensorwise", None), ("rowwise", None), ("rowwise", False)])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_two_shards_are_the_whole(recipe: str, power_of_two: bool | None, kind: str) -> None:
    """`global` on two simulated ranks, lock-step: their codes are slices of the whole matrix's codes."""
    problem = make_problem(M, K, N, torch.float32)
    whole = make_gemms(recipe, power_of_two, format="e4m3")
    x, w, dy = problem
    halves: dict[str, list[Tensor]] = {"x": [x, x], "w": list(w.chunk(2, 0)), "dy": list(dy.chunk(2, 1))}
    if kind == "row":
        halves = {"x": list(x.chunk(2, 1)), "w": list(w.chunk(2, 1)), "dy": [dy, dy]}
    log: list[list[Tensor]] = [[], []]

    def shard(rank: int, reduce_amax: Callable[[Tensor], Tensor]) -> dict[str, tuple[Operand, Operand]]:
        resolved = resolve(
            PrecisionConfig(
                recipe=recipe,
                power_of_two_scales=power_of_two,
                format="e4m3",
                amax_group="global",
            )
        )
        assert resolved is not None
        gemms = Fp8Gemms(
            resolved,
            backend="emulated",
            input_sharded=kind == "row",
            output_sharded=kind == "column",
            reduce_amax=reduce_amax,
        )
        codes = gemms.quantize_weight(halves["w"][rank])
        return {
            "w": (codes.forward, codes.backward),
            "x": gemms.quantize_input(halves["x"][rank]),
            "dy": gemms.quantize_gradient(halves["dy"][rank]),
        }

    for rank in range(2):  # first to learn each rank's amaxes, then with their maxima
        shard(rank, lambda amax, rank=rank: log[rank].append(amax) or amax)
    maxima = [torch.maximum(*pair) for pair in zip(*log, strict=True)]
    parts = []
    for _rank in range(2):
        waiting = iter(maxima)
        parts.append(shard(_rank, lambda _, waiting=waiting: next(waiting)))

    codes = whole.quantize_weight(w)
    expected = {
        "w": (codes.forward, codes.backward),
        "x": whole.quantize_input(x),
        "dy": whole.quantize_gradient(dy),
    }
    cut = {"column": {"w": 0, "dy": 1}, "row": {"x": 1, "w": 1}}[kind]
    for name, (along_last, along_first) in expected.items():
        for full, dim, index in ((along_last, 0, 0), (along_first, 1, 1)):  # the second is turned
            values = dequantised(full)
            for rank in range(2):
                own = dequantised(parts[rank][name][index])
                if name in cut:
                    axis = cut[name] if dim == 0 else 1 - cut[name]
                    assert torch.equal(own, values.chunk(2, axis)[rank]), (name, index)
                else:
                    assert torch.equal(own, values), (name, index)


def dequantised(operand: Operand) -> Tensor:
    values = operand.values.float()
    return values if operand.scale is None else values * operand.scale
