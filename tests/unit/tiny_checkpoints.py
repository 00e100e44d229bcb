"""Random HF checkpoints of every architecture, for the tests of weights and conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

NUM_LAYERS = 4
SIZES: dict[str, Any] = dict(
    vocab_size=100,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=NUM_LAYERS,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
MOE: dict[str, Any] = dict(num_experts=4, moe_intermediate_size=16, num_experts_per_tok=2, head_dim=8)
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-tied": Qwen2Config(**SIZES | {"tie_word_embeddings": True}),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    # Layer 1 has a dense MLP, the others have experts.
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **MOE, mlp_only_layers=[1]),
}


def write_checkpoint(config: PretrainedConfig, folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """Have transformers write a model whose every value is random; biases start at 0 and norms at 1 otherwise."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model.save_pretrained(folder)
    return folder
