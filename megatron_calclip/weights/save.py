"""Write a stream of HF tensors as a HF checkpoint: sharded safetensors, index, configuration, tokenizer.

Tensors are written as they come, a file whenever `max_shard_bytes` are together, so that memory holds one
file's tensors whatever the model's size. Everything goes into `<folder>.partial`, which is renamed at the
end: a folder under the final name is whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_calclip.errors import EXIT_FAILED, UserError
from megatron_calclip.weights.load import INDEX_FILE, SINGLE_FILE

DEFAULT_SHARD_BYTES = 5 * 10**9
"""The size that checkpoints on the Hugging Face hub use."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""What is copied beside the weights: the tokenizer, its chat template, and the sampling defaults."""


def save_hf(
    stream: Iterable[tuple[str, Tensor]],
    folder: str | Path,
    *,
    hf_config: Any,
    tokenizer_files_from: str | Path | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> None:
    """Write a HF checkpoint.

    One rank calls this; the others of the model-parallel group draw from their `stream_hf` until it ends.

    Args:
        stream: (HF name, tensor), each name once.
        folder: where the checkpoint goes. Must not exist, be empty, or (with `overwrite`) be a HF checkpoint.
        hf_config: what `config.json` will hold: the parsed file, or a transformers configuration.
        tokenizer_files_from: a folder whose `TOKENIZER_FILES` are copied.
        max_shard_bytes: most bytes of tensors in a file; a larger single tensor gets a file of its own.
        dtype: type to write all tensors in; None keeps that of each.
        overwrite: replace a checkpoint that is there.

    Raises:
        UserError: when the folder is taken, or writing fails (disk full, say). Nothing is left then but what
            was there before.
    """
    folder = Path(folder)
    _check_free(folder, overwrite=overwrite)
    partial = folder.with_name(folder.name + ".partial")
    with _reported(folder), _removed_on_failure(partial):
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        partial.mkdir(parents=True)
        written = _write_tensors(stream, partial, max_shard_bytes=max_shard_bytes, dtype=dtype)
        config = dict(hf_config if isinstance(hf_config, dict) else hf_config.to_dict())
        # transformers 4 and vLLM call it torch_dtype, transformers 5 dtype: keep the name that is there.
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(written).removeprefix("torch.")
        (partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        for name in TOKENIZER_FILES if tokenizer_files_from is not None else ():
            if (Path(str(tokenizer_files_from)) / name).is_file():
                shutil.copy(Path(str(tokenizer_files_from)) / name, partial / name)
        _replace(folder, partial)


def _check_free(folder: Path, *, overwrite: bool) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / "config.json").is_file():
        raise UserError(str(folder), "exists and is no HF checkpoint; choose another folder")
    if not overwrite:
        raise UserError(str(folder), "exists already; choose another folder, or allow overwriting")


@contextlib.contextmanager
def _reported(folder: Path) -> Iterator[None]:
    """Errors of the file system as the user's: they can free space or choose another place."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        problem = f"cannot be written ({error}); free space there, or choose another folder"
        raise UserError(str(folder), problem, exit_code=EXIT_FAILED) from None


@contextlib.contextmanager
def _removed_on_failure(partial: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_tensors(
    stream: Iterable[tuple[str, Tensor]], folder: Path, *, max_shard_bytes: int, dtype: torch.dtype | None
) -> torch.dtype:
    """Write the weight files and their index; return the type that most tensor bytes have."""
    shards: list[list[str]] = []
    waiting: dict[str, Tensor] = {}
    seen: set[str] = set()
    bytes_of: dict[torch.dtype, int] = {}

    def flush() -> None:
        path = folder / f"{len(shards)}.safetensors"
        save_file(waiting, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors makes files that only their owner can read; servers run as others
        shards.append(list(waiting))
        waiting.clear()

    for name, value in stream:
        assert name not in seen, f"{name} came twice"
        seen.add(name)
        # A copy on the CPU that shares memory with nothing, as safetensors wants.
        tensor = torch.empty(value.shape, dtype=dtype or value.dtype).copy_(value.detach())
        if waiting and sum(t.nbytes for t in waiting.values()) + tensor.nbytes > max_shard_bytes:
            flush()
        waiting[name] = tensor
        bytes_of[tensor.dtype] = bytes_of.get(tensor.dtype, 0) + tensor.nbytes
    assert waiting, "the stream was empty"
    flush()

    if len(shards) == 1:
        (folder / "0.safetensors").rename(folder / SINGLE_FILE)
    else:
        weight_map = {}
        for number, names in enumerate(shards):
            file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            (folder / f"{number}.safetensors").rename(folder / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": sum(bytes_of.values())}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return max(bytes_of, key=lambda kind: bytes_of[kind])


def _replace(folder: Path, partial: Path) -> None:
    """Give `partial` its final name; a checkpoint that was there goes once the new one is on the disk."""
    for path in partial.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if not folder.exists() or not any(folder.iterdir()):
        partial.replace(folder)
        return
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old)
