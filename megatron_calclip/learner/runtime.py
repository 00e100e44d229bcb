"""Process groups, device and seeds of one rank, and the few collectives that the rest of the learner needs.

NCCL with CUDA, gloo without; everything above this file is the same code.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_calclip.config import Config
from megatron_calclip.learner import cpu
from megatron_calclip.weights.stream import ParallelGroups

# A rank that waits longer than this for another one takes it for dead. Rollouts of long answers are the longest waits.
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)

T = TypeVar("T")


@dataclass(frozen=True)
class Runtime:
    """Where this process stands in the job."""

    rank: int
    world_size: int
    device: torch.device
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    dp_rank: int
    dp_size: int
    groups: ParallelGroups

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes log-probabilities and losses."""
        return self.pp_rank == self.pp_size - 1

    @property
    def reports_tokens(self) -> bool:
        """Whether this rank speaks for its tokens in sums over the world: one rank per token, so that none counts twice."""
        return self.is_last_stage and self.tp_rank == 0

    def sum_over_world(self, value: Tensor) -> Tensor:
        """All-reduce a tensor by sum over all ranks; returns a new tensor."""
        return self._reduce(value, dist.ReduceOp.SUM)

    def max_over_world(self, value: Tensor) -> Tensor:
        """All-reduce a tensor by maximum over all ranks; returns a new tensor."""
        return self._reduce(value, dist.ReduceOp.MAX)

    def any_rank(self, flag: bool) -> bool:
        """Whether it is true on any rank; the same answer on all."""
        return bool(self.max_over_world(torch.tensor(float(flag))) > 0)

    def _reduce(self, value: Tensor, op: Any) -> Tensor:
        reduced = value.detach().to(self.device, copy=True)
        if self.world_size > 1:
            dist.all_reduce(reduced, op=op)
        return reduced

    def gather_objects(self, value: T) -> list[T]:
        """One picklable object from every rank, in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value)
        return gathered

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()


def start(config: Config) -> Runtime:
    """Create the process groups, choose the device and seed this rank.

    Works under torchrun and in a plain process (a world of one). The configuration must have passed `config_check.check`
    for this world size.
    """
    if (
        config.train.deterministic
    ):  # read when CUDA's libraries start; Megatron refuses TransformerEngine without the first
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, value)
    # Importing Megatron after this point, so that the CPU view of torch is in place before anything is built.
    cpu.install()
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = cpu.CPU
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        store, rank, world_size = next(dist.rendezvous("env://", timeout=COLLECTIVE_TIMEOUT))
        # torchrun's store outlives the ranks: after a restart the addresses of dead ranks must not be found in it.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"attempt_{attempt}", store),
            rank=rank,
            world_size=world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
    if config.train.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
    p = config.parallel
    ps.initialize_model_parallel(
        tensor_model_parallel_size=p.tp,
        pipeline_model_parallel_size=p.pp,
        virtual_pipeline_model_parallel_size=p.vpp,
        context_parallel_size=p.cp,
    )
    model_parallel_cuda_manual_seed(config.train.seed + 1)
    torch.manual_seed(config.train.seed)
    return Runtime(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=device,
        tp_rank=ps.get_tensor_model_parallel_rank(),
        tp_size=p.tp,
        pp_rank=ps.get_pipeline_model_parallel_rank(),
        pp_size=p.pp,
        cp_rank=ps.get_context_parallel_rank(),
        cp_size=p.cp,
        dp_rank=ps.get_data_parallel_rank(),
        dp_size=ps.get_data_parallel_world_size(),
        groups=ParallelGroups(
            tp=ps.get_tensor_model_parallel_group() if p.tp > 1 else None,
            pp=ps.get_pipeline_model_parallel_group() if p.pp > 1 else None,
        ),
    )


def stop() -> None:
    """Tear the process groups down."""
    if dist.is_initialized():
        from megatron.core import parallel_state as ps

        ps.destroy_model_parallel()
        dist.destroy_process_group()
