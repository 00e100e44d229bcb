"""Cross-checks between settings: what the types of single values cannot say.

Run before a process group or a model exists; imports no torch. What depends on the device is checked in
`precision.backend`.
"""

from __future__ import annotations

import math
import re

from megatron_calclip.config import (
    GENERATED_TASKS,
    Config,
    ShapeConfig,
)
from megatron_calclip.config_calibration import calibration_settings
from megatron_calclip.errors import UserError


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
    _check_model(config)
    _check_task(config)
    _check_data(config)
    _check_layout(config, world_size)
    _check_training(config)
    _check_precision(config)
    _check_calibration(config)
    _check_secrets(config)
    if config.model.shape is not None:
        check_shape(config.model.shape, config)


def _check_model(config: Config) -> None:
    m = config.model
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
        m.warm_start.num_steps == 0 or m.shape is not None,
        "model.warm_start.num_steps",
        "a pretrained model has no warm start; set it to 0",
    )
    _check(
        m.warm_start.num_steps == 0 or config.data.train in GENERATED_TASKS,
        "model.warm_start.num_steps",
        f"worked examples exist only for data.train: {' or '.join(GENERATED_TASKS)}; set it to 0",
    )
    _check(
        m.warm_start.num_steps == 0 or not config.data.instruction,
        "data.instruction",
        "worked examples of the warm start answer the bare problem; leave it out, or set model.warm_start.num_steps to 0",
    )
    _check(
        config.rollout.max_new_tokens < m.max_sequence_length,
        "rollout.max_new_tokens",
        f"leaves no room for a prompt within model.max_sequence_length = {m.max_sequence_length}; lower it",
    )
    if m.tokenizer == "characters":
        _check(
            len(set(m.characters)) == len(m.characters) > 0,
            "model.characters",
            "is empty or names a character twice; list each once",
        )
        _check(
            config.data.chat_template is not True,
            "data.chat_template",
            "`characters` has no template; use false, or give one",
        )


def _check_task(config: Config) -> None:
    """The generated problems, and whether a `characters` tokenizer and the context can hold them."""
    m, task = config.model, config.data.arithmetic
    _check(
        bool(task.operators) and set(task.operators) <= set("+-*"),
        "data.arithmetic.operators",
        f"{task.operators!r}: give some of + - *",
    )
    if m.tokenizer != "characters":
        return
    needs = {  # name -> (alphabet, longest problem)
        "arithmetic": ("0123456789=" + task.operators, task.num_operands * (len(str(task.max_operand)) + 1)),
        "scratchpad": ("0123456789=^_abcdefgh", 2 * config.data.scratchpad.num_digits + 1),
    }
    for name, (alphabet, longest) in needs.items():
        if name not in (config.data.train, *config.eval_sets):
            continue
        absent = sorted(set(alphabet) - set(m.characters))
        _check(
            not absent,
            "model.characters",
            f"lacks {''.join(absent)!r}, which the {name} problems need; add them",
        )
        total = longest + config.rollout.max_new_tokens
        _check(
            total <= m.max_sequence_length,
            "model.max_sequence_length",
            f"{name} problems of up to {longest} characters plus rollout.max_new_tokens = "
            f"{config.rollout.max_new_tokens} exceed {m.max_sequence_length}; raise it to {total}",
        )


def _check_data(config: Config) -> None:
    """Prompts, and the settings of evaluation that differ from training's."""
    data, longest = config.data, config.model.max_sequence_length
    _check(
        data.system_prompt is None or data.chat_template is not False,
        "data.system_prompt",
        "needs a chat template; set data.chat_template, or leave it out",
    )
    _check(
        config.for_evaluation.rollout.max_new_tokens < longest,
        "eval.max_new_tokens",
        f"leaves no room for a prompt within model.max_sequence_length = {longest}; lower it",
    )


def _check_layout(config: Config, world_size: int) -> None:
    """Whether ranks, sequences and batches divide."""
    p, t, a = config.parallel, config.train, config.algorithm
    ranks = p.tp * p.pp * p.cp
    _check(
        world_size % ranks == 0,
        "parallel",
        f"tp {p.tp} x pp {p.pp} x cp {p.cp} = {ranks} does not divide the {world_size} ranks of this launch; "
        "change parallel, or the number of processes (torchrun --nproc-per-node; cluster for --dry-run)",
    )
    dp = world_size // ranks
    _check(t.samples_per_prompt >= 2, "train.samples_per_prompt", "a group needs at least 2 samples; raise it")
    _check(
        config.sequences_per_step % a.num_minibatches == 0,
        "algorithm.num_minibatches",
        f"{a.num_minibatches} does not divide the {config.sequences_per_step} sequences of a step "
        "(train.prompts_per_step x train.samples_per_prompt); choose a divisor",
    )
    per_minibatch = config.sequences_per_step // a.num_minibatches
    _check(
        per_minibatch >= dp,
        "algorithm.num_minibatches",
        f"{per_minibatch} sequences a mini-batch cannot feed {dp} data-parallel ranks; "
        "use fewer mini-batches, or more sequences",
    )
    warm_start = config.model.warm_start
    _check(
        warm_start.num_steps == 0 or warm_start.batch_size % dp == 0,
        "model.warm_start.batch_size",
        f"{warm_start.batch_size} is not divisible by the data-parallel size {dp}; choose a multiple",
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


def _check_training(config: Config) -> None:
    clip, schedule, num_steps = config.algorithm.clip, config.schedule, config.train.num_steps
    _check(
        clip.dual is None or clip.dual > clip.upper,
        "algorithm.clip.dual",
        f"must exceed algorithm.clip.upper = {clip.upper}; raise it",
    )
    _check(
        config.rollout.top_p == 1.0,
        "rollout.top_p",
        "the learner's probabilities have no nucleus, so ratios would be biased; use 1.0",
    )
    rollout = config.rollout
    if rollout.engine == "vllm":
        _check(
            bool(rollout.vllm.urls) != rollout.vllm.launch,
            "rollout.vllm",
            "give the urls of running servers, or launch: true, and not both",
        )
        _check(
            rollout.temperature == 1.0 or rollout.canary_prompts == 0,
            "rollout.canary_prompts",
            "vLLM scores the canary at temperature 1 only; use rollout.temperature: 1, or set it to 0",
        )
        _check(
            not rollout.vllm.colocated or rollout.vllm.launch,
            "rollout.vllm.colocated",
            "only servers that the run starts can be put to sleep; use launch: true",
        )
        _check(
            not rollout.vllm.colocated or rollout.max_staleness == 0,
            "rollout.vllm.colocated",
            "servers that sleep during training cannot draw ahead; use rollout.max_staleness: 0",
        )
    _check(
        config.algorithm.old_log_probs == "matched" or config.algorithm.num_minibatches > 1,
        "algorithm.old_log_probs",
        "mismatched needs other micro-batches than those that train; use algorithm.num_minibatches above 1",
    )
    _check(
        rollout.max_staleness == 0 or config.algorithm.importance.level != "off",
        "rollout.max_staleness",
        "completions from older weights bias the gradient without a correction; use algorithm.importance.level: token",
    )
    pattern = config.reward.format.pattern
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise UserError("reward.format.pattern", f"is no regular expression ({error}); correct it") from None
    buffer, longest = config.reward.overlong_buffer, config.rollout.max_new_tokens
    _check(
        buffer is None or buffer <= longest,
        "reward.overlong_buffer",
        f"exceeds rollout.max_new_tokens = {longest}; lower it",
    )
    _check(
        schedule.min_lr <= config.optimizer.lr,
        "schedule.min_lr",
        f"exceeds optimizer.lr = {config.optimizer.lr}; lower it",
    )
    _check(
        schedule.warmup_steps < num_steps,
        "schedule.warmup_steps",
        f"must be below train.num_steps = {num_steps}; lower it",
    )


def _check_precision(config: Config) -> None:
    """What no backend can do; `precision.backend` checks what a device cannot."""
    precision, parallel, dials = config.precision, config.parallel, config.precision.emulation
    recipe = precision.recipe
    for name in ("fp8_param", "output_layer"):
        _check(
            recipe != "bf16" or not getattr(precision, name),
            f"precision.{name}",
            "needs an FP8 recipe; choose one with precision.recipe, or switch it off",
        )
    _check(
        not precision.fp8_param or precision.params_dtype == "bf16",
        "precision.fp8_param",
        "FP32 parameters are their own masters; use precision.params_dtype: bf16, or switch it off",
    )
    fixed = {"tensorwise_delayed": False, "mxfp8": True}
    _check(
        recipe not in fixed or precision.power_of_two_scales in (None, fixed[recipe]),
        "precision.power_of_two_scales",
        f"{recipe} has no choice of scales; leave it null",
    )
    for name in ("channel_outlier", "first_token_outlier"):
        value = getattr(dials, name)
        _check(
            math.frexp(value)[0] == 0.5,
            f"precision.emulation.{name}",
            f"{value} is no power of two; choose one, so that the multiplication is exact",
        )
    full = parallel.recompute == "full"
    _check(
        not full or recipe != "tensorwise_delayed",
        "parallel.recompute",
        "full would quantise again with tensorwise_delayed's next scale; use selective",
    )
    _check(
        not full or dials.first_token_outlier == 1 or parallel.pp == 1,
        "parallel.recompute",
        "full forgets which tokens emulation.first_token_outlier is for; use selective",
    )
    _check(
        not precision.output_layer or recipe != "tensorwise_delayed",
        "precision.output_layer",
        "tensorwise_delayed keeps histories for decoder layers only; use tensorwise",
    )
    _check(
        not precision.output_layer or not config.train.fused_head,
        "precision.output_layer",
        "the fused head computes in BF16; set train.fused_head: false",
    )


def check_shape(shape: ShapeConfig, config: Config, *, where: str = "model.shape") -> None:
    """Whether a model of this shape exists and can be split and quantised so.

    Args:
        shape: the model.
        config: with the layout and the precision.
        where: the setting that the shape comes from.

    Raises:
        UserError: naming the setting at fault.
    """
    s, p = shape, config.parallel
    _check(
        s.num_attention_heads % s.num_query_groups == 0,
        where,
        f"num_query_groups {s.num_query_groups} does not divide num_attention_heads {s.num_attention_heads}; "
        "choose a divisor",
    )
    _check(
        s.head_dim is not None or s.hidden_size % s.num_attention_heads == 0,
        where,
        f"hidden_size {s.hidden_size} is not divisible by num_attention_heads {s.num_attention_heads}; give head_dim",
    )
    head_dim = s.head_dim or s.hidden_size // s.num_attention_heads
    _check(head_dim % 2 == 0, where, f"head_dim {head_dim} is odd; rotary embedding turns pairs, use an even one")
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
        2 * config.precision.first_last_layers_bf16 < s.num_layers,
        "precision.first_last_layers_bf16",
        f"leaves none of the {s.num_layers} layers in FP8; lower it, or use recipe: bf16",
    )


def _check_secrets(config: Config) -> None:
    """A configuration is printed and saved with the run: no key belongs in it."""
    vllm = config.rollout.vllm
    _check(
        not any(argument.startswith("--api-key") for argument in vllm.arguments),
        "rollout.vllm.arguments",
        "a key would be saved with the run; set MEGATRON_CALCLIP_VLLM_KEY in the environment instead",
    )
    for url in vllm.urls:
        _check(
            re.fullmatch(r"https?://[^/@\s]+", url.rstrip("/")) is not None,
            "rollout.vllm.urls",
            "an entry is no http://host:port; give just that, and a key through MEGATRON_CALCLIP_VLLM_KEY",
        )


def _check_calibration(config: Config) -> None:
    """Losses, calibration and layouts that cannot work together."""
    a, c = config.algorithm, config.calibration
    _check(
        not c.enabled or a.loss in ("clip", "gspo"),
        "calibration.enabled",
        f"algorithm.loss: {a.loss} has no bounds to calibrate; use clip or gspo, or switch it off",
    )
    _check(
        a.loss != "gspo" or config.parallel.cp == 1,
        "algorithm.loss",
        "gspo needs whole sequences on a rank; use parallel.cp: 1",
    )
    calibration_settings(config)
