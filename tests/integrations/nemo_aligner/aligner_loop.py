"""NeMo-Aligner's real training loop on a real Megatron-Core model: the shadow pass's answer, and that measuring disturbs nothing."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import plain_megatron
import torch
from aligner_adapter import AlignerAdapter
from contract import SETTINGS
from megatron.core import num_microbatches_calculator
from torch import Tensor

from megatron_calclip.integrations.nemo_aligner import calibrated_actor
from megatron_calclip.learner import cpu

ROWS_PER_UPDATE = 4  # of eight sequences: two updates a step, each in two micro-batches


def make_actor(adapter: AlignerAdapter, plain: plain_megatron.Plain, settings: dict[str, Any]) -> Any:
    """A calibrated actor on the plain model, with the few methods that NeMo would give it."""

    class Actor(calibrated_actor(adapter.module.MegatronGPTActorModel)):  # type: ignore[misc]
        def get_forward_output_only_func(self) -> Any:
            def forward(batches: Any, model: Any) -> tuple[Tensor, Any]:
                tokens, attention_mask, position_ids = next(batches)
                return model(tokens, position_ids, attention_mask), lambda output: output

            return forward

        def prepare_for_training(self) -> None:
            pass

        prepare_for_training_step = finish_training_step = finish_training = prepare_for_training

        def maybe_onload_parameters(self) -> None:
            pass

        def _make_data_iterator_list(self, data_iterator: Any) -> Any:
            return data_iterator

    actor = adapter.actor(Actor, plain.model, settings, rows=ROWS_PER_UPDATE // 2)
    actor._optimizer = types.SimpleNamespace(mcore_optimizer=plain.optimizer)
    actor.tokenizer = types.SimpleNamespace(eos_id=0)
    adapter.module.set_sync_funcs = lambda *_, **__: None
    num_microbatches_calculator.unset_num_microbatches_calculator()
    num_microbatches_calculator.init_num_microbatches_calculator(0, None, ROWS_PER_UPDATE, ROWS_PER_UPDATE // 2, 1)
    return actor


def check_shadow(adapter: AlignerAdapter) -> None:
    """NeMo-Aligner's own scoring inside our shadow pass gives what our learner's shadow pass gives; in FP8 it does not."""
    plain = plain_megatron.start()
    try:
        actor = make_actor(adapter, plain, SETTINGS)
        mask, expected = plain.response_mask, plain.expected_shadow()
        shadow = actor.shadow_log_probs(plain.tokens)
        torch.testing.assert_close(shadow * mask, expected, rtol=0, atol=2e-5)
        fp8 = actor.get_inference_log_probs(plain.tokens, forward_micro_batch_size=2)
        assert ((fp8 - shadow) * mask).abs().max() > 1e-3, "outside the shadow pass the model computes in FP8"
        again = actor.get_inference_log_probs(plain.tokens, forward_micro_batch_size=2)
        assert torch.equal(again, fp8)
    finally:
        plain_megatron.stop()


def train_one_step(adapter: AlignerAdapter, settings: dict[str, Any], folder: Path) -> tuple[dict[str, Tensor], Any]:
    """One step of `run_training`; the weights afterwards, and the controller."""
    plain = plain_megatron.start(lr=1e-2)
    try:
        actor = make_actor(adapter, plain, settings)
        trainer = adapter.make_trainer(actor, folder)

        def step(**_: Any) -> None:
            with cpu.cuda_type_names():
                plain.optimizer.step()

        trainer.optimizer = types.SimpleNamespace(
            zero_grad=lambda: (plain.model.zero_grad_buffer(), plain.optimizer.zero_grad()),
            step=step,
            param_groups=[{"lr": 1e-2}],
        )
        old = actor.get_inference_log_probs(plain.tokens, forward_micro_batch_size=ROWS_PER_UPDATE // 2)
        generator = torch.Generator().manual_seed(0)
        count = len(plain.tokens)
        advantages = torch.randn(count, 1, generator=generator)
        rollouts = {"response_tokens": plain.tokens, "mask": plain.response_mask}
        if adapter.section == "ppo":
            rollouts |= {
                "prev_logprobs": old,
                "advantages": advantages.expand_as(old).contiguous(),
                "is_end": torch.ones(count),
            }
        else:
            rollouts |= {
                "logprobs": old,
                "advantages": advantages,
                "init_logprobs": old,
                "inference_logprobs": old,
                "valid_mask": torch.ones(count),
                "importance_correction": torch.ones_like(old),
            }
        trainer.run_training(adapter.module.get_iterator_k_split(rollouts, count // ROWS_PER_UPDATE))
        weights = {name: value.detach().clone() for name, value in plain.model.named_parameters()}
        return weights, trainer.calclip
    finally:
        plain_megatron.stop()


def check_loop(adapter: AlignerAdapter, folder: Path) -> None:
    """A measured step trains exactly as the same step unmeasured, and measures what it should."""
    start = {"start": [0.8, 1.2]}  # what the framework's own configuration clips at
    own, _ = train_one_step(adapter, {"enabled": False}, folder / "own")
    # Too few tokens for new bounds: what is tested is that they travel.
    measured, controller = train_one_step(adapter, SETTINGS | start | {"min_tail_tokens": 1}, folder / "measured")
    assert own.keys() == measured.keys()
    assert all(torch.equal(own[name], measured[name]) for name in own)
    report = controller.last_report
    assert report is not None
    num_tokens = 8 * 20
    assert report.num_negative + report.num_positive == num_tokens
    assert report.num_unmoved_weights == num_tokens // 2
    assert report.num_unmoved_weights_off_one == 0, "pi_old saw the micro-batches of training"
    assert (folder / "measured" / "calclip" / "step_00000001.safetensors").is_file()
