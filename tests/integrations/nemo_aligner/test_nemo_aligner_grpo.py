"""The contract on GRPO of a checkout of NeMo-Aligner's branch llama-nemotron-dev, in the light environment."""

# ruff: noqa: E402 (the checkout has to be on the path first)
from __future__ import annotations

import os
import sys

import pytest

SOURCE = os.environ.get("NEMO_ALIGNER_SRC")
if not SOURCE:
    pytest.skip(
        "NEMO_ALIGNER_SRC names no checkout of NeMo-Aligner's branch llama-nemotron-dev", allow_module_level=True
    )
sys.path.insert(0, SOURCE)

import stubs

stubs.install()

from pathlib import Path
from typing import Any

import torch
from aligner_adapter import AlignerAdapter
from contract import SETTINGS, AdapterContract, make_minibatch

from megatron_calclip.integrations.nemo_aligner import calibrate, calibrated_trainer

pytestmark = pytest.mark.integration


def make_adapter(**loss_settings: Any) -> AlignerAdapter:
    from nemo_aligner.experimental.grpo.algorithms import grpo
    from nemo_aligner.experimental.grpo.models.nlp.gpt import megatron_gpt_grpo_actor

    return AlignerAdapter(
        megatron_gpt_grpo_actor, grpo, trainer="GRPOTrainer", section="grpo", loss_settings=loss_settings
    )


@pytest.fixture(params=[False, True], ids=["micro-batch mean", "dapo.token_loss"])
def adapter(request: pytest.FixtureRequest) -> AlignerAdapter:
    return make_adapter(ratio_eps_low=0.2, ratio_eps_high=0.2, dapo={"token_loss": request.param, "clip_higher": False})


@pytest.mark.usefixtures("one_process")
class TestGRPO(AdapterContract):
    pass


def test_shadow_pass_inside_nemo_aligner_is_ours() -> None:
    from aligner_loop import check_shadow

    check_shadow(make_adapter(dapo={"clip_higher": False}))


def test_measuring_disturbs_nothing(tmp_path: Path) -> None:
    from aligner_loop import check_loop

    check_loop(make_adapter(dapo={"clip_higher": False}), tmp_path)


@pytest.mark.usefixtures("one_process")
def test_importance_weights_are_truncated() -> None:
    """The real trainer's are exp(log pi_old - log mu) without a cap."""
    adapter = make_adapter(dapo={"clip_higher": False})
    data = make_minibatch(7)
    rollouts = {
        "text": torch.zeros(6, 1),
        "rewards": torch.arange(6.0),
        "is_end": torch.ones(6),
        "prompt_lengths": torch.ones(6, dtype=torch.long),
        "response_lengths": torch.full((6,), 13),
        "logprobs": data.old,
        "init_logprobs": data.old,
        "response_tokens": torch.ones(6, 13, dtype=torch.long),
        "response_trt_lps": torch.cat([torch.zeros(6, 1), data.sampler], dim=1)[:, :13],
    }
    settings = {
        "length_penalty_enabled": False,
        "use_leave_one_out_baseline": True,
        "normalize_rewards": False,
        "importance_sample_correct": True,
    }

    def weights(calclip: dict[str, Any] | None, cls: type) -> torch.Tensor:
        trainer = cls.__new__(cls)
        trainer.cfg = adapter_cfg(settings)
        if calclip is not None:
            trainer.model = adapter.actor(adapter.module.MegatronGPTActorModel, torch.nn.Module(), calclip, rows=6)
            trainer.model._calclip_loss = trainer.model.cfg.grpo
            trainer.model.calclip_check = lambda: None
            trainer.ckpt_callback = object()
            trainer._calclip_start()
        return trainer.create_grpo_training_data_from_inferences(rollouts)[0]["importance_correction"]

    own = weights(None, adapter.trainer_module.GRPOTrainer)
    calibrated = calibrated_trainer(adapter.trainer_module.GRPOTrainer)
    assert own.max() > 2
    assert torch.equal(weights({"enabled": False}, calibrated), own)
    assert torch.equal(weights(SETTINGS, calibrated), own.clamp(max=2.0))
    assert torch.equal(weights(SETTINGS | {"importance_cap": 1.5}, calibrated), own.clamp(max=1.5))


def adapter_cfg(settings: dict[str, Any]) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.create(settings)


def test_calibrate_replaces_what_the_script_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """`from ... import GRPOTrainer` finds the calibrated one, under the name that checkpoints write down."""
    adapter = make_adapter()
    own_actor, own_trainer = adapter.module.MegatronGPTActorModel, adapter.trainer_module.GRPOTrainer
    monkeypatch.setattr(adapter.module, "MegatronGPTActorModel", own_actor)
    monkeypatch.setattr(adapter.trainer_module, "GRPOTrainer", own_trainer)
    calibrate("grpo")
    for module, own in ((adapter.module, own_actor), (adapter.trainer_module, own_trainer)):
        calibrated = getattr(module, own.__name__)
        assert issubclass(calibrated, own) and calibrated is not own
        assert (calibrated.__module__, calibrated.__name__) == (own.__module__, own.__name__)
    with pytest.raises(ImportError, match=r"NeMo-Aligner, .* is needed"):
        monkeypatch.setitem(sys.modules, "nemo_aligner.algorithms.ppo", None)
        calibrate("ppo")
