"""Dialled-in noise of the emulated quantisers: outlier channels and first tokens."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp8_gemms import (
    BOTH_DTYPES,
    EVERY_RECIPE,
    RECIPES,
    Model,
    assert_is_model,
    make_gemms,
    make_problem,
    run,
)
from torch import Tensor

from megatron_calclip.precision.linear import Fp8Gemms, Operand
from megatron_calclip.precision.scaling import (
    DelayedScaling,
)

CHANNEL, FIRST_TOKENS = 5, torch.tensor([0, 7])


def without_quantising(monkeypatch: pytest.MonkeyPatch) -> None:
    def operands(self: Fp8Gemms, x: Tensor, *_: Any, **__: Any) -> tuple[Operand, Operand]:
        return Operand(x, None), Operand(x.t(), None)

    monkeypatch.setattr(Fp8Gemms, "_operands", operands)


def dialled(recipe: str, power_of_two: bool | None, *, channel: float, first_token: float) -> Callable[..., Tensor]:
    gemms = make_gemms(recipe, power_of_two, channel_outlier=channel, first_token_outlier=first_token)
    if channel > 1:
        gemms.dial_channel(CHANNEL, 32, device=torch.device("cpu"))
    return lambda x, w, codes=None: gemms(x, w, codes, first_tokens=FIRST_TOKENS)


DIALS = pytest.mark.parametrize(("channel", "first_token"), [(64.0, 1.0), (1.0, 64.0), (64.0, 16.0)])


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
