"""Scored completions of one step, and DAPO's dynamic sampling of them.

A group whose rewards are all equal has no advantage and teaches nothing; DAPO (arXiv 2503.14476, section 3.2) drops
it and samples another prompt in its place, until the batch is full or a limit is reached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_calclip.algorithms.advantages import degenerate_groups, overlong_penalty
from megatron_calclip.batch import Prompt, Trajectories
from megatron_calclip.rewards import Score


@dataclass(frozen=True)
class Experience:
    """P prompts with G completions of each: N = P x G sequences."""

    prompts: list[Prompt]
    trajectories: Trajectories
    texts: list[str]
    """The N completions, decoded."""
    rewards: Tensor
    """float32 [N], penalties included."""
    components: dict[str, Tensor] = field(default_factory=dict)
    """float32 [N] by name: what the rewards consist of, and `timed_out`."""

    @classmethod
    def of_scores(
        cls, prompts: list[Prompt], trajectories: Trajectories, texts: list[str], scores: Sequence[Score]
    ) -> Experience:
        """Scored completions; a component that a score lacks is 0 there."""
        names = dict.fromkeys(name for score in scores for name in score.components)
        components = {name: torch.tensor([score.components.get(name, 0.0) for score in scores]) for name in names}
        components["timed_out"] = torch.tensor([float(score.timed_out) for score in scores])
        return cls(prompts, trajectories, texts, torch.tensor([score.value for score in scores]), components)

    def with_overlong_penalty(self, max_length: int, *, buffer: int) -> Experience:
        """A copy whose rewards fall over the last `buffer` of `max_length` tokens; see `overlong_penalty`."""
        lengths = self.trajectories.response_lengths
        penalty = overlong_penalty(lengths, max_length=max_length, buffer=buffer)
        return replace(self, rewards=self.rewards + penalty, components=self.components | {"overlong": penalty})

    def component_means(self) -> dict[str, float]:
        """`reward/<component>`: the mean of each over all samples."""
        return {f"reward/{name}": float(values.mean()) for name, values in self.components.items()}

    def groups_that_teach(self) -> list[int]:
        """Prompts whose completions differ in reward."""
        groups = self.trajectories.groups
        return torch.unique(groups[~degenerate_groups(self.rewards, groups)]).tolist()

    def select(self, groups: Sequence[int]) -> Experience:
        """Some of the prompts with their completions, in the given order."""
        own = self.trajectories.groups
        sequences = torch.cat([torch.nonzero(own == group).flatten() for group in groups])
        return Experience(
            [self.prompts[group] for group in groups],
            self.trajectories.select(sequences, groups=groups),
            [self.texts[index] for index in sequences.tolist()],
            self.rewards[sequences],
            {name: values[sequences] for name, values in self.components.items()},
        )

    @classmethod
    def join(cls, parts: Sequence[Experience]) -> Experience:
        """All prompts of the parts, one after the other."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            [prompt for part in parts for prompt in part.prompts],
            Trajectories.join([part.trajectories for part in parts], num_groups=[len(part.prompts) for part in parts]),
            [text for part in parts for text in part.texts],
            torch.cat([part.rewards for part in parts]),
            _joined_components(parts),
        )


def _joined_components(parts: Sequence[Experience]) -> dict[str, Tensor]:
    names = dict.fromkeys(name for part in parts for name in part.components)
    return {
        name: torch.cat([part.components.get(name, torch.zeros_like(part.rewards)) for part in parts]) for name in names
    }


def dynamic_sampling(
    sample: Callable[[int], Experience], *, num_prompts: int, max_rounds: int
) -> tuple[Experience, int]:
    """Sample until `num_prompts` groups teach something.

    Args:
        sample: draws that many new prompts, and their completions.
        num_prompts: groups wanted.
        max_rounds: calls of `sample` at most. What is then missing is filled up with groups of equal reward, the
            latest ones, so that a batch never shrinks.

    Returns:
        the batch, and how many groups were dropped for it.
    """
    kept: list[Experience] = []
    missing, num_sampled = num_prompts, 0
    for _ in range(max_rounds):
        latest = sample(missing)
        num_sampled += missing
        teaching = latest.groups_that_teach()
        if teaching:
            kept.append(latest.select(teaching))
        missing -= len(teaching)
        if missing == 0:
            break
    else:
        kept.append(latest.select([group for group in range(len(latest.prompts)) if group not in teaching]))
    return Experience.join(kept), num_sampled - num_prompts
