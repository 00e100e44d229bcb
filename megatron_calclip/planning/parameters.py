"""Parameters of every pipeline rank, from the one table that also builds, loads and streams the model.

Counts are exact: they are those of the tensors that `weights.mapping` lists for the layout, as meta tensors.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from megatron_calclip.config import ParallelConfig
from megatron_calclip.weights.mapping import EMBEDDING, OUTPUT, ModelShape, mapped_tensors


@dataclass(frozen=True)
class RankParameters:
    """What one tensor-parallel rank of a pipeline stage holds."""

    stage: int
    layers: tuple[int, ...]
    """Its decoder layers, from 0."""
    total: int
    """All parameters."""
    linears: int
    """Those of decoder linears, which FP8 is about."""
    head: int
    """Those of the output layer, where it is computed; tied ones too."""


@functools.lru_cache(maxsize=64)
def rank_parameters(shape: ModelShape, parallel: ParallelConfig) -> tuple[RankParameters, ...]:
    """Parameters of the ranks of every pipeline stage, first to last.

    Args:
        shape: the model; its layers divide into the stages.
        parallel: `tp`, `pp` and `vpp` are read.
    """
    tp, pp, vpp = parallel.tp, parallel.pp, parallel.vpp or 1
    layers_per_chunk = shape.num_layers // (pp * vpp)
    stage_of = [layer // layers_per_chunk % pp for layer in range(shape.num_layers)]
    sizes: list[list[int]] = [[] for _ in range(pp)]
    linears, head = [0] * pp, 0
    for tensor in mapped_tensors(shape):
        size = 1
        for length in tensor.shard_shape(tp):
            size *= length
        if tensor.layer is not None:
            stage = stage_of[tensor.layer]
            if len(tensor.shard_shape()) == 2:
                linears[stage] += size
        else:
            stage = 0 if tensor.name == EMBEDDING.name else pp - 1
        sizes[stage].append(size)
        if OUTPUT.name in (tensor.name, tensor.copy_name):
            head = size
            if tensor.copy_name and pp > 1:  # Megatron allocates tied embeddings a second time, on the last stage
                sizes[pp - 1].append(size)
    return tuple(
        RankParameters(
            stage=stage,
            layers=tuple(layer for layer in range(shape.num_layers) if stage_of[layer] == stage),
            total=sum(sizes[stage]),
            linears=linears[stage],
            head=head if stage == pp - 1 else 0,
        )
        for stage in range(pp)
    )
