"""A training step's metrics, from what its stages hand over; names and reductions are in `metrics.METRICS`."""

from __future__ import annotations

from typing import Any

import torch

from megatron_calclip.algorithms.advantages import degenerate_groups
from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.diagnostics import PolicyMetricSums
from megatron_calclip.algorithms.mismatch import Mismatch, mismatch
from megatron_calclip.batch import TrainingBatch, Trajectories
from megatron_calclip.learner.learner import UpdateResult
from megatron_calclip.learner.runtime import Runtime

MAX_LOGGED_OUTLIERS = 4
"""Of a step, sequences on which sampler and learner disagree."""


def batch_metrics(batch: TrainingBatch) -> dict[str, float]:
    """What rewards and answers look like; the batch is the same on every rank."""
    trajectories, rewards = batch.trajectories, batch.rewards
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/equal_groups": float(degenerate_groups(rewards, trajectories.groups).float().mean()),
        "response/mean_length": float(trajectories.response_lengths.float().mean()),
        "response/truncated": float((~trajectories.finished).float().mean()),
    }


def sampler_mismatch(batch: TrainingBatch) -> Mismatch:
    """How far the sampler's log-probabilities are from pi_old's."""
    trajectories = batch.trajectories
    assert batch.old_log_probs is not None
    return mismatch(
        batch.old_log_probs, trajectories.sampler_log_probs, trajectories.response_mask, trajectories.lengths
    )


def sampler_metrics(apart: Mismatch, trajectories: Trajectories, *, policy_version: int) -> dict[str, float]:
    """How far sampler and learner were apart, in log-probabilities and in steps.

    Args:
        apart: of the batch.
        trajectories: of the batch.
        policy_version: of the weights that began to train on it.
    """
    staleness = policy_version - trajectories.policy_versions
    return {
        "mismatch/p95_abs_dlogp": apart.p95,
        "mismatch/sequence_max": float(apart.sequence_mean.max()),
        "mismatch/outliers": apart.outliers.numel(),
        "rollout/staleness_mean": float(staleness.float().mean()),
        "rollout/staleness_max": int(staleness.max()),
    }


def outlier_rows(apart: Mismatch, trajectories: Trajectories, texts: list[str]) -> list[dict[str, Any]]:
    """The worst sequences, for `outliers.jsonl`."""
    return [
        {
            "sample_id": int(trajectories.sample_ids[i]),
            "response_tokens": int(trajectories.response_lengths[i]),
            "mean_abs_dlogp": float(apart.sequence_mean[i]),
            "max_abs_dlogp": float(apart.sequence_max[i]),
            "text": texts[i],
        }
        for i in apart.outliers.tolist()[:MAX_LOGGED_OUTLIERS]
    ]


def update_metrics(updates: list[UpdateResult], bounds: ClipBounds, runtime: Runtime) -> dict[str, float]:
    """What the step's updates did, reduced over ranks; collective.

    Args:
        updates: of the step.
        bounds: in force during it.
        runtime: this rank.
    """
    row: dict[str, float] = {
        "grad_norm": sum(result.grad_norm for result in updates) / len(updates),
        "updates/applied": sum(result.applied for result in updates),
        "updates/skipped": sum(not result.applied for result in updates),
        "clip/lower": bounds.lower,
        "clip/upper": bounds.upper,
    }
    total = PolicyMetricSums.empty()
    loss = torch.zeros((), dtype=torch.float64)
    if runtime.reports_tokens:
        loss = torch.stack([result.loss for result in updates]).mean()
        for result in updates:
            for record in result.extras:
                total = total.merge(record.metrics.cpu())
    sums, minima, maxima = total.pack()
    row["loss"] = float(runtime.sum_over_world(loss))
    reduced = PolicyMetricSums(
        runtime.sum_over_world(sums).cpu(),
        -runtime.max_over_world(-minima).cpu(),
        runtime.max_over_world(maxima).cpu(),
    )
    return row | reduced.finalize()
