"""A plain Megatron-Core GPTModel, as NeMo-Aligner and Megatron-LM train it, with the weights of one of our learners.

Layer spec, attention, norms, rotary embedding and output layer are Megatron's own; only the linears are ours, because
without TransformerEngine nothing else computes in (emulated) FP8. Weights, FP8 recipe and distributed optimizer are those of
the learner's, so both must give the same shadow log-probabilities.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from fp8_learners import MODELS, PROMPT_LENGTH, VOCAB_SIZE, Training, precision_config, trajectories

from megatron_calclip.learner import runtime as runtime_module

MODEL = "two layers"


@dataclass
class Plain:
    """The plain model beside the learner."""

    training: Training
    model: Any
    """DistributedDataParallel around a GPTModel."""
    optimizer: Any
    """Megatron's."""
    tokens: Tensor
    """int64 [B, S]: the sequences of the learner's batch, all of one length."""

    def expected_shadow(self) -> Tensor:
        """[B, S - 1] of the response tokens, 0 elsewhere, by our learner."""
        flat = self.training.shadow_log_probs()
        return flat.view(self.tokens.shape)[:, 1:]

    @property
    def response_mask(self) -> Tensor:
        """float32 [B, S - 1]."""
        mask = torch.zeros(self.tokens.shape[0], self.tokens.shape[1] - 1)
        mask[:, PROMPT_LENGTH - 1 :] = 1.0
        return mask


def start(*, dtype: str = "fp32", recipe: str = "tensorwise", lr: float = 1e-3, whole_rows: bool = False) -> Plain:
    """One process; Megatron's groups are made anew, and stay until `stop`.

    Args:
        dtype: of the parameters.
        recipe: of FP8.
        lr: learning rate of the plain model's optimizer.
        whole_rows: the framework describes each row as one packed sequence, for TransformerEngine's attention.
    """
    config = precision_config(recipe, "TP1", dtype=dtype)
    # Frameworks score at temperature 1 here, and over every column that the output layer has.
    config = replace(config, rollout=replace(config.rollout, temperature=1.0))
    runtime = runtime_module.start(config)
    training = Training.begin(config, runtime, MODEL)

    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megatron_calclip.learner.model import build_optimizer, wrap_chunks
    from megatron_calclip.learner.parallel_linear import Fp8ColumnParallelLinear, Fp8RowParallelLinear, make_fp8
    from megatron_calclip.learner.versions import mlp_submodules

    learner, hf_config = training.learner, MODELS[MODEL]
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    attention, mlp = spec.submodules.self_attention.submodules, mlp_submodules(spec.submodules.mlp)
    attention.linear_qkv, attention.linear_proj = Fp8ColumnParallelLinear, Fp8RowParallelLinear
    mlp.linear_fc1, mlp.linear_fc2 = Fp8ColumnParallelLinear, Fp8RowParallelLinear
    if whole_rows:
        attention.core_attention = _whole_row_attention()
    model = GPTModel(
        config=learner.megatron,
        transformer_layer_spec=spec,
        vocab_size=VOCAB_SIZE,
        max_sequence_length=64,
        position_embedding_type="rope",
        rotary_base=int(hf_config.rope_parameters["rope_theta"]),
        share_embeddings_and_output_weights=False,
        parallel_output=True,
    )
    own = {name: value for name, value in training.bare[0].state_dict().items() if "_extra_state" not in name}
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        own[name] = own[name][:VOCAB_SIZE]
    missing, unexpected = model.load_state_dict(own, strict=False)
    assert not unexpected and all("_extra_state" in name for name in missing), (missing, unexpected)
    make_fp8([model], config.precision, backend="emulated", num_layers=learner.shape.num_layers)
    wrapped = wrap_chunks(config, learner.megatron, [model])
    optimizer = build_optimizer(config, wrapped, lr=lr, min_lr=0.0)
    lengths = trajectories().lengths
    assert (lengths == lengths[0]).all()
    return Plain(training, wrapped[0], optimizer, trajectories().tokens.view(len(lengths), -1))


def _whole_row_attention() -> type:
    """Megatron's own attention for a row that is one packed sequence, which it leaves to TransformerEngine otherwise."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class WholeRowAttention(DotProductAttention):
        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any, **kwargs: Any
        ) -> Tensor:
            num_tokens = query.shape[0]
            assert packed_seq_params.cu_seqlens_q.tolist() == [0, num_tokens]
            hidden = torch.ones(1, 1, num_tokens, num_tokens, dtype=torch.bool).triu(1)
            return super().forward(query[:, None], key[:, None], value[:, None], hidden, **kwargs)

    return WholeRowAttention


def stop() -> None:
    """Give the groups back."""
    runtime_module.stop()
