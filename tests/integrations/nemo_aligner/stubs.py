"""What the light environment puts in the place of NeMo, Lightning and TensorRT-LLM, which need a GPU container.

The few functions of NeMo that the code under test really calls are written out below for one process; everything else is a
dummy that only has to be importable. Megatron-Core and NeMo-Aligner are the real ones.
"""

from __future__ import annotations

import abc
import importlib.abc
import importlib.machinery
import logging
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROOTS = ("nemo", "lightning", "tensorrt_llm")


class _DummyMeta(abc.ABCMeta):
    """A class of which every attribute is another dummy class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _dummy(name)


def _dummy(name: str) -> type:
    return _DummyMeta(name, (), {"__init__": lambda self, *args, **kwargs: None})


class _DummyModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = FUNCTIONS.get(name) or _dummy(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in ROOTS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _DummyModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """Answer imports of `ROOTS`; once per process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def average_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """Means over data parallelism, stacked."""
    from megatron.core import parallel_state

    stacked = torch.stack([loss.clone().detach().reshape(()) for loss in losses])
    dist.all_reduce(stacked, group=parallel_state.get_data_parallel_group())
    return stacked / parallel_state.get_data_parallel_world_size()


def reduce_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """Sums over data parallelism, stacked."""
    from megatron.core import parallel_state

    return average_losses_across_data_parallel_group(losses) * parallel_state.get_data_parallel_world_size()


def get_iterator_k_split(batch: Any, num_microbatches: int) -> Iterator[Any]:
    """k pieces along the first dimension of a dict or list of tensors; None and other values go into each piece."""

    def piece(value: Any, index: int) -> Any:
        return value.tensor_split(num_microbatches)[index] if isinstance(value, Tensor) else value

    for index in range(num_microbatches):
        if isinstance(batch, list):
            yield [piece(value, index) for value in batch]
        else:
            yield {key: piece(value, index) for key, value in batch.items()}


def get_last_rank() -> int:
    """The last pipeline stage's."""
    from megatron.core import parallel_state

    return parallel_state.get_pipeline_model_parallel_last_rank()


def get_ltor_masks_and_position_ids(data: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Causal attention mask (True is hidden), loss mask, positions."""
    length = data.shape[1]
    hidden = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    return hidden, torch.ones_like(data, dtype=torch.float32), torch.arange(length).expand_as(data)


FUNCTIONS: dict[str, Any] = {
    function.__name__: function
    for function in (
        average_losses_across_data_parallel_group,
        reduce_losses_across_data_parallel_group,
        get_iterator_k_split,
        get_last_rank,
        get_ltor_masks_and_position_ids,
    )
} | {"logging": logging.getLogger("nemo")}
