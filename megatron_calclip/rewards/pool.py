"""A bounded pool of processes for work that may hang, explode or die: every job ends, and none is lost.

What the field's verifiers fall into, and what is done here instead:

- `SIGALRM` in a thread does nothing, and never interrupts a big-integer power, which is one C call: limits are kept
  by the parent, which kills.
- Forking a process that holds gloo or CUDA threads can deadlock: a *nursery* process, started as a fresh
  interpreter, imports what is slow to import and forks the workers, so that replacing a killed one takes milliseconds.
- A busy machine makes wall-clock limits arbitrary: a job may use `cpu_seconds` of CPU time, and only
  `wall_seconds`, several times as long, is measured on the clock.
- An executor breaks, or waits for ever, when its workers are killed: a job whose worker died for no fault of the
  job's is done again, `MAX_ATTEMPTS` times at most, and so is the nursery.

Nothing outlives the parent: nursery and workers ask the kernel to be killed when the process above them ends.

Left out on purpose: threads (one job per worker at a time, from one thread of the parent) and other machines.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from megatron_calclip.errors import EXIT_FAILED, UserError

# Deaths of its worker after which a job counts as the cause; the machine's out-of-memory killer may take a few innocents.
MAX_ATTEMPTS = 3
# A fresh interpreter that imports sympy takes a second; on an overloaded machine a minute.
START_SECONDS = 120.0
# How long a socket may refuse data of a worker that was stopped: then it is taken for dead.
_SOCKET_SECONDS = 10
_NURSERY = (
    "import sys; sys.path[:] = {path!r}; from megatron_calclip.rewards.worker import nursery; nursery({arguments!r})"
)


@dataclass(frozen=True)
class Limits:
    """What one job may use."""

    cpu_seconds: float
    """CPU time of its worker."""
    wall_seconds: float
    """Time on the clock; for jobs that sleep."""
    memory_mib: int
    """Memory of its worker (RLIMIT_DATA), what it starts with included."""


@dataclass(eq=False)
class _Worker:
    """The parent's end of one worker."""

    connection: Connection
    pid: int | None = None
    """None until it has said that it is ready."""
    job: int | None = None
    since: float = field(default_factory=time.monotonic)
    """Start of its job, or of itself."""
    cpu_before: float = 0.0
    """CPU seconds it had used when it last sent something."""
    next_check: float = float("inf")

    @property
    def is_idle(self) -> bool:
        return self.pid is not None and self.job is None

    def cpu_seconds(self) -> float:
        """CPU time used so far; infinite once it is gone."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return float("inf")
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime, stime

    def kill(self) -> None:
        """End it with all that it has started."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self.connection.close()


class Pool:
    """Processes that turn jobs (bytes) into results (JSON values).

    Args:
        num_workers: processes at most.
        limits: of one job.
        settings: JSON value that `worker.make_handler` makes the workers' function from.
    """

    def __init__(self, num_workers: int, *, limits: Limits, settings: Any) -> None:
        self.num_workers, self.limits, self.settings = num_workers, limits, settings
        self._nursery: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._workers: list[_Worker] = []
        self._failed_starts = 0

    @property
    def worker_pids(self) -> list[int]:
        """Processes that are ready for work."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    @property
    def nursery_pid(self) -> int | None:
        """The process that forks the workers, while there is one."""
        return self._nursery.pid if self._nursery else None

    def map(self, jobs: Sequence[bytes]) -> list[Any]:
        """The result of each job, in order; None for a job that exceeded its limits, or died with its worker each time.

        Raises:
            UserError: when no worker can be started.
        """
        results: list[Any] = [None] * len(jobs)
        attempts = [0] * len(jobs)
        waiting = deque(range(len(jobs)))
        try:
            while waiting or any(worker.job is not None for worker in self._workers):
                self._hire(waiting)
                idle = [worker for worker in self._workers if worker.is_idle]
                for worker in idle[: len(waiting)]:
                    self._assign(worker, waiting.popleft(), jobs)
                for worker in self._ready():
                    job, started = worker.job, worker.pid is not None
                    if self._receive(worker, results):
                        continue
                    self._dismiss(worker)
                    self._failed_starts += not started
                    if job is not None:
                        attempts[job] += 1
                        overdue = time.monotonic() - worker.since >= self.limits.cpu_seconds
                        if not overdue and attempts[job] < MAX_ATTEMPTS:
                            waiting.appendleft(job)
                self._end_overdue()
        except BaseException:
            self.close()  # whatever the workers still do belongs to jobs that nobody waits for
            raise
        return results

    def close(self) -> None:
        """End all processes; the next `map` starts new ones."""
        for worker in list(self._workers):
            self._dismiss(worker)
        if self._control is not None:
            self._control.close()
        if self._nursery is not None:
            self._nursery.kill()
            self._nursery.wait()
        self._nursery = self._control = None

    def _ready(self) -> list[_Worker]:
        """Workers that have sent something, or are gone; waits until there is one, or a limit is reached."""
        now = time.monotonic()
        seconds = max(0.0, min((worker.next_check for worker in self._workers), default=now) - now)
        by_connection = {worker.connection: worker for worker in self._workers}
        return [by_connection[ready] for ready in wait(list(by_connection), seconds)]  # type: ignore[index]

    def _assign(self, worker: _Worker, job: int, jobs: Sequence[bytes]) -> None:
        worker.job, worker.since = job, time.monotonic()
        worker.next_check = worker.since + min(self.limits.cpu_seconds, self.limits.wall_seconds)
        with contextlib.suppress(OSError):  # it is gone: `_ready` finds that out
            worker.connection.send_bytes(jobs[job])

    def _receive(self, worker: _Worker, results: list[Any]) -> bool:
        """Take a worker's greeting or result; False when it is gone."""
        try:
            message = json.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            return False
        if worker.job is None:
            worker.pid, self._failed_starts = message["pid"], 0
        else:
            results[worker.job], worker.job = message["result"], None
        worker.cpu_before = message["cpu_seconds"]
        worker.next_check = float("inf")
        return True

    def _end_overdue(self) -> None:
        """Kill the workers whose job, or whose start, has taken too long."""
        for worker in list(self._workers):
            now = time.monotonic()
            if now < worker.next_check:
                continue
            if worker.pid is None:
                self._failed_starts += 1
                self._end_nursery(worker)
                continue
            left = self.limits.cpu_seconds - (worker.cpu_seconds() - worker.cpu_before)
            end = worker.since + self.limits.wall_seconds
            if left <= 0 or now >= end:
                self._dismiss(worker)  # its job's result stays None
            else:
                worker.next_check = min(now + left, end)

    def _hire(self, waiting: Sequence[int]) -> None:
        """Start workers for the jobs that have none."""
        if self._failed_starts > MAX_ATTEMPTS * self.num_workers:
            raise UserError(
                "reward.num_workers",
                "the processes that score completions do not start, or end at once; see their message above",
                exit_code=EXIT_FAILED,
            )
        num_free = sum(worker.job is None for worker in self._workers)
        for _ in range(min(self.num_workers - len(self._workers), len(waiting) - num_free)):
            own, theirs = socket.socketpair()
            with theirs:
                seconds = _SOCKET_SECONDS.to_bytes(8, sys.byteorder) + bytes(8)  # a struct timeval
                own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
                own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
                try:
                    socket.send_fds(self._nursery_socket(), [b"w"], [theirs.fileno()])
                except OSError:  # the nursery was killed; its workers are dying, too
                    own.close()
                    self._end_nursery()
                    return
            worker = _Worker(Connection(own.detach()))
            worker.next_check = worker.since + START_SECONDS
            self._workers.append(worker)

    def _nursery_socket(self) -> socket.socket:
        if self._control is None:
            self._control, theirs = socket.socketpair()
            arguments = {
                "socket": theirs.fileno(),
                "parent": os.getpid(),
                "memory_mib": self.limits.memory_mib,
                "settings": self.settings,
            }
            code = _NURSERY.format(path=sys.path, arguments=json.dumps(arguments))
            with theirs:
                self._nursery = subprocess.Popen(
                    [sys.executable, "-c", code],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C is the parent's to answer
                )
        return self._control

    def _end_nursery(self, hung: _Worker | None = None) -> None:
        """Give up a nursery that is dead or hangs; its workers die with it and are found gone."""
        if hung is not None:
            self._dismiss(hung)
        if self._control is not None and self._nursery is not None:
            self._control.close()
            self._nursery.kill()
            self._nursery.wait()
        self._control = self._nursery = None

    def _dismiss(self, worker: _Worker) -> None:
        worker.kill()
        self._workers.remove(worker)
