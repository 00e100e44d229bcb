"""Named tensors from one process to many, over a process group of its own: NCCL between GPUs, gloo otherwise.

The receivers are a server's workers, which have process groups of their own already, and maybe another PyTorch program
around them; so the group is built from a store, beside torch's default group. What travels tells its own name, type and
shape: nothing has to be agreed on beforehand. A group serves one transfer, so that a receiver that died, or came
later, cannot keep the others waiting for ever.

It must import without the rest of the package's dependencies: the workers' environment has torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = timedelta(minutes=5)
"""For every single broadcast: a receiver that says nothing for so long is taken for dead."""


class Muster:
    """Who takes part in a transfer: candidates report, the sender decides whom to wait for no longer.

    Args:
        store: that all candidates reach.
    """

    def __init__(self, store: dist.Store) -> None:
        self.store = store

    def has_reported(self, rank: int) -> bool:
        """Whether a candidate has come."""
        return bool(self.store.check([f"here/{rank}"]))

    def decide(self, members: Sequence[int]) -> None:
        """Let these take part."""
        self.store.set("members", json.dumps(list(members)))

    def report(self, rank: int) -> list[int]:
        """Come as a candidate, and wait for the decision.

        Returns:
            the members.

        Raises:
            RuntimeError: when this candidate is not among them.
        """
        self.store.set(f"here/{rank}", "")
        self.store.wait(["members"], TIMEOUT)
        members: list[int] = json.loads(self.store.get("members"))
        if rank not in members:
            raise RuntimeError(f"the broadcast of weights goes on without receiver {rank}")
        return members


class BroadcastGroup:
    """One transfer's process group.

    Args:
        store: that all members reach.
        rank: of this process among the candidates; 0 sends.
        members: candidates that take part, 0 the first; see `Muster`.
        device: where the tensors go through; CUDA means NCCL.
    """

    def __init__(self, store: dist.Store, *, rank: int, members: Sequence[int], device: torch.device) -> None:
        self.device = device
        rank, size = members.index(rank), len(members)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, TIMEOUT)

    def send(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Send all tensors, one after the other, and the end.

        Raises:
            RuntimeError: when a receiver is gone.
        """
        for name, tensor in tensors:
            header = {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
            text = torch.tensor(list(json.dumps(header).encode()), dtype=torch.uint8)
            self._broadcast(torch.tensor([len(text)]))
            self._broadcast(text)
            if tensor.numel():
                self._broadcast(tensor.detach().contiguous().view(-1).view(torch.uint8))
        self._broadcast(torch.tensor([0]))

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """What is sent, each tensor on the group's device.

        Raises:
            RuntimeError: when the sender is gone.
        """
        while length := int(self._broadcast(torch.zeros(1, dtype=torch.int64))):
            text = self._broadcast(torch.empty(length, dtype=torch.uint8))
            header = json.loads(bytes(text.tolist()))
            tensor = torch.empty(header["shape"], dtype=getattr(torch, header["dtype"]), device=self.device)
            if tensor.numel():
                self._broadcast(tensor.view(-1).view(torch.uint8))
            yield header["name"], tensor

    def _broadcast(self, tensor: Tensor) -> Tensor:
        on_device = tensor.to(self.device)
        self._group.broadcast([on_device], dist.BroadcastOptions()).wait()
        return on_device

    def close(self) -> None:
        """Free the connections."""
        if self.device.type == "cuda":
            self._group.abort()  # a plain shutdown waits for members that may be gone
        del self._group
