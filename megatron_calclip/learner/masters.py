"""FP32 master weights of Megatron's distributed optimizer, whole, for the shadow pass, for FP8 parameters and for export.

Each data-parallel rank holds the masters of a slice of the flattened parameters. `full` puts one parameter's slices
together: a sum over the group in which every element comes from exactly one rank, so the result is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_calclip.errors import UserError


@dataclass(frozen=True)
class _Slice:
    master: Tensor
    """float32 [stop - start]: this rank's part."""
    start: int
    stop: int


class MasterWeights:
    """Access to the masters behind the parameters of an optimizer.

    Args:
        optimizer: Megatron's (chained) distributed optimizer.

    Raises:
        UserError: when it keeps no FP32 masters; there is then nothing that a shadow pass could run on.
    """

    def __init__(self, optimizer: Any) -> None:
        self._slices: dict[int, _Slice] = {}
        self._groups: dict[int, dist.ProcessGroup] = {}
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            if not hasattr(part, "shard_fp32_from_float16_groups"):
                raise UserError(
                    "precision", "the optimizer keeps no FP32 master weights; use Megatron's distributed optimizer"
                )
            settings = part.config
            if settings.use_precision_aware_optimizer and settings.main_params_dtype is not torch.float32:
                raise UserError("precision", "the optimizer's masters are not FP32; set main_params_dtype to fp32")
            # Also of parameters without a slice here; experts have a data-parallel group of their own.
            self._groups |= {id(p): part.data_parallel_group for buffer in part.buffers for p in buffer.params}
            for models, masters in (
                (part.model_float16_groups, part.shard_fp32_from_float16_groups),
                (part.model_fp32_groups, part.shard_fp32_groups),
            ):
                for model_group, master_group in zip(models, masters, strict=True):
                    for parameter, master in zip(model_group, master_group, strict=True):
                        span = part._get_model_param_range_map(parameter)["param"]
                        self._slices[id(parameter)] = _Slice(master, span.start, span.end)

    def full(self, parameter: nn.Parameter) -> Tensor:
        """The whole FP32 master of a live parameter, of its shape, to be read; collective over data parallelism."""
        part, group = self._slices.get(id(parameter)), self._groups[id(parameter)]
        if dist.get_world_size(group) == 1:
            assert part is not None
            return part.master.view(parameter.shape)
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if part is not None:
            whole[part.start : part.stop] = part.master
        dist.all_reduce(whole, group=group)
        return whole.view(parameter.shape)

    @torch.no_grad()
    def assign(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """Give a parameter this master, and its rounding as live value.

        Args:
            parameter: a live parameter.
            whole: float32 of its shape, the same on all data-parallel ranks.
        """
        part = self._slices.get(id(parameter))
        if part is not None:
            part.master.copy_(whole.reshape(-1)[part.start : part.stop])
        parameter.copy_(whole)
