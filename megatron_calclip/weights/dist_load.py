"""Read Megatron-Core's distributed checkpoints (`torch_dist`) one tensor at a time, without a model.

Megatron's own `dist_checkpointing` wants the model in memory, on as many processes as it lies across. Here one process
reads any checkpoint, whatever layout wrote it, and hands it out under HF names. On disk the format is PyTorch's DCP:
files of `torch.save` records (`__0_0.distcp`, ...), and `.metadata`, a pickle with the global shape of every tensor, the
blocks that it was saved in, and where each lies. Global names and shapes do not depend on the layout.

`.metadata` is unpickled with the few classes that the format consists of, and tensors with `weights_only`: reading runs
no code of the checkpoint. (Megatron's own loader has no such guard.)

Names are those of Transformer Engine's layers, into which Megatron translates its own. Two forms occur: with the layer's
number in the name (written by `dist_save.py`), or with all layers of a kind stacked along a leading dimension.

Left out on purpose: optimizer state but for the FP32 masters, and the older `zarr` format.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from enum import Enum, EnumType
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron_calclip.errors import UserError
from megatron_calclip.weights.layouts import VOCABULARY
from megatron_calclip.weights.load import HFSource
from megatron_calclip.weights.mapping import MappedTensor, ModelShape, mapped_tensors

METADATA_FILE = ".metadata"
MASTER_PREFIX = "optimizer.state.param."
"""FP32 masters, saved in model space: by a run of ours beside the weights, by Megatron's `fully_reshardable` format among them."""

_LAYERS = "decoder.layers."
_VOCABULARY_ENDINGS = ("word_embeddings.weight", "output_layer.weight")

_UNMAPPED_PREFIXES = ("optimizer.", "chained_", "rng_state", "rerun_state")
FP8_STATE = ".fp8."
"""In the names of delayed scaling's histories and scales."""
_UNMAPPED_PARTS = ("_extra_state", "rotary_pos_emb", "rotary_emb", FP8_STATE)
"""Keys that are no weights."""

_DCP = "torch.distributed.checkpoint"
_METADATA_GLOBALS = {
    f"{_DCP}.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_DCP}.planner": {"BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    f"{_DCP}.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "torch": {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}
"""Module -> names that `.metadata` may refer to."""


def _enum_member(enum_class: Any, name: str) -> Enum:
    """What `getattr` is for in a pickle written by Python 3.11.0 to 3.11.3, and nothing else."""
    if not isinstance(enum_class, EnumType):
        raise pickle.UnpicklingError(f"it asks for {name} of {enum_class!r}, which is no part of the format")
    member: Enum = enum_class[name]
    return member


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Only what the format consists of."""
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if name not in _METADATA_GLOBALS.get(module, ()):
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is no part of the format")
        return super().find_class(module, name)


def _read_metadata(folder: Path) -> Metadata:
    path = folder / METADATA_FILE
    if not path.is_file():
        raise UserError(str(folder), f"has no {METADATA_FILE}; give the folder of a Megatron distributed checkpoint")
    try:
        metadata: Metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
    except Exception as error:  # unpickling damaged data can raise nearly anything
        raise UserError(str(path), f"cannot be read ({error}); give an undamaged checkpoint") from None
    return metadata


class DistCheckpoint:
    """A distributed checkpoint on disk.

    Args:
        folder: with `.metadata` and its files.
        more: other such folders of the same checkpoint, whose tensors have other names.

    Raises:
        UserError: when it is no such checkpoint, or its metadata cannot be read.
    """

    def __init__(self, folder: Path, *more: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, TensorStorageMetadata] = {}
        """Global name -> shape, type and blocks."""
        self._places: dict[MetadataIndex, tuple[Path, _StorageInfo]] = {}
        for part in (folder, *more):
            metadata = _read_metadata(part)
            entries = metadata.state_dict_metadata.items()
            self.tensors |= {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}
            self._places |= {index: (part, place) for index, place in metadata.storage_data.items()}

    def read(self, key: str, *, at: tuple[int, ...] = ()) -> Tensor:
        """Put a global tensor together from its blocks.

        Args:
            key: its name.
            at: index into its leading dimensions, where layers or experts are stacked.

        Raises:
            UserError: when a file is missing or damaged, or blocks are missing.
        """
        entry = self.tensors[key]
        result = torch.empty(entry.size[len(at) :], dtype=entry.properties.dtype)
        target = result.view((*(1 for _ in at), *result.shape))
        if self.fill(key, [((*at, *(0 for _ in result.shape)), target)]) != result.numel():
            raise UserError(str(self.folder), f"has only a part of tensor {key!r}; give a complete checkpoint")
        return result

    def fill(self, key: str, targets: Sequence[tuple[Sequence[int], Tensor]]) -> int:
        """Read rectangles of a global tensor, each block that they need once.

        Args:
            key: its name.
            targets: offsets of a rectangle in the global tensor, and where to put it. What the checkpoint does not have
                stays as it is.

        Returns:
            how many elements the checkpoint has of them.

        Raises:
            UserError: when a file is missing or damaged.
        """
        num_filled = 0
        for chunk in self.tensors[key].chunks:
            shared = [_shared(offsets, target.shape, chunk.offsets, chunk.sizes) for offsets, target in targets]
            if all(spans is None for spans in shared):
                continue
            block = self._read_block(key, chunk)
            for spans, (offsets, target) in zip(shared, targets, strict=True):
                if spans is not None:
                    piece = block[_within(spans, chunk.offsets)]
                    target[_within(spans, offsets)] = piece
                    num_filled += piece.numel()
        return num_filled

    def weights(self, *, vocab_size: int) -> HFSource:
        """All weights under Megatron's global names, the layer's number in each, for a comparison of two checkpoints.

        Args:
            vocab_size: rows of the vocabulary's matrices that count; what follows is padding, which may differ.
        """
        places: dict[str, tuple[str, tuple[int, ...]]] = {}
        for key, entry in self.tensors.items():
            before, stacked, after = key.partition(_LAYERS)
            if not _is_weight(key):
                continue
            if not stacked or after[:1].isdigit():
                places[key] = key, ()
            else:
                places |= {f"{before}{_LAYERS}{i}.{after}": (key, (i,)) for i in range(entry.size[0])}

        def rows(name: str) -> slice:
            return slice(vocab_size) if name.endswith(_VOCABULARY_ENDINGS) else slice(None)

        def spec(name: str) -> Tensor:
            key, at = places[name]
            entry = self.tensors[key]
            return torch.empty(entry.size[len(at) :], dtype=entry.properties.dtype, device="meta")[rows(name)]

        def read(name: str) -> Tensor:
            key, at = places[name]
            return self.read(key, at=at)[rows(name)]

        return HFSource(str(self.folder), specs={name: spec(name) for name in places}, read=read)

    def _read_block(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        folder, place = self._places[MetadataIndex(key, chunk.offsets)]
        path = folder / place.relative_path
        try:
            with path.open("rb") as file:
                window = cast(IO[bytes], _Window(file, place.offset, place.length))
                block: Tensor = torch.load(window, weights_only=True)
                return block.reshape(chunk.sizes)
        except FileNotFoundError:
            raise UserError(str(path), "is missing; give a complete checkpoint") from None
        except Exception as error:  # damaged records raise nearly anything
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(str(path), f"is cut short or damaged at {key!r} ({reason}); copy it again") from None


def _shared(
    offsets: Sequence[int], sizes: Sequence[int], other_offsets: Sequence[int], other_sizes: Sequence[int]
) -> list[tuple[int, int]] | None:
    """What two rectangles of a tensor share: per dimension the first index and the one behind the last; None if nothing."""
    dimensions = zip(offsets, sizes, other_offsets, other_sizes, strict=True)
    spans = [(max(a, b), min(a + n, b + m)) for a, n, b, m in dimensions]
    return spans if all(start < stop for start, stop in spans) else None


def _within(spans: Sequence[tuple[int, int]], offsets: Sequence[int]) -> tuple[slice, ...]:
    """Indices of a tensor as indices of a rectangle of it."""
    return tuple(slice(start - o, stop - o) for (start, stop), o in zip(spans, offsets, strict=True))


class _Window(io.RawIOBase):
    """A part of a file as a file of its own, as `torch.load` wants it."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self.file, self.start, self.length = file, start, length
        file.seek(start)

    def readable(self) -> bool:
        """It can only be read."""
        return True

    def seekable(self) -> bool:
        """It can be."""
        return True

    def tell(self) -> int:
        """Position in the part."""
        return self.file.tell() - self.start

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move within the part."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self.length}[whence]
        return self.file.seek(self.start + origin + offset) - self.start

    def readinto(self, buffer: Any) -> int:
        """Read up to the end of the part."""
        view = memoryview(buffer).cast("B")
        return self.file.readinto(view[: max(self.length - self.tell(), 0)])  # type: ignore[attr-defined]


def checkpoint_keys(tensor: MappedTensor) -> tuple[str, ...]:
    """Names of a parameter in a checkpoint, the layer's number included; the first is TE's, others are aliases."""
    if tensor.expert is not None:
        return (tensor.name.replace(f".local_experts.{tensor.expert}.", ".experts."),)
    if tensor.layer is not None and tensor.te_name.endswith(".pre_mlp_layernorm.weight"):
        # Before a router TE has a plain norm; Megatron's own layers name it as if it were fused.
        return tensor.te_name, tensor.te_name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
    return (tensor.te_name,)


def _locate(
    checkpoint: DistCheckpoint, tensor: MappedTensor, *, prefix: str = ""
) -> tuple[str, tuple[int, ...]] | None:
    """Key and leading index of a parameter, in either form of names."""
    expert = () if tensor.expert is None else (tensor.expert,)
    for key in checkpoint_keys(tensor):
        if prefix + key in checkpoint.tensors:
            return prefix + key, expert
        stacked = prefix + key.replace(f"decoder.layers.{tensor.layer}.", "decoder.layers.", 1)
        if tensor.layer is not None and stacked in checkpoint.tensors:
            return stacked, (tensor.layer, *expert)
    return None


def hf_source(checkpoint: DistCheckpoint, shape: ModelShape, *, dtype: torch.dtype | None = None) -> HFSource:
    """A distributed checkpoint as a HF checkpoint: tensors under HF names, put together as they are read.

    Where the checkpoint holds FP32 masters they are the source, cast to the type of the weights: in BF16 training both
    are equal to the bit, and of FP8 parameters the masters are the better values.

    Args:
        checkpoint: saved by any layout.
        shape: the model.
        dtype: type of the tensors; None keeps that of each weight.

    Raises:
        UserError: when a parameter is missing, has another shape, or has no counterpart in the HF checkpoint.
    """
    places: dict[str, tuple[MappedTensor, str, tuple[int, ...]]] = {}
    specs: dict[str, Tensor] = {}
    used: set[str] = set()
    for tensor in mapped_tensors(shape):
        found = _locate(checkpoint, tensor)
        if found is None:
            raise UserError(
                str(checkpoint.folder),
                f"tensor {checkpoint_keys(tensor)[0]!r} is missing; give a complete {shape.model_type} checkpoint, or the "
                "configuration that belongs to this one",
            )
        used.update(checkpoint_keys(tensor), [found[0]])
        _check_size(checkpoint, tensor, *found)
        kind = dtype or checkpoint.tensors[found[0]].properties.dtype
        best = _locate(checkpoint, tensor, prefix=MASTER_PREFIX) or found
        for hf in tensor.hf:
            places[hf.name] = (tensor, *best)
            specs[hf.name] = torch.empty(hf.shape, dtype=kind, device="meta")
    extra = [key for key in checkpoint.tensors if _is_weight(key) and key not in used]
    if extra:
        raise UserError(
            str(checkpoint.folder),
            f"tensor {extra[0]!r} is not part of this {shape.model_type} model ({len(extra)} such); give the "
            "configuration that belongs to this checkpoint",
        )
    latest: dict[str, list[Tensor]] = {}  # the HF tensors of one fused parameter are asked for one after another

    def read(name: str) -> Tensor:
        tensor, key, at = places[name]
        if tensor.name not in latest:
            latest.clear()
            latest[tensor.name] = tensor.split(checkpoint.read(key, at=at))
        position = [hf.name for hf in tensor.hf].index(name)
        return latest[tensor.name][position].to(specs[name].dtype)

    return HFSource(str(checkpoint.folder), specs=specs, read=read)


def _is_weight(key: str) -> bool:
    return not key.startswith(_UNMAPPED_PREFIXES) and not any(part in key for part in _UNMAPPED_PARTS)


def _check_size(checkpoint: DistCheckpoint, tensor: MappedTensor, key: str, at: tuple[int, ...]) -> None:
    """Compare with what the configuration says; the vocabulary may be padded to another size than ours."""
    size, expected = tuple(checkpoint.tensors[key].size)[len(at) :], tensor.shard_shape()
    if tensor.layout is VOCABULARY and size[0] >= tensor.model.vocab_size and size[1:] == expected[1:]:
        return
    if size != expected:
        raise UserError(
            str(checkpoint.folder),
            f"tensor {key!r} has shape {list(size)}, but the configuration says {list(expected)}; give the "
            "configuration that belongs to this checkpoint",
        )
