"""verl: a registered policy loss with settable bounds, and a training worker that calibrates them.

verl imports this module in every process when `VERL_USE_EXTERNAL_MODULES=megatron_calclip.integrations.verl` is set; the
import registers the policy loss `calclip` (`actor.policy_loss.loss_mode=calclip`) and puts `CalibratedTrainingWorker` in the
place of the actor's worker. Settings come from the YAML file that `MEGATRON_CALCLIP_SETTINGS` names.

- The loss is verl's own vanilla loss, called with a view of its configuration in which the two clip ratios are the
  calibrator's: aggregation, dual clip and importance weights (`algorithm.rollout_correction`) stay verl's.
- The worker runs one shadow pass over the step's data before its first mini-batch and one over each later mini-batch right
  before its update. The Megatron engine alone has one; with other engines the worker refuses to calibrate.
- FP8 ratios are those of the training forward: the worker's loss function is wrapped and sees its log-probabilities.
- The calibrator's state is saved and loaded with the actor's checkpoint.

Left out on purpose: bypass mode (pi_old is the sampler there; refused), dynamic context parallelism, and GSPO's sequence
ratios, whose aggregation differs between verl's versions.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.policy_loss import clip_masks
from megatron_calclip.errors import UserError
from megatron_calclip.integrations import require, require_version
from megatron_calclip.integrations.controller import ClipController, Measurement, PairedLogProbs, epsilons
from megatron_calclip.integrations.shadow import framework_shadow_pass

SETTINGS_VARIABLE = "MEGATRON_CALCLIP_SETTINGS"
VERSIONS = ("0.9.1",)
STATE_FILE = "calclip.safetensors"
LOSS_MODE = "calclip"

_HOW = f"pip install verl=={VERSIONS[-1]}"
require("verl", framework=f"verl {VERSIONS[-1]}", how=_HOW)
require_version("verl", VERSIONS)
core_algos = require("verl.trainer.ppo.core_algos", framework="verl", how=_HOW)
engine_workers = require("verl.workers.engine_workers", framework="verl", how=_HOW)
padding = require("verl.workers.utils.padding", framework="verl", how=_HOW)
tu = require("verl.utils.tensordict_utils", framework="verl", how=_HOW)

_ROWS = "calclip_rows"


class _Active:
    """The bounds in force in this process. A policy loss of verl gets its configuration alone, so they are kept here."""

    is_set = False
    bounds: ClipBounds | None = None
    """None: calibration is off and the configuration's own bounds hold."""


class _WithBounds:
    """An actor configuration in which two numbers are others; verl's own is frozen."""

    def __init__(self, config: Any, bounds: ClipBounds) -> None:
        self._config = config
        self.clip_ratio_low, self.clip_ratio_high = epsilons(bounds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


@core_algos.register_policy_loss(LOSS_MODE)
def calclip_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """verl's vanilla loss at the calibrator's bounds, with clip fractions by sign; see `compute_policy_loss_vanilla`.

    Raises:
        UserError: when the process has no calibrating worker.
    """
    if not _Active.is_set:
        raise UserError(
            f"actor.policy_loss.loss_mode={LOSS_MODE}",
            "no calibrating worker in this process; use a worker whose actor_worker_cls is CalibratedTrainingWorker",
        )
    bounds = _Active.bounds
    loss, metrics = core_algos.compute_policy_loss_vanilla(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode=loss_agg_mode,
        config=config if bounds is None else _WithBounds(config, bounds),
        rollout_is_weights=rollout_is_weights,
    )
    if bounds is None:
        return loss, metrics
    with torch.no_grad():
        mask = response_mask.bool()
        low, high = clip_masks((log_prob - old_log_prob).exp(), advantages, bounds, response_mask=mask)
        num_tokens = mask.sum().clamp(min=1)
        clips = {"low_negative": (low.sum() / num_tokens).item(), "high_positive": (high.sum() / num_tokens).item()}
    metrics |= {f"actor/calclip_{name}": value for name, value in clips.items()}
    return loss, metrics | {"actor/calclip_lower": bounds.lower, "actor/calclip_upper": bounds.upper}


def _settings() -> Mapping[str, Any]:
    path = os.environ.get(SETTINGS_VARIABLE)
    if not path:
        raise UserError(SETTINGS_VARIABLE, "not set in this process; name a YAML file with the settings of calclip")
    if not Path(path).is_file():
        raise UserError(SETTINGS_VARIABLE, f"there is no file {path} on this machine")
    return yaml.safe_load(Path(path).read_text()) or {}


class CalibratedTrainingWorker(engine_workers.TrainingWorker):  # type: ignore[name-defined]
    """verl's training worker for the actor, calibrating. With `enabled: false` it does what verl's own does.

    Args:
        config: verl's `TrainingWorkerConfig`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.start_calibration(_settings())

    def start_calibration(self, settings: Mapping[str, Any]) -> None:
        """Begin with these settings (keys of `controller.SETTINGS`)."""
        self.calclip = ClipController.from_settings(settings)
        self._measurement: Measurement | None = None
        self._unmoved = False
        self._width = 0  # R, tokens of the step's longest response
        self._shadow_old = self._shadow_new = torch.empty(0, 0)
        self._aggregation = ""
        _Active.is_set, _Active.bounds = True, None
        if self.calclip is not None and self.engine_config.strategy != "megatron":
            raise UserError(
                "actor.strategy", f"{self.engine_config.strategy} has no shadow pass; use megatron, or enabled: false"
            )

    def set_loss_fn(self, loss_fn: Callable[..., Any]) -> None:
        """Use a loss function (verl's is a partial that holds the actor's configuration), and watch what it gets."""
        if self.calclip is None:
            super().set_loss_fn(loss_fn)
            return
        self._aggregation = loss_fn.keywords["config"].loss_agg_mode  # type: ignore[attr-defined]
        super().set_loss_fn(functools.partial(self._watched_loss, loss_fn))

    def train_mini_batch(self, data: Any) -> Any:
        """All updates of a training step."""
        if self.calclip is None:
            return super().train_mini_batch(data)
        _refuse_bypass(data)
        _Active.bounds = self.calclip.bounds
        measurement = self.calclip.begin(self.calclip.last_step + 1, num_updates=self._num_updates(data))
        if measurement is None:
            return super().train_mini_batch(data)
        data[_ROWS] = torch.arange(data.shape[0], device=data["input_ids"].device)
        responses = data["responses"]
        self._width = int(responses.offsets().diff().max()) if responses.is_nested else responses.shape[1]
        auto_offload_off = tu.get(data, key="disable_auto_offload", default=False)
        # Weights and masters stay on the device from the first shadow pass to the last.
        with self.engine.train_mode(disable_auto_offload=auto_offload_off):
            tu.assign_non_tensor(data, disable_auto_offload=True)
            self._shadow_old = self._shadow_log_probs(data)
            self._shadow_new, self._unmoved = self._shadow_old.clone(), True
            self._measurement = measurement
            try:
                output = super().train_mini_batch(data)
            finally:
                self._measurement = None
        self.calclip.finish(measurement)
        return output

    def _num_updates(self, data: Any) -> int:
        epochs = tu.get(data, key="epochs", default=1)
        if (size := tu.get(data, key="mini_batch_size")) is not None:
            return epochs * (data.shape[0] * self.engine.get_data_parallel_size() // size)
        return epochs * tu.get(data, key="num_mini_batch")

    def train_batch(self, data: Any) -> Any:
        """One update; on measured steps a shadow pass over its tokens comes first, where weights have moved."""
        if self._measurement is not None and not self._unmoved:
            self._shadow_new[data[_ROWS].cpu()] = self._shadow_log_probs(data)
        output = super().train_batch(data)
        self._unmoved = False
        return output

    def _shadow_log_probs(self, data: Any) -> Tensor:
        """BF16 log-probabilities [B, R] of the responses on the masters, on the CPU; zeros on ranks without outputs."""
        view = data.copy()
        tu.assign_non_tensor(view, compute_loss=False, calculate_entropy=False, disable_auto_offload=True)
        with framework_shadow_pass(self.engine.module, self.engine.optimizer):
            output = self.infer_batch(view)
        shadow = torch.zeros(data.shape[0], self._width)
        if output is not None:
            log_probs = padding.no_padding_2_padding(output["log_probs"], data.cpu())
            shadow[:, : log_probs.shape[1]] = log_probs
        return shadow

    def _watched_loss(self, loss_fn: Callable[..., Any], *, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        if self._measurement is not None and self.engine.is_mp_src_rank_with_outputs():
            self._add(self._measurement, padding.no_padding_2_padding(model_output["log_probs"].detach(), data), data)
        return loss_fn(model_output=model_output, data=data, dp_group=dp_group)

    def _add(self, measurement: Measurement, log_probs: Tensor, data: Any) -> None:
        rows, width = data[_ROWS].cpu(), log_probs.shape[1]
        names = ["response_mask", "old_log_probs", "advantages"]
        has_weights = "rollout_is_weights" in data
        padded = data.select(*names, *(["rollout_is_weights"] if has_weights else [])).to_padded_tensor()
        mask = padded["response_mask"].bool()
        # Other aggregations than this one weigh all tokens of a batch alike.
        by_sequence = self._aggregation == "seq-mean-token-mean"
        measurement.add(
            PairedLogProbs(
                log_probs=log_probs,
                old_log_probs=padded["old_log_probs"],
                shadow_log_probs=self._shadow_new[rows, :width],
                shadow_old_log_probs=self._shadow_old[rows, :width],
                advantages=padded["advantages"],
                importance_weights=padded["rollout_is_weights"] if has_weights else torch.ones(()),
                loss_weights=1.0 / mask.sum(dim=1, keepdim=True).clamp(min=1) if by_sequence else torch.ones(()),
                response_mask=mask,
                sequence_ids=rows + self.engine.get_data_parallel_rank() * len(self._shadow_old),
            ),
            weights_unmoved=self._unmoved,
        )

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> Any:
        """verl's, with the calibrator's state in the same folder."""
        result = super().save_checkpoint(local_path, *args, **kwargs)
        if self.calclip is not None and self.rank == 0:
            self.calclip.save(Path(local_path) / STATE_FILE)
        return result

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> Any:
        """verl's, and the calibrator as it was then."""
        if self.calclip is not None:
            self.calclip.load(Path(local_path) / STATE_FILE)
        return super().load_checkpoint(local_path, *args, **kwargs)


def _refuse_bypass(data: Any) -> None:
    if "rollout_log_probs" not in data:
        return
    old, sampler = (
        data[name].values() if data[name].is_nested else data[name] for name in ("old_log_probs", "rollout_log_probs")
    )
    if torch.equal(old, sampler):
        raise UserError(
            "algorithm.rollout_correction.bypass_mode",
            "pi_old is the sampler, whose ratios calibration cannot compare with BF16; set it to false",
        )


engine_workers.ActorRolloutRefWorker.actor_worker_cls = CalibratedTrainingWorker
