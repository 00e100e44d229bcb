"""The contract on the real `megatron.rl.rl_utils` of a checkout of Megatron-LM.

Real: the loss, the log-probability pass over micro-batches with Megatron's forward schedule, the replayable iterator, the
arguments. Played: rollouts (given), the model (a table), and the training loop around them, which is Megatron's order of
calls: data iterator, then a loss per micro-batch, then the optimizer.
"""

# ruff: noqa: E402 (the checkout has to be on the path first)
from __future__ import annotations

import os
import sys

import pytest

SOURCE = os.environ.get("MEGATRON_LM_SRC")
if not SOURCE:
    pytest.skip("MEGATRON_LM_SRC names no checkout of Megatron-LM", allow_module_level=True)
if "megatron" in sys.modules:
    pytest.skip("another Megatron-Core is imported already; run this file alone", allow_module_level=True)
sys.path.insert(0, SOURCE)

import typing

import typing_extensions

if not hasattr(typing, "override"):  # its main branch is written for Python 3.12
    typing.override = typing_extensions.override  # type: ignore[attr-defined]

import contextlib
import itertools
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from contract import OWN_BOUNDS, SETTINGS, Adapter, AdapterContract, Minibatch, Result, result, step_of_minibatches
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.errors import UserError
from megatron_calclip.integrations import megatron_rl
from megatron_calclip.integrations.controller import ClipController
from megatron_calclip.learner import cpu

pytestmark = pytest.mark.integration


class Table(nn.Module):
    """A model of two tokens that reads its logits from a table; token 0 of a sequence is its row."""

    def __init__(self, minibatches: list[Minibatch]) -> None:
        from megatron.core.enums import ModelType
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.transformer_config import TransformerConfig

        super().__init__()
        self.config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        self.model_type, self.pg_collection = (
            ModelType.encoder_or_decoder,
            ProcessGroupCollection.use_mpu_process_groups(),
        )
        self.shadow = torch.cat([m.shadow for m in minibatches])
        self.shadow_old = torch.cat([m.shadow_old for m in minibatches])
        self.num_updates, self.num_forwards = 0, 0

    def forward(self, tokens: Tensor, *_: Any, **__: Any) -> Tensor:
        self.num_forwards += 1
        log_probs = (self.shadow if self.num_updates else self.shadow_old)[tokens[:, 0]]
        x = log_probs - torch.log(-torch.expm1(log_probs))
        logits = torch.stack([torch.zeros_like(x), x], dim=-1)
        return torch.cat([logits, torch.zeros_like(logits[:, :1])], dim=1)

    def set_input_tensor(self, _: Any) -> None:
        pass


@pytest.fixture
def rl_utils(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module with its functions as they are, on a CPU; what a test wraps is unwrapped afterwards."""
    cpu.install()
    from megatron.rl import rl_utils
    from megatron.training import global_vars

    for name in ("get_grpo_data_iterator", "calculate_grpo_loss"):
        monkeypatch.setattr(rl_utils, name, getattr(rl_utils, name))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(rl_utils, "get_nvtx_range", lambda: lambda *_, **__: contextlib.nullcontext())
    epsilon = 1.0 - OWN_BOUNDS.lower
    args = types.SimpleNamespace(
        bf16=False,
        fp16=False,
        seq_length=41,
        decoder_seq_length=41,
        micro_batch_size=32,
        rl_inference_logprobs_is_correction=True,
        rl_sequence_packing_max_sequences_per_bin=1,
        calculate_per_token_loss=True,
        grpo_clamp_eps_lower=epsilon,
        grpo_clamp_eps_upper=epsilon,
        save=None,
    )
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
    yield rl_utils


COLLECTION = {
    "grpo_iterations": 1,
    "grpo_prompts_per_step": 3,
    "grpo_group_size": 64,
    "global_batch_size": 64,
    "sequence_packing": False,
    "is_correction": True,
}


class MegatronRl(Adapter):
    def __init__(self, rl_utils: Any) -> None:
        self.rl_utils = rl_utils

    @property
    def args(self) -> Any:
        return self.rl_utils.get_args()

    def loss(self, log_probs: Tensor, micro: Any) -> Tensor:
        """As in `train_rl.forward_step` and its `loss_func`."""
        _, advantages, old, loss_mask, _, reference, sampler = micro
        loss = self.rl_utils.calculate_grpo_loss(
            current_logprobs=log_probs,
            old_logprobs=old,
            ref_logprobs=reference,
            advantages=advantages,
            clamp_eps_lower=self.args.grpo_clamp_eps_lower,
            clamp_eps_upper=self.args.grpo_clamp_eps_upper,
            kl_beta=0.0,
            entropy_weight=0.0,
            inference_logprobs=sampler,
            is_truncation_coef=2.0,
            seq_starts=None,
            seq_lengths=None,
        )[0]
        mask = loss_mask[:, 1:].contiguous()
        return (loss * mask).sum() / mask.sum()

    def micro(self, data: Minibatch) -> tuple[Tensor, ...]:
        return next(iter(self.loader([data], batch_size=len(data.old))))

    @staticmethod
    def loader(minibatches: list[Minibatch], *, batch_size: int) -> DataLoader[Any]:
        def join(name: str) -> Tensor:
            return torch.cat([getattr(m, name) for m in minibatches])

        mask = join("mask")
        tokens = torch.ones(len(mask), mask.shape[1] + 1, dtype=torch.long)
        tokens[:, 0] = torch.arange(len(mask))
        positions = torch.arange(mask.shape[1] + 1).expand_as(tokens)
        loss_mask = torch.cat([torch.ones(len(mask), 1), mask], dim=1)  # the first column belongs to no prediction
        old = join("old")
        dataset = TensorDataset(
            tokens, join("advantages")[:, 0], old, loss_mask, positions, torch.zeros_like(old), join("sampler")
        )
        return DataLoader(dataset, batch_size=batch_size)

    def own_loss(self, batch: Minibatch) -> Result:
        return result(self.loss(batch.log_probs, self.micro(batch)), batch)

    def adapted_loss(self, batch: Minibatch, settings: dict[str, Any], bounds: ClipBounds | None) -> Result:
        if bounds is not None:
            settings = settings | {"start": [bounds.lower, bounds.upper], "start_step": 100}
        self.rl_utils.get_grpo_data_iterator = lambda *_, **__: iter(())
        calibration = megatron_rl.calibrate(settings, self.rl_utils)
        self.rl_utils.get_grpo_data_iterator(None, None, None, 0, None, buffered_rollouts=None, **COLLECTION)
        assert (calibration is None) == (bounds is None)
        return self.own_loss(batch)

    def train_step(self, settings: dict[str, Any], minibatches: list[Minibatch], folder: Path) -> ClipController:
        calibration, _ = self.collection(settings, minibatches, folder)
        calibration._finish(self.args)  # what the next collection begins with
        return calibration.controller

    def collection(
        self, settings: dict[str, Any], minibatches: list[Minibatch], folder: Path
    ) -> tuple[megatron_rl.RlCalibration, Table]:
        """All updates on one set of rollouts, in micro-batches of half an update."""
        from megatron.core import num_microbatches_calculator

        self.args.save, rows = str(folder), len(minibatches[0].old)
        num_microbatches_calculator.unset_num_microbatches_calculator()
        num_microbatches_calculator.init_num_microbatches_calculator(0, None, rows, self.args.micro_batch_size, 1)

        def get_grpo_data_iterator(*_: Any, buffered_rollouts: Any = None, **__: Any) -> Any:
            if buffered_rollouts is not None:
                return buffered_rollouts
            cycle = itertools.cycle(self.loader(minibatches, batch_size=self.args.micro_batch_size))
            return self.rl_utils.RerunDataIterator(cycle)

        self.rl_utils.get_grpo_data_iterator = get_grpo_data_iterator
        calibration = megatron_rl.calibrate(settings, self.rl_utils)
        assert calibration is not None
        model, x, buffered = Table(minibatches), torch.cat([m.x for m in minibatches]), None
        for iteration in range(len(minibatches)):
            buffered = self.rl_utils.get_grpo_data_iterator(
                [model], None, None, iteration, None, buffered_rollouts=buffered, **COLLECTION
            )
            for _ in range(num_microbatches_calculator.get_num_microbatches()):
                micro = next(buffered)
                assert micro[0][0, 0] // rows == iteration, "every update trains on its own micro-batches"
                self.loss(torch.nn.functional.logsigmoid(x[micro[0][:, 0]]), micro)
            model.num_updates += 1
        return calibration, model

    def resumed(self, settings: dict[str, Any], folder: Path) -> ClipController:
        calibration = megatron_rl.calibrate(settings, self.rl_utils)
        assert calibration is not None
        self.args.save = str(folder)
        calibration._resume(self.args, num_collections=1)
        return calibration.controller


@pytest.fixture
def adapter(one_process: None, rl_utils: Any, monkeypatch: pytest.MonkeyPatch) -> MegatronRl:
    # A table is no GPTModel; the shadow pass is tested on a real one below.
    monkeypatch.setattr(megatron_rl, "framework_shadow_pass", lambda *_: contextlib.nullcontext())
    return MegatronRl(rl_utils)


class TestMegatronRl(AdapterContract):
    pass


def test_number_of_shadow_passes(adapter: MegatronRl, tmp_path: Path) -> None:
    """All six micro-batches before the first update, and those of the second and third update before each."""
    _, model = adapter.collection(SETTINGS, step_of_minibatches(), tmp_path)
    assert model.num_forwards == 6 + 2 + 2


def test_a_step_without_calibration_runs_no_shadow_pass(adapter: MegatronRl, tmp_path: Path) -> None:
    _, model = adapter.collection(SETTINGS | {"start_step": 2}, step_of_minibatches(), tmp_path)
    assert model.num_forwards == 0
    assert (adapter.args.grpo_clamp_eps_lower, adapter.args.grpo_clamp_eps_upper) == (0.4, 0.8)


def test_sequence_packing_is_refused(adapter: MegatronRl) -> None:
    megatron_rl.calibrate(SETTINGS, adapter.rl_utils)
    with pytest.raises(UserError, match="rl-use-sequence-packing"):
        adapter.rl_utils.get_grpo_data_iterator(None, None, None, 0, None, **COLLECTION | {"sequence_packing": True})


class Fp32Module(nn.Module):
    """For an FP32 model what Megatron's Float16Module is for a BF16 one: takes, and has no use for, `fp32_output`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.config = module, module.config

    def forward(self, *args: Any, fp32_output: bool, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def set_input_tensor(self, tensor: Any) -> None:
        self.module.module.set_input_tensor(tensor)


def test_shadow_pass_inside_megatron_lm_is_ours(rl_utils: Any) -> None:
    """Megatron-LM's own scoring of a GPTModel inside our shadow pass gives what our learner's shadow pass gives."""
    import plain_megatron

    plain = plain_megatron.start(whole_rows=True)
    try:
        args = rl_utils.get_args()
        args.seq_length = args.decoder_seq_length = plain.tokens.shape[1]
        args.micro_batch_size = 1
        calibration = megatron_rl.calibrate(SETTINGS, rl_utils)
        assert calibration is not None
        positions = torch.arange(plain.tokens.shape[1])[None]
        micros = [(row[None], None, None, None, positions) for row in plain.tokens]
        mask, expected = plain.response_mask, plain.expected_shadow()
        model = Fp32Module(plain.model)
        shadow = torch.cat(calibration._shadow([model], plain.optimizer, micros))
        torch.testing.assert_close(shadow * mask, expected, rtol=0, atol=2e-5)
        with torch.no_grad():
            fp8 = torch.cat([rl_utils.get_logprobs(model, row[None], positions) for row in plain.tokens])
        assert ((fp8 - shadow) * mask).abs().max() > 1e-3, "outside the shadow pass the model computes in FP8"
    finally:
        plain_megatron.stop()
