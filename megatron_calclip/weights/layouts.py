"""How HF tensors form one Megatron tensor, and how tensor parallelism (TP) cuts it.

Each layout has two pairs of inverses, exact to the bit: `join`/`split` between the HF tensors and the full
Megatron tensor, `shard`/`unshard` between that and what the TP ranks hold. `blocks` says where in the full tensor
a shard comes from, as checkpoints record it. All of them move rows and columns and compute nothing, so they serve
tensors of any type, meta tensors included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_calclip.weights.mapping import ModelShape


@dataclass(frozen=True)
class Layout:
    """One HF tensor kept as it is, cut by TP along one dimension or not at all."""

    tp_dim: int | None
    """Dimension of the Megatron tensor that TP cuts; None where every rank holds the whole."""

    def join(self, parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
        """HF tensors -> the full Megatron tensor."""
        (part,) = parts
        return part

    def split(self, full: Tensor, shape: ModelShape) -> list[Tensor]:
        """The full Megatron tensor -> HF tensors; the inverse of `join`, bit for bit. May return views."""
        return [full]

    def blocks(self, full: Tensor, *, rank: int, size: int) -> list[tuple[tuple[int, ...], Tensor]]:
        """The contiguous blocks of the full tensor that TP rank `rank` of `size` holds, with their offsets. Views."""
        return [self._block(full, index=rank, count=size)]

    def _block(self, full: Tensor, *, index: int, count: int) -> tuple[tuple[int, ...], Tensor]:
        """Block `index` of `count` equal ones along the dimension that TP cuts."""
        offsets = [0] * full.dim()
        if self.tp_dim is None:
            return tuple(offsets), full
        size, rest = divmod(full.shape[self.tp_dim], count)
        assert rest == 0, (tuple(full.shape), self.tp_dim, count)
        offsets[self.tp_dim] = index * size
        return tuple(offsets), full.narrow(self.tp_dim, index * size, size)

    def shard(self, full: Tensor, *, rank: int, size: int) -> Tensor:
        """The full Megatron tensor -> what TP rank `rank` of `size` holds. May return a view."""
        parts = [block for _, block in self.blocks(full, rank=rank, size=size)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.tp_dim or 0)

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """What the TP ranks hold, in rank order -> the full Megatron tensor."""
        return shards[0] if self.tp_dim is None else torch.cat(list(shards), dim=self.tp_dim)


@dataclass(frozen=True)
class FusedQKV(Layout):
    """Query, key and value rows by query group: for each its query heads, then its key, then its value."""

    def join(self, parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
        """q [q_size, ...], k and v [kv_size, ...] -> [q_size + 2 * kv_size, ...]."""
        groups = [part.unflatten(0, (shape.num_kv_heads, -1)) for part in parts]
        return torch.cat(groups, dim=1).flatten(0, 1)

    def split(self, full: Tensor, shape: ModelShape) -> list[Tensor]:
        """[q_size + 2 * kv_size, ...] -> q, k, v."""
        rows = [shape.q_size // shape.num_kv_heads, shape.head_dim, shape.head_dim]
        return [part.flatten(0, 1) for part in full.unflatten(0, (shape.num_kv_heads, -1)).split(rows, dim=1)]


@dataclass(frozen=True)
class GateUp(Layout):
    """Gate above up; TP cuts each of the two, so that a rank can gate without communication."""

    def join(self, parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
        """gate and up [F, H] -> [2 * F, H]."""
        return torch.cat(list(parts), dim=0)

    def split(self, full: Tensor, shape: ModelShape) -> list[Tensor]:
        """[2 * F, H] -> gate, up."""
        return list(full.chunk(2, dim=0))

    def blocks(self, full: Tensor, *, rank: int, size: int) -> list[tuple[tuple[int, ...], Tensor]]:
        """[gate; up] -> gate_r, up_r."""
        return [self._block(full, index=rank + half * size, count=2 * size) for half in (0, 1)]

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """[gate_r; up_r] of all ranks -> [gate; up]."""
        return torch.cat([shard.unflatten(0, (2, -1)) for shard in shards], dim=1).flatten(0, 1)


@dataclass(frozen=True)
class PaddedVocabulary(Layout):
    """One row per token id, with zero rows added up to the padded size."""

    def join(self, parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
        """[vocab_size, H] -> [padded_vocab_size, H]."""
        (part,) = parts
        padding = shape.padded_vocab_size - part.shape[0]
        return torch.cat([part, part.new_zeros(padding, *part.shape[1:])]) if padding else part

    def split(self, full: Tensor, shape: ModelShape) -> list[Tensor]:
        """[padded_vocab_size, H] -> [vocab_size, H], whatever training did to the padding."""
        return [full[: shape.vocab_size]]


REPLICATED = Layout(None)
COLUMNS = Layout(1)
QKV = FusedQKV(0)
GATE_UP = GateUp(0)
VOCABULARY = PaddedVocabulary(0)
