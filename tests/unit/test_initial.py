"""Random weights: their spread by hand, ties, and independence of the process's own random numbers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from megatron_calclip.initial import random_weights


def config(*, tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=tied,
    )


@pytest.mark.parametrize("tied", [False, True])
def test_scaled_spread_by_hand(tied: bool) -> None:
    tensors = random_weights(config(tied=tied), init="scaled", seed=0)
    layer = "model.layers.7."
    expected = {
        "model.embed_tokens.weight": 0.5,
        f"{layer}self_attn.q_proj.weight": 1 / 8,  # 1 / sqrt(64)
        f"{layer}mlp.up_proj.weight": 1 / 8,
        f"{layer}self_attn.o_proj.weight": 1 / 32,  # 1 / sqrt(64 * 2 * 8)
        f"{layer}mlp.down_proj.weight": 1 / 64,  # 1 / sqrt(256 * 2 * 8)
        "lm_head.weight": 0.5 if tied else 1 / 8,
    }
    for name, std in expected.items():  # at least 4,096 draws: the deviation of their spread is 1.1%
        assert float(tensors[name].std()) == pytest.approx(std, rel=0.05), name
    assert bool((tensors["model.norm.weight"] == 1).all())


def test_default_is_transformers_own_and_seeds_count() -> None:
    torch.manual_seed(3)
    expected = AutoModelForCausalLM.from_config(config(tied=False), dtype=torch.float32).state_dict()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    for init in ("default", "scaled"):
        first, again, other = (random_weights(config(tied=False), init=init, seed=seed) for seed in (3, 3, 4))
        name = "model.layers.0.mlp.up_proj.weight"
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])
        assert torch.equal(first[name], expected[name]) == (init == "default")
    assert torch.equal(torch.get_rng_state(), state)
