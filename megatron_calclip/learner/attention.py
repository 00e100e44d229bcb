"""Causal attention and rotary embedding over packed sequences, for every device that torch's SDPA runs on.

This is the `local` layer spec's attention; with TransformerEngine its own kernels take the same packed layout. Each
group of similar sequences (`learner/packing.py`) is one call of `scaled_dot_product_attention`. Under context
parallelism keys and values are gathered over the group (their gradients reduce-scattered), which is simple, exact,
and costs one gather per layer; ring attention is TransformerEngine's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_calclip.learner.packing import AttentionGroup, PackedLayout


@dataclass
class PackedTokens(PackedSeqParams):
    """Megatron's description of a packed micro-batch, with what our attention and rotary embedding need besides.

    `qkv_format` is `thd` for TransformerEngine. For our own attention it is `packed`: Megatron then applies the rotary
    embedding to all tokens in one go, from per-token frequencies, where its `thd` branch would loop over sequences.
    """

    positions: Tensor | None = None
    """int64 [t]: position of each token in its sequence."""
    groups: tuple[AttentionGroup, ...] = field(default=())
    """Attention calls."""

    @classmethod
    def of(cls, layout: PackedLayout, *, thd: bool, device: torch.device) -> PackedTokens:
        """The parameters of one micro-batch, for TransformerEngine (`thd`) or for our own attention."""
        cu_seqlens = layout.cu_seqlens.to(device)
        return cls(
            qkv_format="thd" if thd else "packed",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=layout.max_seqlen,
            max_seqlen_kv=layout.max_seqlen,
            positions=layout.positions.to(device),
            groups=() if thd else tuple(group.to(device) for group in layout.groups),
        )


class PackedRotaryEmbedding(RotaryEmbedding):
    """Rotary frequencies of a packed micro-batch, per token.

    Megatron asks first for a length, then for the frequencies of that length. For our own attention the 'length'
    handed back is the tensor of positions, so that each token gets the frequencies of its own position, on any
    context-parallel rank; for TransformerEngine's `thd` kernels it is the longest sequence, as they expect.

    Args:
        inv_freq: float32 [d / 2] inverse frequencies, scaling (linear, llama3, YaRN ...) already applied.
    """

    def __init__(self, inv_freq: Tensor) -> None:
        torch.nn.Module.__init__(self)
        self.rotary_interleaved = False
        self.seq_len_interpolation_factor = None
        self.cp_group = None
        self.inv_freq = inv_freq

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> Any:
        """Positions [t], or the longest sequence's length for `thd`."""
        packed: PackedTokens = kwargs.get("packed_seq_params") or args[4]
        return packed.max_seqlen_q if packed.qkv_format == "thd" else packed.positions

    def forward(self, positions: Tensor | int, *_: Any, **__: Any) -> Tensor:
        """Angles [t, 1, 1, d] of the given positions (or of 0..length-1)."""
        if isinstance(positions, int):
            positions = torch.arange(positions, device=self.inv_freq.device)
        half = torch.outer(positions.to(torch.float32), self.inv_freq)
        return torch.cat((half, half), dim=-1)[:, None, None, :]


class PackedAttention(MegatronModule):
    """Causal softmax attention over packed sequences by SDPA, with grouped-query heads and context parallelism.

    Args:
        config: Megatron's TransformerConfig.
        softmax_scale: multiplies q k^T; None is d ** -0.5.
        pg_collection: process groups, of which `cp` is used.
        _: what else Megatron hands to a core attention (layer number, mask type ...).
    """

    def __init__(
        self,
        config: TransformerConfig,
        *_: Any,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **__: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedTokens,
        **_: Any,
    ) -> Tensor:
        """Attend within each sequence.

        Args:
            query: [t, 1, heads, d].
            key: [t, 1, kv heads, d].
            value: like key.
            attention_mask: unused; the packed layout says who sees whom.
            packed_seq_params: the layout.

        Returns:
            [t, 1, heads * d].
        """
        query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        if self.cp_group is not None:
            key = gather_from_sequence_parallel_region(key.contiguous(), group=self.cp_group)
            value = gather_from_sequence_parallel_region(value.contiguous(), group=self.cp_group)
        parts = [self._attend(group, query, key, value) for group in packed_seq_params.groups]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[:, None]

    def _attend(self, group: AttentionGroup, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One call of SDPA; returns [tokens of the group, heads * d]."""
        if group.query_index is None:
            span = slice(group.start, group.start + group.num_tokens)
            q, k, v = (x[span].unflatten(0, (group.batch, -1)) for x in (query, key, value))
        else:
            assert group.key_index is not None
            q = _rows(query, group.query_index)
            k, v = _rows(key, group.key_index), _rows(value, group.key_index)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=group.mask,
            is_causal=group.mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        out = out.transpose(1, 2).flatten(2).flatten(0, 1)
        return out if group.output_index is None else out.index_select(0, group.output_index)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index] for x [t, heads, d] and index [b, s]; `index_select` because its backward adds whole rows."""
    return x.flatten(1).index_select(0, index.flatten()).view(*index.shape, *x.shape[1:])
