"""KL estimators: values by hand, gradients against the formula, extremes."""

import math

import pytest
import torch

from megatron_calclip.algorithms.kl import kl_penalty

KINDS = ["k1", "k2", "k3"]


def value_and_gradient(difference, kind):
    log_probs = torch.tensor(difference, dtype=torch.float32, requires_grad=True)
    mask = torch.ones(len(difference), dtype=torch.bool)
    value = kl_penalty(log_probs, torch.zeros(len(difference)), response_mask=mask, kind=kind)
    return value.detach(), torch.autograd.grad(value.sum(), log_probs)[0]


@pytest.mark.parametrize(
    ("kind", "values", "gradients"),
    [
        # d = log 2 and -log 2.
        ("k1", [0.693147, -0.693147], [1, 1]),
        ("k2", [0.240227, 0.240227], [0.693147, -0.693147]),
        # exp(-d) + d - 1 = 1/2 + log 2 - 1 and 2 - log 2 - 1; gradient 1 - exp(-d) = 1/2 and -1.
        ("k3", [0.193147, 0.306853], [0.5, -1]),
    ],
)
def test_by_hand(kind, values, gradients):
    value, gradient = value_and_gradient([math.log(2), -math.log(2)], kind)
    torch.testing.assert_close(value, torch.tensor(values), atol=1e-5, rtol=0)
    torch.testing.assert_close(gradient, torch.tensor(gradients, dtype=torch.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_extremes_are_finite_and_never_push_away_from_the_reference(kind):
    value, gradient = value_and_gradient([1e4, -1e4], kind)
    assert torch.isfinite(value).all() and torch.isfinite(gradient).all()
    if kind != "k1":
        # Gradient descent lowers a log-probability above the reference and does not lower one below it.
        assert gradient[0] > 0 and gradient[1] <= 0


def test_k3_is_never_negative():
    value, _ = value_and_gradient(torch.linspace(-30, 30, 1001).tolist(), "k3")
    assert (value >= 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_outside_the_mask_has_no_influence(kind):
    log_probs = torch.tensor([1.0, float("nan"), float("inf")], requires_grad=True)
    mask = torch.tensor([True, False, False])
    value = kl_penalty(log_probs, torch.tensor([0.5, 0.0, float("inf")]), response_mask=mask, kind=kind)
    (gradient,) = torch.autograd.grad(value.sum(), log_probs)
    assert value[1:].tolist() == [0.0, 0.0] and gradient[1:].tolist() == [0.0, 0.0]
    assert value[0] > 0


def test_k3_is_unbiased_on_a_small_vocabulary():
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.4, 0.4, 0.2])
    exact = (p * (p / q).log()).sum()
    mask = torch.ones(3, dtype=torch.bool)
    for kind in ("k1", "k3"):
        torch.testing.assert_close((p * kl_penalty(p.log(), q.log(), response_mask=mask, kind=kind)).sum(), exact)


def test_unknown_kind():
    with pytest.raises(ValueError, match="unknown; choose from"):
        kl_penalty(torch.zeros(1), torch.zeros(1), response_mask=torch.ones(1, dtype=torch.bool), kind="k4")
