"""NeMo-Aligner: GRPO of its branch `llama-nemotron-dev`, and PPO of the released 0.7.0.

Both trainers hand an iterator of mini-batches to `run_training`, which takes one optimizer step per batch. The adapter
wraps that iterator: the code between two batches runs exactly between two optimizer steps, so that is where the shadow
passes and the calibration happen, and no method of theirs is written again.

- Bounds: GRPO reads `ratio_eps_low` and `ratio_eps_high` from its configuration at every loss. PPO has one symmetric
  `ratio_eps`; `ClipRange` is a number that answers `1.0 - eps` and `1.0 + eps` with the two bounds.
- FP8 ratios: the loss function is called with the logits of the training forward, and computes log-probabilities from
  them; so does the adapter, once more, on calibration steps.
- Importance weights: GRPO's are not truncated; the adapter truncates them (TIS), PPO 0.7.0 has none.
- State: NeMo-Aligner's trainer state goes through int32, so the calibrator's is in files of its own.

Settings: a mapping `calclip` beside the loss's settings, with the keys of `controller.SETTINGS` and `importance_cap`
(GRPO, default 2), e.g. `++model.grpo.calclip.interval=20` or `++model.ppo.calclip.preset=paper`.

Left out on purpose: context parallelism (GRPO gathers its logits inside the loss), and FP8 parameters under Apex's
distributed optimizer, which does not hand out masters; both are refused in one sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.errors import UserError
from megatron_calclip.integrations import require
from megatron_calclip.integrations.clip_range import ClipRange
from megatron_calclip.integrations.controller import ClipController, Measurement, PairedLogProbs, StateFolder, epsilons
from megatron_calclip.integrations.shadow import framework_shadow_pass

DEFAULT_IMPORTANCE_CAP = 2.0
"""C of truncated importance sampling, as in arXiv 2609.22870."""

_ACTORS = "models.nlp.gpt"
_MODULES = {
    "grpo": (
        f"nemo_aligner.experimental.grpo.{_ACTORS}.megatron_gpt_grpo_actor",
        "nemo_aligner.experimental.grpo.algorithms.grpo",
        "GRPOTrainer",
    ),
    "ppo": (f"nemo_aligner.{_ACTORS}.megatron_gpt_ppo_actor", "nemo_aligner.algorithms.ppo", "PPOTrainer"),
}
"""Modules of the actor model and of the trainer, and the trainer's class."""

_SHADOW_OLD, _SHADOW_NEW, _ROWS = "calclip_shadow_old", "calclip_shadow_new", "calclip_rows"


def calibrated_actor(base: Any) -> type:
    """A subclass of an actor whose bounds can be set and whose ratios can be measured.

    Without a measurement its training step is the base class's own.

    Args:
        base: NeMo-Aligner's `MegatronGPTActorModel` of GRPO or PPO.
    """

    class CalibratedActor(base):
        calclip_measurement: Measurement | None = None
        calclip_weights_unmoved = False

        @property
        def _calclip_loss(self) -> Any:
            """The settings of the loss: `cfg.grpo` or `cfg.ppo`."""
            return self.cfg.grpo if "grpo" in self.cfg else self.cfg.ppo

        def set_clip_bounds(self, bounds: ClipBounds) -> None:
            """Use these bounds from the next loss on."""
            if "grpo" not in self.cfg:
                self.ratio_eps = ClipRange(bounds)
                return
            omegaconf = require("omegaconf", framework="OmegaConf", how="NeMo-Aligner cannot run without it")
            with omegaconf.open_dict(self.cfg):
                low, high = epsilons(bounds)
                self.cfg.grpo.ratio_eps_low, self.cfg.grpo.ratio_eps_high = low, high
                self.cfg.grpo.setdefault("dapo", {})
                self.cfg.grpo.dapo.clip_higher = True

        def calclip_check(self) -> None:
            """Refuse what calibration cannot work with, before training starts."""
            if self.cfg.get("context_parallel_size", 1) > 1:
                raise UserError(
                    "model.context_parallel_size",
                    "calibration cannot read ratios under context parallelism; set it to 1",
                )
            with framework_shadow_pass(self.model, self._calclip_optimizer):
                pass

        @property
        def _calclip_optimizer(self) -> Any:
            # NeMo's wrapper of Megatron-Core's optimizer has this attribute, Apex's distributed optimizer has not.
            return getattr(self._optimizer, "mcore_optimizer", None)

        def shadow_log_probs(self, tokens: Tensor) -> Tensor:
            """BF16 log-probabilities [B, S-1] of token ids [B, S] on the master weights, on the CPU; collective."""
            with framework_shadow_pass(self.model, self._calclip_optimizer):
                return self.get_inference_log_probs(
                    tokens.cuda(), forward_micro_batch_size=self.cfg.micro_batch_size
                ).cpu()

        def get_actor_forward_output_and_loss_func(self) -> Callable[..., Any]:
            forward_step = super().get_actor_forward_output_and_loss_func()
            measurement = self.calclip_measurement
            if measurement is None:
                return forward_step

            def observed_forward_step(data_iterator: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Any]:
                batch = next(data_iterator)
                logits, loss_func = forward_step(iter([batch]), model)

                def observed_loss_func(logits: Tensor) -> Any:
                    self._calclip_add(measurement, batch, logits)
                    return loss_func(logits)

                return logits, observed_loss_func

            return observed_forward_step

        @torch.no_grad()
        def _calclip_add(self, measurement: Measurement, batch: Mapping[str, Tensor], logits: Tensor) -> None:
            from megatron.core import parallel_state

            name = "nemo_aligner.utils.distributed"
            distributed = require(name, framework="NeMo-Aligner", how="see docs/integrations.md")
            # Tensor-parallel ranks compute the log-probabilities together, and one of them counts the tokens.
            log_probs = distributed.from_parallel_logits_to_logprobs(
                vocab_parallel_logits=logits.detach(),
                target=batch["response_tokens"].to(logits.device),
                inference_only=True,
                higher_stability=True,
            )
            if parallel_state.get_tensor_model_parallel_rank() != 0:
                return
            mask = batch["mask"]
            if "is_end" in batch:  # PPO leaves unfinished answers out of the loss, GRPO does not
                mask = mask * batch["is_end"].view(-1, 1)
            num_tokens = mask.sum().clamp(min=1)
            measurement.add(
                PairedLogProbs(
                    log_probs=log_probs,
                    old_log_probs=batch["prev_logprobs" if "prev_logprobs" in batch else "logprobs"],
                    shadow_log_probs=batch[_SHADOW_NEW],
                    shadow_old_log_probs=batch[_SHADOW_OLD],
                    advantages=batch["advantages"],
                    importance_weights=batch.get("importance_correction", torch.ones(())),
                    # the loss is a mean over the tokens of each micro-batch
                    loss_weights=1.0 / num_tokens,
                    response_mask=mask,
                    sequence_ids=batch[_ROWS],
                ),
                weights_unmoved=self.calclip_weights_unmoved,
            )

    return _named_like(CalibratedActor, base)


def calibrated_trainer(base: Any) -> type:
    """A subclass of a trainer that calibrates.

    Args:
        base: NeMo-Aligner's `GRPOTrainer` or `PPOTrainer`; its model has to be of a class that `calibrated_actor` made.
    """

    class CalibratedTrainer(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._calclip_start()

        def _calclip_start(self) -> None:
            settings = dict(self.model._calclip_loss.get("calclip") or {})
            self._calclip_cap = float(settings.pop("importance_cap", DEFAULT_IMPORTANCE_CAP))
            name = "model.grpo.calclip" if "grpo" in self.model.cfg else "model.ppo.calclip"
            self.calclip = ClipController.from_settings(settings, where=name)
            # A run without checkpoints has a stand-in for the callback, which has no folder.
            folder = getattr(self.ckpt_callback, "dirpath", None)
            self._calclip_states = StateFolder(Path(folder) / "calclip") if folder else None
            if self.calclip is not None:
                self.model.calclip_check()

        def create_grpo_training_data_from_inferences(self, rollout_batch: Any) -> Any:
            """GRPO alone: importance weights of the base class, truncated."""
            data, metrics = super().create_grpo_training_data_from_inferences(rollout_batch)
            if self.calclip is not None:
                data["importance_correction"] = data["importance_correction"].clamp(max=self._calclip_cap)
            return data, metrics

        def run_training(self, dataloader_iter: Iterable[dict[str, Any]]) -> Any:
            """The base class's loop, with what calibration does between its optimizer steps."""
            if self.calclip is None:
                return super().run_training(dataloader_iter)
            return super().run_training(self._calclip_batches(self.calclip, dataloader_iter))

        def _calclip_batches(
            self, controller: ClipController, dataloader_iter: Iterable[dict[str, Any]]
        ) -> Iterator[dict[str, Any]]:
            batches = list(dataloader_iter)  # views of one rollout batch
            self.model.set_clip_bounds(controller.bounds)
            measurement = controller.begin(self.step + 1, num_updates=len(batches))
            if measurement is None:
                yield from batches
                return
            from megatron.core import parallel_state

            first_row = parallel_state.get_data_parallel_rank() * sum(len(b["response_tokens"]) for b in batches)
            for batch in batches:
                batch[_SHADOW_OLD] = self.model.shadow_log_probs(batch["response_tokens"])
                batch[_ROWS] = torch.arange(first_row, first_row + len(batch["response_tokens"]))
                first_row += len(batch["response_tokens"])
            self.model.calclip_measurement = measurement
            try:
                for index, batch in enumerate(batches):
                    unmoved = index == 0
                    new = batch[_SHADOW_OLD] if unmoved else self.model.shadow_log_probs(batch["response_tokens"])
                    batch[_SHADOW_NEW] = new
                    self.model.calclip_weights_unmoved = unmoved
                    yield batch
            finally:
                self.model.calclip_measurement = None
            controller.finish(measurement)
            if self._calclip_states is not None:
                self._calclip_states.save(controller)
            self.logger.log_metrics(controller.metrics(), step=self.step, prefix="calclip/")

        def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
            """The base class's, and the calibrator as it was then."""
            super().load_state_dict(state_dict)
            if self.calclip is not None and self._calclip_states is not None:
                self._calclip_states.load(self.calclip, self.step)

    if not hasattr(base, "create_grpo_training_data_from_inferences"):
        del CalibratedTrainer.create_grpo_training_data_from_inferences
    return _named_like(CalibratedTrainer, base)


def calibrate(algorithm: Literal["grpo", "ppo"]) -> None:
    """Put calibrated classes in the place of NeMo-Aligner's own, before its training script imports them.

    Args:
        algorithm: `grpo` (branch llama-nemotron-dev, `train_gpt_grpo.py`) or `ppo` (0.7.0, `train_gpt_ppo_actor.py`).

    Raises:
        ImportError: when this NeMo-Aligner has no such algorithm, or NeMo is missing.
    """
    actor_name, trainer_name, trainer_class = _MODULES[algorithm]
    version = "the branch llama-nemotron-dev" if algorithm == "grpo" else "0.7.0"
    framework, how = f"NeMo-Aligner, {version},", "run in its container, with that version on PYTHONPATH"
    actor = require(actor_name, framework=framework, how=how)
    trainer = require(trainer_name, framework=framework, how=how)
    actor.MegatronGPTActorModel = calibrated_actor(actor.MegatronGPTActorModel)
    setattr(trainer, trainer_class, calibrated_trainer(getattr(trainer, trainer_class)))


def _named_like(calibrated: type, original: type) -> type:
    """NeMo writes the path of a model's class into its checkpoints: the framework's, so that it can read them without us."""
    calibrated.__module__, calibrated.__name__ = original.__module__, original.__name__
    calibrated.__qualname__ = original.__qualname__
    return calibrated
