"""Causal attention and rotary embedding over packed sequences, for every device that torch's SDPA runs on.

This is the `local` layer spec's attention; with TransformerEngine its own kernels take the same packed layout. Each
group of similar sequences (`learner/packing.py`) is one call of `scaled_dot_product_attention`. Queries and keys are
rotated here and not by Megatron, which would compute cosines and sines anew in every layer. Under context
parallelism keys and values are gathered over the group (their gradients reduce-scattered), which is simple, exact,
and costs one gather per layer; ring attention is TransformerEngine's.
"""

from __future__ import annotations

import contextlib
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

from megatron_calclip.learner.packing import AttentionGroup, PackedLayout, PaddedSlots
from megatron_calclip.learner.pointwise import rotate

# Keys times head size up to which a CPU attends in FP32. Below, torch's BF16 kernel takes up to five times as long; above, the gap
# closes, and long sequences are faster in BF16. By shape alone, never by pass: old and new log-probabilities must come from the same kernel.
CPU_FP32_ELEMENTS = 8192


@dataclass
class PackedTokens(PackedSeqParams):
    """Megatron's description of a packed micro-batch, with what our attention and rotary embedding need besides.

    `qkv_format` is `thd` for TransformerEngine and `packed` for our own attention.
    """

    positions: Tensor | None = None
    """int64 [t]: position of each token in its sequence."""
    groups: tuple[AttentionGroup, ...] = field(default=())
    """Attention calls."""
    query_slots: PaddedSlots | None = None
    """See `PackedLayout`."""
    key_slots: PaddedSlots | None = None
    """See `PackedLayout`."""
    rotation: tuple[Tensor, Tensor] | None = None
    """Cosines and signed sines [t, 1, d], float32; `PackedRotaryEmbedding` fills them in on the first pass."""

    @classmethod
    def of(cls, layout: PackedLayout, *, thd: bool, device: torch.device) -> PackedTokens:
        """The parameters of one micro-batch, for TransformerEngine (`thd`) or for our own attention."""
        cu_seqlens = layout.cu_seqlens.to(device)

        def slots(table: PaddedSlots | None) -> PaddedSlots | None:
            return None if thd or table is None else table.to(device)

        return cls(
            qkv_format="thd" if thd else "packed",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=layout.max_seqlen,
            max_seqlen_kv=layout.max_seqlen,
            positions=layout.positions.to(device),
            groups=() if thd else tuple(group.to(device) for group in layout.groups),
            query_slots=slots(layout.query_slots),
            key_slots=slots(layout.key_slots),
        )


class PackedRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding of a packed micro-batch, in the place of Megatron's.

    Megatron asks first for a length, then for the angles of that length, which every layer applies. For our own
    attention the 'length' handed back is the micro-batch; its cosines and sines are noted there, once for all layers
    and passes, and no angles are returned, so that Megatron applies none. For TransformerEngine's `thd` kernels both
    are what they expect: the longest sequence and its angles.

    Args:
        inv_freq: float32 [d / 2] inverse frequencies, scaling (linear, llama3, YaRN ...) already applied.
    """

    def __init__(self, inv_freq: Tensor) -> None:
        torch.nn.Module.__init__(self)
        self.rotary_interleaved = False
        self.seq_len_interpolation_factor = None
        self.cp_group = None
        self.inv_freq = inv_freq

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> PackedTokens | int:
        """The micro-batch, or the longest sequence's length for `thd`."""
        packed: PackedTokens = kwargs.get("packed_seq_params") or args[4]
        return packed.max_seqlen_q if packed.qkv_format == "thd" else packed

    def forward(self, packed: PackedTokens | int, *_: Any, **__: Any) -> Tensor | None:
        """Angles [length, 1, 1, d] for `thd`; None otherwise."""
        if isinstance(packed, int):
            half = torch.outer(torch.arange(packed, device=self.inv_freq.device).float(), self.inv_freq)
            return torch.cat((half, half), dim=-1)[:, None, None, :]
        if packed.rotation is None:
            assert packed.positions is not None
            half = torch.outer(packed.positions.float(), self.inv_freq)
            cos, sin = half.cos(), half.sin()
            packed.rotation = torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
        return None


def _saved_as(dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """Operands and result of an attention call wait for their backward pass in this dtype; log-sums and mask stay as they are."""

    def pack(x: Tensor) -> tuple[Tensor, torch.dtype]:
        return x.to(dtype) if x.dim() == 4 and x.is_floating_point() else x, x.dtype

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[0].to(packed[1]))


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
        packed = packed_seq_params
        assert packed.rotation is not None
        cos, sin = (table.to(query.dtype) for table in packed.rotation)
        query, key = (rotate(x.squeeze(1), cos, sin) for x in (query, key))
        value = value.squeeze(1)
        if self.cp_group is not None:
            key = gather_from_sequence_parallel_region(key.contiguous(), group=self.cp_group)
            value = gather_from_sequence_parallel_region(value.contiguous(), group=self.cp_group)
        if packed.query_slots is not None:
            assert packed.key_slots is not None
            query = packed.query_slots.pad(query)
            key, value = packed.key_slots.pad(key), packed.key_slots.pad(value)
        query_parts = query.split([group.batch * group.num_queries for group in packed.groups])
        num_keys = [group.batch * group.num_keys for group in packed.groups]
        calls = zip(packed.groups, query_parts, key.split(num_keys), value.split(num_keys), strict=True)
        parts = [self._attend(group, *operands) for group, *operands in calls]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return (out if packed.query_slots is None else packed.query_slots.unpad(out))[:, None]

    def _attend(self, group: AttentionGroup, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One call of SDPA on the slots of a group; returns [b * s_q, heads * d]."""
        dtype = query.dtype
        saved: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        small = query.device.type == "cpu" and group.num_keys * query.shape[-1] <= CPU_FP32_ELEMENTS
        if small and dtype is not torch.float32:
            query, key, value, saved = query.float(), key.float(), value.float(), _saved_as(dtype)
        q, k, v = (x.unflatten(0, (group.batch, -1)).transpose(1, 2) for x in (query, key, value))
        with saved:
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=group.mask,
                is_causal=group.mask is None,
                scale=self.softmax_scale,
                enable_gqa=query.size(1) != key.size(1),
            )
        return out.transpose(1, 2).flatten(2).flatten(0, 1).to(dtype)
