"""Load a HF checkpoint into a Megatron model that lies across ranks.

Each rank reads the tensors of its own layers only, joins them as `mapping.py` says and copies its
tensor-parallel shard into its parameters. Everything that can be checked without reading data (names, shapes,
divisibility, files cut short) is checked before the first parameter changes, on every rank alike, so that a
bad checkpoint leaves the model as it was.

No rank scatters to another: all read the files, which a node's page cache holds once. Optimizers keep FP32
masters of their own; the caller refreshes them after loading (Megatron: `optimizer.reload_model_params()`).

Left out on purpose: `.bin` checkpoints (pickles: they can run code); quantised ones are read through
`fp8.dequantized`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from megatron_calclip.errors import EXIT_FAILED, UserError
from megatron_calclip.weights.mapping import ModelShape, find_tensor, hf_shapes
from megatron_calclip.weights.stream import ParallelGroups, global_parameters, group_rank, group_size

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The format's names of types that torch has, too."""

_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Tensors of older checkpoints that are computed from the configuration."""


class HFSource:
    """The tensors of a HF checkpoint by name, read one at a time.

    Args:
        where: what to call it in errors.
        specs: name -> meta tensor (shape and type) of every tensor.
        read: name -> the tensor, on the CPU.
    """

    def __init__(self, where: str, *, specs: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> None:
        self.where = where
        self.specs = specs
        self.read = read

    def cast(self, dtype: torch.dtype | None) -> HFSource:
        """The same tensors in one type; None keeps that of each."""
        if dtype is None:
            return self
        specs = {name: spec.to(dtype) for name, spec in self.specs.items()}
        return HFSource(self.where, specs=specs, read=lambda name: self.read(name).to(dtype))

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors, one after another."""
        return ((name, self.read(name)) for name in self.specs)

    def named(self, where: str) -> HFSource:
        """The same tensors under another name in errors."""
        return HFSource(where, specs=self.specs, read=self.read)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], *, where: str = "state dict") -> HFSource:
        """A checkpoint in memory, such as `model.state_dict()` of a transformers model."""
        specs = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        return cls(where, specs=specs, read=lambda name: tensors[name].detach())

    @classmethod
    def from_folder(cls, folder: str | Path) -> HFSource:
        """A folder with `model.safetensors`, or with several files and their index.

        Opening reads headers only. A file is mapped into memory for as long as a tensor of it is alive: `read`
        touches only what is used of a tensor, and nothing that was read stays behind.

        Raises:
            UserError: for a folder without safetensors, a file that is missing, cut short or no safetensors,
                or an index that does not fit its files.
        """
        folder = Path(folder)
        index = _read_index(folder)
        files = sorted(set(index.values())) if index is not None else [SINGLE_FILE]
        paths: dict[str, Path] = {}
        specs: dict[str, Tensor] = {}
        for file in files:
            opened = _open(folder / file)
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                paths[name], specs[name] = folder / file, _spec(opened.get_slice(name), name, folder / file)
        for name, file in (index or {}).items():
            if name not in paths:
                raise UserError(
                    str(folder / file),
                    f"lacks tensor {name!r}, which the index places there; download the folder again",
                )
        return cls(str(folder), specs=specs, read=lambda name: _open(paths[name]).get_tensor(name))


def _spec(opened: Any, name: str, path: Path) -> Tensor:
    dtype = SAFETENSORS_DTYPES.get(opened.get_dtype())
    if dtype is None:
        raise UserError(
            str(path), f"tensor {name!r} has type {opened.get_dtype()}; give a BF16, FP16 or FP32 checkpoint"
        )
    return torch.empty(opened.get_shape(), dtype=dtype, device="meta")


def _read_index(folder: Path) -> dict[str, str] | None:
    """Tensor -> file name, or None where one file holds all."""
    path = folder / INDEX_FILE
    if not path.is_file():
        if not (folder / SINGLE_FILE).is_file():
            raise UserError(
                str(folder), f"has neither {SINGLE_FILE} nor {INDEX_FILE}; give the folder of a HF checkpoint"
            )
        return None
    try:
        return dict(json.loads(path.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(str(path), f"is no index of safetensors files ({error}); download it again") from None


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise UserError(str(path), "is missing; download the whole checkpoint") from None
    except (SafetensorError, OSError) as error:
        raise UserError(str(path), f"is cut short or no safetensors file ({error}); download it again") from None


def load_hf(chunks: Sequence[nn.Module], shape: ModelShape, groups: ParallelGroups, source: HFSource) -> None:
    """Copy a HF checkpoint into this rank's parameters, cast to their types.

    Args:
        chunks: this rank's model chunks; see `stream.global_parameters`.
        shape: the model.
        groups: the process groups that it lies across. No communication happens here.
        source: the checkpoint.

    Raises:
        UserError: when the checkpoint lacks a tensor, has one too many or one of another shape, or when the
            parallel sizes do not divide the model. No parameter has changed then.
        ValueError: when the model has a parameter that no HF tensor fills.
    """
    try:
        shape.check_parallel(group_size(groups.tp), ep=group_size(groups.ep), expert_tp=group_size(groups.expert_tp))
    except ValueError as error:
        raise UserError("parallel", str(error)) from None
    check_source(source, shape)
    parameters = {
        name: (find_tensor(shape, name), parameter)
        for name, parameter in global_parameters(chunks, shape, groups).items()
    }
    for name, (tensor, parameter) in parameters.items():
        expected = tensor.shard_shape(group_size(groups.tp_group(tensor)))
        assert parameter.shape == expected, (name, tuple(parameter.shape), expected)

    for tensor, parameter in parameters.values():
        group = groups.tp_group(tensor)
        try:
            full = tensor.join([source.read(hf.name) for hf in tensor.hf])
        except (SafetensorError, OSError) as error:
            raise UserError(
                source.where, f"reading {tensor.hf[0].name!r} failed ({error})", exit_code=EXIT_FAILED
            ) from None
        with torch.no_grad():
            parameter.copy_(tensor.shard(full, rank=group_rank(group), size=group_size(group)))


def check_source(source: HFSource, shape: ModelShape) -> None:
    """Check that a checkpoint has exactly the tensors of a model, from names and shapes alone.

    `lm_head.weight` may come with tied embeddings, and is not used: HF takes the embedding too.

    Raises:
        UserError: naming the first tensor that is missing, too many, or of another shape.
    """
    expected = hf_shapes(shape)
    missing = [name for name in expected if name not in source.specs]
    if missing:
        raise UserError(
            source.where,
            f"tensor {missing[0]!r} is missing ({len(missing)} in all); give a complete {shape.model_type} "
            "checkpoint, or the configuration that belongs to this one",
        )
    ignored = {"lm_head.weight"} if shape.tied else set()
    extra = [
        name
        for name in source.specs
        if name not in expected and name not in ignored and not name.endswith(_IGNORED_SUFFIXES)
    ]
    if extra:
        raise UserError(
            source.where,
            f"tensor {extra[0]!r} is not part of this {shape.model_type} model ({len(extra)} such); give "
            "a plain checkpoint (not quantised, no adapters), or the configuration that belongs to this one",
        )
    for name, size in expected.items():
        if source.specs[name].shape != size:
            raise UserError(
                source.where,
                f"tensor {name!r} has shape {list(source.specs[name].shape)}, but the configuration says "
                f"{list(size)}; give the configuration that belongs to this checkpoint",
            )
