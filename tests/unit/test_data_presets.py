"""Every known layout, on rows as their sets publish them, and on the sets at hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megatron_calclip.config import Config, DataConfig, RewardConfig
from megatron_calclip.data_files import DATA_VARIABLE
from megatron_calclip.data_presets import PRESETS, NotOfThisLayout, check_training_reward
from megatron_calclip.data_sets import DataSet, counted, duplicate_reasons, load_data_set, overlap_reasons
from megatron_calclip.errors import UserError

CHAT = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
TESTS = '{"inputs": ["1\\n"], "outputs": ["2\\n"]}'
PARSED = {"inputs": ["1\n"], "outputs": ["2\n"]}


@pytest.mark.parametrize(
    ("layout", "row", "expected"),
    [
        ("gsm8k", {"question": "Q", "answer": "1 #### no\n#### 1,234"}, ("Q", "1234", {})),
        ("math", {"problem": "Q", "solution": r"\boxed{1}, so \boxed{\frac{1}{2}}."}, ("Q", r"\frac{1}{2}", {})),
        ("math", {"problem": "Q", "answer": " 7 ", "level": 3, "other": 1}, ("Q", "7", {"level": 3})),
        ("math500", {"problem": "Q", "answer": "7", "solution": r"\boxed{8}"}, ("Q", "7", {})),
        ("deepmath", {"question": "Q", "final_answer": "x", "difficulty": 5.0}, ("Q", "x", {"difficulty": 5.0})),
        ("deepmath", {"prompt": "Q", "ground_truth": "1"}, ("Q", "1", {})),
        ("deepscaler", {"problem": "Q", "answer": "27", "solution": ""}, ("Q", "27", {})),
        ("aime24", {"id": 60, "problem": "Q", "solution": "s", "answer": "204", "question": "no"}, ("Q", "204", {})),
        ("aime25", {"problem": "Q", "answer": 70}, ("Q", "70", {})),
        ("amc23", {"problem": "Q", "answer": 27.0}, ("Q", "27", {})),
        ("amc24", {"question": "Q", "answer": 0.5}, ("Q", "0.5", {})),
        ("gaokao2023en", {"question": "Q", "answer": "$-1$"}, ("Q", "$-1$", {})),
        ("minerva_math", {"problem": "Q", "solution": r"so \boxed{3e-10} \mathrm{~m}", "idx": 0}, ("Q", "3e-10", {})),
        (
            "olympiadbench",
            {"context": "C", "question": "Q", "final_answer": ["1", " 2 "], "unit": "km", "error": "1e-1"},
            ("C\nQ", "1, 2", {"unit": "km", "tolerance": 0.1}),
        ),
        (
            "olympiadbench",
            {"context": None, "question": "Q", "final_answer": ["$2$"], "unit": None, "error": None},
            ("Q", "$2$", {}),
        ),
        (
            "dapo",
            {"prompt": CHAT, "reward_model": {"ground_truth": "34", "style": "rule"}, "data_source": "d"},
            ("U", "34", {"system": "S", "data_source": "d"}),
        ),
        ("dapo", {"prompt": CHAT[1:], "reward_model": {"ground_truth": 34.0}}, ("U", "34", {"data_source": None})),
        (
            "eurus_code",
            {"prompt": CHAT, "ability": "code", "reward_model": {"ground_truth": TESTS}, "data_source": "taco"},
            ("U", "", {"system": "S", "data_source": "taco", "tests": PARSED}),
        ),
        ("apps", {"question": "Q", "input_output": TESTS, "starter_code": ""}, ("Q", "", {"tests": PARSED})),
        ("apps", {"question": "Q", "tests": PARSED}, ("Q", "", {"tests": PARSED})),
        (
            "apps",
            {"question": "Q", "input_output": TESTS, "starter_code": "def f():"},
            ("Q\n\nStart from this code:\n```python\ndef f():\n```", "", {"tests": PARSED}),
        ),
    ],
)
def test_layout(layout: str, row: dict[str, Any], expected: tuple[str, str, dict[str, Any]]) -> None:
    assert PRESETS[layout].row(row) == expected


@pytest.mark.parametrize(
    ("layout", "row", "problem"),
    [
        ("gsm8k", {"question": "Q", "answer": "42"}, "field 'answer' has no `####`"),
        ("gsm8k", {"question": "Q", "answer": "#### "}, "field 'answer' is empty"),
        ("gsm8k", {"answer": "#### 1"}, "has no field 'question'"),
        ("math", {"answer": "1"}, "has no field 'problem' or 'question'"),
        ("math", {"problem": "  ", "answer": "1"}, "field 'problem' is empty"),
        ("math", {"problem": 3, "answer": "1"}, "field 'problem' is a int, not a text"),
        ("math", {"problem": "Q", "answer": ""}, "field 'answer' is empty"),
        ("math", {"problem": "Q", "answer": None}, "field 'answer' is a NoneType"),
        ("math", {"problem": "Q", "answer": True}, "field 'answer' is a bool"),
        ("minerva_math", {"problem": "Q", "solution": "it is 3"}, r"its 'solution' has no \\boxed"),
        ("olympiadbench", {"question": "Q", "final_answer": []}, "field 'final_answer' is empty"),
        ("olympiadbench", {"question": "Q", "final_answer": [1]}, "is no list of texts"),
        ("olympiadbench", {"question": "Q", "final_answer": ["1"], "error": "1,2"}, "field 'error' is '1,2'"),
        ("dapo", {"prompt": CHAT}, "has no field 'reward_model'"),
        ("dapo", {"prompt": CHAT, "reward_model": {"ground_truth": ""}}, "ground_truth' is empty"),
        ("dapo", {"prompt": CHAT, "reward_model": {}}, "has no 'ground_truth'"),
        ("dapo", {"prompt": [*CHAT, CHAT[1]], "reward_model": {}}, "conversation of system, user, user"),
        ("dapo", {"prompt": [{"role": "user"}], "reward_model": {}}, "no list of messages"),
        ("dapo", {"prompt": [{"role": "user", "content": " "}], "reward_model": {}}, "'prompt' is empty"),
        ("eurus_code", {"prompt": CHAT, "reward_model": {"ground_truth": "{"}}, "holds no tests"),
        ("apps", {"question": "Q", "input_output": '{"inputs": [], "outputs": []}'}, "'input_output' holds no tests"),
        ("apps", {"question": "Q", "input_output": '{"inputs": [1], "outputs": []}'}, "holds no tests"),
        ("apps", {"question": "Q", "tests": 3}, "'tests' holds no tests"),
    ],
)
def test_row_that_cannot_be_used(layout: str, row: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        PRESETS[layout].row(row)


def test_mathematics_among_code_is_left_out() -> None:
    with pytest.raises(NotOfThisLayout, match="has ability 'math'"):
        PRESETS["eurus_code"].row({"prompt": CHAT, "ability": "math", "reward_model": {"ground_truth": "3"}})


# The sets at hand: (name, rows, usable, first answer, {reason: places})
EMPTY, NONE = "field 'answer' is empty", "field 'answer' is a NoneType, not a text or a number"
AT_HAND: list[tuple[str, int, int, str, dict[str, list[str]]]] = [
    ("gsm8k=gsm8k_train", 7473, 7473, "72", {}),
    ("gsm8k=gsm8k_test.jsonl", 1319, 1319, "18", {}),
    ("math=math_train", 7474, 7470, "0", {NONE: ["line 5318", "line 6056"], EMPTY: ["line 31970", "line 31982"]}),
    ("deepmath=deepmath_5k", 4994, 4994, "1", {}),
    ("math500", 500, 500, r"\left( 3, \frac{\pi}{2} \right)", {}),
    ("aime24", 30, 30, "204", {}),
    ("aime25", 30, 30, "70", {}),
    ("dapo=aime2024_x32", 960, 960, "540", {}),
    ("amc23", 40, 40, "27", {}),
    ("gaokao2023en", 385, 383, r"$\{x|-2\leq x < 1\}$", {EMPTY: ["line 168", "line 193"]}),
    ("minerva_math", 272, 272, "1.6", {}),
    ("olympiadbench", 675, 675, "2", {}),
]
needs_data = pytest.mark.skipif(
    not os.environ.get(DATA_VARIABLE), reason=f"the data sets are not at hand ({DATA_VARIABLE} is not set)"
)


def at_hand(name: str) -> DataSet:
    return load_data_set(name, where="here", data=DataConfig(bad_rows="skip"), reward="exact")


@needs_data
@pytest.mark.parametrize(("name", "num_rows", "num_usable", "answer", "left_out"), AT_HAND)
def test_sets_at_hand(name: str, num_rows: int, num_usable: int, answer: str, left_out: dict[str, list[str]]) -> None:
    found = at_hand(name)
    assert (found.num_read, len(found.rows), len(found.places)) == (num_rows, num_usable, num_usable)
    assert found.left_out == left_out
    assert found.rows[0][1] == answer and found.reward == "math"


@needs_data
def test_all_files_at_hand_have_a_layout() -> None:
    files = {
        path.stem
        for path in Path(os.environ[DATA_VARIABLE]).iterdir()
        if path.suffix in (".json", ".jsonl", ".parquet")
    }
    assert files - {"answer_pairs"} == {Path(name.rpartition("=")[2]).stem for name, *_ in AT_HAND}


@needs_data
def test_what_the_sets_at_hand_have_in_common() -> None:
    assert counted(duplicate_reasons(at_hand("dapo=aime2024_x32"))) == {"same problem as an earlier row, exactly": 930}
    # MATH-500 is a part of MATH's test set; this training set leaves its problems out.
    overlap = overlap_reasons(at_hand("math=math_train"), [at_hand("math500")])
    assert sum(reason is not None for reason in overlap) <= 3
    own = overlap_reasons(at_hand("math500"), [at_hand("math500")])
    assert counted(own) == {"problem of the evaluation set math500, exactly": 500}


@pytest.mark.parametrize(
    ("train", "reward", "right"),
    [
        ("gsm8k=x.jsonl", "exact", "math"),
        ("math500", "code", "math"),
        ("apps=x.jsonl", "math", "code"),
        ("scratchpad", "exact", "scratchpad"),
        ("arithmetic", "scratchpad", "exact or math"),
    ],
)
def test_a_reward_that_cannot_read_the_layout(train: str, reward: str, right: str) -> None:
    """It would score 0 throughout."""
    with pytest.raises(UserError, match=rf"^reward.name: {reward} cannot score .*; use {right}, or a function"):
        check_training_reward(Config(data=DataConfig(train=train), reward=RewardConfig(reward)))


@pytest.mark.parametrize(
    ("train", "reward"),
    [
        *(("gsm8k=x.jsonl", "math"), ("gsm8k=x.jsonl", "mine.f"), ("gsm8k.jsonl", "exact"), ("arithmetic", "exact")),
        *(("arithmetic", "math"), ("scratchpad", "scratchpad"), ("scratchpad", "mine.f")),
    ],
)
def test_a_reward_that_can(train: str, reward: str) -> None:
    check_training_reward(Config(data=DataConfig(train=train), reward=RewardConfig(reward)))
