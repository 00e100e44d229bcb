"""Checkpoints: the same bits in any layout and on any number of ranks, whole or absent on disk.

What masters and moments are is put together without the code under test: slices by a sum over data-parallel ranks, shards by
the stream of the weights to Hugging Face names. A step after a load equals that of a run which went on: to the bit in the
same layout, to rounding in another. Known mistakes show: no moments to save before Adam's first step (`step_0`), Adam's step
count lost or one tensor shared by all parameters (the next step has a wrong bias correction), slices at wrong offsets where
gradients have several buckets (tied embeddings under PP are not restored).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from checks import Checks, layout
from invariance_checks import FP32, observables
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file
from tiny_learners import (
    History,
    MegatronLearner,
    PlainLearner,
    make_batch,
    make_config,
    make_learner,
    same_bits,
    snapshot,
    train,
)
from torch import Tensor, nn

from megatron_calclip.checkpoint_files import find
from megatron_calclip.config import Config
from megatron_calclip.config_file import launch_world_size
from megatron_calclip.errors import UserError
from megatron_calclip.hf import character_tokenizer
from megatron_calclip.learner import checkpoint, model
from megatron_calclip.learner.checkpoint_state import adam_step
from megatron_calclip.learner.learner import Learner
from megatron_calclip.objective import supervised_objective
from megatron_calclip.weights.stream import stream_hf

MODEL = "qwen2 tied"  # under PP its embedding has a bucket of gradients of its own
STEP = 1  # RL steps done when a checkpoint is written
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
SP = {"sequence_parallel": True}
STATE, TENSORS = {"note": "kept as it is"}, {"pool": torch.arange(3)}
# Saved by two ranks in one of these layouts, loaded by 1, 2 and 4 ranks in the others.
SAVED: dict[str, Any] = {"tp": 2} | SP
LOADED: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [OVERLAP, {"pp": 2, "vpp": 2}, {"cp": 2}],
    4: [{"tp": 2, "pp": 2}, {"tp": 2}],
}
# A state that goes from each of these layouts to the next one through a checkpoint.
CHAIN: dict[int, list[dict[str, Any]]] = {
    1: [{}, OVERLAP],
    2: [{"tp": 2}, OVERLAP, {"pp": 2}, {"cp": 2}, {"pp": 2, "vpp": 2}, {}, {"tp": 2} | SP],
    4: [
        {"tp": 2} | OVERLAP,
        {"pp": 2} | OVERLAP,
        {},
        {"tp": 2, "pp": 2, "vpp": 2},
        {"tp": 2, "cp": 2},
        {"cp": 2, "pp": 2},
    ],
}
BUCKET_SIZE = 10_000
"""Elements of gradients that are reduced together; the tiny model has about 40,000."""
SAVED_STATE = "optimizer_state.safetensors"
KINDS = ("param", "exp_avg", "exp_avg_sq")


def _config(parallel: dict[str, Any], dtype: str = "fp32") -> Config:
    return make_config(
        parallel=parallel,
        precision={"params_dtype": dtype},
        schedule={"decay": "linear"},  # a learning rate that must be restored, too
        train={"num_steps": 4},
    )


def _save(run_dir: Path, step: int, learner: Learner, *, keep: int = 2) -> Path:
    tokenizer = character_tokenizer("0123456789")
    return checkpoint.save(run_dir, step, learner, tokenizer=tokenizer, state=STATE, tensors=TENSORS, keep=keep)


def check_checkpoints(checks: Checks, root: Path, exchange: Path) -> None:
    """All of this module."""
    if launch_world_size() == 2:
        for parallel, dtype in (({"tp": 2} | SP, "fp32"), ({"pp": 2, "vpp": 2}, "bf16"), (OVERLAP, "bf16")):
            check_same_layout(checks, root / f"{parallel} {dtype}", parallel, dtype)
        check_straight_after_update(checks, root / "overlapped")
        save_for_others(exchange)
        check_folders(checks, root / "folders")
        check_background(checks, root / "background")
    check_other_layouts(checks, exchange)
    every = CHAIN[launch_world_size()]
    check_chain(checks, root / "bf16", every, {"params_dtype": "bf16"})
    fp8 = {"params_dtype": "bf16", "recipe": "tensorwise", "fp8_param": True}
    check_chain(checks, root / "fp8", every[:3], fp8)


def _step(learner: Learner, root: Path) -> History:
    """One RL step."""
    learner.begin_step()
    batch = make_batch(MODEL)
    return train(MegatronLearner(learner, batch, root / "reference"), batch, learner.config, num_steps=1)


def same_history(a: History, b: History) -> bool:
    """Whether two trainings are equal to the bit."""
    return all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(b_values[name]))
        for a_values, b_values in zip(observables(a).values(), observables(b).values(), strict=True)
        for name, value in a_values.items()
    )


def optimizer_state(learner: Learner) -> dict[str, Tensor]:
    """Masters and moments under Hugging Face names, the same on all ranks; collective."""
    (part,) = learner.optimizer.chained_optimizers
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)

    def whole(kind: str, parameter: nn.Parameter) -> Tensor:
        result = torch.zeros(parameter.numel())
        if parameter in part.model_param_gbuf_map:  # this rank has a slice
            span = part._get_model_param_range_map(parameter)["param"]
            index, position = part.model_param_group_index_map[parameter]
            master = part.optimizer.param_groups[index]["params"][position]
            result[span.start : span.end] = master if kind == "param" else part.optimizer.state[master][kind]
        dist.all_reduce(result, group=group)
        return result.view(parameter.shape)

    bare = [chunk.module for chunk in learner.chunks]
    found: dict[str, Tensor] = {}
    for kind in KINDS:
        stream = stream_hf(
            bare,
            learner.shape,
            learner.groups,
            dtype=torch.float32,
            source=lambda _, parameter, kind=kind: whole(kind, parameter),
        )
        found |= {f"{kind} {name}": tensor.clone() for name, tensor in stream}
    return found


def check_chain(checks: Checks, root: Path, layouts: list[dict[str, Any]], precision: dict[str, Any]) -> None:
    """Weights, masters and moments stay the same to the bit from layout to layout; so does Adam's step count."""
    title = f"chain {precision.get('recipe', precision['params_dtype'])}"
    folder, expected = root, dict[str, Tensor]()
    small_buckets = functools.partial(model.DistributedDataParallelConfig, bucket_size=BUCKET_SIZE)
    for position, parallel in enumerate(layouts):
        config = make_config(parallel=parallel, precision=precision)
        with layout(config) as runtime, mock.patch.object(model, "DistributedDataParallelConfig", small_buckets):
            learner = make_learner(config, runtime, MODEL)
            if config.parallel.overlap_grad_reduce:
                (part,) = learner.optimizer.chained_optimizers
                checks.true(f"{title}: {parallel} has several buckets", len(part.buffers[0].buckets) > 1)
            if position == 0:
                _step(learner, root / f"reference {title}")
                folder, steps = _save(root, 0, learner, keep=9), adam_step(learner)
                expected = optimizer_state(learner) | _copies(learner)
                moved = all(bool(expected[f"{kind} model.norm.weight"].any()) for kind in KINDS)
                checks.true(f"{title}: {parallel} has moments to save", moved and steps > 0)
                continue
            fresh = _copies(learner)
            checkpoint.load(folder, learner)
            weights = _copies(learner)
            same = same_bits(optimizer_state(learner) | weights, expected) and adam_step(learner) == steps
            checks.true(f"{title}: {parallel} has the bits of the first layout", same and not same_bits(fresh, weights))
            folder = _save(root, position, learner, keep=9)


def _copies(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.stream_hf()}


def check_same_layout(checks: Checks, root: Path, parallel: dict[str, Any], dtype: str) -> None:
    """Save fresh and after a step, load, continue: the interrupted run equals the uninterrupted one bit for bit."""
    title, config = f"same layout {parallel} {dtype}", _config(parallel, dtype)
    with layout(config) as runtime:
        learner = make_learner(config, runtime, MODEL)
        saved = [(_save(root, 0, learner), snapshot(learner))]
        _step(learner, root)
        saved.append((_save(root, STEP, learner), snapshot(learner)))
        rate = learner.lr
        uninterrupted = _step(learner, root)
        end = snapshot(learner)
        for folder, state in saved:
            learner = make_learner(config, runtime, MODEL)
            values, tensors = checkpoint.load(folder, learner)
            checks.true(
                f"{title}: {folder.name} is restored to the bit",
                same_bits(snapshot(learner), state) and same_bits(tensors, TENSORS) and STATE.items() <= values.items(),
            )
        checks.true(f"{title}: learning rate", learner.lr == rate)
        _step(learner, root)
        checkpoint.load(folder, learner)  # a rollback
        checks.true(f"{title}: learning rate after a rollback", learner.lr == rate)
        longer = dataclasses.replace(config, train=dataclasses.replace(config.train, num_steps=8))
        other = make_learner(longer, runtime, MODEL)
        checkpoint.load(folder, other)
        expected = config.optimizer.lr * (1 - STEP / 8)
        checks.true(f"{title}: the schedule is the configuration's", abs(other.lr - expected) < 1e-12, f"{other.lr}")
        resumed = _step(learner, root)
        checks.true(
            f"{title}: continues to the bit",
            same_history(resumed, uninterrupted) and same_bits(snapshot(learner), end),
        )


def check_straight_after_update(checks: Checks, root: Path) -> None:
    """Overlapped ranks leave the weights of an update apart until the next forward: saving puts them together first."""
    config, batch = _config(OVERLAP), make_batch(MODEL)
    with layout(config) as runtime:
        learner = make_learner(config, runtime, MODEL)
        policy = MegatronLearner(learner, batch, root / "reference")
        weights = torch.where(batch.trajectories.response_mask, 1e-2, 0.0)
        policy.learner.update(policy.prepared, 0, supervised_objective(weights))
        folder = _save(root, STEP, learner)
        trained = policy.weights()
        learner = make_learner(config, runtime, MODEL)
        checkpoint.load_model(folder / "megatron", learner)  # the weights alone, without the masters behind them
        loaded = {name: tensor.clone() for name, tensor in learner.stream_hf()}
        checks.true("overlapped, saved straight after an update", same_bits(loaded, trained))
        moved = not same_bits(trained, PlainLearner(config, MODEL, batch).weights())
        checks.true("which moved the weights", moved)


def save_for_others(exchange: Path) -> None:
    """Leave a checkpoint after one RL step for launches of other sizes."""
    config = _config(SAVED)
    with layout(config) as runtime:
        learner = make_learner(config, runtime, MODEL)
        _step(learner, exchange)
        _save(exchange, STEP, learner)
        state = optimizer_state(learner)
        if runtime.rank == 0:
            save_file(state, exchange / SAVED_STATE)


def _uninterrupted() -> list[History]:
    """Plain training, one RL step each, under the schedule of `_config`."""
    config, batch = _config({}), make_batch(MODEL)
    plain, histories = PlainLearner(config, MODEL, batch), []
    for decay in (0.75, 0.5):  # linear over four steps
        for group in plain.optimizer.param_groups:
            group["lr"] = config.optimizer.lr * decay
        histories.append(train(plain, batch, config, num_steps=1))
    return histories


def check_other_layouts(checks: Checks, exchange: Path) -> None:
    """What `SAVED` wrote, loaded elsewhere, continues as plain training does that was never interrupted."""
    expected = _uninterrupted() if checks.compares else None
    for parallel in LOADED[launch_world_size()]:
        config = _config(parallel)
        with layout(config) as runtime:
            learner = make_learner(config, runtime, MODEL)
            checkpoint.load(exchange / f"step_{STEP}", learner)
            restored = same_bits(optimizer_state(learner), load_file(exchange / SAVED_STATE))
            checks.true(f"{SAVED} -> {parallel}: masters and moments, to the bit", restored)
            loaded = {name: tensor.clone() for name, tensor in learner.stream_hf()}
            history = _step(learner, exchange)
        if expected is not None:
            title, (before, after) = f"{SAVED} -> {parallel}", expected
            checks.close(f"{title}: weights", loaded, before.weights, tolerance=FP32)
            for kind, values in observables(history).items():
                wanted = observables(after)[kind]
                checks.close(f"{title}: continues, {kind}", values, wanted, tolerance=FP32)


def check_folders(checks: Checks, run_dir: Path) -> None:
    """Names, tracker, how many stay, and what an interrupted save leaves behind."""
    config = _config({"tp": 2})
    with layout(config) as runtime:
        learner = make_learner(config, runtime, MODEL)

        def kept() -> list[str]:
            runtime.barrier()
            return sorted(path.name for path in run_dir.glob("step_*"))

        def alone(action: Callable[[], object]) -> None:
            runtime.barrier()
            if runtime.rank == 0:
                action()
            runtime.barrier()

        checks.true("nothing to resume from", find(run_dir, "auto") is None)
        for step in (9, 10):
            _save(run_dir, step, learner)
        tracker = json.loads((run_dir / checkpoint.TRACKER).read_text())
        checks.true("the tracker names the newest", (tracker["step"], tracker["folder"]) == (10, "step_10"))
        checks.true("auto finds it", find(run_dir, "auto") == run_dir / "step_10")
        checks.true("no finds none", find(run_dir, "no") is None)

        alone(lambda: (run_dir / "step_11.0a1b2c3d.partial" / "megatron").mkdir(parents=True))
        checks.true("an interrupted save is ignored", find(run_dir, "auto") == run_dir / "step_10")
        _save(run_dir, 11, learner)
        checks.true("and replaced by the next; the newest two stay", kept() == ["step_10", "step_11"])
        checks.true("which is whole", checkpoint.load(run_dir / "step_11", learner)[0]["step"] == 11)

        alone(lambda: shutil.rmtree(run_dir / "step_11" / "optimizer"))  # as before masters had a folder of their own
        try:
            checkpoint.load(run_dir / "step_11", learner)
            named = False
        except UserError as error:
            named = "error: checkpoint.resume: " in f"error: {error}" and "in a format of before" in str(error)
        checks.true("a checkpoint of the earlier format", named)

        _save(run_dir, 3, learner, keep=1)  # a run that started over in the folder of a longer one
        checks.true("what was just saved stays", find(run_dir, "auto") == run_dir / "step_3")

        alone(lambda: shutil.rmtree(run_dir / "step_3"))
        for resume, problem in (("auto", "is not there"), (str(run_dir / "gone"), "is no checkpoint folder")):
            try:
                find(run_dir, resume)
                named = False
            except UserError as error:
                named = "checkpoint.resume" in str(error) and problem in str(error)
            checks.true(f"a checkpoint that is not there, by {resume[:4]}", named)


def check_background(checks: Checks, root: Path) -> None:
    """What is written in the background is the state at the beginning of the save, while training goes on."""
    config = _config(SAVED)
    with layout(config) as runtime:
        learner = make_learner(config, runtime, MODEL)
        _step(learner, root)
        state = snapshot(learner)
        tokenizer = character_tokenizer("0123456789")
        options: dict[str, Any] = dict(tokenizer=tokenizer, state=STATE, tensors=TENSORS, keep=2)
        pending = checkpoint.begin_save(root, STEP, learner, **options)
        checks.true("in the background: nothing counts before it is finished", find(root, "auto") is None)
        _step(learner, root)
        checks.true("in the background: training went on", not same_bits(snapshot(learner), state))
        folder = pending.finish()
        learner = make_learner(config, runtime, MODEL)
        checkpoint.load(folder, learner)
        checks.true("in the background: the state of the beginning", same_bits(snapshot(learner), state))
        checks.true("in the background: whole", find(root, "auto") == folder)
        pending = checkpoint.begin_save(root, STEP + 1, learner, **options)
        pending.writer.process.kill()
        try:
            pending.finish()
            refused = False
        except UserError as error:
            refused = "cannot write a checkpoint (the process that writes rank" in str(error)
        checks.true("a writer that was killed: nothing is left, the older one stays", refused)
        runtime.barrier()
        checks.true("which is whole", find(root, "auto") == folder and not list(root.glob("*.partial")))
