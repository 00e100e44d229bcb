"""NeMo-RL's Megatron worker with shadow passes between its optimizer steps; imported by Ray in the workers alone.

One call of the worker's `train` takes an optimizer step per global batch. The shadow pass of the next global batch has to
run right after such a step, so `optimizer.step` is wrapped for the duration of a measured call; nothing else of the
worker's loop is touched. Shadow log-probabilities come from the worker's own `get_logprobs`, inside a shadow pass, and ride
on the batch to the loss. Not yet run on a GPU, which NeMo-RL's workers need.

Left out on purpose: everything that does not need the worker (`nemo_rl`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_calclip.errors import UserError
from megatron_calclip.integrations import require
from megatron_calclip.integrations.controller import ClipController
from megatron_calclip.integrations.nemo_rl import ROWS, SHADOW_NEW, SHADOW_OLD, CalibratedPGLossFn
from megatron_calclip.integrations.shadow import framework_shadow_pass

STATE_FILE = "calclip.safetensors"
_ROWS_PER_RANK = 2**32
"""Numbers of sequences are their place on a rank plus the rank times this: more than any rank ever holds."""


class CalibratingWorker:
    """What calibration adds to NeMo-RL's `MegatronPolicyWorkerImpl`; comes before it among the bases."""

    calclip: ClipController | None = None
    calclip_state: Path | None = None
    """Where a resumed run finds its state."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if kwargs.get("weights_path"):
            self.calclip_state = Path(kwargs["weights_path"]).parent / STATE_FILE

    def train(self, data: Any, loss_fn: Any, eval_mode: bool = False, **kwargs: Any) -> dict[str, Any]:
        """The base class's training on one rollout batch, with calibrated bounds."""
        if eval_mode or not isinstance(loss_fn, CalibratedPGLossFn) or not loss_fn.enabled:
            return super().train(data, loss_fn, eval_mode=eval_mode, **kwargs)  # type: ignore[misc]
        controller = self._calclip_controller(loss_fn)
        loss_fn.bounds = controller.bounds
        batch_size = (kwargs.get("gbs") or self.cfg["train_global_batch_size"]) // self.dp_size  # type: ignore[attr-defined]
        # Sequence packing deals its sequences unevenly, and says how many each rank has of each global batch.
        counts = getattr(data, "elem_counts_per_gb", None)
        num_updates = data.size // batch_size if counts is None else len(counts)
        measurement = controller.begin(controller.last_step + 1, num_updates=num_updates)
        if measurement is None:
            return super().train(data, loss_fn, eval_mode=eval_mode, **kwargs)  # type: ignore[misc]

        from megatron.core import parallel_state

        loss_fn.measurement = measurement
        loss_fn.counts_tokens = not (
            parallel_state.get_tensor_model_parallel_rank() or parallel_state.get_context_parallel_rank()
        )
        data[ROWS] = torch.arange(data.size) + parallel_state.get_data_parallel_rank() * _ROWS_PER_RANK
        shadows = [self._shadow_log_probs(data, index, batch_size) for index in range(num_updates)]
        data[SHADOW_OLD] = torch.cat(shadows)
        data[SHADOW_NEW] = data[SHADOW_OLD].clone()
        loss_fn.weights_unmoved = True

        def shadow_next(index: int) -> None:
            """After update number `index` the weights are those that global batch `index`, from 0, is trained at."""
            loss_fn.weights_unmoved = False
            if index < num_updates:
                rows = data.get_batch(batch_idx=index, batch_size=batch_size)[ROWS] % _ROWS_PER_RANK
                data[SHADOW_NEW][rows] = self._shadow_log_probs(data, index, batch_size)

        with _AfterEachStep(self.optimizer, shadow_next):  # type: ignore[attr-defined]
            results = super().train(data, loss_fn, eval_mode=eval_mode, **kwargs)  # type: ignore[misc]
        controller.finish(measurement)
        return results

    def _calclip_controller(self, loss_fn: CalibratedPGLossFn) -> ClipController:
        if self.calclip is None:
            self.calclip = ClipController.from_settings(loss_fn.calclip, where="loss_fn.calclip")
            assert self.calclip is not None
            if self.calclip_state is not None:
                self.calclip.load(self.calclip_state)
        return self.calclip

    def _shadow_log_probs(self, data: Any, index: int, batch_size: int) -> torch.Tensor:
        """Of one global batch, [batch_size, S] on the CPU in NeMo-RL's layout: position i belongs to token i. Collective.

        Batch by batch, because NeMo-RL plans packed and dynamic micro-batches within each.
        """
        batch = data.get_batch(batch_idx=index, batch_size=batch_size)
        with framework_shadow_pass(self.model, self.optimizer):  # type: ignore[attr-defined]
            log_probs = self.get_logprobs(data=batch)["logprobs"]  # type: ignore[attr-defined]
        self.model.train()  # type: ignore[attr-defined]
        return log_probs

    def begin_train_step(self, loss_fn: Any, *args: Any, **kwargs: Any) -> Any:
        """The single controller's split train step: refused, its data is not at hand before its updates."""
        if isinstance(loss_fn, CalibratedPGLossFn) and loss_fn.enabled:
            raise UserError(
                "loss_fn.calclip", "the single controller's split train step cannot calibrate; use run_grpo.py"
            )
        return super().begin_train_step(loss_fn, *args, **kwargs)  # type: ignore[misc]

    def save_checkpoint(self, weights_path: str, *args: Any, **kwargs: Any) -> Any:
        """NeMo-RL's, with the calibrator's state beside the weights."""
        result = super().save_checkpoint(weights_path, *args, **kwargs)  # type: ignore[misc]
        if self.calclip is not None and torch.distributed.get_rank() == 0:
            self.calclip.save(Path(weights_path).parent / STATE_FILE)
        return result


class _AfterEachStep:
    """Calls a function with 1, 2, ... after each step of an optimizer, inside a `with` block."""

    def __init__(self, optimizer: Any, function: Any) -> None:
        self.optimizer, self.function, self.count = optimizer, function, 0

    def __enter__(self) -> None:
        step = self.optimizer.step

        def observed_step(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            self.count += 1
            self.function(self.count)
            return result

        self.optimizer.step = observed_step

    def __exit__(self, *_: Any) -> None:
        del self.optimizer.step  # the class's own method shows again


def _worker_class() -> type:
    how = "import this module in NeMo-RL's Megatron environment"
    base = require(
        "nemo_rl.models.policy.workers.megatron_policy_worker", framework="NeMo-RL's Megatron worker", how=how
    )
    ray = require("ray", framework="Ray", how=how)
    worker = type("CalibratedMegatronPolicyWorker", (CalibratingWorker, base.MegatronPolicyWorkerImpl), {})
    worker.__module__ = __name__
    return ray.remote(runtime_env=base.get_runtime_env_for_policy_worker("megatron_policy_worker"))(worker)


def __getattr__(name: str) -> Any:
    """The worker class that Ray asks for, made on first use: its base needs a GPU environment to be imported."""
    if name == "CalibratedMegatronPolicyWorker":
        globals()[name] = _worker_class()
        return globals()[name]
    raise AttributeError(name)
