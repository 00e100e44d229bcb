"""Logits of a checkpoint for given tokens: by Megatron's model for a distributed checkpoint, by transformers for a HF one.

For `tools/convert/verify.py --logits`: two programs that share no code compute the same function from two files. The
distributed checkpoint is loaded by Megatron's own loader into the model of `learner/model.py`; nothing of our reader or
of the mapping takes part. In FP32, in one process.

Left out on purpose: mixtures of experts, which the learner does not run, and models that do not fit into memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_calclip.config import Config, PrecisionConfig
from megatron_calclip.errors import UserError
from megatron_calclip.learner import runtime
from megatron_calclip.weights.dist_load import DistCheckpoint
from megatron_calclip.weights.mapping import ModelShape


@torch.no_grad()
def transformers_logits(folder: Path, tokens: Tensor) -> Tensor:
    """Logits [t, vocab_size] in FP32 of a HF checkpoint for int64 tokens [t]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    logits: Tensor = model(tokens[None]).logits[0]
    return logits


@torch.no_grad()
def megatron_logits(weights: Path, hf_folder: Path, tokens: Tensor) -> Tensor:
    """Logits [t, vocab_size] in FP32 of a Megatron checkpoint.

    Args:
        weights: folder of the distributed checkpoint.
        hf_folder: with the model's `config.json`.
        tokens: int64 [t], one sequence.

    Raises:
        UserError: for an architecture that the learner does not run.
    """
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(hf_folder, local_files_only=True)
    shape = ModelShape.from_hf_config(hf_config)
    if shape.num_experts:
        raise UserError("--logits", f"cannot run {shape.model_type} in Megatron here; compare bits instead")
    config = Config(precision=PrecisionConfig(params_dtype="fp32"))
    started = runtime.start(config)
    try:
        return _forward(config, hf_config, shape, started, weights, tokens).cpu()
    finally:
        runtime.stop()


def _forward(
    config: Config, hf_config: Any, shape: ModelShape, started: runtime.Runtime, weights: Path, tokens: Tensor
) -> Tensor:
    from megatron.core import dist_checkpointing

    from megatron_calclip.learner import model
    from megatron_calclip.learner.attention import PackedTokens
    from megatron_calclip.learner.packing import pack

    megatron = model.transformer_config(config, hf_config)
    (chunk,) = model.build_chunks(config, hf_config, shape, megatron, started)
    # Layers are stacked in checkpoints of other runs; their names then carry no number.
    stacked = "decoder.layers.self_attention.linear_qkv.weight" in DistCheckpoint(weights).tensors
    state = chunk.sharded_state_dict(metadata={"non_homogeneous_layers": not stacked, "singleton_local_shards": False})
    chunk.load_state_dict(dist_checkpointing.load({"model": state}, str(weights))["model"])
    layout = pack([0], [len(tokens)], [0], cp_size=1, cp_rank=0, align=1)
    packed = PackedTokens.of(layout, thd=model.uses_transformer_engine(config.precision), device=started.device)
    hidden = chunk(
        tokens[None].to(started.device), layout.positions[None].to(started.device), None, packed_seq_params=packed
    )
    output = chunk.shared_embedding_or_output_weight() if shape.tied else chunk.output_layer.weight
    return torch.as_tensor(hidden[0] @ output[: shape.vocab_size].t())
