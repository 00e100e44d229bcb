"""From flat tensors of one step to the loss of a micro-batch: where the algorithm's parts meet.

Pure tensors, no process groups. The trainer fills `PolicyTokens` once a step; `policy_objective` turns one
mini-batch of it into the function that the learner calls for each micro-batch. All denominators are global counts,
so micro-batch losses and metric sums only ever add up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_calclip.algorithms.aggregation import loss_weights
from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.cispo import cispo_loss
from megatron_calclip.algorithms.diagnostics import PolicyMetricSums, policy_metric_sums
from megatron_calclip.algorithms.gspo import gspo_surrogate
from megatron_calclip.algorithms.importance import ImportanceWeights, importance_weights
from megatron_calclip.algorithms.kl import kl_penalty
from megatron_calclip.algorithms.policy_loss import LossInputs, LossOutput, clipped_surrogate, oracle_surrogate
from megatron_calclip.batch import Objective, ScoredTokens, TrainingBatch
from megatron_calclip.config import AlgorithmConfig


@dataclass(frozen=True)
class PolicyTokens:
    """Per-token inputs of the policy loss over a whole step, flat [T], on the CPU."""

    advantages: Tensor
    old_log_probs: Tensor
    sampler_log_probs: Tensor
    importance: ImportanceWeights
    loss_weights: Tensor
    """float32: 0 outside the response mask; they sum to 1 over each mini-batch for the two means."""
    reference_log_probs: Tensor | None
    sequence_ids: Tensor
    num_sequences: int


def minibatch_loss_weights(
    batch: TrainingBatch, minibatches: list[list[int]], algorithm: AlgorithmConfig, max_response_length: int
) -> Tensor:
    """Aggregation weights [T], each token's with the counts of its own mini-batch.

    Args:
        batch: the step's batch.
        minibatches: sequences of each mini-batch.
        algorithm: which aggregation.
        max_response_length: the constant of `fixed_length`, in tokens.
    """
    trajectories = batch.trajectories
    ids = trajectories.sequence_ids
    weights = torch.zeros(trajectories.tokens.numel())
    for sequences in minibatches:
        member = torch.zeros(trajectories.num_sequences, dtype=torch.bool)
        member[sequences] = True
        mask = trajectories.response_mask & member[ids]
        if not mask.any():
            continue  # all masked out: its update has no gradient
        weights += loss_weights(
            mask,
            ids,
            aggregation=algorithm.aggregation,
            num_tokens=int(mask.sum()),
            num_sequences=len(sequences),
            max_response_length=max_response_length,
        )
    return weights


def policy_tokens(
    batch: TrainingBatch, minibatches: list[list[int]], algorithm: AlgorithmConfig, max_response_length: int
) -> PolicyTokens:
    """Everything the losses of a step need, from a batch whose old log-probabilities are known."""
    trajectories = batch.trajectories
    assert batch.old_log_probs is not None
    ids = trajectories.sequence_ids
    importance = importance_weights(
        batch.old_log_probs,
        trajectories.sampler_log_probs,
        trajectories.response_mask,
        ids,
        num_sequences=trajectories.num_sequences,
        level=algorithm.importance.level,
        cap=algorithm.importance.cap,
        mode=algorithm.importance.mode,
    )
    return PolicyTokens(
        advantages=batch.advantages,
        old_log_probs=batch.old_log_probs,
        sampler_log_probs=trajectories.sampler_log_probs,
        importance=importance,
        loss_weights=minibatch_loss_weights(batch, minibatches, algorithm, max_response_length),
        reference_log_probs=batch.reference_log_probs,
        sequence_ids=ids,
        num_sequences=trajectories.num_sequences,
    )


@dataclass(frozen=True)
class MicroBatchRecord:
    """What the policy loss leaves of one micro-batch (n scored tokens), on the learner's device, detached."""

    metrics: PolicyMetricSums
    index: Tensor
    """int64 [n]: the tokens' places in the flat layout, on the CPU."""
    ratio: Tensor
    """float32 [n]: pi_theta / pi_old as the loss clipped it."""
    clipped: Tensor
    """uint8 [n]: 0 where the clip left the gradient, 1 at the lower bound, 2 at the upper, 3 at the dual clip."""
    log_probs: Tensor
    """float32 [n]: log pi_theta."""
    entropy: Tensor
    """float32 [n] nats."""


def _loss_output(
    inputs: LossInputs,
    bounds: ClipBounds,
    algorithm: AlgorithmConfig,
    *,
    exact_on_policy: bool,
    reference_ratio: Tensor | None,
) -> LossOutput:
    """The configured loss."""
    if algorithm.loss == "gspo":
        return gspo_surrogate(inputs, bounds, dual_clip=algorithm.clip.dual, exact_on_policy=exact_on_policy)
    if algorithm.loss == "cispo":
        return cispo_loss(inputs, bounds, exact_on_policy=exact_on_policy)
    if algorithm.loss == "oracle":
        assert reference_ratio is not None
        return oracle_surrogate(inputs, bounds, reference_ratio=reference_ratio, dual_clip=algorithm.clip.dual)
    # bapo is the clipped surrogate, too; its bounds are searched by the caller
    return clipped_surrogate(inputs, bounds, dual_clip=algorithm.clip.dual, exact_on_policy=exact_on_policy)


def policy_objective(
    tokens: PolicyTokens,
    bounds: ClipBounds,
    algorithm: AlgorithmConfig,
    *,
    weights_unmoved: bool = False,
    reference_ratio: Tensor | None = None,
) -> Objective:
    """The policy loss with KL penalty and entropy bonus, as a function of one micro-batch's scored tokens.

    Args:
        tokens: the step's inputs.
        bounds: clip bounds in force during this update.
        algorithm: settings of the loss.
        weights_unmoved: whether the weights are still those of pi_old (the step's first update).
        reference_ratio: [T] BF16 ratios, for the oracle.

    Returns:
        a function to (share of the loss, `MicroBatchRecord`).
    """
    exact_on_policy = algorithm.exact_on_policy and weights_unmoved

    def objective(scored: ScoredTokens) -> tuple[Tensor, MicroBatchRecord]:
        device = scored.log_probs.device

        def pick(values: Tensor) -> Tensor:
            return values[scored.index].to(device)

        mask = torch.ones_like(scored.log_probs, dtype=torch.bool)  # only response tokens are scored
        inputs = LossInputs(
            log_probs=scored.log_probs,
            old_log_probs=pick(tokens.old_log_probs),
            advantages=pick(tokens.advantages),
            importance_weights=pick(tokens.importance.weights),
            response_mask=mask,
            sequence_ids=pick(tokens.sequence_ids),
            num_sequences=tokens.num_sequences,
        )
        output = _loss_output(
            inputs,
            bounds,
            algorithm,
            exact_on_policy=exact_on_policy,
            reference_ratio=None if reference_ratio is None else pick(reference_ratio),
        )
        token_loss = output.token_loss
        if tokens.reference_log_probs is not None:
            penalty = kl_penalty(
                scored.log_probs, pick(tokens.reference_log_probs), response_mask=mask, kind=algorithm.kl.kind
            )
            token_loss = token_loss + algorithm.kl.coefficient * penalty
        if algorithm.entropy_bonus:
            token_loss = token_loss - algorithm.entropy_bonus * scored.entropy
        metrics = policy_metric_sums(
            inputs,
            output,
            entropy=scored.entropy.detach(),
            sampler_log_probs=pick(tokens.sampler_log_probs),
            importance=ImportanceWeights(inputs.importance_weights, pick(tokens.importance.truncated)),
        )
        record = MicroBatchRecord(
            metrics=metrics,
            index=scored.index,
            ratio=output.ratio,
            clipped=(output.clipped_low + 2 * output.clipped_high + 3 * output.clipped_dual).to(torch.uint8),
            log_probs=scored.log_probs.detach(),
            entropy=scored.entropy.detach(),
        )
        return (token_loss * pick(tokens.loss_weights)).sum(), record

    return objective


def supervised_objective(weights: Tensor) -> Objective:
    """Negative log-likelihood for the warm start.

    Args:
        weights: float32 [T], summing to 1 over the mini-batch.
    """

    def objective(scored: ScoredTokens) -> tuple[Tensor, None]:
        return -(scored.log_probs * weights[scored.index].to(scored.log_probs.device)).sum(), None

    return objective
