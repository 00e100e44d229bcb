"""Dynamic sampling: which groups stay, what takes their place, and that nothing gets mixed up."""

import itertools
from collections.abc import Callable

import pytest

from megatron_calclip.batch import Completion, Prompt, Trajectories
from megatron_calclip.experience import Experience, dynamic_sampling
from megatron_calclip.rewards import Score

Sampler = Callable[[int], Experience]


def make_experience(ids: list[int], rewards: list[list[float]]) -> Experience:
    """Two completions per prompt: prompt 7 holds token 7, its completions 70 and 71, of lengths 1 and 2."""
    prompts = [Prompt(id=i, token_ids=(i,), text=f"p{i}", answer="", metadata={}) for i in ids]
    answers = [
        [Completion((10 * i + k,) * (k + 1), (-1.0,) * (k + 1), finished=k == 0, policy_version=i) for k in range(2)]
        for i in ids
    ]
    texts = [f"t{10 * i + k}" for i in ids for k in range(2)]
    scores = [
        Score(value, {"sample": 2.0 * i + k})
        for i, pair in zip(ids, rewards, strict=True)
        for k, value in enumerate(pair)
    ]
    return Experience.of_scores(prompts, Trajectories.from_completions(prompts, answers), texts, scores)


def sampler(rewards: dict[int, list[float]]) -> tuple[Sampler, list[int]]:
    """Draws prompts 1, 2, ... with the given rewards (both 0 where none are given), and keeps the counts asked for."""
    ids, asked = itertools.count(1), []

    def sample(count: int) -> Experience:
        asked.append(count)
        drawn = list(itertools.islice(ids, count))
        return make_experience(drawn, [rewards.get(i, [0.0, 0.0]) for i in drawn])

    return sample, asked


def assert_whole(experience: Experience, ids: list[int]) -> None:
    """Every field belongs to these prompts, in this order."""
    batch = experience.trajectories
    assert [prompt.id for prompt in experience.prompts] == ids
    assert batch.groups.tolist() == [group for group in range(len(ids)) for _ in range(2)]
    assert batch.tokens.tolist() == [t for i in ids for t in (i, 10 * i, i, 10 * i + 1, 10 * i + 1)]
    assert batch.lengths.tolist() == [2, 3] * len(ids)
    assert batch.response_mask.int().tolist() == [0, 1, 0, 1, 1] * len(ids)
    assert batch.sampler_log_probs.tolist() == [0, -1, 0, -1, -1] * len(ids)
    assert batch.sample_ids.tolist() == [s for i in ids for s in (2 * i, 2 * i + 1)]
    assert batch.policy_versions.tolist() == [i for i in ids for _ in range(2)]
    assert batch.finished.tolist() == [True, False] * len(ids)
    assert experience.components["sample"].tolist() == batch.sample_ids.tolist()
    assert experience.texts == [t for i in ids for t in (f"t{10 * i}", f"t{10 * i + 1}")]


def test_equal_groups_give_way_until_the_batch_is_full() -> None:
    sample, asked = sampler({2: [0.0, 1.0], 4: [1.0, 1.0], 5: [1.0, 0.0], 6: [0.5, 0.25], 7: [0.0, 1.0]})
    batch, num_dropped = dynamic_sampling(sample, num_prompts=4, max_rounds=5)
    # 1, 2, 3, 4 -> 2; then 5, 6, 7 -> all.
    assert asked == [4, 3] and num_dropped == 3
    assert_whole(batch, [2, 5, 6, 7])
    assert batch.rewards.tolist() == [0, 1, 1, 0, 0.5, 0.25, 0, 1]


def test_at_the_limit_equal_groups_fill_the_batch() -> None:
    sample, asked = sampler({1: [0.0, 1.0]})
    batch, num_dropped = dynamic_sampling(sample, num_prompts=3, max_rounds=3)
    assert asked == [3, 2, 2] and num_dropped == 4
    assert_whole(batch, [1, 6, 7])
    assert batch.rewards.tolist() == [0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("teaches", [True, False])
def test_one_round_changes_nothing(teaches: bool) -> None:
    sample, asked = sampler({1: [0.0, 1.0], 2: [1.0, 0.0]} if teaches else {})
    batch, num_dropped = dynamic_sampling(sample, num_prompts=2, max_rounds=1)
    assert asked == [2] and num_dropped == 0
    assert_whole(batch, [1, 2])


def test_long_answers_lose_reward_by_their_own_length() -> None:
    batch = make_experience([1, 2], [[1.0, 1.0], [0.0, 0.5]])  # lengths 1 and 2
    # Up to 1 token nothing; 2 of at most 3, with a buffer of 2: (1 - 2) / 2.
    assert batch.with_overlong_penalty(3, buffer=2).rewards.tolist() == [1.0, 0.5, 0.0, 0.0]
    assert batch.rewards.tolist() == [1.0, 1.0, 0.0, 0.5]


def test_components_of_scores() -> None:
    """A component that a score lacks is 0 there; the penalty on length is one more."""
    batch = make_experience([1, 2], [[0.0, 1.0], [1.0, 0.0]])
    scores = [
        Score(1.0, {"task": 1.0}),
        Score(0.5, {"task": 0.25, "format": 1.0}),
        Score(0.0, {}, timed_out=True),
        Score(0.0),
    ]
    scored = Experience.of_scores(batch.prompts, batch.trajectories, batch.texts, scores)
    assert scored.rewards.tolist() == [1.0, 0.5, 0.0, 0.0]
    assert scored.component_means() == {"reward/task": 0.3125, "reward/format": 0.25, "reward/timed_out": 0.25}
    # Lengths 1, 2, 1, 2 of 3 at most, a buffer of 2: the longer ones lose a half.
    assert scored.with_overlong_penalty(3, buffer=2).component_means()["reward/overlong"] == -0.25
    joined = Experience.join([scored, batch.select([0])])
    assert joined.components["task"].tolist() == [1.0, 0.25, 0.0, 0.0, 0.0, 0.0]
