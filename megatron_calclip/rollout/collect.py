"""From prompts to trajectories: every rank samples its share, then all hold the whole batch.

Token ids are small beside everything else in a step, so all ranks keep all of them: advantages, plans and global
counts are then computed everywhere alike without further communication, and model-parallel ranks share one sample
set by construction.

Sampling itself does not communicate, so that it can run beside training (`Ahead`); only putting the shares together does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from megatron_calclip.batch import Completion, Prompt, SamplingParams, Trajectories
from megatron_calclip.rollout.engine import Request, RolloutEngine

GatherObjects = Callable[[Any], list[Any]]


def draw(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    *,
    samples_per_prompt: int,
    sampling: SamplingParams,
    seed_key: tuple[int, int],
    rank: int,
    world_size: int,
) -> list[Completion]:
    """Sample this rank's share of the completions; no communication between ranks.

    Args:
        engine: this rank's engine, with the current weights.
        prompts: P prompts, the same on every rank.
        samples_per_prompt: G.
        sampling: how to draw.
        seed_key: (run seed, step).
        rank: this rank.
        world_size: number of ranks.
    """
    requests = [
        Request(
            prompt_token_ids=prompt.token_ids,
            sample_id=prompt.id * samples_per_prompt + index,
            seed_key=seed_key,
        )
        for prompt in prompts[rank::world_size]
        for index in range(samples_per_prompt)
    ]
    return engine.generate(requests, sampling) if requests else []


def put_together(
    prompts: Sequence[Prompt], own: list[Completion], *, samples_per_prompt: int, gather_objects: GatherObjects
) -> Trajectories:
    """All ranks' shares as one batch; collective.

    Args:
        prompts: P prompts, the same on every rank.
        own: what `draw` returned for them on this rank.
        samples_per_prompt: G.
        gather_objects: collective from one object to the list of all ranks' objects.
    """
    grouped: list[Sequence[Completion]] = [()] * len(prompts)
    shares = gather_objects(own)
    for other, theirs in enumerate(shares):
        for position, index in enumerate(range(other, len(prompts), len(shares))):
            grouped[index] = theirs[position * samples_per_prompt : (position + 1) * samples_per_prompt]
    return Trajectories.from_completions(prompts, grouped)


class Ahead:
    """The next step's completions, drawn while the present step trains (`rollout.max_staleness: 1`).

    The engine keeps the weights that it has until `wait` returns, so all of a batch come from one policy version, the one
    before the weights that will train on them.
    """

    def __init__(self) -> None:
        self._prompts: list[Prompt] = []
        self._completions: list[Completion] | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, prompts: list[Prompt], draw_share: Callable[[], list[Completion]], *, on_thread: bool) -> None:
        """Begin to draw.

        Args:
            prompts: the next step's.
            draw_share: draws this rank's share of their completions, without communication.
            on_thread: False draws them before it returns.
        """
        assert self._thread is None and self._completions is None, "a batch has been drawn and not been taken"
        self._prompts = prompts

        def work() -> None:
            try:
                self._completions = draw_share()
            except BaseException as error:  # raised where the batch is waited for
                self._error = error

        if not on_thread:
            work()
            return
        # A daemon, so that a run that fails or is told to stop does not wait for its rollout.
        self._thread = threading.Thread(target=work, name="rollout", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until the engine is idle; without a batch under way it is.

        Raises:
            Exception: what drawing raised.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def take(self) -> tuple[list[Prompt], list[Completion]] | None:
        """The batch, once; None when none was begun."""
        self.wait()
        completions, self._completions = self._completions, None
        return None if completions is None else (self._prompts, completions)
