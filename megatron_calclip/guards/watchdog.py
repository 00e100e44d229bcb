"""A watchdog in every rank: when a stage takes far too long, it names the rank that holds the others up, and ends the job.

Ranks that wait for another one stand in a collective, and look alike. So each rank publishes its stage, and where its main
thread stands, in the job's key-value store; when time is up, every rank prints the table with the ranks that do not
wait in a collective first, and exits, so that torchrun starts the job anew where `--max-restarts` allows it.

On NCCL the innermost frame is the collective that a rank called last; NCCL's own flight recorder
(`TORCH_NCCL_TRACE_BUFFER_SIZE`) knows more. Not yet run on a GPU.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch.distributed as dist

from megatron_calclip.errors import EXIT_FAILED

CHECKS_PER_TIMEOUT = 20
"""So often within the time limit a rank looks at its clock, and publishes where it stands."""
_COLLECTIVES = ("torch/distributed/", "megatron/core/pipeline_parallel/p2p_communication")
_DEAD = "no sign of life"


@dataclass(frozen=True)
class Standing:
    """Where a rank was when it last said so."""

    rank: int
    stage: str
    seconds: float
    """In this stage."""
    place: str
    """Innermost frame of its main thread outside of torch: file:line function."""
    waits: bool
    """Whether it stands in a collective."""


def standing(rank: int, stage: str, seconds: float, frame: FrameType | None) -> Standing:
    """Describe a rank by its main thread's stack."""
    stack = traceback.extract_stack(frame) if frame is not None else []
    waits = any(part in entry.filename for entry in stack[-4:] for part in _COLLECTIVES)
    own = [entry for entry in stack if "/torch/" not in entry.filename]
    place = "nowhere"
    if own:
        place = f"{'/'.join(own[-1].filename.split('/')[-2:])}:{own[-1].lineno} {own[-1].name}"
    return Standing(rank, stage, seconds, place, waits)


def table(standings: dict[int, Standing | None]) -> list[str]:
    """Lines about all ranks, those that hold the others up first.

    Args:
        standings: by rank; None for one that has not said anything.
    """
    lines = []
    for rank, one in sorted(standings.items(), key=lambda item: (item[1] is not None and item[1].waits, item[0])):
        if one is None:
            lines.append(f"rank {rank}: {_DEAD}")
        else:
            what = "waits for others in" if one.waits else "HANGS in"
            lines.append(f"rank {rank}: {what} stage {one.stage!r} for {one.seconds:.0f} s, at {one.place}")
    return lines


class Watchdog:
    """Call `enter` at the beginning of each stage; the clock runs while `active`.

    Args:
        rank: this rank.
        world_size: number of ranks.
        timeout_seconds: longest that a stage may take.
        end: what to do when one takes longer (tests replace it).
    """

    def __init__(
        self, rank: int, world_size: int, timeout_seconds: float, *, end: Callable[[], None] | None = None
    ) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout_seconds
        self._end = end or (lambda: os._exit(EXIT_FAILED))
        # A client of its own: the job's may be waiting for an answer when this thread wants to ask.
        default: Any = dist.distributed_c10d._get_default_store() if world_size > 1 else None
        self._store: Any = default.clone() if default is not None else None
        self._main = threading.main_thread().ident
        self._stage, self._since = "start", time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def enter(self, stage: str) -> None:
        """A stage begins."""
        self._stage, self._since = stage, time.monotonic()

    def close(self) -> None:
        """Stop watching."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(self.timeout / CHECKS_PER_TIMEOUT):
            own = self._own()
            self._publish(own)
            if own.seconds > self.timeout:
                # Others reach their limit within a check of this one's; wait for what they publish.
                self._stopped.wait(2 * self.timeout / CHECKS_PER_TIMEOUT)
                lines = table(self._all(own))
                print(
                    "\n".join([f"error: no progress for {own.seconds:.0f} s (train.hang_timeout_seconds)", *lines]),
                    file=sys.stderr,
                    flush=True,
                )
                self._end()
                return

    def _own(self) -> Standing:
        frame = sys._current_frames().get(self._main) if self._main is not None else None
        return standing(self.rank, self._stage, time.monotonic() - self._since, frame)

    def _publish(self, own: Standing) -> None:
        if self._store is not None:
            self._store.set(f"watchdog/{self.rank}", json.dumps([own.stage, own.seconds, own.place, own.waits]))

    def _all(self, own: Standing) -> dict[int, Standing | None]:
        found: dict[int, Standing | None] = {self.rank: own}
        for rank in range(self.world_size):
            key = f"watchdog/{rank}"
            if rank != self.rank:
                known = self._store.check([key])
                found[rank] = Standing(rank, *json.loads(self._store.get(key))) if known else None
        return found
