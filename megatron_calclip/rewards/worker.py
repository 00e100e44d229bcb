"""The processes of `pool.Pool`: the nursery, which forks, and its workers, which grade.

Runs in an interpreter of its own, without torch, megatron or threads. A worker reads a job, answers with JSON, and
cannot be trusted to end: its parent kills it. RLIMIT_DATA rather than RLIMIT_AS bounds its memory, because torch and
CUDA, which a user's reward may import, reserve far more addresses than they use.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_PR_SET_PDEATHSIG = 1
Handler = Callable[[bytes], Any]


def die_with_parent(parent: int) -> None:
    """Have this process killed when `parent` (a process id) ends; the thread that started it, to be exact."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def nursery(arguments: str) -> None:
    """Fork a worker for each socket that arrives, until the parent closes the connection.

    Args:
        arguments: JSON object: `socket` (descriptor), `parent` (process id), `memory_mib`, `settings` (of `make_handler`).
    """
    from megatron_calclip.rewards.grading import make_handler

    given = json.loads(arguments)
    die_with_parent(given["parent"])
    control = socket.socket(fileno=given["socket"])
    handler = make_handler(given["settings"])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the workers
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        own_pid = os.getpid()
        if os.fork() == 0:
            control.close()
            with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
                _work(Connection(descriptors[0]), handler, parent=own_pid, memory_mib=given["memory_mib"])
            os._exit(0)
        os.close(descriptors[0])


def _work(connection: Connection, handler: Handler, *, parent: int, memory_mib: int) -> None:
    os.setsid()  # a group of its own, so that what a reward starts is killed with it
    die_with_parent(parent)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    num_bytes = memory_mib << 20
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _send(connection, pid=os.getpid())
    while True:
        job = connection.recv_bytes()
        try:
            result = handler(job)
        except MemoryError:
            result = None
        _send(connection, result=result)


def _send(connection: Connection, **message: Any) -> None:
    connection.send_bytes(json.dumps(message | {"cpu_seconds": time.process_time()}).encode())
