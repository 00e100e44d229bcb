"""Checkpoints of the learner in Megatron's distributed format, reshardable to another TP, PP, VPP and DP on load.

A checkpoint folder is written aside (`step_20.partial`), completed, then renamed, and only then does the tracker
file name it: a folder under its final name is whole. It holds

    step_20/megatron/     model, FP32 masters and optimizer state (torch's distributed format; its `.metadata` is a
    pickle, so
                          load only checkpoints that you trust)
    step_20/hf/           config.json and tokenizer of the policy, for conversion
    step_20/state.json    everything else: step, policy version, learning-rate schedule, calibrator, configuration
    step_20/state.safetensors   tensors of the same (the calibrator's pool)

Megatron 0.16 to 0.19 has three faults with torch's own Adam (without TransformerEngine or apex); each is dealt with
below: a fresh optimizer has no state to save, `step` is dropped on load, and after loading all parameters share one
`step` tensor, which every parameter then increments. A fourth, in versions before NVIDIA/Megatron-LM#5077, has
nothing to do with Adam: where gradients have several buckets, masters and moments are saved from wrong offsets,
without an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_calclip.errors import EXIT_FAILED, UserError
from megatron_calclip.learner.learner import Learner
from megatron_calclip.learner.runtime import Runtime

TRACKER = "latest_checkpoint.json"

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
def _adam_steps_kept(optimizer: Any) -> Iterator[None]:
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


def _model_state(learner: Learner) -> dict[str, Any]:
    """Sharded weights; keys inside are global, so the outer names of the chunks do not matter for resharding."""
    learner.gather_parameters()
    return {
        f"model{index}": chunk.module.sharded_state_dict(metadata=dict(_METADATA))
        for index, chunk in enumerate(learner.chunks)
    }


def _sharded_state(learner: Learner, *, loading: bool) -> dict[str, Any]:
    model_state = _model_state(learner)
    _create_missing_adam_state(learner.optimizer)
    with _bucket_padding_kept(learner.optimizer):
        optimizer = learner.optimizer.sharded_state_dict(model_state, is_loading=loading, metadata=dict(_METADATA))
    return {**model_state, "optimizer": optimizer}


def _write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that it is whole or absent after a crash."""
    aside = path.with_suffix(path.suffix + ".partial")
    with aside.open("w") as file:
        json.dump(value, file, indent=1, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)


def _write(sharded_state: dict[str, Any], folder: Path) -> None:
    """Megatron's synchronous save.

    Its writers report through a manager process, which imports torch and the main script once more: seconds in
    every rank, and a hang where that script does not guard its entry. Here they report to this very process; a
    plain queue does.
    """
    filesystem_async._results_queue = queue.SimpleQueue()
    dist_checkpointing.save(sharded_state, str(folder))


def save_model(folder: Path, learner: Learner) -> None:
    """The weights alone (the reference policy of a KL penalty); collective."""
    _on_rank_zero(learner.runtime, lambda: folder.mkdir(parents=True, exist_ok=True))
    _write(_model_state(learner), folder)
    learner.runtime.barrier()


def load_model(folder: Path, learner: Learner) -> None:
    """Load what `save_model` wrote into the live weights; the optimizer's masters stay."""
    loaded = dist_checkpointing.load(_model_state(learner), str(folder))
    for index, chunk in enumerate(learner.chunks):
        chunk.module.load_state_dict(loaded[f"model{index}"])


def save(
    run_dir: Path,
    step: int,
    learner: Learner,
    *,
    tokenizer: Any,
    state: dict[str, Any],
    tensors: dict[str, Tensor],
    keep: int,
) -> Path:
    """Write `run_dir/step_<step>` and name it in the tracker; collective.

    Args:
        run_dir: the run's folder.
        step: RL steps done.
        learner: what is saved.
        tokenizer: saved beside the weights.
        state: JSON values of the caller (the same on all ranks), returned by `load`.
        tensors: CPU tensors of the caller (the same on all ranks), returned by `load`.
        keep: newest checkpoints that stay.

    Raises:
        UserError: when the folder cannot be written. Older checkpoints stay as they are.
    """
    runtime = learner.runtime
    folder, aside = run_dir / f"step_{step}", run_dir / f"step_{step}.partial"

    def make_room() -> None:
        shutil.rmtree(aside, ignore_errors=True)
        (aside / "megatron").mkdir(parents=True)

    _on_rank_zero(runtime, make_room)
    _write(_sharded_state(learner, loading=False), aside / "megatron")
    runtime.barrier()

    def complete() -> None:
        learner.hf_config.save_pretrained(aside / "hf")
        tokenizer.save_pretrained(aside / "hf")
        save_file(tensors, aside / "state.safetensors")
        _write_json(aside / "state.json", {**state, "step": step, "scheduler": learner.scheduler.state_dict()})
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
        _write_json(run_dir / TRACKER, {"step": step, "folder": folder.name})
        # Later ones are of a longer run that this one started over from; they are not this run's to remove.
        for old in sorted(old for old in _steps(run_dir) if old <= step)[:-keep]:
            shutil.rmtree(run_dir / f"step_{old}", ignore_errors=True)

    _on_rank_zero(runtime, complete)
    return folder


def _on_rank_zero(runtime: Runtime, action: Callable[[], None]) -> None:
    """Run on rank 0; all ranks learn of a failure together, so that none waits for the others.

    Raises:
        UserError: on every rank, when the file system refused.
    """
    problem = None
    if runtime.rank == 0:
        try:
            action()
        except OSError as error:
            problem = str(error)
    problem = runtime.gather_objects(problem)[0]
    if problem is not None:
        raise UserError(
            "run_dir", f"cannot write a checkpoint ({problem}); free space or fix it", exit_code=EXIT_FAILED
        )


def _steps(run_dir: Path) -> list[int]:
    names = (path.name for path in run_dir.glob("step_*") if path.is_dir())
    return [int(name.removeprefix("step_")) for name in names if name.removeprefix("step_").isdigit()]


def find(run_dir: Path, resume: str) -> Path | None:
    """The checkpoint to resume from, by `checkpoint.resume`.

    Raises:
        UserError: when the one asked for is not there, or the tracker names one that is not.
    """
    if resume == "no":
        return None
    if resume != "auto":
        folder = Path(resume)
        if not _is_file(folder / "state.json", "checkpoint.resume"):
            raise UserError("checkpoint.resume", f"{resume!r} is no checkpoint folder; give auto, no or such a folder")
        return folder
    tracker = run_dir / TRACKER
    if not _is_file(tracker, "run_dir"):
        return None
    try:
        folder = run_dir / json.loads(tracker.read_text())["folder"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            "checkpoint.resume", f"{tracker} cannot be read ({error}); set it to a checkpoint's folder"
        ) from None
    if not _is_file(folder / "state.json", "run_dir"):
        raise UserError(
            "checkpoint.resume", f"{tracker} names {folder.name}, which is not there; set it to a checkpoint's folder"
        )
    return folder


def _is_file(path: Path, setting: str) -> bool:
    try:
        return path.is_file()
    except OSError as error:  # a name that is too long, for one
        raise UserError(setting, f"{error.strerror}: {str(path)[:80]!r}; give another folder") from None


def read_state(folder: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint.

    Raises:
        UserError: when it is damaged.
    """
    path = folder / "state.json"
    try:
        state: dict[str, Any] = json.loads(path.read_text())
        int(state["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            "checkpoint.resume", f"{path} is damaged ({error!r}); set it to another checkpoint's folder"
        ) from None
    return state


def load(folder: Path, learner: Learner) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Load weights, masters, optimizer and schedule into a learner of any layout; collective.

    Returns:
        what `save` was given as `state` (with `step`) and as `tensors`.
    """
    loaded = dist_checkpointing.load(_sharded_state(learner, loading=True), str(folder / "megatron"))
    for index, chunk in enumerate(learner.chunks):
        chunk.module.load_state_dict(loaded[f"model{index}"])
    with _adam_steps_kept(learner.optimizer):
        learner.optimizer.load_state_dict(loaded["optimizer"])
    learner.refresh_fp8_params()
    state = read_state(folder)
    learner.scheduler.load_state_dict(state["scheduler"])
    return state, load_file(folder / "state.safetensors")
