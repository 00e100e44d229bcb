"""Flat packed batches for the tests of `megatron_calclip.algorithms`."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_calclip.algorithms.policy_loss import LossInputs


def loss_inputs(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    sequence_ids: Tensor | None = None,
) -> LossInputs:
    """Inputs with the given log-ratios and a leaf `log_probs`; by default one sequence, all response."""
    num_tokens = len(log_ratio)
    ids = torch.zeros(num_tokens, dtype=torch.int64) if sequence_ids is None else sequence_ids
    old = torch.full_like(log_ratio, -1.5)
    return LossInputs(
        log_probs=(old + log_ratio).requires_grad_(),
        old_log_probs=old,
        advantages=advantages,
        importance_weights=torch.ones(num_tokens) if weights is None else weights,
        response_mask=torch.ones(num_tokens, dtype=torch.bool) if mask is None else mask,
        sequence_ids=ids,
        num_sequences=int(ids.max()) + 1,
    )


@dataclass(frozen=True)
class Batch:
    """A random batch: loss inputs plus what the instruments need."""

    inputs: LossInputs
    sampler_log_probs: Tensor
    entropy: Tensor

    def part(self, sequences: list[int]) -> "Batch":
        """A micro-batch: the named sequences, renumbered from 0 in the given order."""
        ids = self.inputs.sequence_ids
        picks = [torch.nonzero(ids == sequence).flatten() for sequence in sequences]
        index = torch.cat(picks)
        new_ids = torch.cat([torch.full_like(pick, new) for new, pick in enumerate(picks)])
        i = self.inputs
        inputs = replace(
            i,
            log_probs=i.log_probs[index],  # not a leaf: gradients flow back to the whole batch
            old_log_probs=i.old_log_probs[index],
            advantages=i.advantages[index],
            importance_weights=i.importance_weights[index],
            response_mask=i.response_mask[index],
            sequence_ids=new_ids,
            num_sequences=len(sequences),
        )
        return Batch(inputs, self.sampler_log_probs[index], self.entropy[index])


def random_batch(seed: int, *, num_sequences: int = 6, sigma: float = 0.4, dirty: bool = True) -> Batch:
    """Sequences of 1 to 12 tokens with a prompt of 0 to 3 tokens and masked tokens inside the response.

    With `dirty`, everything outside the mask is NaN or infinite.
    """
    g = torch.Generator().manual_seed(seed)

    def normal(n: int) -> Tensor:
        return torch.randn(n, generator=g, dtype=torch.float64)

    lengths = torch.randint(1, 13, (num_sequences,), generator=g)
    ids = torch.repeat_interleave(torch.arange(num_sequences), lengths)
    n = len(ids)
    position = torch.cat([torch.arange(int(length)) for length in lengths])
    prompt = torch.randint(0, 4, (num_sequences,), generator=g)[ids]
    mask = (position >= prompt) & (torch.rand(n, generator=g) > 0.15)
    old = -normal(n).abs() - 0.05
    fields = {
        "log_probs": old + sigma * normal(n),
        "old_log_probs": old,
        "advantages": normal(num_sequences)[ids],
        "importance_weights": normal(n).abs(),
        "sampler": old + 0.3 * normal(n),
        "entropy": normal(n).abs(),
    }
    if dirty:
        junk = torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=torch.float64)
        for name, values in fields.items():
            noise = junk[torch.randint(0, 3, (n,), generator=g)]
            fields[name] = torch.where(mask, values, noise)
    inputs = LossInputs(
        log_probs=fields["log_probs"].requires_grad_(),
        old_log_probs=fields["old_log_probs"],
        advantages=fields["advantages"],
        importance_weights=fields["importance_weights"],
        response_mask=mask,
        sequence_ids=ids,
        num_sequences=num_sequences,
    )
    return Batch(inputs, fields["sampler"], fields["entropy"])
