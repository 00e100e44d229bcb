"""Random weights for models made from scratch.

What: transformers' own initialisation, or a scaled one for models that are deep and narrow. transformers draws all
matrices with one small standard deviation (0.02), which suits widths of thousands; at a width of a hundred, signals
and gradients of a deep model nearly vanish, and a tiny run spends its steps on growing them. Left out on purpose:
Megatron's initialisation, which depends on the layout.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

_EMBEDDING_STD = 0.5
"""Standard deviation of scaled embeddings: as large as what a layer adds to them, so that depth does not drown them."""


def random_weights(hf_config: Any, *, init: Literal["default", "scaled"], seed: int) -> dict[str, Tensor]:
    """Float32 weights by their HF names; the same for any layout, and torch's own generator is left as it was.

    Args:
        hf_config: of the model.
        init: `default` is transformers'. `scaled` draws a matrix with standard deviation 1 / sqrt(inputs), one that
            writes to the residual stream with 1 / sqrt(2 * layers) of that (GPT-2, Radford et al., 2019, section 2.3).
        seed: of all of them.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tensors: dict[str, Tensor] = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32).state_dict()
        if init == "scaled":
            for name, tensor in tensors.items():
                tied = name == "lm_head.weight" and hf_config.tie_word_embeddings
                if tensor.dim() == 2 and not tied:
                    tensor.normal_(std=_scaled_std(name, tensor.shape[1], hf_config.num_hidden_layers))
    return tensors


def _scaled_std(name: str, num_inputs: int, num_layers: int) -> float:
    if name == "model.embed_tokens.weight":
        return _EMBEDDING_STD
    writes_to_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
    return float((num_inputs * (2 * num_layers if writes_to_residual else 1)) ** -0.5)
