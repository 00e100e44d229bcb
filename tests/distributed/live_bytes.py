"""Bytes of live tensors, counted operation by operation: what a device's allocator would have to hold."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside the block, counts every storage that an operation makes until it is freed.

    Storages that were there before are not counted. `peak` may be reset at any time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._add(tensor, 0)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._add(tensor, tensor.untyped_storage().nbytes())
        return result

    def _add(self, tensor: Tensor, num_bytes: int) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return
        self._known[key] = weakref.ref(storage, self._freed(key, num_bytes))
        self.now += num_bytes
        self.peak = max(self.peak, self.now)

    def _freed(self, key: int, num_bytes: int) -> Callable[[Any], None]:
        def forget(_: Any) -> None:
            del self._known[key]
            self.now -= num_bytes

        return forget

    def reset_peak(self) -> None:
        """Begin anew from what is live."""
        self.peak = self.now


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.device.type != "meta")
