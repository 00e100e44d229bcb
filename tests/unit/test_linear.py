"""The three FP8 GEMMs of a linear against float64 products of the codes."""

import itertools
from typing import Any

import pytest
import torch
from fp8_gemms import (
    BOTH_DTYPES,
    EVERY_FORMAT,
    EVERY_RECIPE,
    RECIPES,
    SCALED_MM_RECIPES,
    Model,
    assert_is_model,
    make_gemms,
    make_problem,
    run,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_calclip.precision import linear
from megatron_calclip.precision.linear import Backend
from megatron_calclip.precision.scaling import (
    update_delayed_scaling,
)


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
@settings(max_examples=8)
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


# Passes without gradients


PASSES = [(*r, "emulated") for r in RECIPES] + [(*r, "scaled_mm") for r in SCALED_MM_RECIPES]


@pytest.mark.parametrize(("recipe", "power_of_two", "backend"), PASSES)
def test_a_pass_without_gradients_makes_the_forwards_copies_alone(
    recipe: str, power_of_two: bool | None, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same output and the same recorded amaxes as with gradients; nothing is quantised for a backward pass."""
    x, w, _ = make_problem(16, 32, 48, torch.bfloat16)
    expected_gemms, gemms = (make_gemms(recipe, power_of_two, backend=backend) for _ in range(2))
    expected = expected_gemms(x, w.clone().requires_grad_())
    copies: list[int] = []

    def spy(*args: Any, **keywords: Any) -> Any:
        copies.append(keywords["dim"])
        return original(*args, **keywords)

    name = "emulate" if backend == "emulated" else "quantize"
    original = getattr(linear, name)
    monkeypatch.setattr(linear, name, spy)
    with torch.no_grad():
        under_no_grad = gemms(x.requires_grad_(), w.clone().requires_grad_())
    assert not under_no_grad.requires_grad and torch.equal(under_no_grad, expected)
    assert torch.equal(gemms(x.detach(), w), expected)  # nothing asks for a gradient
    assert copies == [-1, -1] * 2  # weight and input, twice
    for mine, other in zip(gemms.buffers(), expected_gemms.buffers(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("reentrant", [False, True])
@EVERY_RECIPE
def test_recomputation_changes_nothing(recipe: str, power_of_two: bool | None, reentrant: bool) -> None:
    """Its first pass may be one without gradients (reentrant, as Megatron's), the second makes what backward needs."""
    problem = make_problem(24, 32, 40, torch.bfloat16)
    gemms = make_gemms(recipe, power_of_two)

    def recomputed(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(gemms, x, w, use_reentrant=reentrant)

    expected, actual = run(make_gemms(recipe, power_of_two), problem), run(recomputed, problem)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
