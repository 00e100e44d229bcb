"""Batches that teach nothing, inputs that are not finite, and the learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from checks import Checks, layout
from megatron.core.transformer.transformer_config import TransformerConfig
from tiny_learners import (
    MegatronLearner,
    PlainLearner,
    make_batch,
    make_config,
    make_learner,
    minibatches,
    same_bits,
    snapshot,
    train,
)
from torch import Tensor

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.batch import Objective, TrainingBatch
from megatron_calclip.config import Config
from megatron_calclip.config_file import launch_world_size
from megatron_calclip.learner.attention import CPU_FP32_ELEMENTS, PackedAttention
from megatron_calclip.learner.packing import AttentionGroup
from megatron_calclip.objective import policy_objective, policy_tokens

MODEL = "qwen2 tied"
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [OVERLAP, {"tp": 2, "sequence_parallel": True}, {"pp": 2, "vpp": 2}],
}


def check_edges(checks: Checks, root: Path, _: Path) -> None:
    """All of this module, on a few layouts."""
    for parallel in LAYOUTS.get(launch_world_size(), []):
        check_equal_rewards(checks, root, parallel)
        check_not_finite(checks, root, parallel)
    if launch_world_size() == 1:
        check_schedule(checks)
        check_attention(checks)


def check_equal_rewards(checks: Checks, root: Path, parallel: dict[str, Any]) -> None:
    """Without advantages, penalty and bonus there is no gradient: weights decay, all else stays."""
    config = make_config(parallel=parallel, algorithm={"kl": {}, "entropy_bonus": 0.0})
    batch = make_batch(MODEL)
    batch = replace(batch, advantages=torch.zeros_like(batch.advantages))
    first = PlainLearner(config, MODEL, batch).weights()
    with layout(config) as runtime:
        policy = MegatronLearner(make_learner(config, runtime, MODEL), batch, root / "reference")
        history = train(policy, batch, config, num_steps=1)
    decay = 1.0
    for _ in history.updates:
        decay *= 1.0 - config.optimizer.lr * config.optimizer.weight_decay
    expected = {name: weight * decay if weight.dim() > 1 else weight for name, weight in first.items()}
    checks.close(f"equal rewards {parallel}: weights decay", history.weights, expected, tolerance=1e-6)
    unmoved = all(torch.equal(history.weights[name], w) for name, w in first.items() if w.dim() == 1)
    no_gradient = all(update.grad_norm == 0.0 == update.loss for update in history.updates)
    checks.true(f"equal rewards {parallel}: norms and biases stay, no gradient", unmoved and no_gradient)


def _objective(batch: TrainingBatch, config: Config, old_log_probs: Tensor) -> Objective:
    algorithm = config.algorithm
    complete = batch.with_log_probs(old_log_probs=old_log_probs, reference_log_probs=old_log_probs)
    tokens = policy_tokens(complete, minibatches(batch, config), algorithm, config.rollout.max_new_tokens)
    return policy_objective(tokens, ClipBounds(algorithm.clip.lower, algorithm.clip.upper), algorithm)


def check_not_finite(checks: Checks, root: Path, parallel: dict[str, Any]) -> None:
    """One bad number anywhere: no rank updates anything, and the next update is as if it had never been."""
    config, batch = make_config(parallel=parallel), make_batch(MODEL)
    plain = PlainLearner(config, MODEL, batch)
    old, _ = plain.score()
    expected = plain.update(0, _objective(batch, config, old))
    # Of the first mini-batch, a token of its longest sequence and the one token of its shortest response.
    trajectories = batch.trajectories
    responses = trajectories.response_mask.nonzero()[:, 0]
    ids = trajectories.sequence_ids[responses]
    bad_tokens = [int(responses[ids == sequence][-1]) for sequence in (2, 1)]
    with layout(config) as runtime:
        learner = make_learner(config, runtime, MODEL)
        policy = MegatronLearner(learner, batch, root / "reference")
        before = snapshot(learner)
        for token in bad_tokens:
            for what, value in (("advantage", math.nan), ("advantage", math.inf), ("old log-prob", math.nan)):
                advantages, log_probs = batch.advantages.clone(), old.clone()
                (advantages if what == "advantage" else log_probs)[token] = value
                result = policy.update(0, _objective(replace(batch, advantages=advantages), config, log_probs))
                checks.true(
                    f"{what} {value} at {token} {parallel}: not applied, nothing moves",
                    not result.applied and same_bits(snapshot(learner), before),
                )
        after = policy.update(0, _objective(batch, config, old))
        weights = policy.weights()
    checks.true(f"after bad input {parallel}: applied", after.applied)
    checks.close(
        f"after bad input {parallel}: the next update",
        {"loss": after.loss, "norm": after.grad_norm, **weights},
        {"loss": expected.loss, "norm": expected.grad_norm, **plain.weights()},
        tolerance=1e-5,
    )


def check_schedule(checks: Checks) -> None:
    """Warm-up and decay are counted in RL steps."""
    schedule = {"warmup_steps": 2, "decay": "linear", "min_lr": 1e-3}
    config = make_config(schedule=schedule, train={"num_steps": 6})
    with layout(config) as runtime:
        learner = make_learner(config, runtime, MODEL)
        rates = []
        for _ in range(7):
            learner.begin_step()
            rates.append(learner.lr)
    # Peak 5e-3 after 2 steps; then 4 equal steps of 1e-3 down to 1e-3 at step 6, where it stays.
    expected = [2.5e-3, 5e-3, 4e-3, 3e-3, 2e-3, 1e-3, 1e-3]
    checks.close(
        "learning-rate schedule",
        {"lr": 1e3 * torch.tensor(rates)},
        {"lr": 1e3 * torch.tensor(expected)},
        tolerance=1e-6,
    )


def check_attention(checks: Checks) -> None:
    """BF16 attention, value and gradients against float64: of few keys, by FP32 and so to one rounding, and of many."""
    attention = PackedAttention(TransformerConfig(num_layers=1, hidden_size=128, num_attention_heads=4))
    generator = torch.Generator().manual_seed(0)
    few = CPU_FP32_ELEMENTS // 32
    for num_keys, tolerance in ((few, 2**-8), (2 * few, 2**-6)):
        drawn = [torch.randn(2 * num_keys, heads, 32, generator=generator) for heads in (4, 2, 2)]
        own = [x.bfloat16().requires_grad_() for x in drawn]
        exact = [x.detach().double().requires_grad_() for x in own]
        actual = attention._attend(AttentionGroup(2, num_keys, num_keys, None), *own)
        q, k, v = (x.unflatten(0, (2, -1)).transpose(1, 2) for x in exact)
        scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) / 32**0.5
        seen = torch.ones(num_keys, num_keys).tril().bool()
        mean = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)
        expected = mean.transpose(1, 2).reshape(2 * num_keys, 128)
        upstream = torch.randn(actual.shape, generator=generator).bfloat16()
        name = f"attention, {num_keys} keys of 32"
        checks.true(f"{name}: BF16", actual.dtype is torch.bfloat16)
        results = {"value": (actual, expected)}
        gradients = zip(
            torch.autograd.grad(actual, own, upstream),
            torch.autograd.grad(expected, exact, upstream.double()),
            strict=True,
        )
        results |= dict(zip(("query", "key", "value's gradient"), gradients, strict=True))
        for what, (a, e) in results.items():
            error = float((a.double() - e).abs().max() / e.abs().max())
            checks.true(f"{name}: {what}", error <= tolerance, f"{error:.1e}")
