"""Handing the learner's weights to the sampler, and proof that it samples from them.

A failed weight sync looks like a collapse of the reward. Two checks follow every sync, the first one of a run or of a
resumed run included:

1. The engine returns the policy version and a fingerprint of every tensor that it holds; they must be those of what
   the learner sent. That finds a tensor that stayed behind, was cut or went to another's place.
2. The canary: a few fixed sequences are scored by both sides. Their distance d0 = mean |log pi_sampler - log
   pi_learner| at the start of the process is what the two precisions explain; later more than 3 d0 + 0.02 nats is
   not. That finds what fingerprints of weights cannot see: stale FP8 scales, a cache that was not reset.

After a failure the weights are sent once more; after a second one the run stops, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_calclip.batch import Completion, Prompt, Trajectories
from megatron_calclip.errors import EXIT_FAILED, UserError
from megatron_calclip.rollout.engine import RolloutEngine, WeightsReceipt
from megatron_calclip.rollout.fingerprint import fingerprint

if TYPE_CHECKING:  # an engine's tests need no Megatron
    from megatron_calclip.learner.learner import Learner

MAX_CANARY_TOKENS = 64
"""Of one sequence: enough to see a fault, little enough to score after every step."""
_TOLERATED_MULTIPLE, _TOLERATED_NATS = 3.0, 0.02


@dataclass(frozen=True)
class Canary:
    """Sequences that both sides score after every sync."""

    trajectories: Trajectories
    """All tokens but the first of each count as responses."""

    @classmethod
    def of_prompts(cls, prompts: Sequence[Prompt]) -> Canary | None:
        """The beginnings of prompts; None when all of them have a single token, which nothing predicts."""
        sequences = [prompt.token_ids[:MAX_CANARY_TOKENS] for prompt in prompts if len(prompt.token_ids) > 1]
        if not sequences:
            return None
        heads = [Prompt(id=i, token_ids=ids[:1], text="", answer="", metadata={}) for i, ids in enumerate(sequences)]
        tails = [[Completion(ids[1:], (0.0,) * (len(ids) - 1), finished=True, policy_version=0)] for ids in sequences]
        return cls(Trajectories.from_completions(heads, tails))

    def distance(self, engine: RolloutEngine, learner: Learner) -> float:
        """Mean |log pi_sampler - log pi_learner| in nats, the largest of all ranks' engines; NaN if one has NaN."""
        batch = self.trajectories
        by_learner = learner.gather_tokens(learner.log_probs(learner.prepare(batch, num_minibatches=1)).log_probs)
        sequences = [tokens.tolist() for tokens in batch.tokens.split(batch.lengths.tolist())]
        by_engine = torch.cat(engine.score(sequences, temperature=learner.config.rollout.temperature))
        distance = (by_engine - by_learner)[batch.response_mask].abs().mean()
        # A maximum over ranks may lose a NaN.
        distances = learner.runtime.gather_objects(float(distance))
        return max(distances, key=lambda value: (value != value, value))


class WeightSync:
    """The one way of weights from the learner to an engine; collective.

    Args:
        learner: the source.
        engine: this rank's engine.
        dtype: of the stream: BF16 unless both sides compute in FP32.
        canary: what both sides score; None leaves the second check out.
    """

    def __init__(self, learner: Learner, engine: RolloutEngine, *, dtype: torch.dtype, canary: Canary | None) -> None:
        self.learner, self.engine, self.dtype, self.canary = learner, engine, dtype, canary
        self.first_distance: float | None = None

    def __call__(self, policy_version: int) -> dict[str, float]:
        """Send the present weights and check that they arrived; returns the canary's metrics.

        Raises:
            UserError: when they did not, twice.
        """
        for _ in range(2):
            problem, metrics = self._send(policy_version)
            problems = [text for text in self.learner.runtime.gather_objects(problem) if text is not None]
            if not problems:
                return metrics
        raise UserError(
            "rollout.engine",
            f"does not sample from the weights of step {policy_version}: {problems[0]}; sending them again did not "
            "help, so the run stops before it trains on such samples. Resume from the last checkpoint",
            exit_code=EXIT_FAILED,
        )

    def restart_canary(self) -> None:
        """Measure d0 anew at the next sync: the learner's precision has changed."""
        self.first_distance = None

    def _send(self, policy_version: int) -> tuple[str | None, dict[str, float]]:
        """One transfer: what is wrong with it on this rank, and its metrics."""
        sent: dict[str, int] = {}

        def observed() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self.learner.stream_hf(dtype=self.dtype):
                sent[name] = fingerprint(tensor)
                yield name, tensor

        receipt = self.engine.load_weights(observed(), policy_version=policy_version)
        problem = _compare(WeightsReceipt(policy_version, sent), receipt)
        if self.canary is None:
            return problem, {}
        distance = self.canary.distance(self.engine, self.learner)
        if self.first_distance is None and problem is None and distance == distance:
            self.first_distance = distance
        limit = _TOLERATED_MULTIPLE * (self.first_distance or 0.0) + _TOLERATED_NATS
        if problem is None and not distance <= limit:
            problem = (
                f"the canary's log-probabilities differ by {distance:.3g} nats from the learner's, "
                f"more than {limit:.3g}"
            )
        return problem, {"canary/mean_abs_dlogp": distance}


def _compare(sent: WeightsReceipt, received: WeightsReceipt) -> str | None:
    """The first difference, in words."""
    if received.policy_version != sent.policy_version:
        return f"it holds policy version {received.policy_version} instead of {sent.policy_version}"
    for name, value in sent.fingerprints.items():
        if name not in received.fingerprints:
            return f"it holds no {name}"
        if received.fingerprints[name] != value:
            return f"its {name} is not the one that was sent"
    return None
