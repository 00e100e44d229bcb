"""RMSNorm, SwiGLU and rotation: values by hand, values and gradients against float64 autograd of the formulas."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_calclip.learner import pointwise
from megatron_calclip.learner.pointwise import rms_norm, rotate, swiglu

EPS = 1e-3  # large enough to matter
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_equal_in_value_and_gradient(
    actual: Tensor, expected: Tensor, own: list[Tensor], exact: list[Tensor]
) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
    upstream = draw(*actual.shape, dtype=actual.dtype, seed=9)
    gradients = torch.autograd.grad(actual, own, upstream)
    for a, e in zip(gradients, torch.autograd.grad(expected, exact, upstream.double()), strict=True):
        assert a.dtype == actual.dtype
        torch.testing.assert_close(a.double(), e, rtol=tolerance, atol=tolerance * float(e.abs().max()))


@pytest.fixture(params=[True, False], ids=["loop", "operations"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU, and by the operations that other devices run."""
    monkeypatch.setattr(pointwise, "_in_loop", lambda x: request.param)


def test_norm_by_hand() -> None:
    # Mean square of (3, 4) is 12.5; with eps 3.5 the root is 4.
    out = rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([2.0, 1.0]), 3.5)
    torch.testing.assert_close(out, torch.tensor([[1.5, 1.0]]))


def test_swiglu_by_hand() -> None:
    # silu(ln 3) = ln 3 * 3 / 4.
    out = swiglu(torch.tensor([[math.log(3.0), 0.0, 4.0, 5.0]]))
    torch.testing.assert_close(out, torch.tensor([[3.0 * math.log(3.0), 0.0]]))


def test_rotation_by_hand() -> None:
    # A quarter turn takes (x1, x2) to (-x2, x1); the pair (2, 4) stays.
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    cos, sin = torch.tensor([[[0.0, 1.0, 0.0, 1.0]]]), torch.tensor([[[-1.0, 0.0, 1.0, 0.0]]])
    assert rotate(x, cos, sin).tolist() == [[[-3.0, 2.0, 1.0, 4.0]]]


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_norm(dtype: torch.dtype) -> None:
    x, weight = draw(11, 1, 24, dtype=dtype).requires_grad_(), draw(24, dtype=dtype, seed=1).requires_grad_()
    exact = [x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    expected = exact[0] * (exact[0].square().mean(-1, keepdim=True) + EPS).rsqrt() * exact[1]
    assert_equal_in_value_and_gradient(rms_norm(x, weight, EPS), expected, [x, weight], exact)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_swiglu(dtype: torch.dtype) -> None:
    x = draw(11, 1, 24, dtype=dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    assert_equal_in_value_and_gradient(swiglu(x), F.silu(gate) * up, [x], [exact])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rotation_is_a_complex_product(dtype: torch.dtype) -> None:
    angles = 3 * draw(11, 1, 4, dtype=torch.float64, seed=2)
    cos, sin = (torch.cat((part, part), -1).to(dtype) for part in (angles.cos(), angles.sin()))
    sin[..., :4] *= -1
    x = draw(11, 3, 8, dtype=dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    turned = torch.complex(*exact.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat((turned.real, turned.imag), -1)
    assert_equal_in_value_and_gradient(rotate(x, cos, sin), expected, [x], [exact])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_swiglu_is_torch_over_the_whole_range(dtype: torch.dtype) -> None:
    """Gates from where the sigmoid is 0 to where it is 1; to a few ulp in FP32, and rounded like torch's two operations."""
    gate = torch.linspace(-100, 100, 4001).to(dtype)
    up = draw(4001, dtype=dtype)
    expected, own = F.silu(gate) * up, swiglu(torch.cat((gate, up)))
    torch.testing.assert_close(own, expected, rtol=1e-6 if dtype is torch.float32 else 2**-8, atol=1e-30)
    if dtype is torch.bfloat16:
        normal = gate.abs() < 87  # beyond, torch has 0 where this has 1e-36
        assert (own != expected)[normal].float().mean() < 1e-2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_numbers_show(value: float) -> None:
    """A NaN anywhere must reach the loss, where the guard stops the step."""
    x = torch.ones(2, 8)
    x[1, 2] = value
    x.requires_grad_()
    for result in (rms_norm(x, torch.ones(8), EPS), swiglu(x)):
        assert result[0].isfinite().all() and not result[1].isfinite().all()
        gradient = torch.autograd.grad(result.sum(), x)[0]
        assert gradient[0].isfinite().all() and not gradient[1].isfinite().all()


@pytest.mark.parametrize("function", [lambda x: rms_norm(x, torch.ones(8), EPS), swiglu])
def test_no_rows(function: object) -> None:
    x = torch.zeros(0, 8, requires_grad=True)
    assert torch.autograd.grad(function(x).sum(), x)[0].shape == (0, 8)  # type: ignore[operator]
