"""NeMo-Aligner as the contract sees it: real loss functions, real trainers' `run_training`, a model that is a table.

The actor's `__init__` is never called: that of the GRPO branch empties /dev/shm and asks for 520 GB. Everything about
memory and data loading is replaced; loss, schedule, iteration over mini-batches and Megatron's forward-backward are real.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import torch
from contract import OWN_BOUNDS, Adapter, Minibatch, Result, result
from megatron.core import num_microbatches_calculator
from megatron.core.enums import ModelType
from megatron.core.transformer.transformer_config import TransformerConfig
from omegaconf import OmegaConf
from torch import Tensor, nn

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.integrations.controller import ClipController
from megatron_calclip.integrations.nemo_aligner import calibrated_actor, calibrated_trainer


class Table(nn.Module):
    """A language model of two tokens that reads its logits from a table; token 0 of a sequence is its row."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x
        self.config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        self.model_type = ModelType.encoder_or_decoder

    def forward(self, tokens: Tensor, *_: Any, **__: Any) -> Tensor:
        x = self.x[tokens[:, 0]]
        logits = torch.stack([torch.zeros_like(x), x], dim=-1)
        return torch.cat([logits, torch.zeros_like(logits[:, :1])], dim=1)  # nothing is predicted after the last token

    def set_input_tensor(self, _: Any) -> None:
        pass


def tokens_of(rows: Tensor, num_columns: int) -> Tensor:
    """[B, S + 1]: the row, then token 1 throughout."""
    return torch.cat([rows[:, None], torch.ones(len(rows), num_columns, dtype=torch.long)], dim=1)


class AlignerAdapter(Adapter):
    """GRPO or PPO; subclasses say how their batches and settings are called.

    Args:
        module: the framework's module of the actor model.
        trainer_module: that of the trainer.
        trainer: name of its class.
        section: `grpo` or `ppo`.
        loss_settings: of the section.
    """

    def __init__(
        self,
        module: Any,
        trainer_module: Any,
        *,
        trainer: str,
        section: str,
        loss_settings: dict[str, Any] | None = None,
    ) -> None:
        self.module, self.trainer_module = module, trainer_module
        self.trainer, self.section = trainer, section
        self.loss_settings = loss_settings or {}
        self.has_importance_weights = section == "grpo"
        # Both modules allocate on, and report the memory of, a CUDA device.
        torch.cuda.current_device = lambda: torch.device("cpu")
        for name in ("log_memory", "print_memory_info", "clear_memory"):
            setattr(module, name, lambda *_: None)
            setattr(trainer_module, name, lambda *_: None)

    def batch(self, data: Minibatch, rows: Tensor) -> dict[str, Any]:
        """What the framework's trainer hands to its actor."""
        batch = {
            "response_tokens": tokens_of(rows, data.old.shape[1]),
            "mask": data.mask,
            "advantages": data.advantages,
            "attention_mask": torch.zeros(len(rows), 1, 1, 1),
            "position_ids": torch.zeros(len(rows), 1),
        }
        if self.section == "ppo":
            return batch | {"prev_logprobs": data.old, "is_end": torch.ones(len(rows))}
        return batch | {
            "logprobs": data.old,
            "init_logprobs": data.old,
            "inference_logprobs": data.sampler,
            "advantages": data.advantages[:, :1],
            "valid_mask": torch.ones(len(rows)),
            "importance_correction": data.importance_weights,
        }

    def actor(self, cls: type, model: nn.Module, settings: dict[str, Any] | None, *, rows: int) -> Any:
        """An actor model without its constructor."""
        actor = cls.__new__(cls)
        epsilon = 1.0 - OWN_BOUNDS.lower
        loss = {"ratio_eps": epsilon, "initial_policy_kl_penalty": 0.0, **self.loss_settings}
        if settings is not None:
            loss["calclip"] = settings
        actor.cfg = OmegaConf.create(
            {"micro_batch_size": rows, "global_batch_size": rows, self.section: loss, "data": {}, "optim": {}}
        )
        OmegaConf.set_struct(actor.cfg, True)
        actor.ratio_eps, actor.entropy_bonus, actor.forward_micro_batch_size = epsilon, 0.0, rows
        actor.model, actor._optimizer = model, types.SimpleNamespace()
        return actor

    def loss(self, actor: Any, data: Minibatch) -> Result:
        forward_step = actor.get_actor_forward_output_and_loss_func()
        batch = self.batch(data, torch.arange(len(data.old)))
        logits, loss_func = forward_step(iter([batch]), actor.model)
        return result(loss_func(logits)[0].reshape(()), data)

    def own_loss(self, batch: Minibatch) -> Result:
        cls = self.module.MegatronGPTActorModel
        return self.loss(self.actor(cls, Table(batch.x), None, rows=len(batch.old)), batch)

    def adapted_loss(self, batch: Minibatch, settings: dict[str, Any], bounds: ClipBounds | None) -> Result:
        cls = calibrated_actor(self.module.MegatronGPTActorModel)
        actor = self.actor(cls, Table(batch.x), settings, rows=len(batch.old))
        if bounds is not None:
            actor.set_clip_bounds(bounds)
        return self.loss(actor, batch)

    def measured_weights(self, batch: Minibatch) -> Tensor:
        return torch.ones_like(batch.mask) / batch.mask.sum()  # each update is one micro-batch here

    def make_trainer(self, actor: Any, folder: Path) -> Any:
        """The real trainer's class without its constructor, which builds data loaders."""
        cls = calibrated_trainer(getattr(self.trainer_module, self.trainer))
        trainer = cls.__new__(cls)
        trainer.cfg = OmegaConf.create({"gradient_clip_val": 0.0, "max_epochs": 1, "max_steps": 10})
        trainer.model = actor
        group = {"lr": 0.0}
        trainer.optimizer = types.SimpleNamespace(zero_grad=lambda: None, step=lambda **_: None, param_groups=[group])
        trainer.scheduler = types.SimpleNamespace(step=lambda: None)
        trainer.logger = types.SimpleNamespace(log_metrics=lambda *_, **__: None)
        trainer.ckpt_callback = types.SimpleNamespace(dirpath=str(folder))
        trainer.step = trainer.consumed_samples = trainer.overall_iter = 0
        trainer.num_steps_per_epoch = 10
        trainer.grpo_optimization_step = trainer.ppo_optimization_step = 0
        self.trainer_module.clip_gradients = lambda *_: torch.tensor(0.0)
        trainer._calclip_start()
        return trainer

    def train_step(self, settings: dict[str, Any], minibatches: list[Minibatch], folder: Path) -> ClipController:
        base, adapter = calibrated_actor(self.module.MegatronGPTActorModel), self
        shadows = [torch.cat([m.shadow_old for m in minibatches]), torch.cat([m.shadow for m in minibatches])]
        rows, count = len(minibatches[0].old), len(minibatches)

        class Actor(base):  # type: ignore[misc, valid-type]
            num_shadows = 0

            def calclip_check(self) -> None:
                pass  # a table is no GPTModel; the shadow pass has a test of its own

            def shadow_log_probs(self, tokens: Tensor) -> Tensor:
                """The first passes are all over old weights."""
                self.num_shadows += 1
                return shadows[0 if self.num_shadows <= count else 1][tokens[:, 0]]

            def prepare_for_training(self) -> None:
                pass

            prepare_for_training_step = finish_training_step = finish_training = prepare_for_training

            def get_ltor_masks_and_position_ids(self, tokens: Tensor) -> tuple[Tensor, None, Tensor]:
                return torch.zeros(len(tokens), 1, 1, 1), None, torch.zeros(len(tokens), 1)

            def _make_data_iterator_list(self, data_iterator: Any) -> Any:
                return data_iterator

        x = torch.cat([m.x for m in minibatches]).requires_grad_()
        actor = self.actor(Actor, Table(x), settings, rows=rows)
        self.module.set_sync_funcs = lambda *_: None
        num_microbatches_calculator.unset_num_microbatches_calculator()
        num_microbatches_calculator.init_num_microbatches_calculator(0, None, rows, rows, 1)
        trainer = self.make_trainer(actor, folder)
        batches = (
            {
                key: value
                for key, value in adapter.batch(m, torch.arange(index * rows, (index + 1) * rows)).items()
                if key not in ("attention_mask", "position_ids")
            }
            for index, m in enumerate(minibatches)
        )
        trainer.run_training(batches)
        loss, epsilons = actor._calclip_loss, (0.4, 0.8)  # of the start, [0.6, 1.8]
        if self.section == "ppo":
            assert (1.0 - actor.ratio_eps, 1.0 + actor.ratio_eps) == (0.6, 1.8)
        else:
            assert loss.dapo.clip_higher and (loss.ratio_eps_low, loss.ratio_eps_high) == epsilons
        assert actor.num_shadows == 2 * count - 1, "the first mini-batch needs no second pass"
        assert x.grad is not None and x.grad.abs().sum() > 0, "the real loop has trained"
        return trainer.calclip

    def resumed(self, settings: dict[str, Any], folder: Path) -> ClipController:
        cls = calibrated_actor(self.module.MegatronGPTActorModel)
        cls.calclip_check = lambda self: None
        trainer = self.make_trainer(self.actor(cls, nn.Module(), settings, rows=1), folder)
        state = {"step": 1, "consumed_samples": 0, "grpo_optimization_step": 3, "ppo_optimization_step": 3}
        trainer.load_state_dict(state)
        return trainer.calclip
