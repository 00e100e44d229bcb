"""The contract on PPO of the released wheel nemo-aligner 0.7.0, in its light environment."""

# ruff: noqa: E402 (the stubs have to be in place first)
from __future__ import annotations

import os

import pytest

if os.environ.get("NEMO_ALIGNER_SRC"):
    pytest.skip("NEMO_ALIGNER_SRC is set, which is another version's turn", allow_module_level=True)
pytest.importorskip(
    "nemo_aligner", reason="nemo-aligner 0.7.0 is not installed; tests/integrations/run.sh nemo_aligner"
)

import stubs

stubs.install()

from pathlib import Path

from aligner_adapter import AlignerAdapter
from contract import AdapterContract

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
