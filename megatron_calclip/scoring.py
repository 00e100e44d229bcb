"""Scores of a batch of trajectories: every rank scores a share, and all hold the result.

What training and evaluation have in common between the rollout and whatever is made of the scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_calclip.batch import Prompt, Trajectories
from megatron_calclip.rewards import RewardSample, Score

if TYPE_CHECKING:
    from megatron_calclip.learner.runtime import Runtime
    from megatron_calclip.rewards.scorer import Scorer


def reward_samples(prompts: Sequence[Prompt], trajectories: Trajectories, tokenizer: Any) -> list[RewardSample]:
    """The N completions as text, without special tokens.

    Args:
        prompts: P prompts, which `trajectories.groups` number.
        trajectories: N sequences.
        tokenizer: HF tokenizer.
    """
    texts = [str(tokenizer.decode(ids.tolist(), skip_special_tokens=True)) for ids in trajectories.responses()]
    columns = trajectories.groups.tolist(), trajectories.response_lengths.tolist(), trajectories.finished.tolist()
    return [
        RewardSample(prompts[group], text, num_tokens, finished)
        for text, group, num_tokens, finished in zip(texts, *columns, strict=True)
    ]


def score_shares(scorer: Scorer, samples: Sequence[RewardSample], runtime: Runtime) -> list[Score]:
    """The score of each sample, on every rank; collective.

    Raises:
        UserError: as `Scorer.score`.
    """
    rank, world_size = runtime.rank, runtime.world_size
    shares = runtime.gather_objects(scorer.score(samples[rank::world_size]))
    return [shares[index % world_size][index // world_size] for index in range(len(samples))]
