"""Typed configuration: defaults -> YAML file (with `extends:`) -> `key=value` overrides -> checked, frozen dataclasses.

The dataclasses below are the reference: each field has its unit, range and meaning. Validation is pydantic's; this module
adds the file format, the overrides, error lines that name the nearest key, and the cross-checks between sections. All of it
happens before a process group or a model exists, and nothing here imports torch, so that a configuration can be checked
anywhere in a fraction of a second.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from megatron_calclip.errors import UserError

_STRICT = ConfigDict(extra="forbid")

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]


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
    wrong_answers: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of demonstrations whose answer is wrong, so that something is left to learn by reinforcement."""


@dataclass(frozen=True, config=_STRICT)
class ModelConfig:
    """Which policy is trained (`model`)."""

    hf: str | None = None
    """Folder with a Hugging Face model (config.json and *.safetensors); exactly one of hf and shape is given."""
    shape: ShapeConfig | None = None
    """Shape of a model with random weights."""
    tokenizer: str | None = None
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
    max_operand: PositiveInt = 99
    """Largest operand."""
    num_operands: Annotated[int, Field(ge=2)] = 2
    """Operands of a problem."""


@dataclass(frozen=True, config=_STRICT)
class DataConfig:
    """Where prompts come from (`data`)."""

    train: str = "arithmetic"
    """`arithmetic` (generated) or the path of a JSON Lines file."""
    eval: str | None = "arithmetic"
    """The same for held-out problems; null switches evaluation off."""
    prompt_field: str = "prompt"
    """Column of the problem in a JSON Lines file."""
    answer_field: str = "answer"
    """Column of the reference answer in a JSON Lines file."""
    chat_template: bool = False
    """Wrap each problem with the tokenizer's chat template as a user's message."""
    shuffle: bool = True
    """Shuffle each epoch by train.seed."""
    arithmetic: ArithmeticTask = field(default_factory=ArithmeticTask)
    """Settings of the generated task."""


@dataclass(frozen=True, config=_STRICT)
class RolloutConfig:
    """How completions are sampled (`rollout`)."""

    engine: Literal["local"] = "local"
    """`local`: a transformers model embedded in every rank."""
    max_new_tokens: PositiveInt = 16
    """Longest completion in tokens, the stop token included."""
    temperature: PositiveFloat = 1.0
    """Divides the logits, in the sampler and in the learner alike."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus mass for evaluation; training needs 1, because the learner's distribution has no nucleus."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Precision of the engine's weights and activations."""
    max_batch_size: PositiveInt = 256
    """Most completions that one engine decodes at once."""


@dataclass(frozen=True, config=_STRICT)
class RewardConfig:
    """How completions are scored (`reward`)."""

    name: str = "exact"
    """`exact` (the completion equals the answer), or the dotted path `package.module.function` of your own:
    called with (prompt: Prompt, completion: str), returns a float."""


@dataclass(frozen=True, config=_STRICT)
class AdvantageConfig:
    """Group-relative advantage (`algorithm.advantage`)."""

    kind: Literal["group_norm", "mean_only", "leave_one_out"] = "group_norm"
    """group_norm: (reward - mean) / std of the group (GRPO); mean_only: without std (Dr.GRPO); leave_one_out (RLOO)."""
    epsilon: PositiveFloat = 1e-6
    """Added to the standard deviation."""


@dataclass(frozen=True, config=_STRICT)
class ClipConfig:
    """The clip range of the importance ratio (`algorithm.clip`)."""

    lower: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """L: a token with A < 0 and ratio <= L gets no gradient."""
    upper: Annotated[float, Field(gt=1)] = 1.24
    """H: a token with A > 0 and ratio >= H gets no gradient."""
    dual: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: bound on the ratio of tokens with A < 0 (must exceed upper); null switches it off."""


@dataclass(frozen=True, config=_STRICT)
class ImportanceConfig:
    """Truncated importance sampling between sampler and learner (`algorithm.importance`)."""

    level: Literal["off", "token", "sequence_product", "sequence_geometric"] = "token"
    """What the ratio pi_old / mu is taken over."""
    cap: PositiveFloat = 2.0
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
    clip: ClipConfig = field(default_factory=ClipConfig)
    """Clip range."""
    importance: ImportanceConfig = field(default_factory=ImportanceConfig)
    """Correction of the sampler-learner mismatch."""
    kl: KLConfig = field(default_factory=KLConfig)
    """Reference policy."""
    entropy_bonus: NonNegativeFloat = 0.0
    """Weight of the mean entropy that is added to the objective."""
    aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] = "sequence_mean"
    """How token losses become one number: sequence_mean (GRPO), token_mean (DAPO), fixed_length (Dr.GRPO)."""
    num_minibatches: PositiveInt = 4
    """Optimizer steps a rollout batch is split into."""
    num_epochs: PositiveInt = 1
    """Passes over the rollout batch; the partition stays, its order changes."""


@dataclass(frozen=True, config=_STRICT)
class PrecisionConfig:
    """Numerical precision of the learner (`precision`)."""

    params_dtype: Literal["bf16", "fp32"] = "bf16"
    """Weights and activations; with bf16 the distributed optimizer keeps FP32 masters."""


@dataclass(frozen=True, config=_STRICT)
class ParallelConfig:
    """How the learner is split over ranks (`parallel`); data parallelism is what remains."""

    tp: PositiveInt = 1
    """Tensor-parallel size."""
    pp: PositiveInt = 1
    """Pipeline-parallel size."""
    vpp: PositiveInt | None = None
    """Model chunks per pipeline rank (interleaved schedule); needs pp > 1."""
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
    """The machines (`cluster`), for --dry-run; a real launch takes the world size from torchrun."""

    num_nodes: PositiveInt = 1
    """Nodes."""
    gpus_per_node: PositiveInt = 1
    """Ranks on each node."""


@dataclass(frozen=True, config=_STRICT)
class OptimizerConfig:
    """AdamW in Megatron's distributed optimizer (`optimizer`)."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
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
    log_prob_chunk: PositiveInt | None = None
    """Rows of logits reduced at a time; null: chosen by device."""
    fused_head: bool = False
    """Fuse the output layer with the log-probabilities: logits never exist, at the price of one more matmul in backward."""
    deterministic: bool = False
    """Only deterministic kernels."""
    seed: NonNegativeInt = 0
    """Keys every random choice, with the step and the sample's id."""


@dataclass(frozen=True, config=_STRICT)
class CheckpointConfig:
    """Saving and resuming (`checkpoint`)."""

    save_every: NonNegativeInt = 0
    """RL steps between checkpoints; 0 saves only at the end."""
    keep: PositiveInt = 2
    """Newest checkpoints that are kept."""
    resume: str = "auto"
    """`auto` (the newest of run_dir, if any), `no`, or the path of a checkpoint."""


@dataclass(frozen=True, config=_STRICT)
class EvalConfig:
    """Evaluation on held-out problems (`eval`)."""

    every: NonNegativeInt = 0
    """RL steps between evaluations; 0: only before the first and after the last step."""
    num_prompts: PositiveInt = 256
    """Held-out problems."""
    samples_per_prompt: PositiveInt = 1
    """Completions per problem."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0 is greedy."""


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
    wandb_project: str | None = None
    """Weights & Biases project; needs the extra `wandb`."""
    mlflow_experiment: str | None = None
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
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Metrics."""
    run_dir: str = "runs/default"
    """Folder that holds everything of the run."""

    @property
    def sequences_per_step(self) -> int:
        """Sequences in a rollout batch."""
        return self.train.prompts_per_step * self.train.samples_per_prompt


class _Loader(yaml.SafeLoader):
    """YAML as everybody means it: `1e-6` is a number, and `no` a word (YAML 1.1 has them the other way round)."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(true|false)$", re.IGNORECASE), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise UserError(where, f"is not valid YAML ({problem}); correct it") from None


def find_config(name: str) -> Path:
    """A path, or the name of a shipped configuration (with or without `.yaml`).

    Raises:
        UserError: when neither exists; it lists the shipped names.
    """
    if Path(name).is_file():
        return Path(name)
    package = Path(__file__).parent
    for folder in (package / "conf", package.parent / "conf"):  # installed wheel, checkout
        if folder.is_dir():
            for candidate in (folder / name, folder / f"{name}.yaml"):
                if candidate.is_file():
                    return candidate
            shipped = sorted(str(p.relative_to(folder)) for p in folder.rglob("*.yaml"))
            raise UserError("CONFIG", f"no file {name!r}; give a path, or one of {', '.join(shipped)}")
    raise UserError("CONFIG", f"no file {name!r}; give the path of a YAML file")


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Deep merge of nested mappings; `over` wins."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return merged


def _read_file(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """One YAML file with what it extends (paths relative to the file that names them)."""
    if path.resolve() in seen:
        raise UserError(str(path), "extends itself; break the circle of `extends:`")
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(str(path), f"cannot be read ({error}); give a readable YAML file") from None
    values = _parse_yaml(text, str(path))
    if values is None:
        values = {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(str(path), "must hold sections at its top level, such as `train:`")
    parent = values.pop("extends", None)
    if parent is None:
        return values
    if not isinstance(parent, str):
        raise UserError(f"{path}: extends", f"{parent!r} must be the path of one YAML file")
    return _merge(_read_file(path.parent / parent, (*seen, path.resolve())), values)


def _apply_override(values: dict[str, Any], override: str) -> dict[str, Any]:
    key, equals, text = override.partition("=")
    key = key.removeprefix("++").removeprefix("+")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w.]*", key):
        raise UserError(override, "an override has the form section.key=value")
    nested: Any = _parse_yaml(text, key) if text else None
    for part in reversed(key.split(".")):
        nested = {part: nested}
    return _merge(values, nested)


def _known_keys(cls: type, prefix: str = "") -> list[str]:
    """Dotted names of all settings under a config dataclass."""
    names: list[str] = []
    hints = get_type_hints(cls)
    for f in dataclasses.fields(cls):
        names.append(prefix + f.name)
        inner = [t for t in (hints[f.name], *getattr(hints[f.name], "__args__", ())) if dataclasses.is_dataclass(t)]
        for t in inner:
            names += _known_keys(t, f"{prefix}{f.name}.")  # type: ignore[arg-type]
    return names


def _user_error(error: ValidationError) -> UserError:
    """Pydantic's first complaint as one line."""
    detail = error.errors()[0]
    where = ".".join(str(part) for part in detail["loc"] if not str(part).startswith("function-"))
    if detail["type"] == "unexpected_keyword_argument":
        parent, _, last = where.rpartition(".")
        known = _known_keys(Config)
        siblings = [k for k in known if k.rpartition(".")[0] == parent]
        names = [k.rpartition(".")[2] for k in siblings]
        near = [f"{parent}.{n}".lstrip(".") for n in difflib.get_close_matches(last, names, 1, 0.6)]
        hint = near or [k for k in known if k.rpartition(".")[2] == last]
        if hint:
            return UserError(where, f"no such setting; did you mean {' or '.join(hint)}?")
        return UserError(where, f"no such setting; known here: {', '.join(names)}")
    return UserError(where or "configuration", f"{detail['msg']} (got {detail['input']!r}); correct the value")


def _check(condition: bool, where: str, problem: str) -> None:
    if not condition:
        raise UserError(where, problem)


def check(config: Config, *, world_size: int) -> None:
    """Cross-checks between sections; the shape of a pretrained model is checked when its config is read.

    Args:
        config: a configuration whose single values are valid.
        world_size: number of ranks: torchrun's WORLD_SIZE, or `cluster`'s product for --dry-run.

    Raises:
        UserError: naming the setting at fault and what would be right.
    """
    p, t, a, m = config.parallel, config.train, config.algorithm, config.model
    _check(
        (m.hf is None) != (m.shape is None),
        "model",
        "give exactly one of model.hf (a pretrained model) and model.shape (random weights)",
    )
    _check(
        m.hf is not None or m.tokenizer is not None,
        "model.tokenizer",
        "a model made from model.shape needs one; give a folder, a hub name, or `characters`",
    )
    _check(
        m.warm_start.num_steps == 0 or config.data.train == "arithmetic",
        "model.warm_start.num_steps",
        "worked examples exist only for data.train: arithmetic; set it to 0",
    )
    _check(
        len(set(m.characters)) == len(m.characters),
        "model.characters",
        "names a character twice; list each once",
    )
    operators = config.data.arithmetic.operators
    _check(
        bool(operators) and set(operators) <= set("+-*"),
        "data.arithmetic.operators",
        f"{operators!r}: give some of + - *",
    )
    ranks = p.tp * p.pp * p.cp
    _check(
        world_size % ranks == 0,
        "parallel",
        f"tp {p.tp} x pp {p.pp} x cp {p.cp} = {ranks} ranks do not divide the {world_size} ranks of this launch; "
        "change parallel, or the number of processes (torchrun --nproc-per-node, cluster for --dry-run)",
    )
    dp = world_size // ranks
    _check(t.samples_per_prompt >= 2, "train.samples_per_prompt", "a group needs at least 2 samples; raise it")
    _check(
        config.sequences_per_step % a.num_minibatches == 0,
        "algorithm.num_minibatches",
        f"{a.num_minibatches} does not divide the {config.sequences_per_step} sequences of a step "
        "(train.prompts_per_step x train.samples_per_prompt)",
    )
    per_minibatch = config.sequences_per_step // a.num_minibatches
    _check(
        per_minibatch >= dp,
        "algorithm.num_minibatches",
        f"{per_minibatch} sequences a mini-batch cannot feed {dp} data-parallel ranks; use fewer mini-batches or "
        "more sequences",
    )
    _check(
        m.warm_start.batch_size % dp == 0,
        "model.warm_start.batch_size",
        f"{m.warm_start.batch_size} is not divisible by the data-parallel size {dp}",
    )
    _check(
        a.clip.dual is None or a.clip.dual > a.clip.upper,
        "algorithm.clip.dual",
        f"must exceed algorithm.clip.upper = {a.clip.upper}",
    )
    _check(
        config.rollout.top_p == 1.0,
        "rollout.top_p",
        "the learner's probabilities have no nucleus, so ratios would be biased; use 1.0",
    )
    _check(
        config.rollout.max_new_tokens < m.max_sequence_length,
        "rollout.max_new_tokens",
        f"leaves no room for a prompt within model.max_sequence_length = {m.max_sequence_length}",
    )
    _check(
        not p.sequence_parallel or p.tp > 1,
        "parallel.sequence_parallel",
        "needs parallel.tp > 1; switch it off",
    )
    _check(p.vpp is None or p.pp > 1, "parallel.vpp", "needs parallel.pp > 1; leave it out")
    _check(
        not p.overlap_param_gather or p.overlap_grad_reduce,
        "parallel.overlap_param_gather",
        "needs parallel.overlap_grad_reduce: true",
    )
    _check(
        config.schedule.min_lr <= config.optimizer.lr,
        "schedule.min_lr",
        f"exceeds optimizer.lr = {config.optimizer.lr}; lower it",
    )
    _check(
        config.schedule.warmup_steps < t.num_steps or config.schedule.warmup_steps == 0,
        "schedule.warmup_steps",
        f"must be below train.num_steps = {t.num_steps}",
    )
    if m.shape is not None:
        check_shape(m.shape, p)


def check_shape(shape: ShapeConfig, parallel: ParallelConfig) -> None:
    """Whether a model of this shape can be split so.

    Raises:
        UserError: naming the setting at fault.
    """
    s, p = shape, parallel
    _check(
        s.num_attention_heads % s.num_query_groups == 0,
        "model.shape.num_query_groups",
        f"{s.num_query_groups} must divide num_attention_heads = {s.num_attention_heads}",
    )
    for name, value in (
        ("num_attention_heads", s.num_attention_heads),
        ("num_query_groups", s.num_query_groups),
        ("ffn_hidden_size", s.ffn_hidden_size),
    ):
        _check(
            value % p.tp == 0,
            "parallel.tp",
            f"{p.tp} does not divide the model's {name} = {value}; choose a divisor",
        )
    stages = p.pp * (p.vpp or 1)
    _check(
        s.num_layers % stages == 0,
        "parallel.pp",
        f"pp x vpp = {stages} does not divide the model's {s.num_layers} layers; choose a divisor",
    )
    _check(
        s.head_dim is not None or s.hidden_size % s.num_attention_heads == 0,
        "model.shape.head_dim",
        f"hidden_size {s.hidden_size} is not divisible by num_attention_heads {s.num_attention_heads}; give head_dim",
    )


def load_config(name: str, overrides: Sequence[str] = (), *, world_size: int | None = None) -> Config:
    """Read, merge and check a configuration.

    Args:
        name: path of a YAML file, or the name of a shipped one.
        overrides: `section.key=value` strings, applied in order; values are YAML.
        world_size: ranks of the launch; None takes `cluster` (--dry-run).

    Raises:
        UserError: one line naming the setting and what to do.
    """
    values = _read_file(find_config(name))
    for override in overrides:
        values = _apply_override(values, override)
    config = config_from_dict(values)
    check(
        config,
        world_size=config.cluster.num_nodes * config.cluster.gpus_per_node if world_size is None else world_size,
    )
    return config


def config_from_dict(values: Mapping[str, Any]) -> Config:
    """A validated configuration from nested mappings; missing settings take their defaults.

    Raises:
        UserError: for an unknown setting or a value of the wrong type or range.
    """
    try:
        return TypeAdapter(Config).validate_python(values)
    except ValidationError as error:
        raise _user_error(error) from None


def config_to_dict(config: Config) -> dict[str, Any]:
    """The resolved configuration as nested plain values."""
    return dataclasses.asdict(config)  # type: ignore[call-overload, no-any-return]


def config_to_yaml(config: Config) -> str:
    """The resolved configuration as YAML that `load_config` reads back."""
    return yaml.safe_dump(config_to_dict(config), sort_keys=False)


def launch_world_size() -> int:
    """Number of ranks that torchrun started (1 outside it)."""
    return int(os.environ.get("WORLD_SIZE", "1"))
