"""Small FP8 linears, matrices for them, and a float64 model of their three GEMMs. Fixtures only."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_calclip.config import EmulationConfig, PrecisionConfig
from megatron_calclip.precision.linear import Backend, Fp8Gemms
from megatron_calclip.precision.quantize import E4M3, E5M2, Quantized, quantize
from megatron_calclip.precision.recipes import resolve
from megatron_calclip.precision.scaling import (
    BlockScaling,
    DelayedScaling,
    MXScaling,
    RowScaling,
    Scaling,
    TensorScaling,
)

BLOCK = 16

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
