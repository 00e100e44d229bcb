"""What of a learner goes into a checkpoint, as blocks, and back.

Weights and FP8 state go into Megatron's distributed format, which its own loader reads. Masters and Adam's moments do not go
through Megatron: each data-parallel rank writes and reads the slices that it owns, in model space, so that nothing crosses
ranks and any layout can read them (Megatron's own reshardable format gathers them on all data-parallel ranks first).

Keys are `optimizer.state.param.<name>` for masters, `.exp_avg.` and `.exp_avg_sq.` for moments, <name> being Megatron's
global name of the parameter: those of its `fully_reshardable` format. Adam's step count is one for all parameters.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from torch import Tensor, nn

from megatron_calclip.learner.checkpoint_blocks import Block, Part, read_part
from megatron_calclip.learner.learner import Learner
from megatron_calclip.weights.dist_load import DistCheckpoint
from megatron_calclip.weights.dist_save import CONTENT_METADATA

_PREFIX = "optimizer.state"
_STEP = "step"
Sharded: TypeAlias = ShardedTensor | ShardedTensorFactory


def model_state(learner: Learner) -> dict[str, Any]:
    """Sharded weights; keys inside are global, so the outer names of the chunks do not matter for resharding."""
    learner.gather_parameters()
    return {
        f"model{index}": chunk.module.sharded_state_dict(metadata=dict(CONTENT_METADATA))
        for index, chunk in enumerate(learner.chunks)
    }


def weight_blocks(state: dict[str, Any]) -> list[Block]:
    """What this rank writes of `model_state`: that of which it holds the main replica."""
    blocks: list[Block] = []
    for sharded in nested_values(state):
        assert isinstance(sharded, ShardedObject | Sharded), type(sharded)
        if not is_main_replica(sharded.replica_id):
            continue
        if isinstance(sharded, ShardedObject):
            pickled = io.BytesIO()
            torch.save([sharded.data], pickled)  # a list, as Megatron reads it
            blocks.append(Block(sharded.unique_key, (), (), pickled.getvalue()))
        else:
            flat = sharded.data.detach().cpu().reshape(-1)
            blocks += _blocks(parts_of(sharded), flat, 0)
    return blocks


def optimizer_blocks(learner: Learner, state: dict[str, Any]) -> list[Block]:
    """What this rank writes of masters and moments.

    Args:
        learner: before its first step the moments are zeros.
        state: its `model_state`.

    Returns:
        on CPUs views of the live values.
    """
    _create_missing_moments(learner)
    return [
        block
        for part, parameter, sharded, start in _slices(learner, state)
        # All but the last of a replica's ids are 0 where it is the one to be saved; the last is the data-parallel rank,
        # and each of those owns another slice.
        if is_main_replica(sharded.replica_id[:-1])
        for kind, values in part._get_main_param_and_optimizer_states(parameter).items()
        if kind != _STEP
        for block in _blocks(parts_of(sharded, prefix=f"{_PREFIX}.{kind}."), values.detach().cpu(), start)
    ]


@torch.no_grad()
def load_optimizer(learner: Learner, state: dict[str, Any], checkpoint: DistCheckpoint, *, adam_step: int) -> None:
    """Read this rank's masters and moments.

    Args:
        learner: of any layout.
        state: its `model_state`.
        checkpoint: written of `optimizer_blocks` by a learner of the same model.
        adam_step: what `adam_step` gave then.

    Raises:
        UserError: when it is of another model.
    """
    _create_missing_moments(learner)
    for part, parameter, sharded, start in _slices(learner, state):
        values = part._get_main_param_and_optimizer_states(parameter)
        for kind in values.keys() - {_STEP}:
            stored = values[kind].detach().to("cpu", copy=True)
            for piece in parts_of(sharded, prefix=f"{_PREFIX}.{kind}."):
                read_part(checkpoint, piece, stored, start)
            values[kind] = stored.to(values[kind].device)
        if _STEP in values:
            values[_STEP] = torch.tensor(float(adam_step))
        part._set_main_param_and_optimizer_states(parameter, values)
    for part in _optimizers(learner):
        for group in part.optimizer.param_groups:
            if not _uses_torch_adam(part):
                group[_STEP] = adam_step


def adam_step(learner: Learner) -> int:
    """How many steps Adam has done; 0 on a rank that owns no parameter."""
    counts: set[int] = set()
    for part in _optimizers(learner):
        optimizer = part.optimizer
        if _uses_torch_adam(part):
            holders = list(optimizer.state.values())
        else:  # FusedAdam counts by group, in some versions not where this rank owns nothing of it
            holders = [group for group in optimizer.param_groups if group["params"]]
        counts |= {int(holder.get(_STEP, 0)) for holder in holders}
    assert len(counts) <= 1, "parameters have been updated unequally often"
    return counts.pop() if counts else 0


def parts_of(sharded: Sharded, *, prefix: str = "") -> list[Part]:
    """The global rectangles that a rank's tensor consists of: one, or several where a factory cuts it (gate and up projection).

    Args:
        sharded: Megatron's.
        prefix: of the keys.
    """
    pieces = [sharded]
    if isinstance(sharded, ShardedTensorFactory):
        # Cut without data: where a piece's view begins is where its run begins.
        like = torch.empty(sharded.data.shape, dtype=sharded.data.dtype, device="meta")
        pieces = list(nested_values([sharded.build_fn(sharded.key, like, sharded.replica_id, sharded.flattened_range)]))
    found: list[Part] = []
    for piece in pieces:
        start = piece.data.storage_offset() if isinstance(sharded, ShardedTensorFactory) else 0
        shape = (*(1 for _ in range(piece.prepend_axis_num)), *piece.local_shape)
        key, size, offsets = prefix + piece.key, tuple(piece.global_shape), tuple(piece.global_offset)
        found.append(Part(key, size, offsets, shape, start, piece.allow_shape_mismatch))
    found.sort(key=lambda part: part.start)
    ends = [0, *(part.stop for part in found)]
    assert [*(part.start for part in found), sharded.data.numel()] == ends, f"{sharded.key} is not cut into runs"
    return found


def _blocks(parts: list[Part], flat: Tensor, start: int) -> Iterator[Block]:
    for part in parts:
        for offsets, value in part.cut(flat, start):
            yield Block(part.key, part.size, offsets, value)


def _optimizers(learner: Learner) -> list[Any]:
    return list(getattr(learner.optimizer, "chained_optimizers", [learner.optimizer]))


def _uses_torch_adam(part: Any) -> bool:
    return isinstance(part.optimizer, torch.optim.Adam)  # AdamW is one, too


def _create_missing_moments(learner: Learner) -> None:
    """Before its first step Adam has no state, which could be neither saved nor loaded into."""
    for part in _optimizers(learner):
        part.init_state_fn(part.optimizer, part.config)
        if _uses_torch_adam(part):  # of which Megatron forgets the step
            for state in part.optimizer.state.values():
                state.setdefault(_STEP, torch.zeros(()))


def _slices(learner: Learner, state: dict[str, Any]) -> Iterator[tuple[Any, nn.Parameter, Sharded, int]]:
    """Optimizer, parameter, its place in the model, and the first element of the slice that this data-parallel rank owns."""
    places = {id(sharded.data): sharded for sharded in nested_values(state) if isinstance(sharded, Sharded)}
    for part in _optimizers(learner):
        for buffer in part.gbuf_ranges:
            for buckets in buffer.values():
                for bucket in buckets:
                    for parameter, ranges in bucket["param_map"].items():
                        yield part, parameter, places[id(parameter)], ranges["param"].start
