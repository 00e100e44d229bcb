"""What the trainer asks completions of: an engine, with the run's sampling settings, over all ranks.

With `rollout.max_staleness` 1 a step's completions may have been drawn ahead, while the step before trained; nobody but
this class knows the difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_calclip.batch import Completion, Prompt, SamplingParams, Trajectories
from megatron_calclip.config import Config
from megatron_calclip.rollout.collect import Ahead, draw, put_together
from megatron_calclip.rollout.engine import RolloutEngine

if TYPE_CHECKING:
    from megatron_calclip.learner.runtime import Runtime


class Sampler:
    """Completions of prompts, the same on every rank.

    Args:
        config: of the run.
        engine: this rank's.
        runtime: this rank.
        stop_token_ids: a completion ends with the first of these.
    """

    def __init__(
        self, config: Config, engine: RolloutEngine, runtime: Runtime, *, stop_token_ids: tuple[int, ...]
    ) -> None:
        self.config, self.engine, self.runtime, self.stop_token_ids = config, engine, runtime, stop_token_ids
        self._ahead = Ahead()

    def sample(
        self, prompts: list[Prompt], *, samples_per_prompt: int, temperature: float, seed_step: int
    ) -> Trajectories:
        """Draw from the engine's present weights; collective.

        Args:
            prompts: P prompts.
            samples_per_prompt: G.
            temperature: 0 is greedy.
            seed_step: with the run's seed and the sample's id it keys the random numbers.
        """
        own = self._draw(prompts, samples_per_prompt=samples_per_prompt, temperature=temperature, seed_step=seed_step)
        return self._together(prompts, own, samples_per_prompt=samples_per_prompt)

    def sample_for_step(self, prompts: list[Prompt], step: int) -> Trajectories:
        """Completions for an RL step: those that were drawn ahead, or new ones; collective."""
        ahead = self._ahead.take()
        train = self.config.train
        if ahead is None:
            return self.sample(
                prompts,
                samples_per_prompt=train.samples_per_prompt,
                temperature=self.config.rollout.temperature,
                seed_step=step,
            )
        drawn_for, own = ahead
        assert drawn_for == prompts, "the completions that were drawn ahead answer other prompts"
        return self._together(prompts, own, samples_per_prompt=train.samples_per_prompt)

    def draw_ahead(self, prompts: list[Prompt], step: int) -> None:
        """Begin the completions for the next RL step; until `wait` the engine is busy."""
        self._ahead.start(
            prompts,
            lambda: self._draw(
                prompts,
                samples_per_prompt=self.config.train.samples_per_prompt,
                temperature=self.config.rollout.temperature,
                seed_step=step,
            ),
            on_thread=self.engine.works_beside_training,
        )

    def wait(self) -> None:
        """Until the engine is idle.

        Raises:
            Exception: what drawing ahead raised.
        """
        self._ahead.wait()

    def discard(self) -> None:
        """Forget what was drawn ahead: the run goes back to an earlier step."""
        self._ahead.take()

    def _draw(
        self, prompts: list[Prompt], *, samples_per_prompt: int, temperature: float, seed_step: int
    ) -> list[Completion]:
        return draw(
            self.engine,
            prompts,
            samples_per_prompt=samples_per_prompt,
            sampling=SamplingParams(
                max_new_tokens=self.config.rollout.max_new_tokens,
                temperature=temperature,
                top_p=self.config.rollout.top_p,
                stop_token_ids=self.stop_token_ids,
            ),
            seed_key=(self.config.train.seed, seed_step),
            rank=self.runtime.rank,
            world_size=self.runtime.world_size,
        )

    def _together(self, prompts: list[Prompt], own: list[Completion], *, samples_per_prompt: int) -> Trajectories:
        return put_together(
            prompts, own, samples_per_prompt=samples_per_prompt, gather_objects=self.runtime.gather_objects
        )
