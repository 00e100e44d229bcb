"""Evaluation on sets of problems: completions from the rollout engine, scored by each set's own reward, and what they say.

The same code serves the command `eval` and a run's `eval.every`. It is collective: every rank samples and scores its share of
each set, and all hold the results. Random numbers are keyed by the seed, the set's name and the sample, so that a set's
completions depend neither on the sets around it nor on the number of ranks (beyond the rounding of a batch's logits).

Scores are those of the answer alone: bonuses for form and penalties for length belong to training.

Left out on purpose: few-shot prompts, and judges that are models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_calclip.config import Config, FormatRewardConfig
from megatron_calclip.data import EvalSet
from megatron_calclip.evaluation_stats import (
    Estimate,
    SetEstimates,
    ks_of,
    majority_score,
    mean_over_sets,
    pass_at_k,
    set_estimates,
)
from megatron_calclip.rewards import Score, make_scorer
from megatron_calclip.rewards.extraction import final_answer
from megatron_calclip.rewards.math_numbers import parse_number, split_unit
from megatron_calclip.rewards.math_text import bare, normalize
from megatron_calclip.scoring import reward_samples, score_shares

if TYPE_CHECKING:
    from fractions import Fraction

    from megatron_calclip.learner.runtime import Runtime
    from megatron_calclip.rewards.scorer import Scorer
    from megatron_calclip.rollout.sampler import Sampler

_SEED_STEP = 0
"""Evaluation draws its random numbers under a step of its own, so that it repeats whenever it is run."""
_MAX_VOTE_LENGTH = 400
"""Characters of an answer that is anyone's; beyond them it is no vote."""
_SOLVED = 1.0
"""Score from which a problem counts as solved in pass@k; only rewards with partial credit have scores in between."""


@dataclass(frozen=True)
class Graded:
    """One completion with its score."""

    text: str
    num_tokens: int
    finished: bool
    """False where the length limit cut it."""
    score: Score
    vote: str | None
    """Its normalised answer, for the majority; None when it gives none."""


@dataclass(frozen=True)
class SetResult:
    """What an evaluation found on one set of P problems."""

    eval_set: EvalSet
    graded: list[list[Graded]]
    """P x n completions."""
    found: SetEstimates

    @property
    def estimates(self) -> dict[str, Estimate]:
        """`avg@n`, `pass@k`, `maj@n`, `response_length` (tokens) and `truncated` (share), with intervals."""
        return self.found.estimates

    @property
    def score(self) -> float:
        """Avg@n."""
        return self.estimates[f"avg@{len(self.graded[0])}"].value

    @property
    def standard_error(self) -> float:
        """Of the score, over problems; 0 for a single one."""
        means = [np.mean([_value(one) for one in row]) for row in self.graded]
        return float(np.std(means, ddof=1)) / len(means) ** 0.5 if len(means) > 1 else 0.0


class Evaluation:
    """Evaluation sets with what scores them.

    Args:
        config: sampling settings (`eval`), rewards, seed.
        sets: what to evaluate on.
        tokenizer: decodes completions.
        sampler: of `config.for_evaluation`; its engine may get other weights between evaluations.
        runtime: this rank.

    Raises:
        UserError: when a set's reward is not available.
    """

    def __init__(
        self, config: Config, sets: Sequence[EvalSet], *, tokenizer: Any, sampler: Sampler, runtime: Runtime
    ) -> None:
        self.config, self.sets, self.tokenizer = config, sets, tokenizer
        self.sampler, self.runtime = sampler, runtime
        answer_alone = replace(config.reward, format=FormatRewardConfig())
        names = sorted({one.reward for one in sets})
        self.scorers: dict[str, Scorer] = {name: make_scorer(replace(answer_alone, name=name)) for name in names}

    def run(self) -> Iterator[SetResult]:
        """Evaluate on one set after the other; collective.

        Raises:
            UserError: when a reward of the user's own fails.
        """
        for one in self.sets:
            graded = self._graded(one)
            values = per_problem_values(graded, votes=one.reward in _VOTES)
            yield SetResult(one, graded, set_estimates(values, seed=self.config.train.seed, name=one.name))

    def close(self) -> None:
        """End the scorers' processes."""
        with contextlib.ExitStack() as stack:
            for scorer in self.scorers.values():
                stack.callback(scorer.close)

    def _graded(self, one: EvalSet) -> list[list[Graded]]:
        settings = self.config.eval
        trajectories = self.sampler.sample(
            one.prompts,
            samples_per_prompt=settings.samples_per_prompt,
            temperature=settings.temperature,
            seed_step=_SEED_STEP,
        )
        samples = reward_samples(one.prompts, trajectories, self.tokenizer)
        scores = score_shares(self.scorers[one.reward], samples, self.runtime)
        graded = [
            Graded(sample.completion, sample.num_tokens, sample.finished, score, vote_of(one.reward, sample.completion))
            for sample, score in zip(samples, scores, strict=True)
        ]
        n = settings.samples_per_prompt
        return [graded[start : start + n] for start in range(0, len(graded), n)]


def _value(one: Graded) -> float:
    return one.score.value


def per_problem_values(graded: Sequence[Sequence[Graded]], *, votes: bool) -> dict[str, np.ndarray]:
    """Name of an estimate -> its value for each of P problems.

    Args:
        graded: P x n completions.
        votes: whether their answers can be compared, so that a majority means something.
    """
    n = len(graded[0])
    scores = np.array([[_value(one) for one in row] for row in graded])
    solved = (scores >= _SOLVED).sum(1)
    values = {f"avg@{n}": scores.mean(1)}
    for k in ks_of(n)[1:]:
        values[f"pass@{k}"] = np.array([pass_at_k(n, int(count), k) for count in solved])
    if votes and n > 1:
        majority = [majority_score([one.vote for one in row], list(map(_value, row))) for row in graded]
        values[f"maj@{n}"] = np.array(majority)
    values["response_length"] = np.array([np.mean([one.num_tokens for one in row]) for row in graded])
    values["truncated"] = np.array([np.mean([not one.finished for one in row]) for row in graded])
    return values


def math_vote(completion: str) -> str | None:
    """The final answer in one spelling; a number by its value and without its unit: 042, 42.0 and 42 cm are one vote."""
    answer = final_answer(completion)
    if answer is None or len(answer) > _MAX_VOTE_LENGTH:
        return None
    text = normalize(answer)
    number = parse_number(split_unit(text).value)
    return _fraction(number.value) if number is not None else bare(text) or None


def _fraction(value: Fraction) -> str:
    """Decimal digits where they are few, hexadecimal ones else: Python refuses to write thousands of decimal ones."""
    few = max(abs(value.numerator), value.denominator) < 10**_MAX_VOTE_LENGTH
    return str(value) if few else f"{value.numerator:#x}/{value.denominator:#x}"


def _stripped(completion: str) -> str | None:
    return completion.strip() or None


# Rewards whose answers can be compared with each other.
_VOTES = {"math": math_vote, "exact": _stripped}


def vote_of(reward: str, completion: str) -> str | None:
    """What a completion counts for in the majority; None when it has no answer, or its reward none to compare."""
    if reward not in _VOTES:
        return None
    try:
        return _VOTES[reward](completion)
    except Exception:  # any text may be met; none may end an evaluation
        return None


def overall(results: Sequence[SetResult]) -> dict[str, Estimate]:
    """Means over sets, of every estimate that all of them have."""
    return mean_over_sets([result.found for result in results])


def eval_metrics(results: Sequence[SetResult]) -> dict[str, float]:
    """The row of metrics of an evaluation in training; sets are apart where there are several."""
    means = overall(results)
    row = {
        "eval/score": sum(result.score for result in results) / len(results),
        "eval/stderr": sum(result.standard_error**2 for result in results) ** 0.5 / len(results),
        "eval/mean_length": means["response_length"].value,
        "eval/truncated": means["truncated"].value,
    }
    if len(results) > 1:
        row |= {f"eval/{result.eval_set.name}/score": result.score for result in results}
    return row
