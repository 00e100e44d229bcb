"""Bytes on the device of every pipeline rank, term by term, in each phase of a step.

The terms follow the learner's code: what each operation keeps for its backward pass (`learner/model.py`,
`precision/linear.py`, `learner/attention.py`), how many micro-batches 1F1B keeps at once, what Megatron's distributed
optimizer holds. For our own layers they are held to the live tensor bytes of real steps on a CPU
(`tests/distributed/check_plan.py`); for TransformerEngine's layers they are derived from what its modules save, as in
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), and not yet checked on a GPU.

Sizes are worst cases of the configuration: a full micro-batch, every token of which is scored. Left out on purpose: the
allocator's fragmentation, the CUDA context and NCCL's buffers, for which `plan.py` keeps a reserve.

Legend: t tokens of a micro-batch on one context-parallel rank, a bytes of an activation, c bytes of an FP8 code.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron_calclip.config import Config, EmulationConfig
from megatron_calclip.learner.logprobs import CPU_CHUNK_ELEMENTS, CUDA_CHUNK_ELEMENTS
from megatron_calclip.learner.packing import MAX_ATTENTION_PADDING
from megatron_calclip.planning.devices import Device
from megatron_calclip.planning.parameters import RankParameters
from megatron_calclip.weights.mapping import ModelShape

_FP32 = 4


@dataclass(frozen=True)
class Storage:
    """How many bytes the chosen layers keep numbers in."""

    transformer_engine: bool
    """TransformerEngine's layers, else our own."""
    activation: int
    """a: 2 in BF16, 4 in FP32."""
    code: int
    """c; 0 without FP8."""
    weight_copies: int
    """FP8 copies of a weight: one along each contracted dimension, one in all if one scale serves both."""

    @classmethod
    def of(cls, config: Config, device: Device) -> Storage:
        """What a process on this device would choose; see `precision.backend.choose`."""
        precision = config.precision
        default_dials = precision.emulation == EmulationConfig()
        engine = device.is_gpu and precision.backend in ("auto", "te") and default_dials
        activation = 2 if precision.params_dtype == "bf16" else _FP32
        if precision.recipe == "bf16":
            return cls(engine, activation, 0, 0)
        per_tensor = precision.recipe in ("tensorwise", "tensorwise_delayed")
        if engine:
            return cls(True, activation, 1, 2)  # Hopper multiplies along rows only, so that both directions are kept
        code = 1 if precision.backend == "scaled_mm" else 2
        if precision.recipe == "blockwise" and precision.power_of_two_scales is False:
            code = 4  # dequantised to FP32
        return cls(False, activation, code, 1 if per_tensor or precision.recipe == "blockwise" else 2)


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank of a pipeline stage."""

    stage: int
    num_parameters: int
    weights: float
    """Live parameters, in BF16 or FP32."""
    gradients: float
    """FP32 sums over micro-batches."""
    optimizer: float
    """FP32 masters (with BF16 parameters) and two moments, divided over data parallelism."""
    fp8_weights: float
    """FP8 copies of weights that are kept between steps, or made anew for every micro-batch in flight."""
    activations: float
    """What backward passes need, of all micro-batches in flight."""
    head: float
    """Logits, their hidden states and work buffers, of one micro-batch; on the last stage."""
    head_backward: float
    """What the backward pass of the output layer needs besides."""
    layer_backward: float
    """What the backward pass of one decoder layer needs besides; with recomputation, its activations too."""
    layer_forward: float
    """What the forward pass of one layer needs where nothing is kept for backward."""
    shadow: float
    """BF16 weights of the shadow pass, where live ones are FP8."""
    weight_sync: float
    """Whole tensors on their way to the sampler."""
    sampler: float
    """Weights of the embedded engine, or what vLLM servers on the same GPUs take."""
    kv_cache: float
    """Of the embedded engine, while it samples."""

    @property
    def static(self) -> float:
        """What is there all the time once the optimizer has stepped."""
        return self.weights + self.gradients + self.optimizer + self.sampler

    @property
    def phases(self) -> dict[str, float]:
        """Peak bytes of each phase of a step."""
        held = self.static + self.fp8_weights
        forward = max(self.layer_forward, self.head)
        return {
            "rollout": held + self.kv_cache,
            "log-probs": held + forward,
            "shadow": held + self.shadow + forward,
            "update": held + self.activations + max(self.head + self.head_backward, self.layer_backward),
            "weight sync": held + self.weight_sync,
        }

    @property
    def peak(self) -> float:
        """The largest phase."""
        return max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        """Its name."""
        return max(self.phases, key=self.phases.__getitem__)

    def terms(self) -> dict[str, float]:
        """Bytes by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("stage", "num_parameters")}


@dataclass(frozen=True)
class MicroBatch:
    """The largest micro-batch of a rank."""

    tokens: int
    """t."""
    scored: int
    """Tokens of it that get logits."""
    in_flight: float
    """Micro-batches whose activations a rank holds at once; a fraction where ranks hold single chunks."""


@dataclass(frozen=True)
class _Widths:
    """Sizes of one decoder layer on a tensor-parallel rank, and of the micro-batch that goes through it."""

    h: int
    q: float
    kv: float
    f: float
    heads: float
    t: int
    """Tokens."""
    t_s: float
    """Tokens where sequence parallelism divides them."""

    @classmethod
    def of(cls, config: Config, shape: ModelShape, tokens: int) -> _Widths:
        p = config.parallel
        return cls(
            h=shape.hidden_size,
            q=shape.q_size / p.tp,
            kv=shape.kv_size / p.tp,
            f=shape.ffn_size / p.tp,
            heads=shape.num_heads / p.tp,
            t=tokens,
            t_s=tokens / (p.tp if p.sequence_parallel else 1),
        )


def layer_activations(
    config: Config, shape: ModelShape, storage: Storage, *, tokens: int, fp8: bool, recompute: str
) -> float:
    """Bytes that one decoder layer keeps for its backward pass.

    Args:
        config: the layout.
        shape: the model.
        storage: see there.
        tokens: t.
        fp8: whether this layer is in FP8.
        recompute: as `parallel.recompute`.
    """
    w, a, te = _Widths.of(config, shape, tokens), storage.activation, storage.transformer_engine
    if recompute == "full":
        return a * w.t_s * w.h
    residual = 2 * a * w.t_s * w.h + 2 * _FP32 * w.t_s  # inputs of both norms, and their scales
    fc1_output = a * w.t * 2 * w.f
    if fp8:  # codes; those of a gathered input are kept whole by our layers and cut by TransformerEngine's
        inputs = storage.code * (2 * (w.t_s if te else w.t) * w.h + w.t * (w.q + w.f))
    else:
        inputs = a * (2 * w.t_s * w.h + w.t * w.f + (0 if te else w.t * w.q))
    attention = _attention_activations(config, shape, storage, w, selective=recompute == "selective")
    return residual + fc1_output + inputs + attention


def _attention_activations(
    config: Config, shape: ModelShape, storage: Storage, w: _Widths, *, selective: bool
) -> float:
    """What lies between the qkv linear and the output projection."""
    a, has_norms = storage.activation, shape.model_type.startswith("qwen3")
    qkv = a * w.t * (w.q + 2 * w.kv)
    norms = a * w.t * w.q + _FP32 * w.t * (w.heads + w.kv / shape.head_dim) if has_norms else 0.0
    if storage.transformer_engine:  # v in the qkv linear's output, q and k rotated; the result with its log-sums
        inputs = qkv + a * w.t * (w.q + w.kv) + norms
        result = a * w.t * w.q + _FP32 * w.t * w.heads
        # The projection's input is the result itself, or codes of it.
        return inputs + (0.0 if selective and storage.code else result)
    if selective:  # the inputs of core attention; v, and without norms k, lie in qkv; grouped heads of q are copied
        copied = w.q + w.kv if has_norms else w.q if w.kv < w.q else 0.0
        return qkv + a * w.t * copied + norms
    padded = MAX_ATTENTION_PADDING * w.t
    kept = a * padded * (2 * w.q + 2 * w.kv * config.parallel.cp) + _FP32 * padded * w.heads
    rotation = 2 * a * w.t * shape.head_dim if a < _FP32 else 0.0
    return kept + rotation + norms + (qkv if has_norms else 0.0)


def _layer_workspaces(
    config: Config, shape: ModelShape, storage: Storage, w: _Widths, *, num_linear: float
) -> tuple[float, float]:
    """Bytes that one layer needs while it runs backward, and forward where nothing is kept.

    Args:
        config: the run.
        shape: the model.
        storage: see there.
        w: sizes.
        num_linear: parameters of the layer's linears on this rank.
    """
    a, recompute, fp8 = storage.activation, config.parallel.recompute, storage.code > 0
    largest_weight = max(2 * w.f * w.h, (w.q + 2 * w.kv) * w.h)
    gathered = a * w.t * w.h if config.parallel.sequence_parallel else 0.0
    mlp, attention = a * w.t * (2 * w.f + 2 * w.h), 0.0
    if not storage.transformer_engine:  # in FP32: operands, result, and the gradients of all of them
        attention = _FP32 * MAX_ATTENTION_PADDING * w.t * 4 * (w.q + w.kv * config.parallel.cp)
    backward = max(mlp, attention) + a * largest_weight + gathered
    # The MLP's two products, the residual stream before and after attention, the embedding, cosines and sines.
    forward = a * (w.t * 3 * w.f + w.t_s * 5 * w.h) + 2 * _FP32 * w.t * shape.head_dim + gathered
    if fp8:
        backward += max(storage.code * storage.weight_copies - a, 0) * w.t * 2 * w.f  # codes of the MLP's gradient
        forward += storage.code * (w.t * w.f + largest_weight)
    if recompute != "none":
        whole, kept = (
            layer_activations(config, shape, storage, tokens=w.t, fp8=fp8, recompute=kind)
            for kind in ("none", recompute)
        )
        backward += whole - kept
        if fp8 and not config.precision.fp8_param and not storage.transformer_engine:
            backward += storage.code * num_linear
    return backward, forward


def _head(
    config: Config, shape: ModelShape, device: Device, storage: Storage, w: _Widths, *, scored: int
) -> tuple[float, float]:
    """Bytes of the output layer for one micro-batch: what is there at its end, and what its backward pass adds.

    Args:
        config: the run.
        shape: the model.
        device: the size of work buffers depends on it.
        storage: see there.
        w: sizes.
        scored: tokens that get logits.
    """
    a, tp = storage.activation, config.parallel.tp
    columns = shape.padded_vocab_size / tp
    gathered = w.t * w.h if config.parallel.sequence_parallel else 0
    hidden = a * (w.t_s * w.h + gathered + scored * w.h)
    chunk = CUDA_CHUNK_ELEMENTS if device.is_gpu else CPU_CHUNK_ELEMENTS
    buffers = 2 * _FP32 * min(chunk, scored * columns)
    gradient = a * columns * w.h
    if config.train.fused_head:  # FP32 sums of the gradients of all hidden states and of one tile of the weight
        return hidden + buffers, gradient + _FP32 * scored * w.h
    return hidden + a * scored * columns + buffers, gradient + a * scored * w.h


def rank_memory(
    config: Config,
    shape: ModelShape,
    device: Device,
    parameters: RankParameters,
    micro: MicroBatch,
    *,
    dp: int,
    sampler: tuple[float, float],
) -> RankMemory:
    """Bytes of a rank.

    Args:
        config: the run.
        shape: the model.
        device: where it runs.
        parameters: of this stage.
        micro: the largest micro-batch.
        dp: data-parallel size; the optimizer is divided over `dp` x `cp` ranks.
        sampler: bytes of the sampler's weights (or servers) and of its cache on this device.
    """
    p, precision = config.parallel, config.precision
    storage, w = Storage.of(config, device), _Widths.of(config, shape, micro.tokens)
    a, count, edge = storage.activation, parameters.total, precision.first_last_layers_bf16
    quantised = [storage.code > 0 and edge <= layer < shape.num_layers - edge for layer in parameters.layers]
    num_linear = parameters.linears / len(parameters.layers)
    fp8_linears = num_linear * sum(quantised)
    kept = sum(
        layer_activations(config, shape, storage, tokens=w.t, fp8=fp8, recompute=p.recompute) for fp8 in quantised
    )
    kept += a * w.t_s * w.h  # what the stage hands on
    stays = precision.fp8_param or storage.transformer_engine
    if not stays and p.recompute != "full":  # each micro-batch keeps the codes that its backward pass multiplies with
        kept += storage.code * fp8_linears
    is_last = parameters.head > 0
    head, head_backward = _head(config, shape, device, storage, w, scored=micro.scored) if is_last else (0.0, 0.0)
    layer_backward, layer_forward = _layer_workspaces(config, shape, storage, w, num_linear=num_linear)
    full_tensor = 2.0 * shape.padded_vocab_size * shape.hidden_size
    lives_in_fp8 = fp8_linears if precision.fp8_param else 0.0
    shadow = min(lives_in_fp8, num_linear) if precision.shadow_streamed else lives_in_fp8
    return RankMemory(
        stage=parameters.stage,
        num_parameters=count,
        weights=a * (count - (lives_in_fp8 if storage.transformer_engine else 0.0)),
        gradients=_FP32 * count,
        optimizer=(3 if a < _FP32 else 2) * _FP32 * count / (dp * p.cp),
        fp8_weights=storage.code * storage.weight_copies * fp8_linears if stays else 0.0,
        activations=micro.in_flight * kept,
        head=head,
        head_backward=head_backward,
        layer_backward=layer_backward,
        layer_forward=layer_forward,
        shadow=2.0 * shadow,
        weight_sync=full_tensor * (2 + 1 / p.tp if p.tp > 1 else 1),
        sampler=sampler[0],
        kv_cache=sampler[1],
    )
