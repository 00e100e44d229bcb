"""Checkpoint folders that are whole or absent: written aside, renamed at the end.

Everything goes into `<folder>.partial`. Only when its last byte is on the disk does it take its final name, so that
no interruption leaves half a checkpoint there, and a checkpoint that is to be replaced stays until then.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from megatron_calclip.errors import EXIT_FAILED, UserError

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


@contextlib.contextmanager
def written_aside(folder: Path, *, overwrite: bool, mark: str, kind: str) -> Iterator[Path]:
    """A new folder to write into, which becomes `folder` when the block ends without an error.

    Args:
        folder: the final name. Must not exist, be empty, or (with `overwrite`) hold `mark`.
        overwrite: replace a checkpoint that is there.
        mark: file by which a checkpoint of this kind is known; nothing else is ever replaced.
        kind: what such a folder is called in errors.

    Raises:
        UserError: when the folder is taken, or writing fails (disk full, say). Nothing is left then but what was
            there before.
    """
    check_free(folder, overwrite=overwrite, mark=mark, kind=kind)
    partial = _beside(folder, "partial")
    with _reported(folder), _removed_on_failure(partial):
        partial.mkdir(parents=True)
        yield partial
        _replace(folder, partial)


def check_free(folder: Path, *, overwrite: bool, mark: str, kind: str) -> None:
    """Refuse a final name that is taken; see `written_aside`, which checks it, too."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / mark).is_file():
        raise UserError(str(folder), f"exists and is no {kind}; choose another folder")
    if not overwrite:
        raise UserError(str(folder), "exists already; choose another folder, or allow overwriting (--overwrite)")


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy those of `TOKENIZER_FILES` that are there."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copy(source / name, target / name)


@contextlib.contextmanager
def _reported(folder: Path) -> Iterator[None]:
    """Errors of the file system as the user's: they can free space or choose another place."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        # torch.save answers an error of the file with one of its own, raised while it handles that.
        cause = error.__context__ if isinstance(error, RuntimeError) else error
        if not isinstance(cause, (OSError, SafetensorError)):
            raise
        problem = f"cannot be written ({cause}); free space there, or choose another folder"
        raise UserError(str(folder), problem, exit_code=EXIT_FAILED) from None


def _beside(folder: Path, ending: str) -> Path:
    """A name that nobody has: `NAME.old` may be a user's own."""
    return folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.{ending}")


@contextlib.contextmanager
def _removed_on_failure(partial: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _replace(folder: Path, partial: Path) -> None:
    """Give `partial` its final name; a checkpoint that was there goes once the new one is on the disk."""
    for path in partial.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    if not folder.exists() or not any(folder.iterdir()):
        partial.replace(folder)
        return
    old = _beside(folder, "old")
    folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old)
