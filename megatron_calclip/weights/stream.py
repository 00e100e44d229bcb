"""The weight stream: HF name and full tensor, one after another, from a model that lies across ranks.

Rollout sync, export and verification all read a model through `stream_hf`. It runs the mapping of
`mapping.py` backwards: for each parameter the pipeline stage that owns it broadcasts its shard along the
pipeline-parallel (PP) group, every stage gathers the shards over its tensor-parallel (TP) group, and the full
tensor is split into its HF tensors. Every rank gets the same tensors in the same order; a rank holds one full
tensor at a time.

The shard goes over PP before it is gathered over TP because PP spans nodes: that way each link between nodes
carries a tensor once, not once for each TP rank.

Left out on purpose: Megatron's globals (process groups come as arguments), sharing between data-parallel
replicas (each streams to itself, and callers use one), and quantised formats for a server, which are made
from the full tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_calclip.weights.mapping import MappedTensor, ModelShape, find_tensor, mapped_tensors

# Types that a parameter may have. Their positions here travel between ranks; gloo carries all of them.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(\.experts\.local_experts\.|\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)")


@dataclass(frozen=True)
class ParallelGroups:
    """The process groups that one copy of the model lies across; None is a group of one rank."""

    tp: dist.ProcessGroup | None = None
    """Tensor parallel."""
    pp: dist.ProcessGroup | None = None
    """Pipeline parallel, in stage order."""
    ep: dist.ProcessGroup | None = None
    """Expert parallel: rank i holds the i-th block of the experts."""
    expert_tp: dist.ProcessGroup | None = None
    """Tensor parallel inside one expert. Megatron's default is a group as large as `tp`."""

    def tp_group(self, tensor: MappedTensor) -> dist.ProcessGroup | None:
        """The group that `tensor` is cut over."""
        return self.tp if tensor.expert is None else self.expert_tp


def group_size(group: dist.ProcessGroup | None) -> int:
    """Ranks in `group`."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: dist.ProcessGroup | None) -> int:
    """This rank's position in `group`."""
    return 0 if group is None else dist.get_rank(group)


def global_parameters(
    chunks: Sequence[nn.Module], shape: ModelShape, groups: ParallelGroups
) -> dict[str, nn.Parameter]:
    """This rank's parameters under names that are unique over the whole model.

    Megatron numbers layers within a model chunk and experts within a rank. A layer's global number is its
    `layer_number` (from 1), which holds for any split over pipeline stages and virtual stages.

    Args:
        chunks: the model chunks of this rank (several under virtual pipeline), bare or in wrappers that keep
            the model in `.module`, as DistributedDataParallel and Float16Module do.
        shape: the model.
        groups: of which `ep` is read.
    """
    first_expert = group_rank(groups.ep) * shape.num_experts // group_size(groups.ep)
    parameters: dict[str, nn.Parameter] = {}
    for chunk in chunks:
        module: Any = chunk
        while hasattr(module, "module"):
            module = module.module
        for name, parameter in module.named_parameters():
            if layer := _LAYER.match(name):
                number = module.decoder.layers[int(layer[1])].layer_number - 1
                name = f"decoder.layers.{number}.{name[layer.end() :]}"
            name = _EXPERT.sub(lambda match: f"{match[1]}{int(match[2]) + first_expert}", name)
            assert name not in parameters, f"two chunks hold {name}"
            parameters[name] = parameter
    return parameters


def stream_hf(
    chunks: Sequence[nn.Module],
    shape: ModelShape,
    groups: ParallelGroups,
    *,
    dtype: torch.dtype | None = None,
    source: Callable[[str, nn.Parameter], Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's weights as a HF checkpoint has them.

    A collective over `groups`: every rank must draw the same number of tensors. Order is that of
    `hf_shapes(shape)`. Padding rows of the vocabulary are cut off. With tied embeddings only
    `model.embed_tokens.weight` comes, as in HF's safetensors files. Tensors are contiguous and never alias a
    parameter, but two tensors from one fused parameter may share memory: copy what is to be kept.

    Args:
        chunks: this rank's model chunks; see `global_parameters`.
        shape: the model.
        groups: the process groups that it lies across.
        dtype: type of the tensors that come; None keeps each parameter's own.
        source: (global Megatron name, parameter) -> the shard to send, of the parameter's shape. For values
            better than the live parameter's, such as the FP32 master behind an FP8 parameter.

    Raises:
        ValueError: when a parameter has no counterpart in the HF checkpoint, a tensor of the checkpoint is
            held by no rank, or a type is neither FP32, BF16 nor FP16.
    """
    held: dict[str, tuple[str, nn.Parameter]] = {}
    for name, parameter in global_parameters(chunks, shape, groups).items():
        tensor = find_tensor(shape, name)
        if name != tensor.copy_name:
            held[tensor.name] = name, parameter
    device = next(parameter.device for chunk in chunks for parameter in chunk.parameters())

    owners = _owners(held, shape, groups, dtype=dtype, device=device)
    for tensor, (stage, ep_rank, kind) in zip(mapped_tensors(shape), owners, strict=True):
        group = groups.tp_group(tensor)
        shard = torch.empty(tensor.shard_shape(group_size(group)), dtype=_DTYPES[kind], device=device)
        if tensor.name in held:
            name, parameter = held[tensor.name]
            value = parameter if source is None else source(name, parameter)
            assert value.shape == shard.shape, (name, value.shape, shard.shape)
            # Always a copy: what is yielded must not change with the next optimizer step.
            shard.copy_(value.detach())
        if tensor.expert is not None and group_rank(groups.pp) == stage:
            _broadcast(shard, groups.ep, ep_rank)
        _broadcast(shard, groups.pp, stage)
        full = _gather(shard, tensor, group)
        for hf, part in zip(tensor.hf, tensor.split(full), strict=True):
            assert tuple(part.shape) == hf.shape, hf.name
            yield hf.name, part.contiguous()


def _owners(
    held: dict[str, tuple[str, nn.Parameter]],
    shape: ModelShape,
    groups: ParallelGroups,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
) -> list[list[int]]:
    """For each mapped tensor, its owner: pipeline stage, expert-parallel rank, type (index into `_DTYPES`).

    Errors are found after the exchange, so that all ranks raise them and none is left waiting.
    """
    tensors = mapped_tensors(shape)
    owners = torch.full((len(tensors), 3), -1, dtype=torch.int32)
    for index, tensor in enumerate(tensors):
        if tensor.name in held:
            kind = dtype or held[tensor.name][1].dtype
            code = _DTYPES.index(kind) if kind in _DTYPES else len(_DTYPES)
            owners[index] = torch.tensor([group_rank(groups.pp), group_rank(groups.ep), code])
    owners = owners.to(device)
    for group in (groups.pp, groups.ep):
        if group_size(group) > 1:
            dist.all_reduce(owners, op=dist.ReduceOp.MAX, group=group)
    table: list[list[int]] = owners.tolist()
    for tensor, (stage, _, code) in zip(tensors, table, strict=True):
        if stage < 0:
            raise ValueError(f"no rank holds {tensor.name!r}; build the model with all layers of its configuration")
        if code == len(_DTYPES):
            raise ValueError(f"{tensor.name!r} is not of a floating type of 16 or 32 bits; pass such a dtype")
    return table


def _broadcast(tensor: Tensor, group: dist.ProcessGroup | None, owner: int) -> None:
    if group_size(group) > 1:
        dist.broadcast(tensor, group=group, group_src=owner)


def _gather(shard: Tensor, tensor: MappedTensor, group: dist.ProcessGroup | None) -> Tensor:
    """The full tensor on every rank of the TP group."""
    size = group_size(group)
    if size == 1 or tensor.layout.tp_dim is None:
        return shard
    shards = shard.new_empty(size, *shard.shape)
    dist.all_gather_into_tensor(shards.view(-1), shard.view(-1), group=group)
    return tensor.unshard(shards.unbind())
