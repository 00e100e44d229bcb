"""FP8 GEMMs against `torch._scaled_mm` and torchao, and how one product is rounded."""

import itertools
from typing import Any

import pytest
import torch
from fp8_gemms import BOTH_DTYPES, EVERY_FORMAT, SCALED_MM_RECIPES, Model, half_ulp, make_gemms, make_problem, run
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from megatron_calclip.precision.linear import Operand, gemm
from megatron_calclip.precision.quantize import E4M3

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
