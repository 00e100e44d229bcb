"""From sequences of any length to packed micro-batches: the only place where tokens are padded.

`plan_step` decides, from the lengths alone and identically on every rank, which sequences form which
mini-batch (one optimizer step), and how each mini-batch is cut into micro-batches and dealt to the
data-parallel ranks, balanced by tokens. The old log-probabilities are computed over the plan that training
uses: per-tensor FP8 scales depend on what shares a micro-batch, and another partition would show up as false
importance ratios.

`pack` lays one micro-batch out for the model: sequences end to end, cut zigzag over context-parallel ranks as
TransformerEngine expects it, padded once at the end to the multiple that sequence parallelism or an FP8
recipe needs. Attention works on groups of neighbouring sequences of similar length, one call per group.

Left out on purpose: splitting one sequence over micro-batches, and balancing by attention FLOPs (quadratic in
the length): at the lengths of RL the linears dominate.

Legend: T tokens of the batch, t tokens of a micro-batch on this context-parallel rank, n scored tokens of it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Padding of one attention call: sequences join a group while padded size / tokens stays below this.
MAX_ATTENTION_PADDING = 1.25


@dataclass(frozen=True)
class StepPlan:
    """Which sequences go where in one step; equal on all ranks."""

    minibatches: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    """[mini-batch][data-parallel rank][micro-batch] -> indices of sequences. All ranks have equally many
    micro-batches; one without sequences keeps a rank in step with the others."""

    def of_rank(self, minibatch: int, dp_rank: int) -> tuple[tuple[int, ...], ...]:
        """Micro-batches of one data-parallel rank in one mini-batch."""
        return self.minibatches[minibatch][dp_rank]

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


@dataclass(frozen=True)
class AttentionGroup:
    """Neighbouring sequences that share one attention call, padded to the longest of them.

    Indices address the local queries [t] and the keys gathered over context parallelism [cp * t].
    """

    query_index: Tensor | None
    """int64 [b, s_q]; None where the group is a plain view (equal lengths, one context-parallel rank)."""
    key_index: Tensor | None
    """int64 [b, s_k]; None with query_index."""
    output_index: Tensor | None
    """int64 [tokens]: rows of the flattened [b * s_q] output that hold real tokens; None with query_index."""
    mask: Tensor | None
    """bool [b, 1, s_q, s_k], True where a query sees a key; None for plain causal attention (padding on the
    right needs no mask then, since no real query comes after a padded key)."""
    start: int
    """First local token of the group."""
    num_tokens: int
    """Local tokens of the group."""
    batch: int
    """b: sequences."""

    def to(self, device: torch.device) -> AttentionGroup:
        """The same group with its tables on a device."""
        tables = {
            name: table.to(device)
            for name in ("query_index", "key_index", "output_index", "mask")
            if (table := getattr(self, name)) is not None
        }
        return replace(self, **tables)


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
    """Attention calls, in token order."""


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


def _group(lengths: Sequence[int], starts: Sequence[int], cp_size: int, cp_rank: int, total: int) -> AttentionGroup:
    """Index tables of one attention call.

    Args:
        lengths: padded lengths of its sequences, over all context-parallel ranks, longest first.
        starts: first local token of each.
        cp_size: context-parallel size.
        cp_rank: this rank.
        total: local tokens t of the micro-batch.
    """
    local = [n // cp_size for n in lengths]
    common = dict(start=starts[0], num_tokens=sum(local), batch=len(lengths))
    if cp_size == 1 and lengths[0] == lengths[-1]:
        return AttentionGroup(query_index=None, key_index=None, output_index=None, mask=None, **common)
    length_of, start_of = torch.tensor(local)[:, None], torch.tensor(starts)[:, None]
    slot = torch.arange(local[0])[None]
    real = slot < length_of
    query_index = torch.where(real, start_of + slot, starts[0])
    output_index = real.flatten().nonzero()[:, 0]
    if cp_size == 1:
        return AttentionGroup(
            query_index=query_index, key_index=query_index, output_index=output_index, mask=None, **common
        )
    # Keys arrive rank after rank; bring each sequence's together and let positions decide who sees whom.
    far = 2 * max(lengths)
    keys = torch.full((len(lengths), lengths[0]), 0)
    key_position = torch.full((len(lengths), lengths[0]), far)
    query_position = torch.zeros_like(query_index)
    for row, (length, start, size) in enumerate(zip(lengths, starts, local, strict=True)):
        query_position[row, :size] = _positions(length, cp_size, cp_rank)
        for rank in range(cp_size):
            columns = slice(rank * size, (rank + 1) * size)
            keys[row, columns] = rank * total + start + torch.arange(size)
            key_position[row, columns] = _positions(length, cp_size, rank)
    mask = (key_position[:, None] <= query_position[:, :, None])[:, None]
    return AttentionGroup(query_index=query_index, key_index=keys, output_index=output_index, mask=mask, **common)


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
    source, positions, starts, start = [], [], [], 0
    for index, length in zip([*order, -1], [*padded, filler], strict=True):
        if not length:
            continue
        place = _positions(length, cp_size, cp_rank)
        if index < 0:
            source.append(torch.full_like(place, -1))
        else:
            source.append(torch.where(place < lengths[index], place + offsets[index], -1))
        positions.append(place)
        starts.append(start)
        start += place.numel()
    whole = [n for n in [*padded, filler] if n]
    groups = [_group(whole[a:b], starts[a:b], cp_size, cp_rank, start) for a, b in _group_bounds(padded)]
    if filler:  # apart, so that padding never widens a group of real sequences
        groups.append(_group(whole[-1:], starts[-1:], cp_size, cp_rank, start))
    return PackedLayout(
        source=torch.cat(source),
        positions=torch.cat(positions),
        cu_seqlens=torch.tensor([0, *whole]).cumsum(0).to(torch.int32),
        max_seqlen=max(whole),
        groups=tuple(groups),
    )
