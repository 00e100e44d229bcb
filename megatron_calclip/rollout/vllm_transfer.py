"""How a step's weights get from rank 0 to the vLLM servers: through a file, or from memory to memory.

Both keep the newest weights at hand, so that a server that comes back in the middle of a rollout gets them although the
learner's ranks are not there to stream them again: the file on disk, the broadcast in rank 0's host memory.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from megatron_calclip.rollout.broadcast import TIMEOUT, BroadcastGroup, Muster
from megatron_calclip.rollout.vllm_http import Server, ServerError

_POLL_SECONDS = 0.01


class Transfer(Protocol):
    """A way of weights to servers."""

    def publish(self, tensors: dict[str, Tensor], policy_version: int) -> None:
        """Keep these as the newest weights.

        Args:
            tensors: under HF names, in host memory.
            policy_version: theirs.
        """
        ...

    def deliver(self, servers: Sequence[Server]) -> list[str]:
        """Let servers load the newest weights; what went wrong, a line for each server that could not."""
        ...


class FileTransfer:
    """One safetensors file that learner and servers can read.

    Args:
        folder: for the file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._newest: tuple[Path, int] | None = None

    def publish(self, tensors: dict[str, Tensor], policy_version: int) -> None:
        """See `Transfer`; files of older weights go."""
        path = self.folder / f"weights_{policy_version}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".partial")
        save_file(tensors, aside)
        aside.rename(path)
        self._newest = path, policy_version
        for old in self.folder.glob("weights_*.safetensors"):
            if old != path:
                old.unlink()

    def deliver(self, servers: Sequence[Server]) -> list[str]:
        """See `Transfer`."""
        assert self._newest is not None
        path, policy_version = self._newest
        problems = []
        for server in servers:
            try:
                server.update({"path": str(path)}, policy_version)
            except ServerError as error:
                problems.append(str(error))
        return problems


class BroadcastTransfer:
    """From rank 0 to all workers of all servers at once; see `broadcast.py`.

    Args:
        device: of rank 0; CUDA means NCCL. Servers must be of the same kind.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._newest: tuple[dict[str, Tensor], int] | None = None

    def publish(self, tensors: dict[str, Tensor], policy_version: int) -> None:
        """See `Transfer`."""
        self._newest = tensors, policy_version

    def deliver(self, servers: Sequence[Server]) -> list[str]:
        """See `Transfer`. Servers that do not answer at the beginning are left out of the group."""
        assert self._newest is not None
        tensors, policy_version = self._newest
        problems: list[str] = []
        ranks: dict[int, range] = {}  # index of a server -> its workers' ranks
        size = 1
        for index, server in enumerate(servers):
            try:
                num_workers = server.num_workers()
            except ServerError as error:
                problems.append(str(error))
                continue
            ranks[index] = range(size, size + num_workers)
            size += num_workers
        if not ranks:
            return problems
        store = dist.TCPStore("0.0.0.0", 0, None, True, timeout=TIMEOUT, wait_for_workers=False)

        def update(index: int) -> str | None:
            url, first_rank = servers[index].url, ranks[index].start
            try:
                place = {"host": _own_address(url), "port": store.port, "first_rank": first_rank}
                servers[index].update({"broadcast": place}, policy_version)
            except (ServerError, OSError) as error:
                return str(error)
            return None

        lost: list[str] = []
        with ThreadPoolExecutor(len(ranks)) as pool:
            updates = {index: pool.submit(update, index) for index in ranks}
            members = [0, *_those_who_come(Muster(store), ranks, updates)]
            if len(members) > 1:
                try:
                    group = BroadcastGroup(store, rank=0, members=members, device=self.device)
                    group.send(tensors.items())
                    group.close()
                except (RuntimeError, ValueError) as error:  # what torch raises for a member that is gone
                    lost = [f"the broadcast of weights failed ({str(error).splitlines()[0]})"]
            problems += [problem for one in updates.values() if (problem := one.result()) is not None]
        return problems + lost  # the server's own error first: it is the cause


def _those_who_come(muster: Muster, ranks: dict[int, range], updates: dict[int, Future[str | None]]) -> list[int]:
    """Wait until each server's workers have all come, or its update has failed; the ranks of those who came."""
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    come: dict[int, range] = {}
    while len(come) < len(ranks) and time.monotonic() < deadline:
        missing = {index: own for index, own in ranks.items() if index not in come}
        if all(updates[index].done() for index in missing):
            break
        come |= {index: own for index, own in missing.items() if all(map(muster.has_reported, own))}
        time.sleep(_POLL_SECONDS)
    members = [rank for own in come.values() for rank in own]
    muster.decide([0, *members])
    return members


def _own_address(url: str) -> str:
    """Under which address a server sees this machine.

    Raises:
        OSError: when the server cannot be reached.
    """
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=10.0) as connection:
        return str(connection.getsockname()[0])
