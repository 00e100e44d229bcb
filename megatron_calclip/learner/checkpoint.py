"""Checkpoints of a run in Megatron's distributed format, reshardable to another TP, PP, VPP and DP on load.

A checkpoint folder is written aside (`step_20.partial`), completed, flushed, then renamed, and only then does the tracker
file name it: a folder under its final name is whole, and `checkpoint_files.py` can tell whether it still is. It holds

    step_20/megatron/     model, FP8 state, FP32 masters and optimizer state (torch's distributed format; its
    `.metadata` is a pickle, so load only checkpoints that you trust)
    step_20/hf/           config.json and tokenizer of the policy, for conversion
    step_20/state.json    everything else: step, policy version, learning-rate schedule, calibrator, configuration
    step_20/state.safetensors   tensors of the same (the calibrator's pool)
    step_20/manifest.json every file's size and hash

Files are written by a forked process. It sees memory as it is at the fork, so that training can go on at once
(`checkpoint.async_save`) without a copy of the state; on GPUs the state has been copied to the host before.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import pickle
import queue
import secrets
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_calclip.checkpoint_files import (
    BEST_TRACKER,
    STATE,
    TRACKER,
    FileRecord,
    flush_folder,
    flushed_record,
    read_state,
    superseded,
    write_json,
    write_manifest,
)
from megatron_calclip.errors import EXIT_FAILED, UserError
from megatron_calclip.learner.checkpoint_state import adam_steps_kept, model_state, sharded_state
from megatron_calclip.learner.learner import Learner
from megatron_calclip.learner.runtime import Runtime

_FORK = multiprocessing.get_context("fork")
_PR_SET_PDEATHSIG = 1
_WRITE_ERRORS = (OSError, SafetensorError, RuntimeError)
"""What a full disk makes of Python's, safetensors' and torch's writers."""


def _begin(state: dict[str, Any], folder: Path) -> tuple[Any, queue.SimpleQueue[Any]]:
    """Plan a save of sharded state with all ranks; what remains is to write this rank's files, and to finalize.

    Megatron's writers report through a manager process, which imports torch and the main script once more: seconds in
    every rank, and a hang where that script does not guard its entry. Here a plain queue takes the report.
    """
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    filesystem_async._results_queue = results
    return dist_checkpointing.save(state, str(folder), async_sharded_save=True), results


def save_model(folder: Path, learner: Learner) -> None:
    """The weights alone (the reference policy of a KL penalty); collective."""
    _on_rank_zero(learner.runtime, lambda: folder.mkdir(parents=True, exist_ok=True), folder)
    request, _ = _begin(model_state(learner), folder)
    request.execute_sync()
    learner.runtime.barrier()


def load_model(folder: Path, learner: Learner) -> None:
    """Load what `save_model` wrote into the live weights; the optimizer's masters stay."""
    loaded = dist_checkpointing.load(model_state(learner), str(folder))
    for index, chunk in enumerate(learner.chunks):
        chunk.module.load_state_dict(loaded[f"model{index}"])


@dataclass
class PendingSave:
    """A checkpoint whose files are being written by another process, as memory was when it began."""

    run_dir: Path
    step: int
    runtime: Runtime
    aside: Path
    keep: int
    best: dict[str, float] | None
    request: Any
    """Megatron's."""
    results: queue.SimpleQueue[Any]
    """Where `request` expects the writer's report."""
    writer: Any
    """The process; None where this rank has nothing to write."""

    def is_written(self) -> bool:
        """Whether all ranks' files are; collective."""
        return not self.runtime.any_rank(self.writer is not None and self.writer.is_alive())

    def finish(self) -> Path:
        """Wait for the files, and let the checkpoint count; collective.

        Returns:
            its folder.

        Raises:
            UserError: when it could not be written. Older checkpoints stay as they are.
        """
        runtime, folder = self.runtime, self.run_dir / f"step_{self.step}"
        problem, records = self._report()
        problems = [text for text in runtime.gather_objects(problem) if text is not None]
        if problems:
            if runtime.rank == 0:
                shutil.rmtree(self.aside, ignore_errors=True)
            raise _cannot_write(problems[0])
        for finalize in self.request.finalize_fns:
            finalize()
        every = {name: record for own in runtime.gather_objects(records) for name, record in own.items()}

        def complete() -> None:
            for report in self.aside.glob("*.report"):
                report.unlink()
            digest = write_manifest(self.aside, every)
            shutil.rmtree(folder, ignore_errors=True)
            self.aside.rename(folder)
            flush_folder(self.run_dir)
            write_json(self.run_dir / TRACKER, {"step": self.step, "folder": folder.name, "manifest_sha256": digest})
            if self.best is not None:
                write_json(self.run_dir / BEST_TRACKER, self.best)
            best = None if self.best is None else int(self.best["step"])
            for old in superseded(self.run_dir, newest=self.step, keep=self.keep, best=best):
                shutil.rmtree(old, ignore_errors=True)

        _on_rank_zero(runtime, complete, self.aside)
        return folder

    def _report(self) -> tuple[str | None, dict[str, FileRecord]]:
        """What went wrong with this rank's files, and their records."""
        if self.writer is None:
            return None, {}
        self.writer.join()
        try:
            outcome, records = pickle.loads(self._report_file().read_bytes())
        except (OSError, EOFError, pickle.UnpicklingError):
            return f"the process that writes rank {self.runtime.rank}'s files ended with {self.writer.exitcode}", {}
        if isinstance(outcome, Exception):
            return str(outcome), {}
        self.results.put(outcome)
        return None, records

    def _report_file(self) -> Path:
        return self.aside / f"writer_{self.runtime.rank}.report"

    def start_writer(self) -> None:
        """Fork the process that writes this rank's files."""
        if self.request.async_fn is None:
            return
        arguments = list(self.request.async_fn_args)
        if self.request.preload_fn:
            arguments[1] = self.request.preload_fn()  # from the GPU to the host
        self.writer = _FORK.Process(
            target=_write_files, args=(self.request.async_fn, arguments, self._report_file()), name="checkpoint"
        )
        self.writer.start()


def _write_files(write: Callable[..., None], arguments: list[Any], report: Path) -> None:
    """In the forked process: write, flush and hash the files of Megatron's write buckets, then report."""
    # It ends with the run; a run that is started again writes into another folder in any case.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)  # the run saves when it is told to stop, and needs this process for it
    rank, buckets, _ = arguments
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    records: dict[str, FileRecord] = {}
    try:
        write(rank, buckets, results)
        outcome = results.get()
        if not isinstance(outcome, Exception):
            paths = [Path(bucket[0]) for bucket in buckets]
            records = {f"{path.parent.name}/{path.name}": flushed_record(path) for path in paths}
    except _WRITE_ERRORS as error:
        outcome = error
    aside = report.with_suffix(".partial")
    aside.write_bytes(pickle.dumps((outcome, records)))
    aside.rename(report)


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
    runtime = learner.runtime
    # A name that no earlier attempt has: a writer that outlived its run must not get in the way.
    name = runtime.gather_objects(f"step_{step}.{secrets.token_hex(4)}.partial")[0]
    aside = run_dir / name

    def prepare() -> None:
        for left in run_dir.glob("step_*.partial"):
            shutil.rmtree(left, ignore_errors=True)
        (aside / "megatron").mkdir(parents=True)
        learner.hf_config.save_pretrained(aside / "hf")
        tokenizer.save_pretrained(aside / "hf")
        save_file(tensors, aside / "state.safetensors")
        write_json(aside / STATE, {**state, "step": step, "scheduler": learner.scheduler.state_dict()})

    _on_rank_zero(runtime, prepare, aside)
    state_to_write = sharded_state(learner, loading=False)
    try:
        request, results = _begin(state_to_write, aside / "megatron")
    except _WRITE_ERRORS as error:
        if runtime.rank != 0:  # rank 0 alone writes here; the others end with it
            raise
        shutil.rmtree(aside, ignore_errors=True)
        raise _cannot_write(str(error)) from None
    pending = PendingSave(run_dir, step, runtime, aside, keep, best, request, results, writer=None)
    pending.start_writer()
    return pending


def save(run_dir: Path, step: int, learner: Learner, **options: Any) -> Path:
    """`begin_save` and `PendingSave.finish` in one; collective."""
    return begin_save(run_dir, step, learner, **options).finish()


def _cannot_write(problem: str) -> UserError:
    return UserError("run_dir", f"cannot write a checkpoint ({problem}); free space or fix it", exit_code=EXIT_FAILED)


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
        except _WRITE_ERRORS as error:
            problem = str(error)
            shutil.rmtree(folder, ignore_errors=True)
    problem = runtime.gather_objects(problem)[0]
    if problem is not None:
        raise _cannot_write(problem)


def load(folder: Path, learner: Learner) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Load weights, masters, optimizer and schedule into a learner of any layout; collective.

    Returns:
        what `save` was given as `state` (with `step`) and as `tensors`.
    """
    loaded = dist_checkpointing.load(sharded_state(learner, loading=True), str(folder / "megatron"))
    for index, chunk in enumerate(learner.chunks):
        chunk.module.load_state_dict(loaded[f"model{index}"])
    with adam_steps_kept(learner.optimizer):
        learner.optimizer.load_state_dict(loaded["optimizer"])
    learner.refresh_fp8_params()
    state = read_state(folder)
    learner.scheduler.load_state_dict(state["scheduler"])
    return state, load_file(folder / "state.safetensors")
