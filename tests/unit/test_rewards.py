"""The scorer: built-in rewards, a user's own function, whatever it does, as one clear error, and shaping."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from megatron_calclip.batch import Prompt
from megatron_calclip.config import FormatRewardConfig, RewardConfig
from megatron_calclip.config_check import check
from megatron_calclip.config_file import config_from_dict
from megatron_calclip.errors import EXIT_FAILED, EXIT_USAGE, UserError
from megatron_calclip.rewards import RewardSample, Score, make_scorer
from megatron_calclip.rewards.scorer import default_num_workers

PROMPT = Prompt(id=7, token_ids=(1,), text="1+1=", answer="2", metadata={"unit": "apples"})

MODULE = """
import time

def length(sample):
    return len(sample.completion) + len(sample.prompt.metadata["unit"]) + sample.num_tokens + sample.finished

def tensor(sample):
    import torch
    return torch.tensor(0.5)

def right(sample):
    return sample.completion == sample.prompt.answer

def parts(sample):
    return {"reward": 2.5, "brevity": -1, "depth": 3}

def raises(sample):
    raise KeyError("two\\nlines")

def nothing(sample):
    pass

def infinite(sample):
    return float("inf")

def no_reward(sample):
    return {"brevity": 1}

def reserved(sample):
    return {"reward": 1, "mean": 1}

def with_slash(sample):
    return {"reward": 1, "len/ratio": 2}

def called_task(sample):
    return {"reward": 1, "task": 2}

def infinite_part(sample):
    return {"reward": 1, "brevity": float("nan")}

def two_arguments(sample, other):
    return 0.0

def sleeps(sample):
    time.sleep(60)

def forgets(sample):
    return bytearray(3 << 30) and 1

number = 3
"""


def sample(completion: str, prompt: Prompt = PROMPT) -> RewardSample:
    return RewardSample(prompt, completion, num_tokens=len(completion), finished=True)


def score(config: RewardConfig, *completions: str, prompt: Prompt = PROMPT) -> list[Score]:
    with closing(make_scorer(config)) as scorer:
        return scorer.score([sample(completion, prompt) for completion in completions])


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "own_rewards.py").write_text(MODULE)
    (tmp_path / "broken_rewards.py").write_text("def f(:\n")
    (tmp_path / "raising_rewards.py").write_text("raise RuntimeError('no database')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "own_rewards"


@pytest.mark.parametrize(
    ("completion", "reward"), [("2", 1.0), (" 2\n", 1.0), ("2 ", 1.0), ("02", 0.0), ("", 0.0), ("22", 0.0)]
)
def test_exact(completion: str, reward: float) -> None:
    assert score(RewardConfig(), completion) == [Score(reward, {"task": reward})]


def test_scratchpad() -> None:
    prompt = Prompt(id=0, token_ids=(1,), text="^3_4=", answer="37")
    values = [one.value for one in score(RewardConfig("scratchpad"), "3a7h", "3a8h", prompt=prompt)]
    assert values == [1.0, 0.0]


def test_small_rewards_start_no_process() -> None:
    with closing(make_scorer(RewardConfig())) as scorer:
        scorer.score([sample("2")])
        assert scorer.pool.nursery_pid is None and scorer.pool.worker_pids == []


@pytest.mark.parametrize(("name", "value"), [("length", 11.0), ("tensor", 0.5), ("right", 1.0)])
def test_own_function(own: str, name: str, value: float) -> None:
    (result,) = score(RewardConfig(f"{own}.{name}", num_workers=1), "2" if name == "right" else "ab")
    assert result == Score(value, {"task": value}) and type(result.value) is float


def test_own_function_with_components(own: str) -> None:
    (result,) = score(RewardConfig(f"{own}.parts", num_workers=1), "ab")
    assert result == Score(2.5, {"task": 2.5, "brevity": -1.0, "depth": 3.0})


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("raises", r"own_rewards\.raises raised KeyError: .*prompt id 7, completion 'abc'"),
        ("nothing", "raised TypeError"),
        ("two_arguments", "raised TypeError"),
        ("no_reward", "raised KeyError: 'reward'"),
        ("reserved", "component named 'mean'"),
        ("with_slash", "component named 'len/ratio'.*choose a name without /"),
        ("called_task", "'task' is what `reward` is called among the components"),
        ("infinite", r"returned inf.*prompt id 7"),
        ("infinite_part", "returned nan for 'brevity'"),
    ],
)
def test_own_function_that_fails_ends_the_run(own: str, name: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint) as caught:
        score(RewardConfig(f"{own}.{name}", num_workers=1), "abc")
    assert (caught.value.where, caught.value.exit_code) == ("reward.name", EXIT_FAILED)


@pytest.mark.parametrize("name", ["sleeps", "forgets"])
def test_own_function_past_its_limits_counts_as_wrong(own: str, name: str) -> None:
    """A sleep is ended by the clock, an allocation by RLIMIT_DATA."""
    config = RewardConfig(f"{own}.{name}", num_workers=1, timeout_seconds=0.5, memory_mib=1024)
    assert score(config, "abc") == [Score(0.0, {"task": 0.0}, timed_out=True)]


@pytest.mark.parametrize(
    "name",
    [
        "best",
        "no_such_package.f",
        "own_rewards.absent",
        "own_rewards.number",
        "broken_rewards.f",
        "raising_rewards.f",
        ".own_rewards.length",
        "own_rewards.",
        ".",
    ],
)
def test_what_cannot_be_imported_is_a_wrong_setting(own: str, name: str) -> None:
    with pytest.raises(UserError, match=r"cannot import|not a function") as caught:
        make_scorer(RewardConfig(name))
    assert (caught.value.where, caught.value.exit_code) == ("reward.name", EXIT_USAGE)


@pytest.mark.parametrize(
    ("pattern", "completion", "matches"),
    [
        ("boxed", r"So \boxed{2}.", True),
        ("boxed", "So 2.", False),
        ("boxed", r"\boxed{2} or \boxed{3}", False),
        ("think", "<think>one\nand one</think> 2", True),
        ("think", "<think>one and one</think>", False),
        ("think", "<think>a</think> 2 <think>b</think> 3", False),
        ("think", "two", False),
        (r"^Answer: \d+$", "Answer: 2", True),
        (r"^Answer: \d+$", "Answer: two", False),
    ],
)
def test_format(pattern: str, completion: str, matches: bool) -> None:
    config = RewardConfig(format=FormatRewardConfig(pattern, weight=0.25), num_workers=1)
    assert score(config, completion) == [Score(0.25 * matches, {"task": 0.0, "format": float(matches)})]


def test_format_adds_to_the_reward() -> None:
    config = RewardConfig(format=FormatRewardConfig(r"^\d$", weight=0.25), num_workers=1)
    assert score(config, "2") == [Score(1.25, {"task": 1.0, "format": 1.0})]


def test_hostile_pattern_ends() -> None:
    """(a+)+$ on a text that does not match takes exponential time."""
    config = RewardConfig(format=FormatRewardConfig(r"^(a+)+$"), num_workers=1, timeout_seconds=0.3)
    (result,) = score(config, 40 * "a" + "b")
    assert result == Score(0.0, {"task": 0.0, "format": 0.0}, timed_out=True)


def test_workers_are_shared_among_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_num_workers() == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert default_num_workers() == 1


def test_math_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'megatron-calclip\[math\]'"):
        make_scorer(RewardConfig("math"))


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match="no regular expression") as caught:
        check(
            config_from_dict(
                {"reward": {"format": {"pattern": "(a"}}, "model": {"shape": {}, "tokenizer": "characters"}}
            ),
            world_size=1,
        )
    assert caught.value.where == "reward.format.pattern"
