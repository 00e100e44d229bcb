"""Which checkpoint of a run is whole: manifests with sizes and hashes, the tracker file, and the search for the newest.

A checkpoint is written aside, flushed to disk and renamed. Its `manifest.json` lists every file with its size and SHA-256;
the tracker (`latest_checkpoint.json`) names the newest checkpoint and holds the hash of its manifest. A file that is cut
short, changed or missing, and a tracker that names something else, are thus found before anything is loaded, and the
newest checkpoint that is whole is used in the place of a damaged one.

No torch and no Megatron in here: what a checkpoint contains is `learner/checkpoint.py`'s.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_calclip.errors import UserError

_BEGUN = re.compile(r"step_\d+\.[0-9a-f]{8}\.partial")
"""A checkpoint that is being written (`learner/checkpoint.py`)."""
_VISIBLE_SECONDS = 30
"""How long a shared file system may take to show another machine's file."""

TRACKER = "latest_checkpoint.json"
BEST_TRACKER = "best_checkpoint.json"
"""Names the checkpoint with the best evaluation, for the reader."""
MANIFEST = "manifest.json"
STATE = "state.json"
_READ_BYTES = 1 << 20

GatherObjects = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class FileRecord:
    """What a manifest says of a file."""

    size: int
    """Bytes."""
    sha256: str


def flushed_record(path: Path) -> FileRecord:
    """Flush a file to disk, and read it for its record."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest, size = hashlib.sha256(), 0
        while block := file.read(_READ_BYTES):
            digest.update(block)
            size += len(block)
    return FileRecord(size, digest.hexdigest())


class HashedFile:
    """A file to be written, whose record needs no reading: it is hashed as it is written, and flushed to disk at the end.

    Args:
        path: of the file; one that is there is replaced.
    """

    def __init__(self, path: Path) -> None:
        self._file, self._digest = path.open("wb"), hashlib.sha256()
        self.size = 0
        """Bytes so far."""

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                self.flush()
                os.fsync(self._file.fileno())

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes, as a file does."""
        self._digest.update(data)
        self.size += memoryview(data).nbytes
        return self._file.write(data)

    def flush(self) -> None:
        """Hand all to the operating system, as a file does."""
        self._file.flush()

    @property
    def record(self) -> FileRecord:
        """Of what has been written."""
        return FileRecord(self.size, self._digest.hexdigest())


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to disk: without that a renamed file may be gone after a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that it is whole or absent after a crash."""
    aside = path.with_suffix(path.suffix + ".partial")
    with aside.open("w") as file:
        json.dump(value, file, indent=1, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)


def _wait_for(path: Path) -> None:
    """Until a shared file system shows a file that another machine has written."""
    for _ in range(_VISIBLE_SECONDS):
        if path.is_file():
            return
        time.sleep(1.0)
    raise OSError(f"{path} has been written by a rank, and is not there")


def write_manifest(folder: Path, records: dict[str, FileRecord]) -> str:
    """Write a checkpoint's manifest, and the names in its folders to disk.

    Args:
        folder: of the checkpoint.
        records: by path within it; files that are not named are read and added.

    Returns:
        the manifest's SHA-256.

    Raises:
        OSError: when a file that another rank has written cannot be seen from here.
    """
    for name in records:
        _wait_for(folder / name)
    paths = [path for path in folder.rglob("*") if path.is_file()]
    complete = {str(path.relative_to(folder)): path for path in paths if path.name != MANIFEST}
    known = {name: records.get(name) or flushed_record(path) for name, path in complete.items()}
    write_json(folder / MANIFEST, {name: [record.size, record.sha256] for name, record in known.items()})
    for inner in {path.parent for path in paths} | {folder}:
        flush_folder(inner)
    return flushed_record(folder / MANIFEST).sha256


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """A checkpoint's manifest.

    Raises:
        ValueError: saying what is wrong with it.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text())
        return {str(name): FileRecord(int(size), str(sha256)) for name, (size, sha256) in content.items()}
    except FileNotFoundError:
        raise ValueError(f"has no {MANIFEST}") from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} cannot be read ({error})") from None


def damage(folder: Path, manifest: dict[str, FileRecord], *, share: int = 0, num_shares: int = 1) -> str | None:
    """What is wrong with a checkpoint's files, or None.

    Args:
        folder: of the checkpoint.
        manifest: its own.
        share: this reader's; all sizes are looked at, and the contents of every `num_shares`-th file are read.
        num_shares: readers among which the contents are divided.
    """
    for position, (name, expected) in enumerate(sorted(manifest.items())):
        path = folder / name
        try:
            size = path.stat().st_size
            if size != expected.size:
                return f"{name} has {size} bytes instead of {expected.size}"
            if position % num_shares == share and flushed_record(path) != expected:
                return f"{name} is not what was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def steps(run_dir: Path) -> list[int]:
    """Steps of the checkpoints in a run's folder, in no order; partial ones do not count."""
    names = (path.name for path in run_dir.glob("step_*") if path.is_dir())
    return [int(name.removeprefix("step_")) for name in names if name.removeprefix("step_").isdigit()]


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that a run may resume from."""

    folder: Path
    problem: str | None
    """What is wrong with it as far as names and manifest tell; its files may be damaged beyond that."""


def candidates(run_dir: Path) -> Iterator[Candidate]:
    """Checkpoints of a run, the one that the tracker names first, then those before it, the newest first.

    Those behind it are of a longer run that this one started over from; they count only when the tracker cannot be read.
    Nothing at all comes of a folder without checkpoints.

    Raises:
        UserError: for a folder that cannot be looked into.
    """
    tracker = run_dir / TRACKER
    tracked = is_file(tracker, "run_dir")
    known = sorted(steps(run_dir), reverse=True)
    if tracked:
        try:
            content = json.loads(tracker.read_text())
            step, folder, expected = int(content["step"]), run_dir / content["folder"], content["manifest_sha256"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            yield Candidate(tracker, f"cannot be read ({error!r})")
        else:
            yield Candidate(folder, _manifest_problem(folder, expected=expected))
            known = [other for other in known if other < step]
    for step in known:
        folder = run_dir / f"step_{step}"
        yield Candidate(folder, _manifest_problem(folder, expected=None))


def _manifest_problem(folder: Path, *, expected: str | None) -> str | None:
    if not folder.is_dir():
        return "is not there"
    try:
        read_manifest(folder)
    except ValueError as error:
        return str(error)
    if expected is not None and flushed_record(folder / MANIFEST).sha256 != expected:
        return f"{MANIFEST} is not the one that {TRACKER} names"
    return None


def is_file(path: Path, setting: str) -> bool:
    """Whether there is such a file.

    Raises:
        UserError: naming the setting, for a name that no file can have.
    """
    try:
        return path.is_file()
    except OSError as error:  # a name that is too long, for one
        raise UserError(setting, f"{error.strerror}: {str(path)[:80]!r}; give another folder") from None


def read_state(folder: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint.

    Raises:
        UserError: when it is damaged.
    """
    path = folder / STATE
    try:
        state: dict[str, Any] = json.loads(path.read_text())
        int(state["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            "checkpoint.resume", f"{path} is damaged ({error!r}); set it to another checkpoint's folder"
        ) from None
    return state


def superseded(run_dir: Path, *, newest: int, keep: int, best: int | None) -> Iterable[Path]:
    """Folders of checkpoints that may go.

    Later ones than the newest are of a longer run that this one started over from; they are not this run's to remove.

    Args:
        run_dir: the run's folder.
        newest: step of the checkpoint that was just written.
        keep: newest checkpoints that stay.
        best: step of one that stays besides.
    """
    for old in sorted(step for step in steps(run_dir) if step <= newest)[:-keep]:
        if old != best:
            yield run_dir / f"step_{old}"


def discard(folders: Iterable[Path]) -> None:
    """Remove folders while the program goes on, since large files take a while; their names are free at once.

    What a program that is killed meanwhile leaves is removed by the next `discard_leftovers`.
    """
    aside = []
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):  # an earlier call's thread has just removed it
            aside.append(folder.rename(folder.with_name(f".removed_{secrets.token_hex(4)}")))

    def remove() -> None:
        for folder in aside:
            shutil.rmtree(folder, ignore_errors=True)

    if aside:
        threading.Thread(target=remove, name="discard").start()


def discard_leftovers(run_dir: Path) -> None:
    """Remove what runs that were killed have left: checkpoints that they had begun, and those that they were removing.

    A conversion that is being written beside them (`step_200_hf...partial`) is not theirs.
    """
    begun = [path for path in run_dir.glob("step_*.partial") if _BEGUN.fullmatch(path.name)]
    discard([*begun, *run_dir.glob(".removed_*")])


def set_aside(run_dir: Path) -> Path | None:
    """Move an earlier run's checkpoints out of the way of one that starts over in its folder, so that neither is taken for the
    other's.

    Returns:
        the folder that holds them now; None when there were none.
    """
    found = [run_dir / f"step_{step}" for step in steps(run_dir)]
    found += [path for path in (run_dir / TRACKER, run_dir / BEST_TRACKER) if path.exists()]
    if not found:
        return None
    aside = run_dir / f"earlier_{secrets.token_hex(4)}"
    aside.mkdir()
    for path in found:
        path.rename(aside / path.name)
    return aside


def find(
    run_dir: Path,
    resume: str,
    *,
    say: Callable[[str], None] = print,
    share: int = 0,
    num_shares: int = 1,
    gather_objects: GatherObjects = lambda value: [value],
) -> Path | None:
    """The checkpoint to resume from, by `checkpoint.resume`; its files have been read and are whole. Collective.

    Args:
        run_dir: the run's folder.
        resume: `auto`, `no`, or a checkpoint's folder.
        say: told of each damaged checkpoint that is passed over.
        share: this rank; files are divided among the ranks.
        num_shares: number of ranks.
        gather_objects: collective from one object to the list of all ranks' objects.

    Raises:
        UserError: when the one asked for is not there or damaged, or a run has checkpoints and all are damaged.
    """
    if resume == "no":
        return None

    def problem_of(candidate: Candidate) -> str | None:
        found = candidate.problem
        if found is None:
            found = damage(candidate.folder, read_manifest(candidate.folder), share=share, num_shares=num_shares)
        return next((one for one in gather_objects(found) if one is not None), None)

    if resume != "auto":
        folder = Path(resume)
        if not is_file(folder / STATE, "checkpoint.resume"):
            raise UserError("checkpoint.resume", f"{resume!r} is no checkpoint folder; give auto, no or such a folder")
        problem = problem_of(Candidate(folder, _manifest_problem(folder, expected=None)))
        if problem is not None:
            raise UserError("checkpoint.resume", f"{resume} is damaged ({problem}); give another checkpoint")
        return folder
    problems: list[str] = []
    # Rank 0 looks; what it found is the same for all, also where a file system shows changes late.
    for candidate in gather_objects(list(candidates(run_dir)) if share == 0 else None)[0]:
        problem = problem_of(candidate)
        if problem is None:
            for line in problems:
                say(f"DAMAGED CHECKPOINT: {line}")
            if problems:
                say(f"resuming from {candidate.folder} instead")
            return candidate.folder
        problems.append(f"{candidate.folder}: {problem}")
    if problems:
        raise UserError(
            "checkpoint.resume",
            f"no checkpoint is whole ({problems[0]}); restore one, or use checkpoint.resume=no to start over",
        )
    return None
