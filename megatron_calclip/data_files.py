"""Rows of a data set, wherever it is: JSON Lines, a JSON array, Parquet, a folder of the `datasets` library, the Hugging Face hub.

Every row comes with its place in the file, so that a bad one can be named, and every file with its SHA-256, so that a report can
say what was read. What a row means is the business of `data_presets`.

Left out on purpose: streaming. A run addresses its prompts by position, and the largest sets in use for RL fit into memory.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_calclip.errors import UserError

DATA_VARIABLE = "MEGATRON_CALCLIP_DATA"
"""Environment variable: the folder in which relative names of data files are looked up, too."""
HUB_PREFIX = "hub:"

_SUFFIXES = (".jsonl", ".json", ".parquet")
_PARQUET_BATCH = 1024
"""Rows decoded at once; only one batch of raw rows is in memory."""
_GAP = re.compile(r"[\s\ufeff]*")


@dataclass(frozen=True)
class RawRow:
    """One row, as it stands in the file."""

    place: str
    """Where: `line 3` of a text file, `row 3` of others; both count from 1."""
    value: Any
    """The row's object; the reason, as a ValueError, where it cannot be read."""


@dataclass(frozen=True)
class RowFile:
    """A data set that was found."""

    name: str
    """Path, or hub name: what errors and reports call it."""
    rows: Callable[[], Iterator[RawRow]]
    """Reads it from the start; raises ValueError for what is no such file."""
    sha256: Callable[[], str]
    """Of the file's bytes; of the rows as JSON lines where there is no single file."""


def open_rows(path: str, *, where: str) -> RowFile:
    """Find a data set.

    Args:
        path: of a file (`.jsonl`, `.json`, `.parquet`; the suffix may be left out), of a folder that `datasets` wrote or
            can read, or `hub:OWNER/NAME[/CONFIGURATION]`. Folder and hub name may end in `@SPLIT`.
        where: the setting that names it, for errors.

    Raises:
        UserError: when there is no such data set, or a library that it needs is not installed.
    """
    if path.startswith(HUB_PREFIX):
        return _hub_rows(path, where)
    file = _find(path, _SUFFIXES, os.path.isfile)
    if file is not None and file.suffix == ".parquet":
        pyarrow = _require("pyarrow.parquet", where)
        return RowFile(str(file), lambda: _parquet_rows(file, pyarrow), lambda: _digest(file))
    if file is not None:
        return RowFile(str(file), lambda: _json_rows(file), lambda: _digest(file))
    name, split = _split_of(path)
    folder = _find(name, (), os.path.isdir)
    if folder is None or not _holds_data(folder):
        raise UserError(
            where, f"no file {path!r}, here or in {DATA_VARIABLE}; give a data file, or {HUB_PREFIX}OWNER/NAME"
        )
    return _dataset_rows(path, where, lambda datasets: _load_folder(datasets, folder), split)


def _find(path: str, suffixes: tuple[str, ...], exists: Callable[[str], bool]) -> Path | None:
    """A path as it is given, or in the folder that the environment names; pathlib's tests raise for impossible names."""
    folders = ["", *filter(None, [os.environ.get(DATA_VARIABLE)])]
    names = [os.path.join(folder, path + suffix) for folder in folders for suffix in ("", *suffixes)]
    return next((Path(name) for name in names if exists(name)), None)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# JSON


def _json_rows(path: Path) -> Iterator[RawRow]:
    """A JSON array where the first character is a bracket, else an object a line, whatever the suffix says."""
    with path.open("rb") as file:
        start = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")
        file.seek(0)
        if start.startswith(b"[") and path.suffix == ".json":
            yield from _json_array(file.read())
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                yield RawRow(f"line {number}", _parsed(line))


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return ValueError(f"is not JSON ({error})")


def _json_array(content: bytes) -> Iterator[RawRow]:
    """The elements of an array one by one, each with the line on which it begins."""
    text = content.decode("utf-8-sig")  # raises ValueError
    decoder, position, line, counted = json.JSONDecoder(), text.index("[") + 1, 1, 0
    while True:
        position = _GAP.match(text, position).end()  # type: ignore[union-attr]
        if text.startswith("]", position):
            return
        line, counted = line + text.count("\n", counted, position), position
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {line} is not JSON ({error})") from None
        yield RawRow(f"line {line}", value)
        position = _GAP.match(text, position).end()  # type: ignore[union-attr]
        if not text.startswith((",", "]"), position):
            raise ValueError("is not JSON (an array without its end)")
        position += text.startswith(",", position)


# Parquet and `datasets`


def _require(module: str, where: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UserError(where, f"needs {package}: pip install 'megatron-calclip[data]', or give a JSON file") from None


def _parquet_rows(path: Path, pyarrow: Any) -> Iterator[RawRow]:
    number = 0
    try:
        for batch in pyarrow.ParquetFile(path).iter_batches(batch_size=_PARQUET_BATCH):
            for value in batch.to_pylist():
                number += 1
                yield RawRow(f"row {number}", value)
    except OSError as error:  # pyarrow's own errors are ValueErrors, or these
        raise ValueError(f"is no Parquet file ({error})") from None


def _split_of(path: str) -> tuple[str, str | None]:
    name, at, split = path.rpartition("@")
    return (name, split) if at else (path, None)


def _hub_rows(path: str, where: str) -> RowFile:
    name, split = _split_of(path.removeprefix(HUB_PREFIX))
    parts = name.split("/")
    if not 2 <= len(parts) <= 3 or not all(parts):
        raise UserError(where, f"{path!r} is no hub name; give {HUB_PREFIX}OWNER/NAME[/CONFIGURATION][@SPLIT]")
    arguments = ["/".join(parts[:2]), *parts[2:]]
    return _dataset_rows(path, where, lambda datasets: datasets.load_dataset(*arguments), split)


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _holds_data(folder: Path) -> bool:
    """Whether `datasets` has something to read there: it would search any folder, down to the last file."""
    return _is_saved(folder) or any(True for suffix in _SUFFIXES for _ in folder.glob(f"*{suffix}"))


def _load_folder(datasets: Any, folder: Path) -> Any:
    return (datasets.load_from_disk if _is_saved(folder) else datasets.load_dataset)(str(folder))


def _dataset_rows(path: str, where: str, load: Callable[[Any], Any], split: str | None) -> RowFile:
    datasets = _require("datasets", where)
    try:
        found = load(datasets)
    except Exception as error:  # the library raises nearly anything, for a hub that does not answer too
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(where, f"cannot load {path!r} ({reason}); give another data set, or a local copy") from None
    if isinstance(found, datasets.DatasetDict):
        splits = list(found)
        chosen = split or (splits[0] if len(splits) == 1 else "")
        if chosen not in splits:
            raise UserError(where, f"{path!r} has the splits {', '.join(splits)}; end its name in @SPLIT")
        found = found[chosen]
    elif split is not None:
        raise UserError(where, f"{path!r} has no splits; leave @{split} out")

    def rows() -> Iterator[RawRow]:
        return (RawRow(f"row {number}", value) for number, value in enumerate(found, 1))

    def sha256() -> str:
        digest = hashlib.sha256()
        for value in found:
            digest.update(json.dumps(value, sort_keys=True, default=str).encode() + b"\n")
        return digest.hexdigest()

    return RowFile(path, rows, sha256)
