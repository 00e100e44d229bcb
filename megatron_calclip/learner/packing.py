"""From sequences of any length to packed micro-batches: the only place where tokens are padded.

`plan_step` decides, from the lengths alone and identically on every rank, which sequences form which
mini-batch (one optimizer step), and how each mini-batch is cut into micro-batches and dealt to the
data-parallel ranks, balanced by tokens. The old log-probabilities are computed over the plan that training
uses: per-tensor FP8 scales depend on what shares a micro-batch, and another partition would show up as false
importance ratios.

`pack` lays one micro-batch out for the model: sequences end to end, cut zigzag over context-parallel ranks as
TransformerEngine expects it, padded once at the end to the multiple that sequence parallelism or an FP8
recipe needs. Attention works on groups of neighbouring sequences of similar length, one call per group; one table
says which slot of the padded groups each token takes, so that padding all of them is one gather, and so is its
gradient.

Left out on purpose: splitting one sequence over micro-batches, and balancing by attention FLOPs (quadratic in
the length): at the lengths of RL the linears dominate.

Legend: T tokens of the batch, t tokens of a micro-batch on this context-parallel rank, n scored tokens of it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Padding of one attention call: sequences join a group while padded size / tokens stays below this. Attention pays the
# square of it; one more call costs less. Of 1.25, 1.1 and 1.05 the middle was fastest (docs/performance.md).
MAX_ATTENTION_PADDING = 1.1


@dataclass(frozen=True)
class StepPlan:
    """Which sequences go where in one step; equal on all ranks."""

    minibatches: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    """[mini-batch][data-parallel rank][micro-batch] -> indices of sequences. All ranks have equally many
    micro-batches; one without sequences keeps a rank in step with the others."""

    def only(self, keep: Sequence[bool]) -> StepPlan:
        """The same plan without the sequences that are not kept; micro-batches stay, if need be empty."""

        def kept(micro: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(i for i in micro if keep[i])

        return StepPlan(
            tuple(tuple(tuple(kept(micro) for micro in rank) for rank in minibatch) for minibatch in self.minibatches)
        )

    def sequences(self, minibatch: int) -> list[int]:
        """Indices of all sequences of a mini-batch, ascending."""
        return sorted(i for rank in self.minibatches[minibatch] for micro in rank for i in micro)


def _ceil_to(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _balanced_bins(lengths: Sequence[int], indices: Sequence[int], num_bins: int) -> list[list[int]]:
    """Longest first, each to the bin with the fewest tokens (ties: the first bin)."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [(0, target) for target in range(num_bins)]
    for index in sorted(indices, key=lambda i: (-lengths[i], i)):
        load, target = loads[0]
        bins[target].append(index)
        heapq.heapreplace(loads, (load + lengths[index], target))
    return bins


def plan_step(
    lengths: Sequence[int],
    *,
    num_minibatches: int,
    dp_size: int,
    tokens_per_microbatch: int,
    microbatch_multiple: int = 1,
) -> StepPlan:
    """Partition a batch into mini-batches, ranks and micro-batches.

    Args:
        lengths: tokens of each of the N sequences.
        num_minibatches: optimizer steps; consecutive sequences form a mini-batch, so groups stay together.
        dp_size: data-parallel ranks.
        tokens_per_microbatch: budget; only a single longer sequence exceeds it.
        microbatch_multiple: the number of micro-batches of a rank is a multiple of this (the interleaved
            pipeline schedule needs the pipeline size).

    Raises:
        ValueError: when the sequences do not divide into the mini-batches.
    """
    num_sequences = len(lengths)
    if num_sequences % num_minibatches or not num_sequences:
        raise ValueError(
            f"{num_sequences} sequences do not split into {num_minibatches} mini-batches; choose a divisor"
        )
    size = num_sequences // num_minibatches
    minibatches = []
    for start in range(0, num_sequences, size):
        indices = range(start, start + size)
        budget = tokens_per_microbatch
        least = sum(min(lengths[i], budget) for i in indices)
        per_rank = math.ceil(least / (budget * dp_size))
        while True:
            per_rank = _ceil_to(per_rank, microbatch_multiple)
            bins = _balanced_bins(lengths, indices, per_rank * dp_size)
            if all(len(b) < 2 or sum(lengths[i] for i in b) <= budget for b in bins):
                break
            per_rank += 1
        # Heaviest bins first, dealt back and forth, so that the ranks' totals stay close.
        bins.sort(key=lambda b: -sum(lengths[i] for i in b))
        ranks: list[list[tuple[int, ...]]] = [[] for _ in range(dp_size)]
        for row in range(per_rank):
            dealt = bins[row * dp_size : (row + 1) * dp_size]
            for rank, micro in enumerate(dealt if row % 2 == 0 else reversed(dealt)):
                ranks[rank].append(tuple(micro))
        minibatches.append(tuple(tuple(rank) for rank in ranks))
    return StepPlan(tuple(minibatches))


class _Pad(torch.autograd.Function):
    """A plain gather's gradient adds rows to zeros; as every token has one slot, this one's is a gather, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(slot)
        return x.flatten(1).index_select(0, token).view(-1, *x.shape[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slot,) = ctx.saved_tensors
        return grad.flatten(1).index_select(0, slot).view(-1, *grad.shape[1:]), None, None


class _Unpad(torch.autograd.Function):
    """Its gradient copies rows, where a plain gather's would add them."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(slot)
        ctx.num_slots = len(padded)
        return padded.index_select(0, slot)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (slot,) = ctx.saved_tensors
        return grad.new_zeros(ctx.num_slots, grad.shape[1]).index_copy_(0, slot, grad), None


@dataclass(frozen=True)
class PaddedSlots:
    """Where tokens lie once the sequences of every attention group are padded: p slots for n tokens, p >= n."""

    token: Tensor
    """int64 [p]: the token in each slot; any token in a slot of padding."""
    slot: Tensor
    """int64 [n]: the slot of each token; no token has two."""

    def to(self, device: torch.device) -> PaddedSlots:
        """The same tables on a device."""
        return PaddedSlots(self.token.to(device), self.slot.to(device))

    def pad(self, x: Tensor) -> Tensor:
        """Tokens [n, ...] to slots [p, ...]. The gradient of padding is dropped, whatever it is."""
        return _Pad.apply(x, self.token, self.slot)

    def unpad(self, padded: Tensor) -> Tensor:
        """Slots [p, c] to tokens [n, c]. Padding gets a gradient of zero."""
        return _Unpad.apply(padded, self.slot)


@dataclass(frozen=True)
class AttentionGroup:
    """Neighbouring sequences that share one attention call, padded to the longest of them."""

    batch: int
    """b: sequences."""
    num_queries: int
    """s_q: query slots of each."""
    num_keys: int
    """s_k: key slots of each."""
    mask: Tensor | None
    """bool [b, 1, s_q, s_k], True where a query sees a key; None for plain causal attention (padding on the
    right needs no mask then, since no real query comes after a padded key)."""

    def to(self, device: torch.device) -> AttentionGroup:
        """The same group with its mask on a device."""
        return self if self.mask is None else replace(self, mask=self.mask.to(device))


@dataclass(frozen=True)
class PackedLayout:
    """Where the tokens of one micro-batch lie on this rank."""

    source: Tensor
    """int64 [t]: index of each local token in the batch's flat layout [T]; -1 for padding."""
    positions: Tensor
    """int64 [t]: position of each token in its sequence."""
    cu_seqlens: Tensor
    """int32 [b + 1]: boundaries of padded sequences over all context-parallel ranks (TransformerEngine's)."""
    max_seqlen: int
    """Longest padded sequence, over all context-parallel ranks."""
    groups: tuple[AttentionGroup, ...]
    """Attention calls; their slots follow one another in this order."""
    query_slots: PaddedSlots | None
    """Slots of the local tokens [t]; None where no group is padded, so that tokens are their own slots."""
    key_slots: PaddedSlots | None
    """Slots of the keys gathered over context parallelism [cp * t]; `query_slots` where that is 1."""


def _zigzag(length: int, cp_size: int, cp_rank: int) -> list[range]:
    """Positions of a padded sequence that a context-parallel rank holds: chunk r and its mirror image."""
    if cp_size == 1:
        return [range(length)]
    chunk = length // (2 * cp_size)
    mirror = 2 * cp_size - 1 - cp_rank
    return [range(cp_rank * chunk, (cp_rank + 1) * chunk), range(mirror * chunk, (mirror + 1) * chunk)]


def _positions(length: int, cp_size: int, cp_rank: int) -> Tensor:
    return torch.cat([torch.arange(r.start, r.stop) for r in _zigzag(length, cp_size, cp_rank)])


def _group_bounds(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Cut sequences, longest first, into runs whose padding stays small."""
    bounds, start = [], 0
    for stop in range(1, len(lengths) + 1):
        run = lengths[start : stop + 1]
        if stop == len(lengths) or len(run) * run[0] > MAX_ATTENTION_PADDING * sum(run):
            bounds.append((start, stop))
            start = stop
    return bounds


def _padded_slots(sequences: Sequence[Sequence[Tensor]]) -> PaddedSlots:
    """Pad each group of sequences, given as the tokens of each, to its longest."""
    tokens, slots, start = [], [], 0
    for group in sequences:
        size = max(len(sequence) for sequence in group)
        table = torch.nn.utils.rnn.pad_sequence(list(group), batch_first=True, padding_value=-1).flatten()
        real = (table >= 0).nonzero()[:, 0]
        tokens.append(table.clamp(min=0))
        slots.append(torch.stack([table[real], start + real]))
        start += len(group) * size
    token_of, slot_of = torch.cat(slots, dim=1)
    slot = torch.empty_like(token_of)
    slot[token_of] = slot_of
    return PaddedSlots(torch.cat(tokens), slot)


def _groups(
    lengths: Sequence[int], bounds: Sequence[tuple[int, int]], cp_size: int, cp_rank: int
) -> tuple[list[AttentionGroup], PaddedSlots | None, PaddedSlots | None]:
    """Attention calls of one micro-batch, with the slots of its queries and keys.

    Args:
        lengths: padded lengths of its sequences, over all context-parallel ranks, in their order.
        bounds: first and last (excluded) sequence of each group.
        cp_size: context-parallel size.
        cp_rank: this rank.
    """
    if cp_size == 1 and all(lengths[a] == lengths[b - 1] for a, b in bounds):
        return [AttentionGroup(b - a, lengths[a], lengths[a], mask=None) for a, b in bounds], None, None
    local = [length // cp_size for length in lengths]
    starts = [sum(local[:index]) for index in range(len(local))]
    total = sum(local)
    own = [start + torch.arange(size) for start, size in zip(starts, local, strict=True)]
    query_slots = _padded_slots([own[a:b] for a, b in bounds])
    if cp_size == 1:
        groups = [AttentionGroup(b - a, max(lengths[a:b]), max(lengths[a:b]), mask=None) for a, b in bounds]
        return groups, query_slots, query_slots
    # Keys arrive rank after rank; bring each sequence's together and let positions decide who sees whom.
    every = [torch.cat([tokens + rank * total for rank in range(cp_size)]) for tokens in own]
    groups = []
    for a, b in bounds:
        keys = [torch.cat([_positions(length, cp_size, rank) for rank in range(cp_size)]) for length in lengths[a:b]]
        queries = [_positions(length, cp_size, cp_rank) for length in lengths[a:b]]
        pad = torch.nn.utils.rnn.pad_sequence
        # A key of padding lies beyond every query; a query of padding sees the first key, lest its softmax be empty.
        key_positions = pad(keys, batch_first=True, padding_value=2 * max(lengths))
        query_positions = pad(queries, batch_first=True, padding_value=0)
        mask = (key_positions[:, None] <= query_positions[:, :, None])[:, None]
        groups.append(AttentionGroup(b - a, query_positions.shape[1], key_positions.shape[1], mask=mask))
    return groups, query_slots, _padded_slots([every[a:b] for a, b in bounds])


def pack(
    sequences: Sequence[int],
    lengths: Sequence[int],
    offsets: Sequence[int],
    *,
    cp_size: int,
    cp_rank: int,
    align: int,
    min_tokens: int = 1,
) -> PackedLayout:
    """Lay out one micro-batch.

    Args:
        sequences: indices of its sequences (may be empty: then it holds padding only).
        lengths: tokens of every sequence of the batch.
        offsets: first token of every sequence in the flat layout.
        cp_size: context-parallel size; each sequence is padded to a multiple of 2 * cp_size.
        cp_rank: this rank's place in it.
        align: local tokens t become a multiple of this, by one more sequence of padding.
        min_tokens: smallest t.
    """
    order = sorted(sequences, key=lambda i: (-lengths[i], i))
    multiple = 2 * cp_size if cp_size > 1 else 1
    padded = [_ceil_to(lengths[i], multiple) for i in order]
    local = sum(padded) // cp_size
    filler = (_ceil_to(max(local, min_tokens), align) - local) * cp_size
    while filler % multiple:
        filler += align * cp_size
    source, positions = [], []
    for index, length in zip([*order, -1], [*padded, filler], strict=True):
        if not length:
            continue
        place = _positions(length, cp_size, cp_rank)
        if index < 0:
            source.append(torch.full_like(place, -1))
        else:
            source.append(torch.where(place < lengths[index], place + offsets[index], -1))
        positions.append(place)
    whole = [n for n in [*padded, filler] if n]
    bounds = _group_bounds(padded)
    if filler:  # apart, so that padding never widens a group of real sequences
        bounds.append((len(padded), len(whole)))
    groups, query_slots, key_slots = _groups(whole, bounds, cp_size, cp_rank)
    return PackedLayout(
        source=torch.cat(source),
        positions=torch.cat(positions),
        cu_seqlens=torch.tensor([0, *whole]).cumsum(0).to(torch.int32),
        max_seqlen=max(whole),
        groups=tuple(groups),
        query_slots=query_slots,
        key_slots=key_slots,
    )
