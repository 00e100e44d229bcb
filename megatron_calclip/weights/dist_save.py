"""Write Megatron-Core's distributed checkpoint format (`torch_dist`) one parameter at a time, without a model.

`dist_load.py` describes the format; what tells where everything is (`write_metadata`, `name_format`) serves a learner's own
checkpoints as well (`learner/checkpoint_blocks.py`). One process writes the files that training on a given layout would
write, one for each model-parallel rank; Megatron loads them into any other layout.

Left out on purpose: optimizer state (a conversion starts a new one), and Megatron-LM's `args`, which its `--load` wants.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_calclip.errors import UserError
from megatron_calclip.weights.dist_load import METADATA_FILE, checkpoint_keys
from megatron_calclip.weights.load import HFSource
from megatron_calclip.weights.mapping import EMBEDDING, MappedTensor, ModelShape, mapped_tensors

FORMAT_FILE = "metadata.json"
COMMON_FILE = "common.pt"
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
CONTENT_METADATA = {"non_homogeneous_layers": True, "singleton_local_shards": False}
"""How names are formed; Megatron-LM reads it before it asks for tensors."""

_ATTENTION_MODULES = ("linear_qkv", "core_attention", "linear_proj")
_MLP_MODULES = ("linear_fc1", "linear_fc2")
_EMPTY_EXTRA_STATE = [None]
"""As Megatron saves the extra state of a linear that has none."""


class WrittenBlock(NamedTuple):
    """A block in a file. A plain tuple: rank 0 reads those of all ranks while training stands still."""

    key: str
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None for an object."""
    file: str
    """Name, without the folder."""
    start: int
    length: int
    """Bytes."""


@dataclass(frozen=True)
class ShardLayout:
    """How a checkpoint's files are cut: one for each rank of a model-parallel group, as training would write them."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    """Virtual pipeline stages of each rank."""
    ep: int = 1

    @property
    def num_ranks(self) -> int:
        """Ranks of the group, TP fastest, PP slowest."""
        return self.tp * self.ep * self.pp

    def check(self, shape: ModelShape) -> None:
        """Check that a model can be cut this way.

        Raises:
            UserError: naming the option that does not divide.
        """
        try:
            shape.check_parallel(self.tp, ep=self.ep, expert_tp=self.tp)
        except ValueError as error:
            raise UserError("--tp, --ep", str(error)) from None
        if shape.num_layers % (self.pp * self.vpp):
            raise UserError(
                "--pp, --vpp",
                f"num_hidden_layers is {shape.num_layers}, which {self.pp} x {self.vpp} stages do not divide; use divisors",
            )
        if self.ep > 1 and not shape.num_experts:
            raise UserError("--ep", f"is {self.ep}, but the model has no experts; leave it at 1")

    def stage(self, tensor: MappedTensor) -> int:
        """The pipeline rank that holds a parameter."""
        if tensor.layer is None:
            return 0 if tensor.name == EMBEDDING.name else self.pp - 1
        return tensor.layer // (tensor.model.num_layers // (self.pp * self.vpp)) % self.pp

    def ranks(self, tensor: MappedTensor) -> list[int]:
        """The ranks that save it, by TP rank; a single one where TP does not cut it."""
        experts_each = max(tensor.model.num_experts // self.ep, 1)
        first = (self.stage(tensor) * self.ep + (tensor.expert or 0) // experts_each) * self.tp
        return list(range(first, first + (self.tp if tensor.layout.tp_dim is not None else 1)))


def write_metadata(folder: Path, written: Iterable[WrittenBlock]) -> None:
    """Write what tells where the blocks of all ranks are.

    Args:
        folder: with their files.
        written: by all ranks together; every tensor must be complete.
    """
    metadata, missing = Metadata({}, storage_data={}), dict[str, int]()
    for block in written:
        place = _StorageInfo(block.file, block.start, block.length)
        if block.dtype is None:
            metadata.state_dict_metadata[block.key] = BytesStorageMetadata()
            metadata.storage_data[MetadataIndex(block.key)] = place
            continue
        new = TensorStorageMetadata(TensorProperties(block.dtype), torch.Size(block.size), [])
        entry = metadata.state_dict_metadata.setdefault(block.key, new)
        assert isinstance(entry, TensorStorageMetadata) and (entry.size, entry.properties) == (new.size, new.properties)
        chunk = ChunkStorageMetadata(torch.Size(block.offsets), torch.Size(block.shape))
        metadata.storage_data[MetadataIndex(block.key, chunk.offsets, len(entry.chunks))] = place
        entry.chunks.append(chunk)
        missing[block.key] = missing.get(block.key, math.prod(block.size)) - math.prod(block.shape)
    wrong = [key for key, numel in missing.items() if numel]
    assert not wrong, f"{wrong[0]} is not written once as a whole, and {len(wrong) - 1} others"
    (folder / METADATA_FILE).write_bytes(pickle.dumps(metadata))


def name_format(folder: Path) -> None:
    """Write the two files by which Megatron knows one of its checkpoints."""
    torch.save({"content_metadata": CONTENT_METADATA}, folder / COMMON_FILE)
    (folder / FORMAT_FILE).write_text(json.dumps(FORMAT))


def write_dist_checkpoint(source: HFSource, shape: ModelShape, folder: Path, *, layout: ShardLayout) -> None:
    """Write a HF checkpoint as a distributed one; memory holds about one parameter at a time.

    Args:
        source: the tensors, in the types that they are to have.
        shape: the model.
        folder: empty.
        layout: how the files are cut. Any layout can load them.

    Raises:
        UserError: when the tensors of one fused parameter have several types.
    """
    written: list[WrittenBlock] = []
    with contextlib.ExitStack() as stack:

        @functools.cache
        def file_of(name: str) -> IO[bytes]:
            return stack.enter_context((folder / name).open("wb"))

        for tensor in mapped_tensors(shape):
            full = tensor.join(_parts(source, tensor))
            size = full.shape if tensor.expert is None else (tensor.model.num_experts, *full.shape)
            ranks = layout.ranks(tensor)
            for tp_rank, rank in enumerate(ranks):
                name = f"__{rank}_0.distcp"
                for offsets, block in tensor.blocks(full, rank=tp_rank, size=len(ranks)):
                    if tensor.expert is not None:
                        offsets, block = (tensor.expert, *offsets), block[None]
                    place = (name, *_append(file_of(name), block))
                    written += [  # all names of a parameter point at the same bytes
                        WrittenBlock(key, tuple(size), tuple(offsets), tuple(block.shape), full.dtype, *place)
                        for key in checkpoint_keys(tensor)
                    ]
        written += _append_extra_states(shape, "__0_0.distcp", file_of("__0_0.distcp"))
    write_metadata(folder, written)
    name_format(folder)


def _parts(source: HFSource, tensor: MappedTensor) -> Sequence[Tensor]:
    parts = [source.read(hf.name) for hf in tensor.hf]
    if len({part.dtype for part in parts}) > 1:
        kinds = ", ".join(f"{hf.name}: {part.dtype}" for hf, part in zip(tensor.hf, parts, strict=True))
        raise UserError(source.where, f"tensors of one fused parameter differ in type ({kinds}); give --torch-dtype")
    return parts


def _append_extra_states(shape: ModelShape, name: str, file: IO[bytes]) -> list[WrittenBlock]:
    """Write an empty extra state (FP8 histories) for every module that may ask for one: Megatron's loader insists.

    All names point at one record.
    """
    place = (name, *_append(file, _EMPTY_EXTRA_STATE))
    written = []
    for layer in range(shape.num_layers):
        prefix = f"decoder.layers.{layer}."
        modules = [f"{prefix}self_attention.{module}" for module in _ATTENTION_MODULES]
        names = [f"{name}._extra_state/shard_0_1" for name in modules]
        if shape.is_moe(layer):
            experts = range(shape.num_experts)
            moe = [f"{prefix}mlp.experts.experts.{module}._extra_state/shard_" for module in _MLP_MODULES]
            names += [f"{name}{expert}_{shape.num_experts}" for name in moe for expert in experts]
        else:
            names += [f"{prefix}mlp.{module}._extra_state/shard_0_1" for module in _MLP_MODULES]
        written += [WrittenBlock(key, (), (), (), None, *place) for key in names]
    return written


def _append(file: IO[bytes], value: Any) -> tuple[int, int]:
    """Write a record; returns where it begins and how long it is."""
    if isinstance(value, Tensor):
        # A view would be saved with all of its storage.
        value = value.contiguous()
        if value.untyped_storage().nbytes() != value.nbytes:
            value = value.clone()
    start = file.tell()
    torch.save(value, file)
    return start, file.tell() - start
