"""The forked process that writes a rank's files of a checkpoint.

It sees memory as it is at the fork, so that training can go on at once without a copy of the state: pages that training
writes are copied by the kernel. It must not touch a GPU; what was there has been copied to the host before, into pageable
memory, since pinned memory does not outlive a fork.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import pickle
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from megatron_calclip.checkpoint_files import FileRecord, flushed_record
from megatron_calclip.learner.checkpoint_blocks import Block, write_blocks
from megatron_calclip.learner.runtime import Runtime
from megatron_calclip.weights.dist_save import WrittenBlock

_FORK = multiprocessing.get_context("fork")
_PR_SET_PDEATHSIG = 1
WRITE_ERRORS = (OSError, SafetensorError, RuntimeError)
"""What a full disk makes of Python's, safetensors' and torch's writers."""


@dataclass
class Report:
    """What writing processes have done."""

    problem: str | None = None
    written: dict[str, list[WrittenBlock]] = field(default_factory=dict)
    """By part."""
    records: dict[str, FileRecord] = field(default_factory=dict)
    """By path within the checkpoint."""


class Writer:
    """A process that writes this rank's files, as memory was when it was made.

    Args:
        runtime: this rank.
        folder: of the checkpoint; there already.
        parts: blocks by the folder within it that they go to; the folders are there already.
        others: writes further files on rank 0, and returns their paths.
    """

    def __init__(
        self,
        runtime: Runtime,
        folder: Path,
        parts: Mapping[str, Sequence[Block]],
        *,
        others: Callable[[], list[Path]] = list,
    ) -> None:
        self.runtime, self.folder = runtime, folder
        self._report_path = folder / f"writer_{runtime.rank}.report"
        self.process = _FORK.Process(target=self._write, args=(parts, others), name="checkpoint")
        self.process.start()

    def _write(self, parts: Mapping[str, Sequence[Block]], others: Callable[[], list[Path]]) -> None:
        """In the forked process."""
        gc.disable()  # which may find tensors of the GPU, and would have pages copied
        torch.set_num_threads(1)  # the threads of OpenMP are not in here; it would wait for them
        # It ends with the run; a run that is started again writes into another folder in any case.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The run saves when it is told to stop, and needs this process for it. The handlers are kept: with one of them a
        # whole trainer might be destroyed, whose process groups would wait for threads that are not in here.
        self._handlers = [signal.signal(s, signal.SIG_IGN) for s in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
        report = Report()
        try:
            for part, blocks in parts.items():
                if blocks:
                    path = self.folder / part / f"__{self.runtime.rank}_0.distcp"
                    report.written[part], record = write_blocks(path, blocks)
                    report.records[str(path.relative_to(self.folder))] = record
            if self.runtime.rank == 0:
                report.records |= {str(path.relative_to(self.folder)): flushed_record(path) for path in others()}
        except WRITE_ERRORS as error:
            report = Report(str(error))
        aside = self._report_path.with_suffix(".partial")
        aside.write_bytes(pickle.dumps(report))
        aside.rename(self._report_path)

    def is_done(self) -> bool:
        """Whether the processes of all ranks have ended; collective."""
        return not self.runtime.any_rank(self.process.is_alive())

    def finish(self) -> Report:
        """Wait for the files; collective.

        Returns:
            on rank 0 the report of all ranks, on the others an empty one.
        """
        whole = Report()
        for report in _gather_on_rank_zero(self.runtime, self._wait()):
            whole.problem = whole.problem or report.problem
            whole.records |= report.records
            for part, written in report.written.items():
                whole.written.setdefault(part, []).extend(written)
        return whole

    def _wait(self) -> Report:
        self.process.join()
        try:
            report: Report = pickle.loads(self._report_path.read_bytes())
            self._report_path.unlink()
        except (OSError, EOFError, pickle.UnpicklingError):
            code = self.process.exitcode
            return Report(f"the process that writes rank {self.runtime.rank}'s files ended with {code}")
        return report


def _gather_on_rank_zero(runtime: Runtime, value: Any) -> list[Any]:
    """One object from every rank, in rank order, on rank 0; an empty list on the others."""
    if runtime.world_size == 1:
        return [value]
    gathered: list[Any] = [None] * runtime.world_size if runtime.rank == 0 else []
    dist.gather_object(value, gathered if runtime.rank == 0 else None, dst=0)
    return gathered
