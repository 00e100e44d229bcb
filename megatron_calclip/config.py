"""The configuration as typed, frozen dataclasses: the reference of all settings, each with its unit, range and meaning.

Single values are validated by pydantic; `config_check` checks them against each other, `config_file` reads and writes
them. None of the three imports torch, so that a configuration can be checked anywhere in a fraction of a second, before
a process group or a model exists.
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

_STRICT = ConfigDict(extra="forbid")

# The largest value of any count or size: tensors and kernels index with 32 bits in places.
_LARGEST = 2**31 - 1


def _number(value: Any) -> Any:
    """Refuse what pydantic would take for a number: `true` for 1, and the text "3" for 3."""
    if isinstance(value, bool | str | bytes):
        raise ValueError("should be a number")
    return value


Int = Annotated[int, BeforeValidator(_number), Field(le=_LARGEST)]
GENERATED_TASKS = ("arithmetic", "scratchpad")

PositiveInt = Annotated[Int, Field(ge=1)]
NonNegativeInt = Annotated[Int, Field(ge=0)]
Float = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
PositiveFloat = Annotated[Float, Field(gt=0)]
NonNegativeFloat = Annotated[Float, Field(ge=0)]
Share = Annotated[Float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]
"""A name or a path: not empty, and without the NUL character that no file system takes."""


@dataclass(frozen=True, config=_STRICT)
class ShapeConfig:
    """Shape of a model made from scratch (`model.shape`); a pretrained one takes it from its HF config."""

    architecture: Literal["llama", "qwen2", "qwen3"] = "qwen2"
    """HF architecture: qwen2 has a bias on q, k, v; qwen3 normalises q and k; llama has neither."""
    num_layers: PositiveInt = 4
    """Transformer layers."""
    hidden_size: PositiveInt = 128
    """Width of the residual stream."""
    ffn_hidden_size: PositiveInt = 384
    """Width of the gated MLP."""
    num_attention_heads: PositiveInt = 4
    """Query heads; must be divisible by parallel.tp."""
    num_query_groups: PositiveInt = 4
    """Key/value heads (GQA); divides num_attention_heads, and is divisible by parallel.tp."""
    head_dim: PositiveInt | None = None
    """Width of one head; default hidden_size / num_attention_heads."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary position embedding."""
    tie_embeddings: bool = True
    """Input and output embeddings share one matrix."""


@dataclass(frozen=True, config=_STRICT)
class WarmStart:
    """A short supervised start on worked examples of the task (`model.warm_start`); its result is cached."""

    num_steps: NonNegativeInt = 0
    """Optimizer steps; 0 switches the warm start off."""
    batch_size: PositiveInt = 64
    """Examples a step; must be divisible by the data-parallel size."""
    lr: PositiveFloat = 2e-3
    """Peak learning rate (linear warm-up over a tenth of the steps, then linear decay to a tenth)."""
    noise: Share = 0.0
    """How often demonstrations go wrong at the end (see the task), so that something is left to reinforce."""
    noise_share: Share = 0.25
    """The last share of the steps, in which they do."""
    bf16_share: Share = 0.0
    """The first share of the steps, in which an FP8 learner still computes in BF16."""


@dataclass(frozen=True, config=_STRICT)
class ModelConfig:
    """Which policy is trained (`model`)."""

    hf: Text | None = None
    """Folder with a Hugging Face model (config.json, *.safetensors); exactly one of hf and shape is given."""
    shape: ShapeConfig | None = None
    """Shape of a model with random weights."""
    init: Literal["default", "scaled"] = "default"
    """Random weights of `shape`. default: transformers' own; scaled: by the number of inputs and layers, from which
    deep and narrow models learn in fewer steps."""
    tokenizer: Text | None = None
    """Folder or hub name of a HF tokenizer, or `characters`; default: the one beside model.hf."""
    characters: str = "0123456789+-*=() "
    """The alphabet of the `characters` tokenizer."""
    max_sequence_length: PositiveInt = 4096
    """Longest prompt plus response, in tokens."""
    warm_start: WarmStart = field(default_factory=WarmStart)
    """Supervised start for models made from scratch."""


@dataclass(frozen=True, config=_STRICT)
class ArithmeticTask:
    """Generated problems such as `37+48=` (`data.arithmetic`)."""

    operators: str = "+"
    """Operators to draw from: any of + - *."""
    max_operand: Annotated[Int, Field(ge=1, le=10**9)] = 99
    """Largest operand."""
    num_operands: Annotated[Int, Field(ge=2, le=32)] = 2
    """Operands of a problem."""


@dataclass(frozen=True, config=_STRICT)
class ScratchpadTask:
    """Generated problems `^3_4_8=`, answered by sums modulo 10 with free letters (`data.scratchpad`)."""

    num_digits: Annotated[Int, Field(ge=1, le=1000)] = 12
    """Digits of a problem; an answer has twice as many tokens, and its end."""


@dataclass(frozen=True, config=_STRICT)
class DataConfig:
    """Where prompts come from (`data`)."""

    train: Text = "arithmetic"
    """`arithmetic` or `scratchpad` (generated), or a data set, `[LAYOUT=]PLACE`: a JSON Lines, JSON or Parquet file, a
    `datasets` folder or `hub:OWNER/NAME[/CONFIGURATION]`, the last two with `@SPLIT`; layouts are in docs/data.md."""
    prompt_field: str = "prompt"
    """Column of the problem in a data set without a layout."""
    answer_field: str = "answer"
    """Column of the reference answer in a data set without a layout."""
    instruction: str | None = None
    """Follows each problem on a line of its own; null: the layout's."""
    system_prompt: Text | None = None
    """The system message before each problem (needs chat_template); null: the row's own, if it has one."""
    chat_template: bool | Text = False
    """Wrap each problem as a user's message: true with the tokenizer's template, or a Jinja template's path or text."""
    bad_rows: Literal["error", "skip"] = "error"
    """A row without problem or usable answer ends the run, or is left out and reported."""
    too_long: Literal["error", "skip"] = "error"
    """A prompt that leaves no room for rollout.max_new_tokens ends the run, or is left out and reported."""
    duplicates: Literal["keep", "drop"] = "keep"
    """Rows with the problem of an earlier row; they are reported in any case."""
    overlap: Literal["keep", "drop"] = "keep"
    """Training rows with a problem of an evaluation set; they are reported in any case."""
    shuffle: bool = True
    """Shuffle each epoch by train.seed."""
    arithmetic: ArithmeticTask = field(default_factory=ArithmeticTask)
    """Settings of the generated task `arithmetic`."""
    scratchpad: ScratchpadTask = field(default_factory=ScratchpadTask)
    """Settings of the generated task `scratchpad`."""


@dataclass(frozen=True, config=_STRICT)
class VllmConfig:
    """vLLM servers for `rollout.engine: vllm` (`rollout.vllm`)."""

    urls: tuple[Text, ...] = ()
    """Servers that are already running (`http://host:port`); replicas of one model."""
    launch: bool = False
    """Start servers on rank 0's machine, and end them with the run."""
    python: Text | None = None
    """Interpreter that has vLLM, for `launch` and `megatron-calclip serve`; null: this one."""
    num_servers: PositiveInt = 1
    """Servers to start."""
    first_port: Annotated[Int, Field(ge=1024, le=65000)] = 8400
    """Port of the first one; the others follow."""
    arguments: tuple[Text, ...] = ()
    """Further arguments of the servers' command line."""
    transfer: Literal["file", "broadcast"] = "file"
    """How weights travel: file: a safetensors file in run_dir that learner and servers can read; broadcast: from
    rank 0's memory into the servers', by NCCL between GPUs and by gloo otherwise."""
    colocated: bool = False
    """The servers share the learner's GPUs: they sleep, their weights in host memory, while the learner trains.
    Needs `launch`."""
    start_timeout_seconds: PositiveFloat = 600.0
    """How long they may take to come up."""
    request_timeout_seconds: PositiveFloat = 1800.0
    """How long the answers to one prompt may take."""
    num_retries: NonNegativeInt = 3
    """Further attempts at prompts whose server failed, each after a longer pause."""
    recovery_timeout_seconds: NonNegativeFloat = 300.0
    """How long to wait for a server when none is left; servers of `launch` are started anew."""


@dataclass(frozen=True, config=_STRICT)
class RolloutConfig:
    """How completions are sampled (`rollout`)."""

    engine: Literal["local", "vllm"] = "local"
    """`local`: a transformers model embedded in every rank; `vllm`: servers over HTTP."""
    vllm: VllmConfig = field(default_factory=VllmConfig)
    """The servers."""
    max_new_tokens: PositiveInt = 16
    """Longest completion in tokens, the stop token included."""
    temperature: PositiveFloat = 1.0
    """Divides the logits, in the sampler and in the learner alike."""
    top_p: Annotated[Float, Field(gt=0, le=1)] = 1.0
    """Nucleus mass; only 1 is right, because the learner's distribution has no nucleus. Evaluation has its own."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Precision of the engine's weights and activations, where they are not in FP8."""
    precision: Literal["bf16", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "mxfp8"] = "bf16"
    """FP8 scheme of the decoder's linears, weights and inputs (vLLM's names; emulated by `local`); bf16: none."""
    canary_prompts: Annotated[Int, Field(ge=0, le=64)] = 4
    """Prompts that sampler and learner both score after every weight sync, to see that they agree; 0: none."""
    max_batch_size: PositiveInt = 256
    """Most completions that the local engine decodes at once; for vLLM `--max-num-seqs` in rollout.vllm.arguments."""
    kv_cache: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Precision of the engine's key-value cache; auto: rollout.dtype."""
    max_staleness: Annotated[Int, Field(ge=0, le=1)] = 0
    """1: each step's completions are drawn while the step before trains, from weights that are one step old; needs
    algorithm.importance, which corrects for that. A resumed run then repeats the interrupted one only up to its
    first rollout."""


@dataclass(frozen=True, config=_STRICT)
class MathRewardConfig:
    """Comparison of mathematical answers (`reward.math`)."""

    relative_tolerance: Annotated[Float, Field(ge=0, lt=0.5)] = 1e-6
    """Distance, as a share of the reference's size, within which numbers that are not whole count as equal; a row's
    own column `tolerance` (absolute) comes first."""


@dataclass(frozen=True, config=_STRICT)
class CodeRewardConfig:
    """Running programs against tests (`reward.code`)."""

    timeout_seconds: PositiveFloat = 5.0
    """Seconds for one test."""
    total_timeout_seconds: PositiveFloat = 60.0
    """Seconds for all tests of one program."""
    memory_mib: PositiveInt = 1024
    """Address space of each process of a program; its files, in memory too, may take a quarter of it."""
    num_processes: PositiveInt = 16
    """Processes and threads that a program may have at once."""
    output_kib: PositiveInt = 1024
    """Largest output of one test; more fails it."""
    max_tests: PositiveInt = 64
    """Tests that are run, evenly spaced, when a problem has more."""
    partial_credit: bool = False
    """Reward the share of tests passed, instead of 1 for all and else 0."""
    allow_unsandboxed: bool = False
    """Run programs without a sandbox where the machine offers none: they can reach the network and read files."""


@dataclass(frozen=True, config=_STRICT)
class FormatRewardConfig:
    """A bonus for the form of a completion, right or wrong (`reward.format`)."""

    pattern: Text | None = None
    """Regular expression searched in the completion (`.` matches newlines), or `boxed` (exactly one \\boxed{...}) or
    `think` (<think>...</think>, once, then an answer); null: no such reward."""
    weight: Float = 0.1
    """Added to the reward where the pattern matches."""


@dataclass(frozen=True, config=_STRICT)
class RewardConfig:
    """How completions are scored (`reward`)."""

    name: Text = "exact"
    """`exact` (the completion equals the answer), `scratchpad` (for that task), `math` (the boxed answer equals the
    reference mathematically), `code` (the program passes the tests), or the dotted path `package.module.function` of
    your own: called with a `rewards.RewardSample`, returns a number, or a dictionary with `reward` and other parts.
    Where data.train names a layout, the one that its answers are for, or your own."""
    math: MathRewardConfig = field(default_factory=MathRewardConfig)
    """Settings of `math`."""
    code: CodeRewardConfig = field(default_factory=CodeRewardConfig)
    """Settings of `code`."""
    format: FormatRewardConfig = field(default_factory=FormatRewardConfig)
    """Bonus for the form."""
    num_workers: PositiveInt | None = None
    """Scoring processes of each rank; null: its share of the machine's cores."""
    timeout_seconds: PositiveFloat = 5.0
    """CPU seconds to score one completion, and four times as many on the clock; past them it is wrong."""
    memory_mib: Annotated[Int, Field(ge=256)] = 2048
    """Memory of one scoring process; what needs more is wrong."""
    overlong_buffer: PositiveInt | None = None
    """DAPO's overlong shaping: over the last so many tokens before rollout.max_new_tokens the reward falls by up to
    1; null: no such penalty. Not in evaluation."""


@dataclass(frozen=True, config=_STRICT)
class AdvantageConfig:
    """Group-relative advantage (`algorithm.advantage`)."""

    kind: Literal["group_norm", "mean_only", "leave_one_out"] = "group_norm"
    """group_norm: (reward - mean) / group std (GRPO); mean_only: no std (Dr.GRPO); leave_one_out: RLOO."""
    epsilon: PositiveFloat = 1e-6
    """Added to the standard deviation."""


@dataclass(frozen=True, config=_STRICT)
class DynamicSamplingConfig:
    """DAPO's dynamic sampling (`algorithm.dynamic_sampling`): groups of equal reward give way to other prompts."""

    enabled: bool = False
    """Drop groups without advantage, and sample new prompts until the batch is full."""
    max_rounds: PositiveInt = 4
    """Samplings for one step at most; what is then missing stays filled with groups of equal reward."""


@dataclass(frozen=True, config=_STRICT)
class ClipConfig:
    """The clip range of the importance ratio (`algorithm.clip`)."""

    lower: Annotated[Float, Field(gt=0, lt=1)] = 0.8
    """L: a token with A < 0 and ratio <= L gets no gradient."""
    upper: Annotated[Float, Field(gt=1)] = 1.24
    """H: a token with A > 0 and ratio >= H gets no gradient."""
    dual: Annotated[Float, Field(gt=1)] | None = None
    """Dual clip: bound on the ratio of tokens with A < 0 (must exceed upper); null switches it off."""


@dataclass(frozen=True, config=_STRICT)
class ImportanceConfig:
    """Truncated importance sampling between sampler and learner (`algorithm.importance`)."""

    level: Literal["off", "token", "sequence_product", "sequence_geometric"] = "token"
    """What the ratio pi_old / mu is taken over."""
    cap: Annotated[Float, Field(ge=1)] = 2.0
    """C: largest weight."""
    mode: Literal["truncate", "mask"] = "truncate"
    """Above the cap: truncate the weight, or mask the token out."""


@dataclass(frozen=True, config=_STRICT)
class KLConfig:
    """Penalty on the distance to a frozen reference policy (`algorithm.kl`)."""

    coefficient: NonNegativeFloat = 0.0
    """Weight of the penalty; 0 keeps no reference at all."""
    kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator (Schulman, 'Approximating KL divergence')."""


@dataclass(frozen=True, config=_STRICT)
class AlgorithmConfig:
    """The policy-gradient method (`algorithm`)."""

    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    """How rewards become advantages."""
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    """Whether groups of equal reward are replaced."""
    clip: ClipConfig = field(default_factory=ClipConfig)
    """Clip range."""
    importance: ImportanceConfig = field(default_factory=ImportanceConfig)
    """Correction of the sampler-learner mismatch."""
    kl: KLConfig = field(default_factory=KLConfig)
    """Reference policy."""
    loss: Literal["clip", "gspo", "cispo", "bapo", "oracle"] = "clip"
    """clip: the clipped surrogate (GRPO, DAPO, Dr.GRPO by their settings); gspo: one ratio per sequence;
    cispo: clipped weights, every token keeps a gradient; bapo: bounds searched for each update; oracle (for
    studies): clip masks from BF16 ratios, a shadow pass at every mini-batch."""
    exact_on_policy: bool = False
    """Take the ratio of unmoved weights (the first mini-batch) as exactly 1; kernels may differ in a bit."""
    old_log_probs: Literal["matched", "mismatched"] = "matched"
    """matched: pi_old over the very micro-batches that train; mismatched (an experiment, not for use): over others, as
    some systems do, so that scales which depend on a batch's other tokens turn up as ratios of unmoved weights."""
    entropy_bonus: NonNegativeFloat = 0.0
    """Weight of the mean entropy that is added to the objective."""
    aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] = "sequence_mean"
    """How token losses become one number: sequence_mean (GRPO), token_mean (DAPO), fixed_length (Dr.GRPO)."""
    num_minibatches: PositiveInt = 4
    """Optimizer steps a rollout batch is split into."""
    num_epochs: PositiveInt = 1
    """Passes over the rollout batch; the partition stays, its order changes."""


Grid = tuple[Float, Float, Float]
Bounds = tuple[Annotated[Float, Field(gt=0, lt=1)], Annotated[Float, Field(gt=1)]]


@dataclass(frozen=True, config=_STRICT)
class CalibrationConfig:
    """Calibrated clipping (`calibration`); null: the preset's, see algorithms/calibration_settings.py."""

    enabled: bool = False
    """Re-fit the clip bounds to BF16 shadow ratios; they start at `start`, and algorithm.clip is not used."""
    preset: Literal["robust", "paper"] = "robust"
    """paper: the published method with nothing of ours; robust: our rules for fragile points on top."""
    schedule: Literal["every", "drift"] | None = None
    """every: at multiples of the interval; drift: the interval stretches while the bounds rest, and shrinks
    when the gap between FP8 and BF16 clipping moves."""
    interval: PositiveInt | None = None
    """Steps between calibrations."""
    start_step: PositiveInt | None = None
    """No calibration before this step (counted from 1)."""
    start: Bounds | None = None
    """Bounds [L, H] before the first calibration."""
    reference: Bounds | None = None
    """Bounds that BF16 would train with: the target."""
    grid_lower: Grid | None = None
    """First, last and step of the lower bound's candidates."""
    grid_upper: Grid | None = None
    """First, last and step of the upper bound's candidates."""
    delta_lower: PositiveFloat | None = None
    """Most that the lower bound moves per calibration."""
    delta_upper: PositiveFloat | None = None
    """Most that the upper bound moves per calibration."""
    minibatches: Literal["all", "last"] | None = None
    """Mini-batches of the step whose tokens are counted."""
    token_fraction: Annotated[Float, Field(gt=0, le=1)] | None = None
    """Share of the sequences that the shadow passes run on."""
    balance: Literal["gradient", "surrogate"] | None = None
    """What the upper bound balances."""
    balance_ratio_cap: Annotated[float, BeforeValidator(_number), Field(gt=0)] | None = None
    """Ratios are capped here inside the balance, in both precisions alike; .inf: nowhere."""
    weighting: Literal["loss", "token"] | None = None
    """Weight of a token in the balance: what the loss's aggregation gives it, or 1."""
    min_tail_tokens: PositiveInt | None = None
    """Tail tokens that a lower bound needs; with fewer, calibrations are pooled, or the bound is held."""
    pool: PositiveInt | None = None
    """Calibrations that may be pooled, the present one included."""
    hold_unsolvable: bool | None = None
    """Hold an upper bound whose target lies out of the balance's range; else it goes to the grid's end."""
    min_balance_range: NonNegativeFloat | None = None
    """Share of its target over which the balance must vary on the grid; an upper bound is held else."""
    max_interval_share: Annotated[Float, Field(gt=0, le=1)] | None = None
    """Share of the grid that a bound's interval may cover; a bound is held else."""
    num_replicates: NonNegativeInt | None = None
    """Bootstrap replicates behind every interval; 0: no intervals."""
    sequence_grid_width: PositiveFloat | None = None
    """GSPO: candidates lie within this factor of BF16's own spread of log r."""
    measure: Literal["calibration_steps", "every_step"] = "calibration_steps"
    """every_step runs the shadow passes at each step, for studies; the ledger books them apart."""
    dump: bool = False
    """Write each calibration step's tokens to run_dir/dumps, for offline replay."""


@dataclass(frozen=True, config=_STRICT)
class EmulationConfig:
    """Noise dialled into the emulated quantiser alone (`precision.emulation`); weights and BF16 never see it.

    Large models have outlier channels and massive activations on the first token; tiny ones do not. These
    multipliers, powers of two, put them where only the quantiser looks, so that a tiny run has the
    quantisation noise of a large one.
    """

    block_size: PositiveInt | None = None
    """Block of the blockwise and MXFP8 recipes; null: 128 and 32."""
    channel_outlier: Annotated[Float, Field(ge=1)] = 1.0
    """Multiplies one input channel of the attention's qkv and of the MLP's first linear."""
    first_token_outlier: Annotated[Float, Field(ge=1)] = 1.0
    """Multiplies the first token of each sequence at the input of the MLP's second linear."""


@dataclass(frozen=True, config=_STRICT)
class PrecisionConfig:
    """Numerical precision of the learner (`precision`)."""

    params_dtype: Literal["bf16", "fp32"] = "bf16"
    """Weights and activations; with bf16 the distributed optimizer keeps FP32 masters."""
    recipe: Literal["bf16", "tensorwise_delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"] = "bf16"
    """FP8 recipe of the decoder's linears; bf16: none."""
    format: Literal["auto", "hybrid", "e4m3"] = "auto"
    """hybrid: E4M3 forward, E5M2 gradients; auto: hybrid with per-tensor scales, else e4m3."""
    backend: Literal["auto", "te", "scaled_mm", "emulated"] = "auto"
    """Who computes: TransformerEngine, torch._scaled_mm, or exact codes anywhere; auto: te where it is installed beside
    a GPU, else scaled_mm where it has the recipe, else emulated. What te cannot do is an error, never a silent change."""
    power_of_two_scales: bool | None = None
    """Round scales down to powers of two; null: the recipe's own (yes but for per-tensor scales)."""
    amax_history_length: PositiveInt = 1024
    """Steps of tensorwise_delayed's history."""
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    """What tensorwise_delayed takes from its history."""
    margin: NonNegativeInt = 0
    """tensorwise_delayed scales down by 2 ** margin."""
    amax_group: Literal["te", "global"] = "te"
    """te: each shard's own amax where TransformerEngine takes that; global: reduced over the TP ranks."""
    fp8_param: bool = False
    """Keep the decoder's weights in FP8 between steps (FP32 masters stay in the optimizer); needs
    params_dtype bf16 and an FP8 recipe."""
    first_last_layers_bf16: NonNegativeInt = 0
    """This many layers at each end stay in BF16."""
    output_layer: bool = False
    """Quantise the output layer, too (emulated only)."""
    shadow_streamed: bool = False
    """Rebuild the shadow pass's BF16 weights layer by layer: extra memory of a layer instead of a model."""
    emulation: EmulationConfig = field(default_factory=EmulationConfig)
    """Dials of the emulated backend."""


@dataclass(frozen=True, config=_STRICT)
class ParallelConfig:
    """How the learner is split over ranks (`parallel`); data parallelism is what remains."""

    tp: PositiveInt = 1
    """Tensor-parallel size."""
    pp: PositiveInt = 1
    """Pipeline-parallel size."""
    vpp: Annotated[Int, Field(ge=2)] | None = None
    """Model chunks per pipeline rank (interleaved schedule), at least 2; needs pp > 1."""
    cp: PositiveInt = 1
    """Context-parallel size."""
    sequence_parallel: bool = False
    """Split norms and residual stream over the tensor-parallel group along the tokens; needs tp > 1."""
    overlap_grad_reduce: bool = False
    """Overlap the gradient reduce-scatter with the backward pass."""
    overlap_param_gather: bool = False
    """Overlap the parameter all-gather with the forward pass; needs overlap_grad_reduce."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation (Megatron's granularity; full recomputes every layer)."""


@dataclass(frozen=True, config=_STRICT)
class ClusterConfig:
    """The machines (`cluster`), for --dry-run and `plan`; a real launch takes the world size from torchrun."""

    num_nodes: PositiveInt = 1
    """Nodes of the learner."""
    gpus_per_node: PositiveInt = 1
    """Ranks on each node."""
    device: Literal["cpu", "h100", "h200", "b200"] = "h100"
    """What the ranks run on, for `plan`: memory and speed."""
    num_rollout_nodes: NonNegativeInt = 0
    """Further nodes for vLLM servers alone (`rollout.vllm.urls`)."""


@dataclass(frozen=True, config=_STRICT)
class OptimizerConfig:
    """AdamW in Megatron's distributed optimizer (`optimizer`)."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    beta1: Share = 0.9
    """Decay of the first moment."""
    beta2: Share = 0.95
    """Decay of the second moment."""
    epsilon: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 switches clipping off."""


@dataclass(frozen=True, config=_STRICT)
class ScheduleConfig:
    """Learning-rate schedule, in RL steps (`schedule`)."""

    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Linear warm-up from zero."""
    min_lr: NonNegativeFloat = 0.0
    """Where the decay ends, at train.num_steps."""


@dataclass(frozen=True, config=_STRICT)
class TrainConfig:
    """Sizes and seeds (`train`)."""

    num_steps: PositiveInt = 100
    """RL steps (rollout batches)."""
    prompts_per_step: PositiveInt = 32
    """Prompts of a rollout batch."""
    samples_per_prompt: PositiveInt = 8
    """Completions per prompt: the group; at least 2."""
    tokens_per_microbatch: PositiveInt = 16384
    """Token budget of one packed micro-batch; a longer sequence gets a micro-batch of its own."""
    fused_head: bool = False
    """Fuse the output layer with the log-probabilities: no logits, but one more matmul in backward."""
    deterministic: bool = False
    """Only deterministic kernels."""
    max_skipped_updates: PositiveInt = 5
    """Updates in a row with a loss or gradient that is not finite, which are skipped, that end the run."""
    hang_timeout_seconds: PositiveFloat = 1500.0
    """A stage that takes longer ends the run, with a table of what each rank is doing."""
    seed: NonNegativeInt = 0
    """Keys every random choice, with the step and the sample's id."""


@dataclass(frozen=True, config=_STRICT)
class CheckpointConfig:
    """Saving and resuming (`checkpoint`)."""

    save_every: NonNegativeInt = 0
    """RL steps between checkpoints; 0 saves only at the end."""
    keep: PositiveInt = 2
    """Newest checkpoints that are kept."""
    keep_best: bool = True
    """Save a checkpoint wherever eval/score is the best of the run, and keep the best one besides the newest."""
    async_save: bool = False
    """Write files while training goes on; a checkpoint counts from the end of a later step on."""
    resume: Text = "auto"
    """`auto` (the newest of run_dir, if any), `no`, or the path of a checkpoint."""


@dataclass(frozen=True, config=_STRICT)
class EvalConfig:
    """Evaluation on held-out problems (`eval`)."""

    sets: Literal["auto"] | tuple[Text, ...] = "auto"
    """Data sets, each as `data.train` names one; auto: the task of `data.train` if it is generated, else none."""
    every: NonNegativeInt = 0
    """RL steps between evaluations; 0: only before the first and after the last step."""
    num_prompts: PositiveInt | None = 256
    """Problems of each set, its first ones; null: all (of a generated task 256)."""
    samples_per_prompt: Annotated[Int, Field(ge=1, le=2000)] = 1
    """Completions per problem."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[Float, Field(gt=0, le=1)] = 1.0
    """Nucleus mass."""
    max_new_tokens: PositiveInt | None = None
    """Longest completion in tokens; null: rollout.max_new_tokens."""


@dataclass(frozen=True, config=_STRICT)
class AlarmsConfig:
    """Rules by which a run is taken to go wrong (`alarms`), each against the steps before without an alarm."""

    window: Annotated[Int, Field(ge=2)] = 20
    """Steps whose median is the yardstick; no alarm before so many."""
    entropy_factor: Annotated[Float, Field(gt=1)] = 2.0
    """Entropy above so many times the median, and"""
    entropy_rise: PositiveFloat = 0.3
    """above the median by so many nats, is a surge."""
    loss_deviations: PositiveFloat = 20.0
    """A loss further from the median than so many deviations (1.4826 median absolute deviations), and"""
    min_loss_distance: PositiveFloat = 0.1
    """further than this, is a spike."""
    action: Literal["warn", "stop", "rollback"] = "warn"
    """warn: a line and a metric; stop: end the run; rollback: go back to the newest checkpoint and on with other prompts."""
    max_rollbacks: NonNegativeInt = 2
    """Times that a run goes back; then it stops."""


@dataclass(frozen=True, config=_STRICT)
class ProfileConfig:
    """A window of torch's profiler (`tracking.profile`)."""

    start_step: NonNegativeInt = 0
    """First RL step that is recorded."""
    num_steps: NonNegativeInt = 0
    """Steps recorded; 0 switches it off. The trace goes to run_dir/profile."""


@dataclass(frozen=True, config=_STRICT)
class TrackingConfig:
    """Where metrics go besides run_dir/metrics.jsonl (`tracking`)."""

    tensorboard: bool = True
    """Event files in run_dir/tensorboard."""
    wandb_project: Text | None = None
    """Weights & Biases project; needs the extra `wandb`."""
    mlflow_experiment: Text | None = None
    """MLflow experiment; needs the extra `mlflow`."""
    samples_per_step: NonNegativeInt = 4
    """Completions that each step writes to run_dir/samples.jsonl."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """torch profiler."""


@dataclass(frozen=True, config=_STRICT)
class Config:
    """A whole run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The policy."""
    data: DataConfig = field(default_factory=DataConfig)
    """Prompts."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Sampling."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Scoring."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """Policy gradient."""
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    """Calibrated clipping."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Numerical precision."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Learner layout."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Machines."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate over time."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Sizes and seeds."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving and resuming."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Held-out evaluation."""
    alarms: AlarmsConfig = field(default_factory=AlarmsConfig)
    """Entropy surges and loss spikes."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Metrics."""
    run_dir: Text = "runs/default"
    """Folder that holds everything of the run."""

    @property
    def eval_sets(self) -> tuple[str, ...]:
        """Data sets to evaluate on."""
        if self.eval.sets == "auto":
            return (self.data.train,) if self.data.train in GENERATED_TASKS else ()
        return self.eval.sets

    @property
    def for_evaluation(self) -> Config:
        """The same run with the lengths and the nucleus of `eval` in `rollout`."""
        longest = self.eval.max_new_tokens or self.rollout.max_new_tokens
        return replace(self, rollout=replace(self.rollout, max_new_tokens=longest, top_p=self.eval.top_p))

    @property
    def sequences_per_step(self) -> int:
        """Sequences in a rollout batch."""
        return self.train.prompts_per_step * self.train.samples_per_prompt
