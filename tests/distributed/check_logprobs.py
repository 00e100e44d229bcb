"""Vocabulary-parallel log-probs against float64 autograd of the plain formula: values, gradients, padding, empty batches.

Run with `torchrun --nproc-per-node 2 tests/distributed/check_logprobs.py`; exits non-zero on any difference.
Every rank computes the whole problem in float64 and compares its shard. Plain torch.distributed on gloo.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_calclip.learner.logprobs import linear_token_log_probs, token_log_probs

HIDDEN_SIZE = 24
TOLERANCE = 1e-5  # relative and absolute, to float64
COLLECTIVE_TIMEOUT = timedelta(seconds=60)  # ranks that disagree about a collective must fail, not hang


def assert_close(actual: Tensor | None, expected: Tensor) -> None:
    assert actual is not None
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE, atol=TOLERANCE)


def plain(logits: Tensor, targets: Tensor, *, vocab_size: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies by the formula, in the dtype of the logits."""
    every = torch.log_softmax(logits[:, :vocab_size] / temperature, dim=-1)
    return every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)


def make_problem(num_tokens: int, stored_vocab: int, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the whole output weight, and targets; equal on all ranks."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, HIDDEN_SIZE, generator=generator)
    weight = torch.randn(stored_vocab, HIDDEN_SIZE, generator=generator)
    return hidden, weight, torch.randint(0, vocab_size, (num_tokens,), generator=generator)


def weighted_loss(log_probs: Tensor, entropy: Tensor | None) -> Tensor:
    assert entropy is not None
    weights = torch.arange(log_probs.shape[0]) % 3 - 1.0  # every third token is masked, no neighbours are alike
    return (log_probs * weights).sum() + 0.1 * (entropy * weights).sum()


def check(num_tokens: int, stored_vocab: int, vocab_size: int, temperature: float, offset: float) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shard = slice(rank * stored_vocab // world_size, (rank + 1) * stored_vocab // world_size)
    hidden, weight, targets = make_problem(num_tokens, stored_vocab, vocab_size)
    whole_logits = hidden @ weight.t() + offset
    exact = {"vocab_size": vocab_size, "temperature": temperature}
    options: dict[str, Any] = {**exact, "group": dist.group.WORLD, "with_entropy": True, "entropy_grad": True}

    whole = whole_logits.double().requires_grad_()
    expected = plain(whole, targets, **exact)
    (expected_grad,) = torch.autograd.grad(weighted_loss(*expected), whole)
    logits = whole_logits[:, shard].clone().requires_grad_()
    actual = token_log_probs(logits, targets, **options)
    assert_close(actual[0], expected[0])
    assert_close(actual[1], expected[1])
    (grad,) = torch.autograd.grad(weighted_loss(*actual), logits)
    assert_close(grad, expected_grad[:, shard])
    assert not grad[1::3].any()  # masked

    inputs = (hidden.double().requires_grad_(), weight.double().requires_grad_())
    expected = plain(inputs[0] @ inputs[1].t(), targets, **exact)
    expected_grads = torch.autograd.grad(weighted_loss(*expected), inputs)
    local = (hidden.clone().requires_grad_(), weight[shard].clone().requires_grad_())
    actual = linear_token_log_probs(*local, targets, tile_rows=5, tile_columns=7, **options)
    assert_close(actual[0], expected[0])
    assert_close(actual[1], expected[1])
    grad_hidden, grad_weight = torch.autograd.grad(weighted_loss(*actual), local)
    assert_close(grad_weight, expected_grads[1][shard])
    dist.all_reduce(grad_hidden)  # partial by contract: the caller sums over the group
    assert_close(grad_hidden, expected_grads[0])


def main() -> None:
    """Check all shapes on the ranks of the launcher."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    try:
        check(num_tokens=13, stored_vocab=64, vocab_size=64, temperature=1.0, offset=0.0)
        # Padding in the last shard, then a last shard of nothing but padding.
        check(num_tokens=13, stored_vocab=64, vocab_size=51, temperature=0.7, offset=0.0)
        check(num_tokens=13, stored_vocab=64, vocab_size=20, temperature=1.3, offset=-1e3)
        # Odd sizes: 25 columns a shard, 49 of them real.
        check(num_tokens=13, stored_vocab=50, vocab_size=49, temperature=0.7, offset=0.0)
        # Several tiles in each shard.
        check(num_tokens=4, stored_vocab=20000, vocab_size=19999, temperature=1.0, offset=9.0)
        check(num_tokens=0, stored_vocab=64, vocab_size=64, temperature=1.0, offset=0.0)
        check(num_tokens=1, stored_vocab=64, vocab_size=64, temperature=1.0, offset=-1e4)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
