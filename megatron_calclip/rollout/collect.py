"""From prompts to trajectories: every rank samples its share, then all hold the whole batch.

Token ids are small beside everything else in a step, so all ranks keep all of them: advantages, plans and global
counts are then computed everywhere alike without further communication, and model-parallel ranks share one sample
set by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron_calclip.batch import Completion, Prompt, SamplingParams, Trajectories
from megatron_calclip.rollout.engine import Request, RolloutEngine

GatherObjects = Callable[[Any], list[Any]]


def collect(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    *,
    samples_per_prompt: int,
    sampling: SamplingParams,
    seed_key: tuple[int, int],
    rank: int,
    world_size: int,
    gather_objects: GatherObjects,
) -> Trajectories:
    """Sample completions of all prompts, split over the ranks.

    Args:
        engine: this rank's engine, with the current weights.
        prompts: P prompts, the same on every rank.
        samples_per_prompt: G.
        sampling: how to draw.
        seed_key: (run seed, step).
        rank: this rank.
        world_size: number of ranks.
        gather_objects: collective from one object to the list of all ranks' objects.
    """
    own = prompts[rank::world_size]
    requests = [
        Request(
            prompt_token_ids=prompt.token_ids,
            sample_id=prompt.id * samples_per_prompt + index,
            seed_key=seed_key,
        )
        for prompt in own
        for index in range(samples_per_prompt)
    ]
    completions = engine.generate(requests, sampling) if requests else []
    grouped: list[Sequence[Completion]] = [()] * len(prompts)
    for other, theirs in enumerate(gather_objects(completions)):
        for position, index in enumerate(range(other, len(prompts), world_size)):
            grouped[index] = theirs[position * samples_per_prompt : (position + 1) * samples_per_prompt]
    return Trajectories.from_completions(prompts, grouped)
