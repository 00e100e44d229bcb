"""The one mapping between Hugging Face checkpoints and Megatron-Core parameters, as tables.

Loading a model, the weight stream to the rollout engine and the converters all read these tables. A `Rule`
says for one Megatron parameter which HF tensors it holds, their shapes, and its `Layout`: how the HF tensors
are joined and how tensor parallelism (TP) cuts the result. An `Architecture` is a few tuples of rules; a new
one is one more entry in `ARCHITECTURES`. `mapped_tensors(shape)` binds them to the layers and experts of one
model, in the order in which weights are streamed. It needs the configuration only, so every tensor of a 32B
model can be listed with its shard shapes in a moment.

Names come in two kinds: with Transformer Engine (TE), a norm carries the name of the linear that follows,
because TE fuses the two, and the experts of a layer are one grouped module.

Left out on purpose: megatron and torch.distributed (plain tensors in, plain tensors out), and quantised
formats, which are a step after this one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_calclip.weights.layouts import COLUMNS, GATE_UP, QKV, REPLICATED, VOCABULARY, Layout

VOCAB_MULTIPLE = 128
"""The vocabulary is padded to a multiple of this, whatever TP is: all layouts then have the same shapes."""

"""Whose layers a GPTModel has: Megatron's own, or Transformer Engine's (norms fused, experts grouped)."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of one model that fix the names and shapes of all its tensors."""

    model_type: str
    """Key of `ARCHITECTURES`."""
    num_layers: int
    hidden_size: int
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads = query groups."""
    head_dim: int
    ffn_size: int
    """Width of a dense MLP."""
    vocab_size: int
    padded_vocab_size: int
    """Rows of Megatron's embedding: `vocab_size` rounded up to `VOCAB_MULTIPLE`; the rows added are zero."""
    tied: bool
    """Whether the output layer is the embedding."""
    num_experts: int = 0
    """Experts of a mixture-of-experts (MoE) layer; 0 for a dense model."""
    expert_ffn_size: int = 0
    """Width of one expert's MLP."""
    dense_layers: tuple[int, ...] = ()
    """Layers of an MoE model, from 0, that have a dense MLP."""

    @property
    def q_size(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    def is_moe(self, layer: int) -> bool:
        """Whether `layer` (from 0) has experts."""
        return self.num_experts > 0 and layer not in self.dense_layers

    def check_parallel(self, tp: int, *, ep: int = 1, expert_tp: int = 1) -> None:
        """Check that the model can be cut this way.

        Args:
            tp: tensor-parallel size.
            ep: expert-parallel size.
            expert_tp: tensor-parallel size inside one expert.

        Raises:
            ValueError: naming the size that does not divide.
        """
        divisions = [
            ("num_attention_heads", self.num_heads, "tp", tp),
            ("intermediate_size", self.ffn_size, "tp", tp),
            ("the padded vocabulary", self.padded_vocab_size, "tp", tp),
            ("num_experts", self.num_experts, "ep", ep),
            ("moe_intermediate_size", self.expert_ffn_size, "expert_tp", expert_tp),
        ]
        for name, size, axis, parts in divisions:
            if size % parts:
                raise ValueError(f"{name} is {size}, which {axis}={parts} does not divide; use a divisor")
        # Megatron lets several ranks share one query group when there are fewer groups than ranks.
        if self.num_kv_heads % tp and tp % self.num_kv_heads:
            raise ValueError(
                f"num_key_value_heads is {self.num_kv_heads}, neither a multiple nor a divisor of tp={tp}; "
                "use another tp"
            )

    @classmethod
    def from_hf_config(cls, config: Any) -> ModelShape:
        """Read the sizes from a HF configuration.

        Args:
            config: the parsed `config.json`, or a transformers configuration.

        Raises:
            ValueError: for an architecture that has no table, a missing key, or a variant (such as output
                biases) that Megatron's layers do not have.
        """
        values: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
        model_type = str(values.get("model_type"))
        if model_type not in ARCHITECTURES:
            raise ValueError(
                f"model_type {model_type!r} is not supported; use one of {', '.join(sorted(ARCHITECTURES))}"
            )
        architecture = ARCHITECTURES[model_type]
        for flag in architecture.refused:
            if values.get(flag):
                raise ValueError(f"{flag}={values[flag]} of a {model_type} model is not supported; use one without")

        def size(*keys: str, default: int | None = None) -> int:
            found = next((values[key] for key in keys if values.get(key) is not None), default)
            if found is None:
                raise ValueError(f"the configuration has no {keys[0]!r}; give the model's complete config.json")
            return int(found)

        num_layers, hidden = size("num_hidden_layers"), size("hidden_size")
        num_heads, vocab = size("num_attention_heads"), size("vocab_size")
        num_experts = size("num_experts", "num_local_experts") if architecture.experts else 0
        dense = set(values.get("mlp_only_layers") or ()) if architecture.experts else set()
        step = size("decoder_sparse_step", default=1)
        dense |= {layer for layer in range(num_layers) if architecture.experts and (layer + 1) % step}
        return cls(
            model_type=model_type,
            num_layers=num_layers,
            hidden_size=hidden,
            num_heads=num_heads,
            num_kv_heads=size("num_key_value_heads", default=num_heads),
            head_dim=size("head_dim", default=architecture.head_dim or hidden // num_heads),
            ffn_size=size("intermediate_size"),
            vocab_size=vocab,
            padded_vocab_size=math.ceil(vocab / VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
            tied=bool(values.get("tie_word_embeddings", False)),
            num_experts=num_experts,
            expert_ffn_size=size("moe_intermediate_size") if architecture.experts else 0,
            dense_layers=tuple(sorted(dense)),
        )


@dataclass(frozen=True)
class Rule:
    """One line of a table. Names inside a layer are relative to it; `{expert}` is the expert's number."""

    name: str
    """The Megatron parameter, as built from Megatron's own layers."""
    layout: Layout
    hf: Mapping[str, tuple[str, ...]]
    """HF tensor -> its dimensions, as attributes of `ModelShape`; in the order that `layout.join` wants."""
    te_name: str | None = None
    """The Megatron parameter as built from TE's layers, where it differs."""


def _norm(hf: str, name: str, te_name: str | None = None, *, size: str = "hidden_size") -> Rule:
    return Rule(name, REPLICATED, {hf: (size,)}, te_name)


@dataclass(frozen=True)
class Architecture:
    """The rules of one `model_type`, in the order of the forward pass."""

    attention: tuple[Rule, ...]
    """Everything before the MLP, in every layer."""
    mlp: tuple[Rule, ...]
    """The MLP and its norm in a dense layer."""
    moe: tuple[Rule, ...] = ()
    """What an MoE layer has once: norm and router."""
    experts: tuple[Rule, ...] = ()
    """What an MoE layer has for each expert."""
    refused: tuple[str, ...] = ()
    """Configuration flags that would add tensors which Megatron's layers do not have."""
    head_dim: int | None = None
    """Head size where the configuration gives none; None: hidden_size / num_heads."""


EMBEDDING = Rule(
    "embedding.word_embeddings.weight",
    VOCABULARY,
    {"model.embed_tokens.weight": ("vocab_size", "hidden_size")},
)
FINAL_NORM = _norm("model.norm.weight", "decoder.final_layernorm.weight")
OUTPUT = Rule("output_layer.weight", VOCABULARY, {"lm_head.weight": ("vocab_size", "hidden_size")})

_INPUT_NORM = _norm("input_layernorm.weight", "input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
_QKV_WEIGHT = Rule(
    "self_attention.linear_qkv.weight",
    QKV,
    {
        "self_attn.q_proj.weight": ("q_size", "hidden_size"),
        "self_attn.k_proj.weight": ("kv_size", "hidden_size"),
        "self_attn.v_proj.weight": ("kv_size", "hidden_size"),
    },
)
_QKV_BIAS = Rule(
    "self_attention.linear_qkv.bias",
    QKV,
    {
        "self_attn.q_proj.bias": ("q_size",),
        "self_attn.k_proj.bias": ("kv_size",),
        "self_attn.v_proj.bias": ("kv_size",),
    },
)
_QK_NORMS = (
    _norm("self_attn.q_norm.weight", "self_attention.q_layernorm.weight", size="head_dim"),
    _norm("self_attn.k_norm.weight", "self_attention.k_layernorm.weight", size="head_dim"),
)
_PROJ = Rule("self_attention.linear_proj.weight", COLUMNS, {"self_attn.o_proj.weight": ("hidden_size", "q_size")})
_DENSE_MLP = (
    _norm("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    Rule(
        "mlp.linear_fc1.weight",
        GATE_UP,
        {
            "mlp.gate_proj.weight": ("ffn_size", "hidden_size"),
            "mlp.up_proj.weight": ("ffn_size", "hidden_size"),
        },
    ),
    Rule("mlp.linear_fc2.weight", COLUMNS, {"mlp.down_proj.weight": ("hidden_size", "ffn_size")}),
)
_MOE = (
    _norm("post_attention_layernorm.weight", "pre_mlp_layernorm.weight"),
    Rule("mlp.router.weight", REPLICATED, {"mlp.gate.weight": ("num_experts", "hidden_size")}),
)
_EXPERTS = (
    Rule(
        "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        GATE_UP,
        {
            "mlp.experts.{expert}.gate_proj.weight": ("expert_ffn_size", "hidden_size"),
            "mlp.experts.{expert}.up_proj.weight": ("expert_ffn_size", "hidden_size"),
        },
        "mlp.experts.linear_fc1.weight{expert}",
    ),
    Rule(
        "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        COLUMNS,
        {"mlp.experts.{expert}.down_proj.weight": ("hidden_size", "expert_ffn_size")},
        "mlp.experts.linear_fc2.weight{expert}",
    ),
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        attention=(_INPUT_NORM, _QKV_WEIGHT, _PROJ), mlp=_DENSE_MLP, refused=("attention_bias", "mlp_bias")
    ),
    "qwen2": Architecture(attention=(_INPUT_NORM, _QKV_WEIGHT, _QKV_BIAS, _PROJ), mlp=_DENSE_MLP),
    "qwen3": Architecture(
        attention=(_INPUT_NORM, _QKV_WEIGHT, *_QK_NORMS, _PROJ),
        mlp=_DENSE_MLP,
        refused=("attention_bias",),
        head_dim=128,
    ),
    "qwen3_moe": Architecture(
        attention=(_INPUT_NORM, _QKV_WEIGHT, *_QK_NORMS, _PROJ),
        mlp=_DENSE_MLP,
        moe=_MOE,
        experts=_EXPERTS,
        refused=("attention_bias",),
    ),
}


@dataclass(frozen=True)
class HFTensor:
    """Name and shape of one tensor of a HF checkpoint."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class MappedTensor:
    """A rule bound to one model, layer and expert: one Megatron parameter and the HF tensors in it."""

    name: str
    """Global Megatron name with Megatron's own layers: layers and experts count over all ranks."""
    te_name: str
    """Global Megatron name with TE's layers; the same where TE changes nothing."""
    hf: tuple[HFTensor, ...]
    layout: Layout
    model: ModelShape = field(repr=False)
    layer: int | None = None
    """Number of the layer that it belongs to, from 0."""
    expert: int | None = None
    """Number of the expert that it belongs to: TP cuts those over the expert-TP group."""
    copy_name: str | None = None
    """A second parameter with the same value: the output layer of tied embeddings, which Megatron allocates
    on the last pipeline stage when that is not the first."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The HF tensors, in the order of `hf` -> the full Megatron tensor."""
        assert [tuple(part.shape) for part in parts] == [hf.shape for hf in self.hf], self.name
        return self.layout.join(parts, self.model)

    def split(self, full: Tensor) -> list[Tensor]:
        """The full Megatron tensor -> the HF tensors. May return views."""
        return self.layout.split(full, self.model)

    def shard(self, full: Tensor, *, rank: int, size: int) -> Tensor:
        """The full Megatron tensor -> what TP rank `rank` of `size` holds. May return a view."""
        return self.layout.shard(full, rank=rank, size=size)

    def blocks(self, full: Tensor, *, rank: int, size: int) -> list[tuple[tuple[int, ...], Tensor]]:
        """Where in the full tensor that comes from: (offsets, block) for each contiguous block. Views."""
        return self.layout.blocks(full, rank=rank, size=size)

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """What the TP ranks hold, in rank order -> the full Megatron tensor."""
        return self.layout.unshard(shards)

    def shard_shape(self, tp: int = 1) -> tuple[int, ...]:
        """Shape on one of `tp` ranks, from meta tensors."""
        parts = [torch.empty(hf.shape, device="meta") for hf in self.hf]
        return tuple(self.shard(self.join(parts), rank=0, size=tp).shape)


def _bind(
    rule: Rule, shape: ModelShape, *, layer: int | None = None, expert: int | None = None, tied: bool = False
) -> MappedTensor:
    megatron = "" if layer is None else f"decoder.layers.{layer}."
    hf = "" if layer is None else f"model.layers.{layer}."
    return MappedTensor(
        name=megatron + rule.name.format(expert=expert),
        te_name=megatron + (rule.te_name or rule.name).format(expert=expert),
        hf=tuple(
            HFTensor(hf + name.format(expert=expert), tuple(getattr(shape, size) for size in sizes))
            for name, sizes in rule.hf.items()
        ),
        layout=rule.layout,
        model=shape,
        layer=layer,
        expert=expert,
        copy_name=OUTPUT.name if tied else None,
    )


@functools.lru_cache(maxsize=8)
def mapped_tensors(shape: ModelShape) -> tuple[MappedTensor, ...]:
    """Every parameter of a model, in streaming order: embedding, layers ascending, final norm, output."""
    architecture = ARCHITECTURES[shape.model_type]
    tensors = [_bind(EMBEDDING, shape, tied=shape.tied)]
    for layer in range(shape.num_layers):
        moe = shape.is_moe(layer)
        once = architecture.attention + (architecture.moe if moe else architecture.mlp)
        tensors += [_bind(rule, shape, layer=layer) for rule in once]
        tensors += [
            _bind(rule, shape, layer=layer, expert=expert)
            for expert in range(shape.num_experts if moe else 0)
            for rule in architecture.experts
        ]
    tensors.append(_bind(FINAL_NORM, shape))
    if not shape.tied:
        tensors.append(_bind(OUTPUT, shape))
    return tuple(tensors)


@functools.lru_cache(maxsize=8)
def _by_megatron_name(shape: ModelShape) -> Mapping[str, MappedTensor]:
    return {
        name: tensor
        for tensor in mapped_tensors(shape)
        for name in (tensor.name, tensor.te_name, tensor.copy_name)
        if name is not None
    }


def find_tensor(shape: ModelShape, megatron_name: str) -> MappedTensor:
    """The entry of a Megatron parameter, under any of its names.

    Args:
        shape: the model.
        megatron_name: global name, such as `decoder.layers.7.mlp.linear_fc1.weight`.

    Raises:
        ValueError: for a parameter that no HF tensor fills.
    """
    tensor = _by_megatron_name(shape).get(megatron_name)
    if tensor is None:
        raise ValueError(
            f"Megatron parameter {megatron_name!r} has no counterpart in a {shape.model_type} checkpoint; "
            "build the model with the layers of that architecture, or extend its table"
        )
    return tensor


def hf_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name -> shape of all tensors of the HF checkpoint, in streaming order; without `lm_head` when tied."""
    return {hf.name: hf.shape for tensor in mapped_tensors(shape) for hf in tensor.hf}


def hf_specs(shape: ModelShape, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of the HF checkpoint as meta tensors of one type, in streaming order."""
    return {name: torch.empty(size, dtype=dtype, device="meta") for name, size in hf_shapes(shape).items()}
