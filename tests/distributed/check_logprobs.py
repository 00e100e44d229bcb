"""Vocabulary-parallel log-probs equal those of one process: values, gradients, padding, empty batches.

Run with `torchrun --nproc-per-node 2 tests/distributed/check_logprobs.py`; exits non-zero on any difference.
Every rank computes the whole problem without a group and compares its shard. Plain torch.distributed on gloo.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_calclip.learner.logprobs import linear_token_log_probs, token_log_probs

HIDDEN_SIZE = 24
# Relative and absolute: sums over ranks add in another order than sums over tiles.
TOLERANCE = 1e-5
COLLECTIVE_TIMEOUT = timedelta(seconds=60)  # ranks that disagree about a collective must fail, not hang


def assert_close(actual: Tensor | None, expected: Tensor | None) -> None:
    assert actual is not None and expected is not None
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


def make_problem(num_tokens: int, stored_vocab: int, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the whole output weight, and targets; equal on all ranks."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, HIDDEN_SIZE, generator=generator)
    weight = torch.randn(stored_vocab, HIDDEN_SIZE, generator=generator)
    return hidden, weight, torch.randint(0, vocab_size, (num_tokens,), generator=generator)


def weighted_loss(log_probs: Tensor, entropy: Tensor | None) -> Tensor:
    assert entropy is not None
    weights = torch.arange(log_probs.shape[0]) % 3 - 0.5  # no token is like its neighbours
    return (log_probs * weights).sum() + 0.1 * (entropy * weights).sum()


def check(num_tokens: int, stored_vocab: int, vocab_size: int, temperature: float, offset: float) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shard = slice(rank * stored_vocab // world_size, (rank + 1) * stored_vocab // world_size)
    hidden, weight, targets = make_problem(num_tokens, stored_vocab, vocab_size)
    whole_logits = (hidden @ weight.t() + offset).requires_grad_()
    options: dict[str, Any] = {
        "temperature": temperature,
        "vocab_size": vocab_size,
        "with_entropy": True,
        "entropy_grad": True,
    }

    expected = token_log_probs(whole_logits, targets, **options)
    (expected_grad,) = torch.autograd.grad(weighted_loss(*expected), whole_logits)
    logits = whole_logits.detach()[:, shard].clone().requires_grad_()
    actual = token_log_probs(logits, targets, group=dist.group.WORLD, **options)
    assert_close(actual[0], expected[0])
    assert_close(actual[1], expected[1])
    (grad,) = torch.autograd.grad(weighted_loss(*actual), logits)
    assert_close(grad, expected_grad[:, shard])

    inputs = (hidden.requires_grad_(), weight.requires_grad_())
    expected = linear_token_log_probs(hidden, weight, targets, **options)
    expected_grads = torch.autograd.grad(weighted_loss(*expected), inputs)
    local_hidden = hidden.detach().requires_grad_()
    local_weight = weight.detach()[shard].clone().requires_grad_()
    options |= {"group": dist.group.WORLD, "tile_rows": 5, "tile_columns": 7}
    actual = linear_token_log_probs(local_hidden, local_weight, targets, **options)
    assert_close(actual[0], expected[0])
    assert_close(actual[1], expected[1])
    grad_hidden, grad_weight = torch.autograd.grad(weighted_loss(*actual), (local_hidden, local_weight))
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
        # Several tiles in each shard.
        check(num_tokens=4, stored_vocab=20000, vocab_size=19999, temperature=1.0, offset=9.0)
        check(num_tokens=0, stored_vocab=64, vocab_size=64, temperature=1.0, offset=0.0)
        check(num_tokens=1, stored_vocab=64, vocab_size=64, temperature=1.0, offset=-1e4)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
