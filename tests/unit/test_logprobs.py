"""Values and gradients of both log-prob forms against float64 autograd of the plain formula, one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_calclip.learner.logprobs import linear_token_log_probs, token_log_probs

HIDDEN_SIZE = 16
TOLERANCE = 1e-5  # absolute, to float64


def make_logits(num_tokens: int, vocab: int, *, seed: int = 0, scale: float = 4.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, vocab, generator=generator) * scale
    return logits, torch.randint(0, vocab, (num_tokens,), generator=generator)


def make_linear(num_tokens: int, vocab: int, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, HIDDEN_SIZE, generator=generator)
    weight = torch.randn(vocab, HIDDEN_SIZE, generator=generator)
    return hidden, weight, torch.randint(0, vocab, (num_tokens,), generator=generator)


def plain(logits: Tensor, targets: Tensor, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The formula that the module replaces, in float64."""
    log_p = torch.log_softmax(logits.double() / temperature, dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def loss_weights(num_tokens: int) -> tuple[Tensor, Tensor]:
    """Upstream gradients of log-prob and entropy; every third token is masked in both."""
    generator = torch.Generator().manual_seed(1)
    mask = (torch.arange(num_tokens) % 3 != 0).double()
    return torch.randn(num_tokens, generator=generator) * mask, torch.rand(num_tokens, generator=generator) * mask


def weighted_loss(log_probs: Tensor, entropy: Tensor | None) -> Tensor:
    log_prob_weights, entropy_weights = loss_weights(log_probs.shape[0])
    loss = (log_probs * log_prob_weights.to(log_probs.dtype)).sum()
    return loss if entropy is None else loss + (entropy * entropy_weights.to(entropy.dtype)).sum()


def assert_close(actual: Tensor | None, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    assert actual is not None
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=tolerance)


def test_hand_computed_values() -> None:
    # exp(logits) = 1, 2, 1 -> p = 1/4, 1/2, 1/4; entropy = 2 (1/4) ln 4 + (1/2) ln 2 = 1.5 ln 2.
    logits = torch.tensor([[0.0, math.log(2.0), 0.0]])
    log_probs, entropy = token_log_probs(logits, torch.tensor([1]), with_entropy=True)
    assert_close(log_probs, torch.tensor([-math.log(2.0)]))
    assert_close(entropy, torch.tensor([1.5 * math.log(2.0)]))
    # Temperature 1/2 squares the weights: 1, 4, 1 -> p of the middle = 2/3.
    log_probs, entropy = token_log_probs(logits, torch.tensor([1]), temperature=0.5)
    assert_close(log_probs, torch.tensor([math.log(2.0 / 3.0)]))
    assert entropy is None


def test_hand_computed_gradient() -> None:
    # d log p_1 / d logits = one_hot - p = (-1/4, 1/2, -1/4); temperature 2 would halve it.
    logits = torch.tensor([[0.0, math.log(2.0), 0.0]], requires_grad=True)
    token_log_probs(logits, torch.tensor([1]))[0].sum().backward()
    assert_close(logits.grad, torch.tensor([[-0.25, 0.5, -0.25]]))


@settings(max_examples=60)
@given(
    num_tokens=st.integers(1, 9),
    vocab=st.integers(1, 70),
    tile_rows=st.integers(1, 10),
    tile_columns=st.integers(1, 75),
    temperature=st.sampled_from([0.6, 1.0, 1.7]),
    seed=st.integers(0, 2**16),
)
def test_linear_matches_plain_for_any_tile(
    num_tokens: int, vocab: int, tile_rows: int, tile_columns: int, temperature: float, seed: int
) -> None:
    hidden, weight, targets = make_linear(num_tokens, vocab, seed=seed)
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    actual = linear_token_log_probs(
        hidden,
        weight,
        targets,
        temperature=temperature,
        with_entropy=True,
        entropy_grad=True,
        tile_rows=tile_rows,
        tile_columns=tile_columns,
    )
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = plain(exact[0] @ exact[1].t(), targets, temperature=temperature)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e)
    gradients = torch.autograd.grad(weighted_loss(*actual), inputs)
    for a, e in zip(gradients, torch.autograd.grad(weighted_loss(*expected), exact), strict=True):
        assert_close(a, e, 1e-4)  # gradients of the weights reach 10


# 8192 columns make one tile: one column short, exact, and one beyond; 97 rows end in a partial row tile.
@pytest.mark.parametrize(("num_tokens", "vocab"), [(97, 8191), (33, 8192), (97, 8193), (3, 20011), (300, 13)])
@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logits_form_matches_plain(num_tokens: int, vocab: int, entropy_grad: bool, temperature: float) -> None:
    logits, targets = make_logits(num_tokens, vocab)
    logits.requires_grad_()
    options: dict[str, Any] = {"temperature": temperature, "with_entropy": True, "entropy_grad": entropy_grad}
    log_probs, entropy = token_log_probs(logits, targets, **options)
    exact = logits.detach().double().requires_grad_()
    exact_log_probs, exact_entropy = plain(exact, targets, temperature=temperature)
    assert_close(log_probs, exact_log_probs)
    assert_close(entropy, exact_entropy)
    assert entropy is not None and entropy.requires_grad == entropy_grad
    (grad,) = torch.autograd.grad(weighted_loss(log_probs, entropy if entropy_grad else None), logits)
    loss = weighted_loss(exact_log_probs, exact_entropy if entropy_grad else None)
    assert_close(grad, torch.autograd.grad(loss, exact)[0])
    # Masked tokens have a zero upstream gradient: exactly zero, not merely small.
    assert not grad[::3].any()


def test_entropy_alone_has_a_gradient() -> None:
    logits, targets = make_logits(5, 31)
    logits.requires_grad_()
    entropy = token_log_probs(logits, targets, with_entropy=True, entropy_grad=True)[1]
    assert entropy is not None
    exact = logits.detach().double().requires_grad_()
    expected = torch.autograd.grad(plain(exact, targets)[1].sum(), exact)[0]
    assert_close(torch.autograd.grad(entropy.sum(), logits)[0], expected)


def test_entropy_does_not_change_the_log_probs() -> None:
    logits, targets = make_logits(40, 9001)
    with_entropy = token_log_probs(logits, targets, with_entropy=True)[0]
    assert torch.equal(token_log_probs(logits, targets)[0], with_entropy)


@pytest.mark.parametrize("form", ["logits", "linear"])
def test_padded_columns_take_no_part(form: str) -> None:
    vocab_size, stored = 50, 64
    hidden, weight, targets = make_linear(7, stored)
    targets %= vocab_size
    # Padding would dominate every row if it were read.
    weight[vocab_size:] = hidden.sum(0) * 100
    if form == "linear":
        padded = weight.requires_grad_()
        result = linear_token_log_probs(
            hidden, padded, targets, vocab_size=vocab_size, with_entropy=True, tile_columns=9
        )
    else:
        padded = (hidden @ weight.t()).requires_grad_()
        result = token_log_probs(padded, targets, vocab_size=vocab_size, with_entropy=True)
    expected = plain((hidden.double() @ weight.detach().double().t())[:, :vocab_size], targets)
    for a, e in zip(result, expected, strict=True):
        assert_close(a, e)
    (grad,) = torch.autograd.grad(result[0].sum(), padded)
    padding = grad[vocab_size:] if form == "linear" else grad[:, vocab_size:]
    assert padding.numel() and not padding.any()


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_empty_and_single_batches(num_tokens: int) -> None:
    hidden, weight, targets = make_linear(num_tokens, 21)
    hidden.requires_grad_()
    weight.requires_grad_()
    log_probs, entropy = linear_token_log_probs(hidden, weight, targets, with_entropy=True)
    assert log_probs.shape == (num_tokens,) and entropy is not None and entropy.shape == (num_tokens,)
    grad_hidden, grad_weight = torch.autograd.grad(log_probs.sum(), [hidden, weight])
    assert grad_hidden.shape == hidden.shape and grad_weight.shape == weight.shape

    logits = (hidden @ weight.t()).detach().requires_grad_()
    from_logits, entropy_from_logits = token_log_probs(logits, targets, with_entropy=True)
    assert_close(from_logits, log_probs.detach())
    assert_close(entropy_from_logits, entropy)
    assert torch.autograd.grad(from_logits.sum(), logits)[0].shape == logits.shape


@pytest.mark.parametrize("temperature", [1.0, 0.3, 3.0])
def test_extreme_logits(temperature: float) -> None:
    vocab = 8200  # the second tile must raise the maximum of the first, and the other way round
    logits, targets = make_logits(6, vocab)
    logits[0] -= 1e4
    logits[1] += 1e4
    logits[2, 3], targets[2] = 1e4, 3
    logits[3, -1], targets[3] = 1e4, 0
    logits[4, :-1], targets[4] = -1e4, vocab - 1
    logits[5] = -1e4
    logits.requires_grad_()
    log_probs, entropy = token_log_probs(logits, targets, temperature=temperature, with_entropy=True, entropy_grad=True)
    exact = logits.detach().double().requires_grad_()
    expected = plain(exact, targets, temperature=temperature)
    # Row 3 has a log-prob of about -1e4 / temperature, where FP32 itself resolves 1e-7 of the value.
    torch.testing.assert_close(log_probs.double(), expected[0], rtol=2e-7, atol=TOLERANCE)
    assert_close(entropy, expected[1])
    (grad,) = torch.autograd.grad(log_probs.sum() + entropy.sum(), logits)  # type: ignore[union-attr]
    assert_close(grad, torch.autograd.grad(expected[0].sum() + expected[1].sum(), exact)[0])


def test_bfloat16_logits_are_reduced_in_fp32() -> None:
    logits, targets = make_logits(40, 20011)
    logits = logits.bfloat16().requires_grad_()
    log_probs, entropy = token_log_probs(logits, targets, with_entropy=True, entropy_grad=True)
    exact = logits.detach().double().requires_grad_()
    expected = plain(exact, targets)
    assert log_probs.dtype == torch.float32
    assert_close(log_probs, expected[0])
    assert_close(entropy, expected[1])
    (grad,) = torch.autograd.grad(weighted_loss(log_probs, entropy), logits)
    assert grad.dtype == torch.bfloat16
    expected_grad = torch.autograd.grad(weighted_loss(*expected), exact)[0]
    # The gradient is rounded to BF16 once: 2^-9 of each value.
    torch.testing.assert_close(grad.double(), expected_grad, rtol=2**-8, atol=1e-6)


def test_bfloat16_linear_equals_output_linear_then_logits_form() -> None:
    hidden, weight, targets = make_linear(30, 999)
    hidden, weight = hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()
    fused = linear_token_log_probs(
        hidden, weight, targets, with_entropy=True, entropy_grad=True, tile_rows=16, tile_columns=100
    )
    plain_form = token_log_probs(hidden @ weight.t(), targets, with_entropy=True, entropy_grad=True)
    for a, e in zip(fused, plain_form, strict=True):
        assert e is not None
        # A product summed in another order may round to the neighbouring BF16 logit.
        assert_close(a, e, 2e-3)
    gradients = torch.autograd.grad(weighted_loss(*fused), [hidden, weight])
    expected = torch.autograd.grad(weighted_loss(*plain_form), [hidden, weight])
    for a, e in zip(gradients, expected, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a - e).norm() < 0.01 * e.norm()


def test_bfloat16_weight_gradient_is_summed_in_fp32() -> None:
    # With p = 1/2 token 0 adds 1/2 to the gradient of row 0, and each of the 255 others 2^-11. A sum kept in
    # BF16 over the tiles (one token each) would lose those: 1/2 + 2^-11 rounds to 1/2.
    num_tokens = 256
    hidden = torch.full((num_tokens, 1), 2.0**-10).bfloat16()
    hidden[0] = 1.0
    weight = torch.zeros(2, 1).bfloat16().requires_grad_()
    targets = torch.zeros(num_tokens, dtype=torch.int64)
    log_probs, _ = linear_token_log_probs(hidden, weight, targets, tile_rows=1)
    (grad,) = torch.autograd.grad(log_probs.sum(), weight)
    # (1 + 255 / 1024) / 2 = 0.6245
    torch.testing.assert_close(grad.float(), torch.tensor([[0.6245], [-0.6245]]), rtol=2**-8, atol=0)


def test_frozen_weight_gets_no_gradient() -> None:
    hidden, weight, targets = make_linear(5, 40)
    hidden.requires_grad_()
    linear_token_log_probs(hidden, weight, targets)[0].sum().backward()
    exact = hidden.detach().double().requires_grad_()
    plain(exact @ weight.double().t(), targets)[0].sum().backward()
    assert exact.grad is not None and weight.grad is None
    assert_close(hidden.grad, exact.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inplace_backward_writes_over_the_logits(dtype: torch.dtype) -> None:
    logits, targets = make_logits(50, 8200)
    leaf = logits.to(dtype).requires_grad_()
    expected = torch.autograd.grad(token_log_probs(leaf, targets, vocab_size=8199)[0].sum(), leaf)[0]
    owned = leaf * 2.0  # this product does not need its result in its own backward pass
    # Doubled logits at temperature 2 are the same distribution; the factors 1/2 and 2 of the gradient cancel.
    log_probs, _ = token_log_probs(owned, targets, vocab_size=8199, temperature=2.0, inplace_backward=True)
    (grad,) = torch.autograd.grad(log_probs.sum(), leaf, retain_graph=True)
    assert torch.equal(owned.detach() * 2.0, grad)
    assert_close(grad, expected, 1e-6 if dtype == torch.float32 else 2**-8)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(log_probs.sum(), leaf)


def test_strided_logits() -> None:
    logits, targets = make_logits(6, 40)
    transposed = logits.t().contiguous().t().requires_grad_()
    assert not transposed.is_contiguous()
    log_probs, _ = token_log_probs(transposed, targets)
    assert_close(log_probs, plain(logits, targets)[0])
    expected = torch.softmax(logits.double(), -1).neg() + torch.nn.functional.one_hot(targets, 40)
    assert_close(torch.autograd.grad(log_probs.sum(), transposed)[0], expected)


def test_default_dtype_does_not_matter() -> None:
    hidden, weight, targets = make_linear(6, 40)
    expected = linear_token_log_probs(hidden, weight, targets, with_entropy=True)
    torch.set_default_dtype(torch.bfloat16)
    try:
        actual = linear_token_log_probs(hidden, weight, targets, with_entropy=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True) if a is not None and e is not None)


class LargestAllocation(TorchDispatchMode):
    """Records the largest result of an operation, in elements, leaving out the memory of `known`."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in self.known:
            self.num_elements = max(self.num_elements, result.untyped_storage().nbytes() // result.itemsize)
        return result


def test_no_copy_of_the_logits_is_allocated() -> None:
    logits, targets = make_logits(200, 20000)
    owned = logits.requires_grad_() * 1.0
    with LargestAllocation(owned) as allocated:
        log_probs, entropy = token_log_probs(
            owned, targets, with_entropy=True, entropy_grad=True, inplace_backward=True
        )
        torch.autograd.grad(weighted_loss(log_probs, entropy), owned)
    assert allocated.num_elements == 2 * 2**17  # two buffers of one chunk

    hidden, weight, targets = make_linear(200, 20000)
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    with LargestAllocation(*inputs) as allocated:
        log_probs, entropy = linear_token_log_probs(
            hidden, weight, targets, with_entropy=True, entropy_grad=True, tile_rows=100, tile_columns=500
        )
        assert allocated.num_elements == 2 * 100 * 500  # two buffers of one tile
        torch.autograd.grad(weighted_loss(log_probs, entropy), inputs)
    assert allocated.num_elements == weight.numel()  # its gradient; the logits have 200 * 20000 elements


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 3, 4)}, "flatten"),
        ({"logits": torch.zeros(2, 4, dtype=torch.float64)}, "not supported"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, "targets do not fit"),
        ({"targets": torch.zeros(2, dtype=torch.int32)}, "targets do not fit"),
        ({"targets": torch.tensor([0, 4])}, "outside 0..3"),
        ({"targets": torch.tensor([-100, 0])}, "outside 0..3"),
        ({"targets": torch.tensor([0, 3]), "vocab_size": 3}, "outside 0..2"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"vocab_size": 5}, "vocab_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"entropy_grad": True}, "with_entropy"),
        ({"logits": torch.zeros(2, 4, requires_grad=True), "inplace_backward": True}, "leaf"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], message: str) -> None:
    arguments = {"logits": torch.zeros(2, 4), "targets": torch.tensor([0, 1])} | change
    with pytest.raises(ValueError, match=message):
        token_log_probs(**arguments)


@pytest.mark.parametrize(
    ("hidden", "weight", "options", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(4, 5), {}, "do not fit"),
        (torch.zeros(2, 3), torch.zeros(4, 3).bfloat16(), {}, "dtype"),
        (torch.zeros(2, 3), torch.zeros(4, 3), {"tile_rows": 0}, "empty"),
        (torch.zeros(2, 3), torch.zeros(4, 3), {"tile_columns": -1}, "empty"),
    ],
)
def test_wrong_linear_arguments(hidden: Tensor, weight: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_token_log_probs(hidden, weight, torch.tensor([0, 1]), **options)
