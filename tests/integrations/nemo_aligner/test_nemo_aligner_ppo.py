"""The contract on PPO of the released wheel nemo-aligner 0.7.0, in its light environment."""

from __future__ import annotations

import os

import pytest

if os.environ.get("NEMO_ALIGNER_SRC"):
    pytest.skip("NEMO_ALIGNER_SRC is set, which is another version's turn", allow_module_level=True)
pytest.importorskip("nemo_aligner", reason="nemo-aligner 0.7.0 is not installed; tests/integrations/run.sh nemo_aligner")

import stubs

stubs.install()

from aligner_adapter import AlignerAdapter
from contract import AdapterContract

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_process")]


@pytest.fixture
def adapter() -> AlignerAdapter:
    from nemo_aligner.algorithms import ppo
    from nemo_aligner.models.nlp.gpt import megatron_gpt_ppo_actor

    return AlignerAdapter(megatron_gpt_ppo_actor, ppo, trainer="PPOTrainer", section="ppo")


class TestPPO(AdapterContract):
    pass
