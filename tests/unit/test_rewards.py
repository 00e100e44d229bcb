"""Rewards: the exact match, and a user's own function, whatever it does, as one clear error."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_calclip.batch import Prompt
from megatron_calclip.config import RewardConfig
from megatron_calclip.errors import EXIT_FAILED, EXIT_USAGE, UserError
from megatron_calclip.rewards import Reward, exact, load_reward

PROMPT = Prompt(id=7, token_ids=(1,), text="1+1=", answer="2", metadata={"unit": "apples"})

MODULE = """
import torch

def length(prompt, completion):
    return len(completion) + len(prompt.metadata["unit"])

def tensor(prompt, completion):
    return torch.tensor(0.5)

def right(prompt, completion):
    return completion == prompt.answer

def raises(prompt, completion):
    raise KeyError("two\\nlines")

def nothing(prompt, completion):
    pass

def infinite(prompt, completion):
    return float("inf")

def one_argument(prompt):
    return 0.0

number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_rewards.py").write_text(MODULE)
    (tmp_path / "broken_rewards.py").write_text("def f(:\n")
    (tmp_path / "raising_rewards.py").write_text("raise RuntimeError('no database')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_rewards"


@pytest.mark.parametrize(
    ("completion", "reward"), [("2", 1.0), (" 2\n", 1.0), ("2 ", 1.0), ("02", 0.0), ("", 0.0), ("22", 0.0)]
)
def test_exact(completion: str, reward: float) -> None:
    assert exact(PROMPT, completion) == load_reward(RewardConfig())(PROMPT, completion) == reward


def test_scratchpad() -> None:
    prompt = Prompt(id=0, token_ids=(1,), text="^3_4=", answer="37")
    reward = load_reward(RewardConfig("scratchpad"))
    assert (reward(prompt, "3a7h"), reward(prompt, "3a8h")) == (1.0, 0.0)


@pytest.mark.parametrize(("name", "value"), [("length", 8.0), ("tensor", 0.5), ("right", 1.0)])
def test_own_function(own: str, name: str, value: float) -> None:
    reward: Reward = load_reward(RewardConfig(f"{own}.{name}"))
    result = reward(PROMPT, "2" if name == "right" else "ab")
    assert result == value and type(result) is float


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("raises", r"own_rewards\.raises raised KeyError: .*prompt id 7, completion 'abc'"),
        ("nothing", "raised TypeError"),
        ("one_argument", "raised TypeError"),
        ("infinite", "returned inf for prompt id 7"),
    ],
)
def test_own_function_that_fails_ends_the_run(own: str, name: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint) as caught:
        load_reward(RewardConfig(f"{own}.{name}"))(PROMPT, "abc")
    assert (caught.value.where, caught.value.exit_code) == ("reward.name", EXIT_FAILED)


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
    with pytest.raises(UserError, match=r"cannot import|name a function") as caught:
        load_reward(RewardConfig(name))
    assert (caught.value.where, caught.value.exit_code) == ("reward.name", EXIT_USAGE)
