"""Rewards: from a prompt and a completion to a number with named components.

`exact` and `scratchpad` (built-in tasks), `math` and `code` (verifiable answers), or a function of yours by dotted
path. All but the first two run in a bounded pool of processes (`pool`), because they execute what the policy wrote,
or think about it for longer than anyone wants to wait.

    scorer = make_scorer(config.reward)
    scores = scorer.score([RewardSample(prompt, text, num_tokens=120, finished=True), ...])
    scorer.close()

This module imports neither torch nor sympy, so that the pool's processes start fast. Left out on purpose: reward
models and judges over HTTP; a function of yours may call one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the configuration needs pydantic, which the workers do without
    from megatron_calclip.config import RewardConfig
    from megatron_calclip.prompt import Prompt
    from megatron_calclip.rewards.scorer import Scorer


@dataclass(frozen=True)
class RewardSample:
    """One completion to be scored; what a reward of your own is called with."""

    prompt: Prompt
    """The problem, with its reference `answer` and the data row's other columns in `metadata`."""
    completion: str
    """What the policy wrote, decoded, without special tokens."""
    num_tokens: int
    """Tokens of the completion, the stop token included."""
    finished: bool
    """False where the length limit cut it."""


@dataclass(frozen=True)
class Score:
    """The reward of one completion."""

    value: float
    """The reward: `components["correct"]` of a built-in reward, plus the format bonus where there is one."""
    components: dict[str, float] = field(default_factory=dict)
    """Its parts by name, logged as `reward/<name>`: means over all samples."""
    timed_out: bool = False
    """The limits of time or memory ended the scoring, which counts as a wrong answer."""


def make_scorer(config: RewardConfig) -> Scorer:
    """The scorer that `reward` describes; it starts no process before its first use.

    Raises:
        UserError: when the reward cannot be imported, or needs a library or a sandbox that is not there.
    """
    from megatron_calclip.rewards.scorer import Scorer

    return Scorer(config)


def check_gold(name: str, answer: str, metadata: dict[str, Any]) -> None:
    """Whether a reference answer is one that the reward can compare with; called when data loads.

    Args:
        name: `reward.name`; rewards other than `math` and `code` take any answer.
        answer: the reference answer.
        metadata: the other columns of its row.

    Raises:
        ValueError: with the reason, as a predicate ("is empty").
    """
    if name == "math":
        from megatron_calclip.rewards.math_answer import check_reference

        check_reference(answer, metadata)
    elif name == "code":
        from megatron_calclip.rewards.code import check_tests

        check_tests(answer, metadata)
