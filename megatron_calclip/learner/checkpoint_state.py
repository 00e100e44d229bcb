"""What of a learner goes into Megatron's distributed checkpoints, and the faults of Megatron's that this meets.

Megatron 0.16 to 0.19 has three faults with torch's own Adam (without TransformerEngine or apex); each is dealt with
below: a fresh optimizer has no state to save, `step` is dropped on load, and after loading all parameters share one
`step` tensor, which every parameter then increments. A fourth, in versions before NVIDIA/Megatron-LM#5077, has
nothing to do with Adam: where gradients have several buckets, masters and moments are saved from wrong offsets,
without an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_calclip.learner.learner import Learner

_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "non_homogeneous_layers": True,  # layers that stay in BF16 have no amax histories
    "chained_optim_avoid_prefix": True,
}


def _parts(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _uses_torch_adam(part: Any) -> bool:
    return isinstance(part.optimizer, torch.optim.Adam)  # AdamW is one, too


def _create_missing_adam_state(optimizer: Any) -> None:
    """Before its first step torch's Adam has no state, which Megatron can neither save nor load into."""
    for part in filter(_uses_torch_adam, _parts(optimizer)):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)


@contextlib.contextmanager
def adam_steps_kept(optimizer: Any) -> Iterator[None]:
    """While loading, hand Adam's `step` to Megatron, which forgets it; afterwards give each parameter its own tensor."""
    parts = [part for part in _parts(optimizer) if _uses_torch_adam(part)]
    for part in parts:
        part._set_main_param_and_optimizer_states = _with_step(part)
    try:
        yield
    finally:
        for part in parts:
            del part._set_main_param_and_optimizer_states
            for state in part.optimizer.state.values():
                state["step"] = state["step"].clone()


@contextlib.contextmanager
def _bucket_padding_kept(optimizer: Any) -> Iterator[None]:
    """Lay the buckets of optimizer state out end to end as they are, padding included.

    Megatron drops the padding between buckets and then reads every parameter at its offset with the padding. Large
    models have several buckets when `overlap_grad_reduce` is on, and tied embeddings have one of their own under
    pipeline parallelism.
    """
    buffers = [buffer for part in _parts(optimizer) for buffer in part.buffers]
    sizes = [(buffer, buffer.numel) for buffer in buffers]
    sizes += [(bucket, bucket.grad_data.numel()) for buffer in buffers for bucket in buffer.buckets]
    without_padding = [(item, item.numel_unpadded) for item, _ in sizes]
    for item, size in sizes:
        item.numel_unpadded = size
    try:
        yield
    finally:
        for item, size in without_padding:
            item.numel_unpadded = size


def _with_step(part: Any) -> Callable[[Any, dict[str, Any]], None]:
    original = part._set_main_param_and_optimizer_states

    def set_states(model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = part.model_param_group_index_map[model_param]
        state = part.optimizer.state[part.optimizer.param_groups[group]["params"][order]]
        original(model_param, {"step": state["step"], **tensors})

    return set_states


def model_state(learner: Learner) -> dict[str, Any]:
    """Sharded weights; keys inside are global, so the outer names of the chunks do not matter for resharding."""
    learner.gather_parameters()
    return {
        f"model{index}": chunk.module.sharded_state_dict(metadata=dict(_METADATA))
        for index, chunk in enumerate(learner.chunks)
    }


def sharded_state(learner: Learner, *, loading: bool) -> dict[str, Any]:
    """Weights, FP8 state, masters and moments as Megatron's sharded tensors; collective.

    Args:
        learner: of any layout.
        loading: whether the result is filled from a checkpoint, and not written to one.
    """
    weights = model_state(learner)
    _create_missing_adam_state(learner.optimizer)
    with _bucket_padding_kept(learner.optimizer):
        optimizer = learner.optimizer.sharded_state_dict(weights, is_loading=loading, metadata=dict(_METADATA))
    return {**weights, "optimizer": optimizer}
