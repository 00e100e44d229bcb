"""Checkpoints of a run, reshardable to another TP, PP, VPP and DP on load, written while training goes on.

A checkpoint folder is written aside (`step_20.<random>.partial`), completed, flushed, then renamed, and only then does the tracker
file name it: a folder under its final name is whole, and `checkpoint_files.py` can tell whether it still is. It holds

    step_20/megatron/     weights and FP8 state: Megatron's distributed checkpoint
    step_20/optimizer/    FP32 masters and Adam's moments, written by the rank that owns them: the same format of PyTorch's
    step_20/hf/           config.json and tokenizer of the policy, for conversion
    step_20/state.json    everything else: step, policy version, learning-rate schedule, calibrator, configuration
    step_20/state.safetensors   tensors of the same (the calibrator's pool)
    step_20/manifest.json every file's size and hash

Megatron's loader unpickles `megatron/.metadata` and `common.pt`: load only checkpoints that you trust.

All files but those that tell of others are written by a forked process on each rank (`checkpoint_writer.py`). Training
stands still only while ranks name what they will write (`checkpoint_state.py`; no tensor crosses ranks) and, at the end, while
rank 0 puts together where everything is.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_calclip.checkpoint_files import (
    BEST_TRACKER,
    STATE,
    TRACKER,
    FileRecord,
    discard,
    discard_leftovers,
    flush_folder,
    read_state,
    superseded,
    write_json,
    write_manifest,
)
from megatron_calclip.convert.checkpoints import HF_PART, MEGATRON_PART, OPTIMIZER_PART
from megatron_calclip.errors import EXIT_FAILED, UserError
from megatron_calclip.hf import GENERATION
from megatron_calclip.learner.checkpoint_state import (
    adam_step,
    load_optimizer,
    model_state,
    optimizer_blocks,
    weight_blocks,
)
from megatron_calclip.learner.checkpoint_writer import WRITE_ERRORS, Writer
from megatron_calclip.learner.learner import Learner
from megatron_calclip.learner.runtime import Runtime
from megatron_calclip.weights.dist_load import FP8_STATE, METADATA_FILE, DistCheckpoint
from megatron_calclip.weights.dist_save import name_format, write_metadata

_TENSORS = "state.safetensors"


def save_model(folder: Path, learner: Learner) -> None:
    """The weights alone (the reference policy of a KL penalty), in place of what the folder held; collective.

    Raises:
        UserError: when the folder cannot be written.
    """

    def make_room() -> None:
        if folder.is_dir():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)

    _on_rank_zero(learner.runtime, make_room, folder)
    writer = Writer(learner.runtime, folder, {".": weight_blocks(model_state(learner))})
    _finish(writer, lambda _: name_format(folder))


def load_model(folder: Path, learner: Learner) -> None:
    """Load what `save_model` wrote into the live weights; the optimizer's masters stay. Collective."""
    loaded = dist_checkpointing.load(model_state(learner), str(folder))
    for index, chunk in enumerate(learner.chunks):
        chunk.module.load_state_dict(loaded[f"model{index}"])


@dataclass
class PendingSave:
    """A checkpoint whose files are being written by other processes, as memory was when it began."""

    run_dir: Path
    step: int
    keep: int
    best: dict[str, float] | None
    writer: Writer

    def is_written(self) -> bool:
        """Whether all ranks' files are; collective."""
        return self.writer.is_done()

    def finish(self) -> Path:
        """Wait for the files, and let the checkpoint count; collective.

        Returns:
            its folder.

        Raises:
            UserError: when it could not be written. Older checkpoints stay as they are.
        """
        aside, folder = self.writer.folder, self.run_dir / f"step_{self.step}"

        def complete(records: dict[str, FileRecord]) -> None:
            name_format(aside / MEGATRON_PART)
            digest = write_manifest(aside, records)
            shutil.rmtree(folder, ignore_errors=True)
            aside.rename(folder)
            flush_folder(self.run_dir)
            write_json(self.run_dir / TRACKER, {"step": self.step, "folder": folder.name, "manifest_sha256": digest})
            if self.best is not None:
                write_json(self.run_dir / BEST_TRACKER, self.best)
            best = None if self.best is None else int(self.best["step"])
            discard(superseded(self.run_dir, newest=self.step, keep=self.keep, best=best))

        _finish(self.writer, complete)
        return folder


def begin_save(
    run_dir: Path,
    step: int,
    learner: Learner,
    *,
    tokenizer: Any,
    state: dict[str, Any],
    tensors: dict[str, Tensor],
    keep: int,
    best: dict[str, float] | None = None,
) -> PendingSave:
    """Begin to write `run_dir/step_<step>`; training may go on at once. Collective.

    Args:
        run_dir: the run's folder.
        step: RL steps done.
        learner: what is saved.
        tokenizer: saved beside the weights.
        state: JSON values of the caller (the same on all ranks), returned by `load`.
        tensors: CPU tensors of the caller (the same on all ranks), returned by `load`.
        keep: newest checkpoints that stay.
        best: step and score of the best evaluation, whose checkpoint stays besides.

    Raises:
        UserError: when the folder cannot be written. Older checkpoints stay as they are.
    """
    # A name that no earlier attempt has: a writer that outlived its run must not get in the way.
    name = learner.runtime.gather_objects(f"step_{step}.{secrets.token_hex(4)}.partial")[0]
    aside = run_dir / name

    def prepare() -> None:
        discard_leftovers(run_dir)
        for part in (MEGATRON_PART, OPTIMIZER_PART, HF_PART):
            (aside / part).mkdir(parents=True)

    _on_rank_zero(learner.runtime, prepare, aside)
    weights = model_state(learner)
    parts = {MEGATRON_PART: weight_blocks(weights), OPTIMIZER_PART: optimizer_blocks(learner, weights)}
    own = {"step": step, "scheduler": learner.scheduler.state_dict(), "adam_step": adam_step(learner)}

    def write_others() -> list[Path]:
        learner.hf_config.save_pretrained(aside / HF_PART)
        tokenizer.save_pretrained(aside / HF_PART)
        generation = Path(learner.config.model.hf or "", GENERATION)  # holds the tokens that end a completion
        if learner.config.model.hf is not None and generation.is_file():
            shutil.copyfile(generation, aside / HF_PART / GENERATION)
        save_file(tensors, aside / _TENSORS)
        write_json(aside / STATE, {**state, **own})
        return [*(aside / HF_PART).iterdir(), aside / _TENSORS, aside / STATE]

    return PendingSave(run_dir, step, keep, best, Writer(learner.runtime, aside, parts, others=write_others))


def save(run_dir: Path, step: int, learner: Learner, **options: Any) -> Path:
    """`begin_save` and `PendingSave.finish` in one; collective."""
    return begin_save(run_dir, step, learner, **options).finish()


def _finish(writer: Writer, complete: Callable[[dict[str, FileRecord]], None]) -> None:
    """Wait for all files, say where their blocks are, and let rank 0 complete the folder; collective.

    Raises:
        UserError: when any of it failed. The folder is gone then.
    """
    report = writer.finish()

    def act() -> None:
        if report.problem is not None:
            raise OSError(report.problem)
        for part, written in report.written.items():
            write_metadata(writer.folder / part, written)
        complete(report.records)

    _on_rank_zero(writer.runtime, act, writer.folder)


def _on_rank_zero(runtime: Runtime, action: Callable[[], None], folder: Path) -> None:
    """Run on rank 0; all ranks learn of a failure together, so that none waits for the others.

    Args:
        runtime: this rank.
        action: writes into the folder.
        folder: removed when that fails.

    Raises:
        UserError: on every rank, when the file system refused.
    """
    problem = None
    if runtime.rank == 0:
        try:
            action()
        except WRITE_ERRORS as error:
            problem = str(error)
            shutil.rmtree(folder, ignore_errors=True)
    problem = runtime.gather_objects(problem)[0]
    if problem is not None:
        raise UserError(
            "run_dir", f"cannot write a checkpoint ({problem}); free space or fix it", exit_code=EXIT_FAILED
        )


def check_fp8_state(folder: Path, state: Any) -> None:
    """Whether a checkpoint's weights come with the histories that delayed scaling goes on from.

    Args:
        folder: Megatron's part of the checkpoint.
        state: the sharded state that would be loaded.

    Raises:
        UserError: when they are missing, or of another length.
    """
    stored = DistCheckpoint(folder).tensors
    for wanted in nested_values(state):
        if not isinstance(wanted, ShardedTensor) or FP8_STATE not in wanted.key:
            continue
        entry = stored.get(wanted.key)
        if entry is None or tuple(entry.size) != tuple(wanted.global_shape):
            found = "has none" if entry is None else f"has them with {tuple(entry.size)} entries"
            raise UserError(
                "precision.recipe",
                f"tensorwise_delayed goes on from amax histories of {tuple(wanted.global_shape)} entries, and {folder} {found}; "
                "resume with the recipe and precision.amax_history_length of that run, or start from its weights "
                "(tools/convert/megatron_to_hf.py, then model.hf)",
            )


def load(folder: Path, learner: Learner) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Load weights, masters, optimizer and schedule into a learner of any layout; collective.

    Returns:
        what `save` was given as `state` (with `step`) and as `tensors`.

    Raises:
        UserError: for a checkpoint in an earlier format, of another model, or without the FP8 state that this learner needs.
    """
    check_fp8_state(folder / MEGATRON_PART, model_state(learner))
    state, optimizer = read_state(folder), folder / OPTIMIZER_PART
    if not (optimizer / METADATA_FILE).is_file():
        raise UserError(
            "checkpoint.resume",
            f"{folder} keeps its optimizer in a format of before 0.1.0; set it to no and start from its weights "
            "(tools/convert/megatron_to_hf.py, then model.hf)",
        )
    load_optimizer(learner, model_state(learner), DistCheckpoint(optimizer), adam_step=state["adam_step"])
    load_model(folder / MEGATRON_PART, learner)
    learner.refresh_fp8_params()
    # Of the schedule its place alone: what it looks like is the configuration's to say, and Megatron's own loader would add the
    # place to that of a learner that has trained (a rollback).
    learner.scheduler.num_steps = 0
    learner.scheduler.step(increment=state["scheduler"]["num_steps"])
    return state, load_file(folder / _TENSORS)
