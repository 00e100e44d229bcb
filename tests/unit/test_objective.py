"""From a step's tensors to micro-batch losses: hand numbers, and sums that no split changes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.diagnostics import PolicyMetricSums
from megatron_calclip.batch import Completion, Prompt, ScoredTokens, TrainingBatch, Trajectories
from megatron_calclip.config import AlgorithmConfig, ImportanceConfig, KLConfig
from megatron_calclip.objective import (
    minibatch_loss_weights,
    policy_objective,
    policy_tokens,
    supervised_objective,
)

BOUNDS = ClipBounds(0.8, 1.24)


def make_batch(lengths: list[int], advantages: list[float], *, seed: int = 0, noise: float = 0.0) -> TrainingBatch:
    """Sequences of a prompt of two tokens and a response; log pi_old = -1, mu and pi_ref off by `noise`."""
    completions = [[Completion((1,) * n, (-1.0,) * n, finished=True, policy_version=0)] for n in lengths]
    prompts = [Prompt(i, (5, 6), "", "") for i in range(len(lengths))]
    trajectories = Trajectories.from_completions(prompts, completions)
    mask, ids = trajectories.response_mask, trajectories.sequence_ids
    generator = torch.Generator().manual_seed(seed)

    def around(value: float) -> Tensor:
        return torch.where(mask, value + noise * torch.randn(len(mask), generator=generator), 0.0)

    trajectories.sampler_log_probs.copy_(around(-1.0))
    per_token = torch.tensor(advantages)[ids] * mask
    batch = TrainingBatch(trajectories, torch.tensor(advantages), per_token)
    return batch.with_log_probs(old_log_probs=around(-1.0), reference_log_probs=around(-1.0))


def scored(batch: TrainingBatch, sequences: list[int], log_probs: Tensor, entropy: Tensor) -> ScoredTokens:
    """One micro-batch: the response tokens of some sequences, in this order."""
    ids, mask = batch.trajectories.sequence_ids, batch.trajectories.response_mask
    index = torch.cat([torch.zeros(0, dtype=torch.int64), *(((ids == s) & mask).nonzero()[:, 0] for s in sequences)])
    return ScoredTokens(index=index, log_probs=log_probs[index], entropy=entropy[index])


def by_hand(algorithm: AlgorithmConfig) -> tuple[float, Tensor, PolicyMetricSums]:
    """Loss and gradient of two sequences: A = 1 with log-ratios log 1.1, log 1.5; A = -2 with log 0.9."""
    batch = make_batch([2, 1], [1.0, -2.0])
    log_probs = torch.zeros(7).index_copy(0, torch.tensor([2, 3, 6]), torch.tensor([1.1, 1.5, 0.9]).log() - 1.0)
    log_probs.requires_grad_()
    tokens = policy_tokens(batch, [[0, 1]], algorithm, max_response_length=4)
    entropy = torch.full((7,), 0.5)
    loss, record = policy_objective(tokens, BOUNDS, algorithm)(scored(batch, [0, 1], log_probs, entropy))
    loss.backward()
    assert log_probs.grad is not None
    return loss.item(), log_probs.grad, record.metrics


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        # Two response tokens in sequence 0, one in sequence 1, at most 4 a response.
        ("sequence_mean", [1 / 4, 1 / 4, 1 / 2]),
        ("token_mean", [1 / 3, 1 / 3, 1 / 3]),
        ("fixed_length", [1 / 8, 1 / 8, 1 / 8]),
    ],
)
def test_clipped_surrogate_by_hand(aggregation: Any, weights: list[float]) -> None:
    loss, gradient, sums = by_hand(AlgorithmConfig(aggregation=aggregation))
    # -min(r A, clip(r) A): -1.1, -1.24 (clipped), +1.8; gradients -r A: -1.1, 0, +1.8.
    a, b, c = weights
    assert loss == pytest.approx(-1.1 * a - 1.24 * b + 1.8 * c, rel=1e-6)
    torch.testing.assert_close(gradient[[2, 3, 6]], torch.tensor([-1.1 * a, 0.0, 1.8 * c]))
    assert gradient[[0, 1, 4, 5]].tolist() == [0.0] * 4
    metrics = sums.finalize()
    assert metrics["clip/high_positive"] == 0.5 and metrics["clip/low_negative"] == 0.0
    assert metrics["ratio/max"] == pytest.approx(1.5) and metrics["entropy"] == 0.5


def test_kl_and_entropy_by_hand() -> None:
    algorithm = AlgorithmConfig(aggregation="token_mean", entropy_bonus=0.1, kl=KLConfig(coefficient=0.3, kind="k2"))
    loss, _, _ = by_hand(algorithm)
    surrogate = (-1.1 - 1.24 + 1.8) / 3
    # K2 = d^2 / 2 with d = log pi_theta - log pi_ref = log r here.
    penalty = sum(math.log(r) ** 2 / 2 for r in (1.1, 1.5, 0.9)) / 3
    assert loss == pytest.approx(surrogate + 0.3 * penalty - 0.1 * 0.5, rel=1e-6)


def test_importance_weights_multiply_the_surrogate_alone() -> None:
    # pi_old / mu = e, truncated to 2, on every token.
    batch = make_batch([1], [1.0])
    batch.trajectories.sampler_log_probs[2] = -2.0
    algorithm = AlgorithmConfig(importance=ImportanceConfig(cap=2.0), entropy_bonus=1.0)
    tokens = policy_tokens(batch, [[0]], algorithm, max_response_length=1)
    micro = scored(batch, [0], torch.full((3,), -1.0), torch.full((3,), 0.25))
    loss, record = policy_objective(tokens, BOUNDS, algorithm)(micro)
    assert loss.item() == pytest.approx(-2.0 * 1.0 - 0.25)
    assert record.metrics.finalize()["importance/truncated"] == 1.0


def test_weights_count_within_each_mini_batch() -> None:
    # Mini-batch 0 has sequences 0 and 2 (1 + 3 tokens), mini-batch 1 sequence 1 (2 tokens).
    batch = make_batch([1, 2, 3], [1.0, 1.0, 1.0])
    weights = minibatch_loss_weights(batch, [[0, 2], [1]], AlgorithmConfig(aggregation="token_mean"), 8)
    assert weights.tolist() == [0, 0, 0.25, 0, 0, 0.5, 0.5, 0, 0, 0.25, 0.25, 0.25]


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    aggregation=st.sampled_from(["sequence_mean", "token_mean", "fixed_length"]),
    level=st.sampled_from(["off", "token", "sequence_product", "sequence_geometric"]),
    loss_kind=st.sampled_from(["clip", "gspo", "cispo"]),
    cuts=st.lists(st.integers(0, 8), max_size=3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30)
def test_no_split_changes_loss_gradient_or_metrics(
    lengths: list[int], aggregation: Any, level: Any, loss_kind: Any, cuts: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch = make_batch(lengths, torch.randn(len(lengths), generator=generator).tolist(), seed=seed, noise=0.4)
    algorithm = AlgorithmConfig(
        loss=loss_kind,
        aggregation=aggregation,
        importance=ImportanceConfig(level=level),
        kl=KLConfig(coefficient=0.1),
        entropy_bonus=0.1,
    )
    everything = list(range(len(lengths)))
    tokens = policy_tokens(batch, [everything], algorithm, max_response_length=8)
    objective = policy_objective(tokens, BOUNDS, algorithm)
    num_tokens = batch.trajectories.tokens.numel()
    entropy = torch.rand(num_tokens, generator=generator)
    values = -1.0 + 0.4 * torch.randn(num_tokens, generator=generator)

    def run(parts: list[list[int]]) -> tuple[float, Tensor, PolicyMetricSums]:
        log_probs = values.clone().requires_grad_()
        total, loss = PolicyMetricSums.empty(), 0.0
        for part in parts:  # an empty one keeps a rank in step with the others
            share, record = objective(scored(batch, part, log_probs, entropy))
            share.backward()
            total, loss = total.merge(record.metrics), loss + share.item()
        assert log_probs.grad is not None
        return loss, log_probs.grad, total

    edges = [0, *sorted(cuts), len(lengths)]
    shuffled = torch.randperm(len(lengths), generator=generator).tolist()
    parts = [shuffled[min(a, b) : b] for a, b in itertools.pairwise(edges)]
    loss, gradient, sums = run([everything])
    split_loss, split_gradient, split_sums = run([*parts, []])
    assert split_loss == pytest.approx(loss, abs=1e-5)
    torch.testing.assert_close(split_gradient, gradient)
    torch.testing.assert_close(split_sums.pack(), sums.pack())


def test_supervised_by_hand() -> None:
    # Negative log-likelihoods 1 and 3 at tokens 0 and 2, weights 1/4 and 3/4.
    log_probs = torch.tensor([-1.0, -3.0], requires_grad=True)
    micro = ScoredTokens(index=torch.tensor([0, 2]), log_probs=log_probs, entropy=torch.zeros(2))
    loss, extra = supervised_objective(torch.tensor([0.25, 0.0, 0.75]))(micro)
    loss.backward()
    assert loss.item() == 0.25 * 1 + 0.75 * 3 and extra is None
    assert log_probs.grad is not None and log_probs.grad.tolist() == [-0.25, -0.75]
