"""The scorer: samples in, scores out; the pool behind it, and what the settings must have for it.

`exact` and `scratchpad` compare two short texts, which is cheaper than sending them anywhere: they run here. All
else runs in the pool.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron_calclip.config import RewardConfig
from megatron_calclip.errors import EXIT_FAILED, UserError
from megatron_calclip.rewards import RewardSample, Score
from megatron_calclip.rewards.grading import FORMAT, METADATA_USED, TASK, load, make_handler
from megatron_calclip.rewards.pool import Limits, Pool

BUILT_IN = ("exact", "scratchpad", "math", "code")
_IN_PROCESS = ("exact", "scratchpad")
# A job may sleep, or find the machine busy: it gets this many times its CPU seconds on the clock.
WALL_FACTOR = 4


class Scorer:
    """Scores samples as `reward` says.

    Args:
        config: the section `reward`.

    Raises:
        UserError: when the reward cannot be imported, or needs a library or a sandbox that is not there.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        _check_available(config)
        settings = asdict(config)
        self._in_process = make_handler(settings) if config.name in _IN_PROCESS and not config.format.pattern else None
        self.pool = Pool(config.num_workers or default_num_workers(), limits=_limits(config), settings=settings)

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        """The score of each sample, in order.

        Raises:
            UserError: when a reward of the user's own raises, or returns no finite number; when no process can be
                started.
        """
        jobs = [pickle.dumps(self._payload(sample)) for sample in samples]
        here = self._in_process
        outcomes = self.pool.map(jobs) if here is None else [here(job) for job in jobs]
        return [self._score(sample, outcome) for sample, outcome in zip(samples, outcomes, strict=True)]

    def close(self) -> None:
        """End the processes."""
        self.pool.close()

    def _payload(self, sample: RewardSample) -> Any:
        if self.config.name not in BUILT_IN:
            return sample
        metadata = sample.prompt.metadata
        used = {key: metadata[key] for key in METADATA_USED.get(self.config.name, ()) if key in metadata}
        return sample.completion, sample.prompt.answer, used

    def _score(self, sample: RewardSample, outcome: dict[str, Any] | None) -> Score:
        if outcome is None:
            names = [TASK, FORMAT] if self.config.format.pattern else [TASK]
            return Score(0.0, dict.fromkeys(names, 0.0), timed_out=True)
        if "error" in outcome:
            raise UserError(
                "reward.name",
                f"{self.config.name} {outcome['error']} (prompt id {sample.prompt.id}, completion "
                f"{sample.completion[:40]!r}); correct the reward",
                exit_code=EXIT_FAILED,
            )
        return Score(outcome[TASK] + self.config.format.weight * outcome.get(FORMAT, 0.0), outcome)


def default_num_workers() -> int:
    """This rank's share of the CPU cores that the process may use, at least one."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)


def _limits(config: RewardConfig) -> Limits:
    memory = config.memory_mib
    if config.name == "code":  # the worker waits for the sandbox, which has limits of its own
        seconds = config.code.total_timeout_seconds + config.code.timeout_seconds
        return Limits(config.timeout_seconds + seconds, WALL_FACTOR * config.timeout_seconds + seconds, memory)
    return Limits(config.timeout_seconds, WALL_FACTOR * config.timeout_seconds, memory)


def _check_available(config: RewardConfig) -> None:
    if config.name == "math" and importlib.util.find_spec("math_verify") is None:
        raise UserError("reward.name", "math needs math-verify; pip install 'megatron-calclip[math]'")
    if config.name == "code":
        from megatron_calclip.rewards.sandbox import check_sandbox

        check_sandbox(allow_unsandboxed=config.code.allow_unsandboxed)
    if config.name not in BUILT_IN:
        try:
            load(config.name)
        except ValueError as error:
            raise UserError(
                "reward.name",
                f"{error}; give {', '.join(BUILT_IN)}, or package.module.function of a module on PYTHONPATH",
            ) from None
