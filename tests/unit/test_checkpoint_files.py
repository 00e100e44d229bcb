"""Damaged checkpoints are found and named, and the one before is used. The files here are any; no learner is needed."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_calclip import checkpoint_files
from megatron_calclip.checkpoint_files import (
    MANIFEST,
    STATE,
    TRACKER,
    HashedFile,
    damage,
    discard,
    discard_leftovers,
    find,
    flushed_record,
    read_manifest,
    set_aside,
    steps,
    superseded,
    write_json,
    write_manifest,
)
from megatron_calclip.errors import UserError


def make_checkpoint(run_dir: Path, step: int) -> Path:
    """A checkpoint of a few files, named by the tracker."""
    folder = run_dir / f"step_{step}"
    (folder / "megatron").mkdir(parents=True)
    (folder / "megatron" / "__0_0.distcp").write_bytes(bytes(range(256)) * (10 + step))
    (folder / "megatron" / "__1_0.distcp").write_bytes(b"x" * 999)
    write_json(folder / STATE, {"step": step})
    digest = write_manifest(folder, {})
    write_json(run_dir / TRACKER, {"step": step, "folder": folder.name, "manifest_sha256": digest})
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for step in (2, 4, 6):
        make_checkpoint(tmp_path, step)
    return tmp_path


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (
        lambda folder: os.truncate(folder / "megatron" / "__0_0.distcp", 100),
        "megatron/__0_0.distcp has 100 bytes instead of 4096",
    ),
    "a flipped bit": (
        lambda folder: flip(folder / "megatron" / "__0_0.distcp"),
        "megatron/__0_0.distcp is not what was written",
    ),
    "a missing shard": (
        lambda folder: (folder / "megatron" / "__1_0.distcp").unlink(),
        "megatron/__1_0.distcp is missing",
    ),
    "a changed manifest": (
        lambda folder: (folder / MANIFEST).write_text((folder / MANIFEST).read_text().replace("a", "b")),
        "manifest.json is not the one that latest_checkpoint.json names",
    ),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "has no manifest.json"),
    "a damaged manifest": (lambda folder: (folder / MANIFEST).write_text("{"), "manifest.json cannot be read"),
    "a missing folder": (shutil.rmtree, "is not there"),
    "a wrong tracker": (
        lambda folder: write_json(
            folder.parent / TRACKER, {"step": 6, "folder": "step_6", "manifest_sha256": "0" * 64}
        ),
        "manifest.json is not the one that latest_checkpoint.json names",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_named_and_the_one_before_is_used(run_dir: Path, kind: str) -> None:
    harm, expected = DAMAGES[kind]
    assert find(run_dir, "auto") == run_dir / "step_6"
    harm(run_dir / "step_6")
    lines: list[str] = []
    assert find(run_dir, "auto", say=lines.append) == run_dir / "step_4"
    assert lines[0].startswith("DAMAGED CHECKPOINT: ") and expected in lines[0] and "step_6" in lines[0]
    assert "step_4" in lines[-1]


def test_a_tracker_that_cannot_be_read_leaves_the_newest(run_dir: Path) -> None:
    (run_dir / TRACKER).write_text("{")
    lines: list[str] = []
    assert find(run_dir, "auto", say=lines.append) == run_dir / "step_6"
    assert "latest_checkpoint.json: cannot be read" in lines[0]


def test_checkpoints_of_a_longer_run_in_the_same_folder_do_not_count(run_dir: Path) -> None:
    folder = make_checkpoint(run_dir, 3)
    assert find(run_dir, "auto") == folder
    flip(folder / "megatron" / "__0_0.distcp")
    assert find(run_dir, "auto", say=lambda line: None) == run_dir / "step_2"


def test_no_whole_checkpoint_is_no_fresh_start(run_dir: Path) -> None:
    for step in (2, 4, 6):
        flip(run_dir / f"step_{step}" / STATE)
    with pytest.raises(UserError, match=r"checkpoint\.resume: no checkpoint is whole .*state\.json.*start over"):
        find(run_dir, "auto")
    assert find(run_dir, "no") is None


def test_a_checkpoint_that_is_asked_for_is_not_replaced(run_dir: Path) -> None:
    assert find(run_dir, str(run_dir / "step_2")) == run_dir / "step_2"
    flip(run_dir / "step_2" / "megatron" / "__0_0.distcp")
    with pytest.raises(UserError, match=r"step_2 is damaged \(megatron/__0_0\.distcp is not what was written\)"):
        find(run_dir, str(run_dir / "step_2"))
    with pytest.raises(UserError, match="is no checkpoint folder"):
        find(run_dir, str(run_dir / "step_7"))


def test_an_empty_folder_is_a_fresh_start(tmp_path: Path) -> None:
    assert find(tmp_path, "auto") is None
    (tmp_path / "step_4.0a1b.partial").mkdir()
    assert find(tmp_path, "auto") is None


def test_readers_share_the_contents_and_see_all_sizes(run_dir: Path) -> None:
    folder = run_dir / "step_6"
    manifest = read_manifest(folder)
    flip(folder / "megatron" / "__0_0.distcp")
    found = [damage(folder, manifest, share=share, num_shares=3) for share in range(3)]
    assert [problem is None for problem in found].count(False) == 1
    # Any rank that sees it tells the others.
    answers = iter([[None, "state.json is not what was written"], [None, None]])

    def gather(value: object) -> list[object]:
        return [value] if isinstance(value, list) else next(answers)

    assert find(run_dir, "auto", say=lambda line: None, gather_objects=gather) == run_dir / "step_4"


def test_manifest_holds_what_was_hashed_before(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    record = flushed_record(tmp_path / "a")
    (tmp_path / "b").write_bytes(b"22")
    digest = write_manifest(tmp_path, {"a": record})
    manifest = read_manifest(tmp_path)
    assert manifest == {"a": record, "b": flushed_record(tmp_path / "b")} and manifest["b"].size == 2
    assert digest == flushed_record(tmp_path / MANIFEST).sha256
    assert json.loads((tmp_path / MANIFEST).read_text())["a"][1] == record.sha256


def test_what_may_go(run_dir: Path) -> None:
    for step in (8, 20):
        make_checkpoint(run_dir, step)
    assert [path.name for path in superseded(run_dir, newest=8, keep=2, best=None)] == ["step_2", "step_4"]
    assert [path.name for path in superseded(run_dir, newest=8, keep=1, best=4)] == ["step_2", "step_6"]


def test_a_file_that_is_hashed_as_it_is_written(tmp_path: Path) -> None:
    with HashedFile(tmp_path / "blocks") as file:
        for part in (b"abc", memoryview(bytes(range(256)) * 9), b""):
            assert file.write(part) == len(part)
        assert file.size == 3 + 9 * 256
    assert file.record == flushed_record(tmp_path / "blocks")


def test_what_is_discarded_is_gone_at_once(run_dir: Path) -> None:
    (run_dir / "step_4_hf.0a1b2c3d.partial").mkdir()  # a conversion that goes on beside the run
    for name in ("step_8.1a2b3c4d.partial", ".removed_1a2b"):  # of runs that were killed
        (run_dir / name / "megatron").mkdir(parents=True)
    discard([run_dir / "step_2"])
    discard_leftovers(run_dir)
    assert sorted(steps(run_dir)) == [4, 6] and not (run_dir / "step_2").exists()
    for thread in threading.enumerate():
        if thread.name == "discard":
            thread.join()
    left = sorted(path.name for path in run_dir.iterdir())
    assert left == [TRACKER, "step_4", "step_4_hf.0a1b2c3d.partial", "step_6"]


def test_checkpoints_of_an_earlier_run_are_moved_aside(run_dir: Path) -> None:
    """A run that starts over in their folder must neither resume from them nor count them as its own."""
    aside = set_aside(run_dir)
    assert aside is not None and aside.parent == run_dir
    assert steps(run_dir) == [] and find(run_dir, "auto") is None
    assert find(aside, "auto") == aside / "step_6" and sorted(steps(aside)) == [2, 4, 6]
    assert set_aside(run_dir) is None


def test_what_another_thread_has_just_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier save's thread may end between the listing and the renaming of the next one."""
    (tmp_path / ".removed_2").mkdir()
    discard([tmp_path / ".removed_1", tmp_path / ".removed_2"])
    assert not (tmp_path / ".removed_2").exists()


def test_a_manifest_names_every_file_that_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared file system may show another machine's file late, or never: then the checkpoint is not whole."""
    (tmp_path / "a").write_bytes(b"1")
    record = flushed_record(tmp_path / "a")
    seconds = 0

    def sleep(_: float) -> None:
        nonlocal seconds
        seconds += 1
        if seconds == 3:
            (tmp_path / "late").write_bytes(b"1")

    monkeypatch.setattr(checkpoint_files.time, "sleep", sleep)
    write_manifest(tmp_path, {"a": record, "late": record})
    assert read_manifest(tmp_path) == {"a": record, "late": record} and seconds == 3
    with pytest.raises(OSError, match="never has been written by a rank, and is not there"):
        write_manifest(tmp_path, {"a": record, "never": record})
