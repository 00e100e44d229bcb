"""HF config -> Megatron GPTModel chunks, DistributedDataParallel, distributed optimizer, learning-rate schedule.

One code path for CPU and CUDA. What differs is the layer spec (TransformerEngine's where it is present on a GPU,
else our own: SDPA attention, RMSNorm, Megatron's parallel linears) and the fusions that need CUDA kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_calclip.config import Config, PrecisionConfig
from megatron_calclip.hf import FIXED_ROPE_SCALINGS
from megatron_calclip.learner import cpu
from megatron_calclip.learner.attention import PackedAttention, PackedRotaryEmbedding
from megatron_calclip.learner.parallel_linear import Fp8ColumnParallelLinear, Fp8RowParallelLinear, make_fp8
from megatron_calclip.learner.pointwise import rms_norm, swiglu
from megatron_calclip.learner.runtime import Runtime
from megatron_calclip.learner.versions import mlp_submodules
from megatron_calclip.precision.backend import choose, transformer_engine_present
from megatron_calclip.precision.recipes import megatron_fields
from megatron_calclip.weights.mapping import ModelShape

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def uses_transformer_engine(precision: PrecisionConfig) -> bool:
    """Whether layers come from TransformerEngine: it is present, and no other FP8 backend was asked for."""
    if precision.recipe == "bf16" and precision.backend != "te":
        return precision.backend == "auto" and transformer_engine_present()
    return choose(precision) == "te"


def transformer_config(config: Config, hf_config: Any) -> TransformerConfig:
    """Megatron's configuration of the layers for this model and layout."""
    p = config.parallel
    dtype = DTYPES[config.precision.params_dtype]
    on_gpu = not cpu.needed()
    uses_te = uses_transformer_engine(config.precision)
    inv_freq_scale = _rope(hf_config)[1]
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
    recompute: dict[str, Any] = {}
    if p.recompute != "none":
        recompute["recompute_granularity"] = p.recompute
    if p.recompute == "full":
        recompute |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    megatron = TransformerConfig(
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        ffn_hidden_size=hf_config.intermediate_size,
        num_attention_heads=hf_config.num_attention_heads,
        num_query_groups=hf_config.num_key_value_heads,
        kv_channels=head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=hf_config.model_type == "qwen2",
        qk_layernorm=hf_config.model_type == "qwen3",
        # YaRN multiplies cosine and sine by a factor; on q and k that is its square on the logits.
        softmax_scale=inv_freq_scale**2 * head_dim**-0.5,
        hidden_dropout=0.0,  # an importance ratio of unmoved weights must be 1
        attention_dropout=0.0,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=p.tp,
        pipeline_model_parallel_size=p.pp,
        virtual_pipeline_model_parallel_size=p.vpp,
        context_parallel_size=p.cp,
        sequence_parallel=p.sequence_parallel,
        # Packed micro-batches differ in length. Megatron's exchange of shapes takes forward for backward where both
        # neighbours are one rank (interleaved, PP 2), so the interleaved schedule gets micro-batches of one length.
        variable_seq_lengths=p.vpp is None,
        overlap_p2p_comm=p.vpp is not None,
        batch_p2p_comm=p.vpp is None,
        moe_token_dispatcher_type="alltoall",  # the only dispatcher that allows that, even in a dense model
        calculate_per_token_loss=True,  # losses arrive divided by GLOBAL counts; Megatron must only sum
        deterministic_mode=config.train.deterministic,
        use_cpu_initialization=not on_gpu,
        perform_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=on_gpu,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        apply_rope_fusion=uses_te,
        persist_layer_norm=on_gpu,
        **recompute,
        **(megatron_fields(config.precision) if uses_te else {}),
    )
    # Read by our FP8 linears at every forward pass, as Megatron reads `fp8` for TransformerEngine's.
    megatron.fp8_active = config.precision.recipe != "bf16" and not uses_te
    # Megatron would divide gradients by a token count; ours are already normalised.
    megatron.finalize_model_grads_func = lambda model, _num_tokens=None, **kw: finalize_model_grads(model, None, **kw)
    return megatron


def _rope(hf_config: Any) -> tuple[Tensor, float]:
    """Inverse frequencies [d / 2] with their scaling, and the factor on cosine and sine (YaRN), by transformers' rules."""
    parameters = hf_config.rope_parameters
    kind = parameters["rope_type"]
    if kind == "default":
        head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        return 1.0 / (parameters["rope_theta"] ** exponent), 1.0
    assert kind in FIXED_ROPE_SCALINGS, "checked when the configuration is read"
    inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
    return inv_freq, factor


class RMSNorm(torch.nn.Module):
    """As Megatron builds a norm; marks its weight for the gradient all-reduce of sequence parallelism.

    Args:
        config: `params_dtype` and `sequence_parallel` are read.
        hidden_size: width of the last dimension.
        eps: added to the mean square.
        _: what else Megatron hands to a norm.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., hidden size]; FP32 inside, the result in the dtype of `x`."""
        return rms_norm(x, self.weight, self.eps)


class GatedMLP(MLP):
    """Megatron's MLP where it is a SwiGLU without biases, as in all models supported here."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor | None]:
        """Hidden states [t, 1, h] to (the MLP's output, no bias)."""
        gate_and_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(swiglu(gate_and_up))


class HiddenOutput(ColumnParallelLinear):
    """The output layer, holding its weight but handing the hidden states through.

    Only response tokens need logits, and their log-probabilities are reduced without FP32 copies of the logits
    (`learner/logprobs.py`); both happen in the loss function, on the rows that it selects.
    """

    def forward(self, input_: Tensor, weight: Any = None, runtime_gather_output: Any = None) -> tuple[Tensor, None]:
        """Hidden states [t, 1, h], whole along the tokens; in backward their gradients are summed over TP."""
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(input_, group=self.tp_group), None
        return copy_to_tensor_model_parallel_region(input_, group=self.tp_group), None


def _layer_spec(config: TransformerConfig, vp_stage: int | None, *, uses_te: bool) -> TransformerBlockSubmodules:
    if uses_te:
        from megatron.core.extensions.transformer_engine import TENorm

        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        norm: Any = TENorm
    else:
        layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
        norm = RMSNorm
        block = layer.submodules
        block.input_layernorm = block.pre_mlp_layernorm = norm
        attention = block.self_attention.submodules
        attention.core_attention = PackedAttention
        attention.linear_qkv, attention.linear_proj = Fp8ColumnParallelLinear, Fp8RowParallelLinear
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = norm
        mlp = mlp_submodules(block.mlp)
        mlp.linear_fc1, mlp.linear_fc2 = Fp8ColumnParallelLinear, Fp8RowParallelLinear
    num_layers = get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=norm)


def build_chunks(
    config: Config, hf_config: Any, shape: ModelShape, megatron: TransformerConfig, runtime: Runtime
) -> list[GPTModel]:
    """This rank's model chunks (one, or `parallel.vpp` of them), with random weights."""
    chunks = []
    for stage in range(config.parallel.vpp or 1):
        vp_stage = stage if config.parallel.vpp else None
        model = GPTModel(
            config=megatron,
            transformer_layer_spec=_layer_spec(megatron, vp_stage, uses_te=uses_transformer_engine(config.precision)),
            vocab_size=shape.padded_vocab_size,
            max_sequence_length=config.model.max_sequence_length,
            pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )
        model.rotary_pos_emb = PackedRotaryEmbedding(_rope(hf_config)[0].to(runtime.device))
        if model.post_process:
            # GPTModel names its output layer's class itself; the weights stay what they are, only forward changes.
            model.output_layer.__class__ = HiddenOutput
        if not uses_transformer_engine(config.precision):
            for layer in model.decoder.layers:
                layer.mlp.__class__ = GatedMLP  # the versions of Megatron name its class in different places
        chunks.append(model.to(runtime.device))
    if megatron.fp8_active:
        backend = choose(config.precision)
        assert backend != "te"
        make_fp8(chunks, config.precision, backend=backend, num_layers=shape.num_layers)
    return chunks


def wrap_chunks(config: Config, megatron: TransformerConfig, chunks: list[GPTModel]) -> list[DistributedDataParallel]:
    """Data parallelism with gradients in FP32, sharded for the distributed optimizer."""
    p = config.parallel
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=p.overlap_grad_reduce,
        overlap_param_gather=p.overlap_param_gather,
        fp8_param_gather=megatron.fp8_param,
    )
    wrapped = [
        DistributedDataParallel(megatron, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    if p.overlap_grad_reduce:
        syncs = [chunk.no_sync for chunk in wrapped]
        megatron.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
    return wrapped


def build_optimizer(config: Config, chunks: list[DistributedDataParallel], *, lr: float, min_lr: float) -> Any:
    """Megatron's distributed optimizer: AdamW on FP32 masters, sharded over data parallelism."""
    o = config.optimizer
    dtype = DTYPES[config.precision.params_dtype]
    optimizer_config = MegatronOptimizerConfig(
        optimizer="adam",
        lr=lr,
        min_lr=min_lr,
        weight_decay=o.weight_decay,
        adam_beta1=o.beta1,
        adam_beta2=o.beta2,
        adam_eps=o.epsilon,
        clip_grad=o.clip_grad,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
        overlap_param_gather=config.parallel.overlap_param_gather,
        fp8_recipe=chunks[0].config.fp8_recipe if chunks[0].config.fp8 else None,  # the model's own
    )
    with cpu.cuda_type_names():
        optimizer = get_megatron_optimizer(optimizer_config, chunks)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, torch.optim.Adam):  # without TransformerEngine or apex; AdamW is one, too
            for group in part.optimizer.param_groups:
                group["fused"], group["foreach"] = True, False  # one pass over memory, not a dozen
    return optimizer


def build_scheduler(
    optimizer: Any, *, lr: float, min_lr: float, weight_decay: float, decay: str, warmup_steps: int, num_steps: int
) -> OptimizerParamScheduler:
    """Megatron's learning-rate schedule, counted in RL steps."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=lr,
        min_lr=min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=num_steps,
        lr_decay_style=decay,
        start_wd=weight_decay,
        end_wd=weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
