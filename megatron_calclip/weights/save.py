"""Write a stream of HF tensors as a HF checkpoint: sharded safetensors, index, configuration, tokenizer.

The header of a safetensors file comes first and holds the place of every tensor. Shapes and types are known before
the first value is, so headers are written ahead and each value goes to its place as it comes: memory holds one tensor,
whatever the sizes of model and files. The folder is whole or absent (`folders.py`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from megatron_calclip.weights.folders import copy_tokenizer, written_aside
from megatron_calclip.weights.fp8 import SCALE_SUFFIX
from megatron_calclip.weights.load import INDEX_FILE, SAFETENSORS_DTYPES, SINGLE_FILE

DEFAULT_SHARD_BYTES = 5 * 10**9
"""The size that checkpoints on the Hugging Face hub use."""

CONFIG_FILE = "config.json"
_HEADER_ALIGNMENT = 8  # of the first value in a file, by the format
_DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


def save_hf(
    stream: Iterable[tuple[str, Tensor]],
    folder: str | Path,
    *,
    specs: Mapping[str, Tensor],
    hf_config: Any,
    tokenizer_files_from: str | Path | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Write a HF checkpoint.

    One rank calls this; the others of the model-parallel group draw from their `stream_hf` until it ends.

    Args:
        stream: (HF name, tensor), each name of `specs` once, in any order.
        folder: where the checkpoint goes; see `folders.written_aside`.
        specs: name -> meta tensor of every tensor (`mapping.hf_specs`). Values are cast to its type.
        hf_config: what `config.json` will hold: the parsed file, or a transformers configuration.
        tokenizer_files_from: a folder whose `TOKENIZER_FILES` are copied.
        max_shard_bytes: most bytes of tensors in a file; a larger single tensor gets a file of its own.
        overwrite: replace a checkpoint that is there.

    Raises:
        UserError: when the folder is taken, or writing fails (disk full, say). Nothing is left then but what
            was there before.
    """
    with written_aside(Path(folder), overwrite=overwrite, mark=CONFIG_FILE, kind="HF checkpoint") as partial:
        write_hf(
            stream,
            partial,
            specs=specs,
            hf_config=hf_config,
            tokenizer_files_from=tokenizer_files_from,
            max_shard_bytes=max_shard_bytes,
        )


def write_hf(
    stream: Iterable[tuple[str, Tensor]],
    folder: Path,
    *,
    specs: Mapping[str, Tensor],
    hf_config: Any,
    tokenizer_files_from: str | Path | None,
    max_shard_bytes: int,
) -> None:
    """Write the files of a HF checkpoint into an empty folder; the arguments are those of `save_hf`."""
    _write_tensors(stream, folder, _into_shards(specs, max_shard_bytes))
    config = dict(hf_config if isinstance(hf_config, dict) else hf_config.to_dict())
    # transformers 4 and vLLM call it torch_dtype, transformers 5 dtype: keep the name that is there.
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = _model_dtype(specs)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if tokenizer_files_from is not None:
        copy_tokenizer(Path(tokenizer_files_from), folder)


def _model_dtype(specs: Mapping[str, Tensor]) -> str:
    """The type that most elements have, FP8 codes and their scales aside."""
    counts: dict[torch.dtype, int] = {}
    for name, spec in specs.items():
        if spec.dtype.itemsize > 1 and not name.endswith(SCALE_SUFFIX):
            counts[spec.dtype] = counts.get(spec.dtype, 0) + spec.numel()
    return str(max(counts, key=lambda dtype: counts[dtype])).removeprefix("torch.")


def _into_shards(specs: Mapping[str, Tensor], max_shard_bytes: int) -> list[dict[str, Tensor]]:
    """The tensors of each file, filled up in order."""
    shards: list[dict[str, Tensor]] = [{}]
    room = max_shard_bytes
    for name, spec in specs.items():
        if shards[-1] and spec.nbytes > room:
            shards.append({})
            room = max_shard_bytes
        shards[-1][name] = spec
        room -= spec.nbytes
    return shards


def _write_tensors(stream: Iterable[tuple[str, Tensor]], folder: Path, shards: Sequence[Mapping[str, Tensor]]) -> None:
    """Write the weight files, and their index where there are several."""
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [SINGLE_FILE]
    places: dict[str, tuple[IO[bytes], int, Tensor]] = {}
    with contextlib.ExitStack() as stack:
        for name, shard in zip(files, shards, strict=True):
            file: IO[bytes] = stack.enter_context((folder / name).open("wb"))
            places |= {tensor: (file, start, shard[tensor]) for tensor, start in _write_header(file, shard)}
        for name, value in stream:
            assert name in places, f"{name} came twice, or is not in the specs"
            place, start, spec = places.pop(name)
            assert value.shape == spec.shape, (name, value.shape, spec.shape)
            place.seek(start)
            place.write(_bytes(value.to(spec.dtype)))
        assert not places, f"the stream lacks {next(iter(places))}"
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(spec.nbytes for shard in shards for spec in shard.values())},
            "weight_map": {tensor: name for name, shard in zip(files, shards, strict=True) for tensor in shard},
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _write_header(file: IO[bytes], shard: Mapping[str, Tensor]) -> Iterator[tuple[str, int]]:
    """Write a file's header; yield each tensor with the place of its values in the file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    # Wide types first, so that every value is aligned to its own size.
    for name in sorted(shard, key=lambda name: -shard[name].dtype.itemsize):
        spec = shard[name]
        starts[name], end = end, end + spec.nbytes
        header[name] = {
            "dtype": _DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    begin = file.tell()
    yield from ((name, begin + start) for name, start in starts.items())


def _bytes(value: Tensor) -> Any:
    """The values of a tensor in memory order, without a copy where it is contiguous and on the CPU."""
    return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
