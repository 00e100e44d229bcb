"""The contract on PPO of the released wheel nemo-aligner 0.7.0, in its light environment."""

# ruff: noqa: E402 (the stubs have to be in place first)
from __future__ import annotations

import os

import pytest

if os.environ.get("NEMO_ALIGNER_SRC"):
    pytest.skip("NEMO_ALIGNER_SRC is set, which is another version's turn", allow_module_level=True)
# Not "nemo_aligner": this folder would pass for a package of that name.
pytest.importorskip(
    "nemo_aligner.package_info", reason="nemo-aligner 0.7.0 is not installed; tests/integrations/run.sh nemo_aligner"
)

import stubs

stubs.install()

from pathlib import Path

import torch
from aligner_adapter import AlignerAdapter, Table
from contract import SETTINGS, AdapterContract, make_minibatch

from megatron_calclip.integrations.controller import ClipController
from megatron_calclip.integrations.nemo_aligner import calibrated_actor

pytestmark = pytest.mark.integration


@pytest.fixture
def adapter() -> AlignerAdapter:
    from nemo_aligner.algorithms import ppo
    from nemo_aligner.models.nlp.gpt import megatron_gpt_ppo_actor

    return AlignerAdapter(megatron_gpt_ppo_actor, ppo, trainer="PPOTrainer", section="ppo")


@pytest.mark.usefixtures("one_process")
class TestPPO(AdapterContract):
    pass


def test_shadow_pass_inside_nemo_aligner_is_ours(adapter: AlignerAdapter) -> None:
    from aligner_loop import check_shadow

    check_shadow(adapter)


def test_measuring_disturbs_nothing(adapter: AlignerAdapter, tmp_path: Path) -> None:
    from aligner_loop import check_loop

    check_loop(adapter, tmp_path)


@pytest.mark.usefixtures("one_process")
def test_unfinished_answers_do_not_count(adapter: AlignerAdapter) -> None:
    """PPO's loss leaves sequences with `is_end` 0 out."""
    data = make_minibatch(1)
    rows = torch.arange(len(data.old))
    model = Table(data.x)
    actor = adapter.actor(calibrated_actor(adapter.module.MegatronGPTActorModel), model, SETTINGS, rows=len(rows))
    controller = ClipController.from_settings(SETTINGS)
    assert controller is not None
    measurement = controller.begin(1, num_updates=2)
    assert measurement is not None
    batch = adapter.batch(data, rows) | {
        "calclip_shadow_old": data.shadow_old,
        "calclip_shadow_new": data.shadow,
        "calclip_rows": rows,
        "is_end": (rows != 2).float(),
    }
    actor._calclip_add(measurement, batch, model(batch["response_tokens"]))
    report = controller.finish(measurement)
    counted = data.mask[(rows != 2) & (data.advantages[:, 0] != 0)].sum()
    assert report.num_negative + report.num_positive == counted
