"""Puts this folder on the path of its tests (`contract`), and keeps their process groups apart from other tests'."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def one_process() -> Iterator[None]:
    """Megatron's process groups for a single process on gloo."""
    from megatron.core import parallel_state

    from megatron_calclip.learner import cpu

    cpu.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
