"""Names of sets, bad rows by their place, references that no reward can read, and what counts as the same problem."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_calclip.config import DataConfig
from megatron_calclip.data_sets import DataSet, duplicate_reasons, load_data_set, normalized_problem, overlap_reasons
from megatron_calclip.errors import UserError


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(name: str | Path, *, reward: str = "exact", **data: Any) -> DataSet:
    return load_data_set(str(name), where="data.train", data=DataConfig(**data), reward=reward)


def fault(name: str | Path, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        load(name, **settings)
    return str(caught.value)


def made_of(*problems: str, name: str = "set") -> DataSet:
    return DataSet(
        name, name, "", None, [(problem, "", {}) for problem in problems], [""] * len(problems), len(problems)
    )


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"problem": "Q", "answer": "1"}
    path = write(tmp_path / "aime24.jsonl", [row])
    for name in ("aime24", "aime24=aime24", f"aime24={path}"):
        found = load(name)
        assert (found.name, found.reward, found.rows) == ("aime24", "math", [("Q", "1", {})])
    plain = load(path, prompt_field="problem")
    assert (plain.name, plain.reward, plain.rows) == ("aime24", None, [("Q", "1", {})])
    equals = write(tmp_path / "lr=3.jsonl", [row])
    assert load(equals, prompt_field="problem").name == "lr=3"
    assert "Layouts for LAYOUT=FILE: gsm8k, math," in fault(f"gmsk8={path}")
    assert "Layouts" not in fault("absent.jsonl")


def test_a_bad_row_ends_the_run_or_is_left_out(tmp_path: Path) -> None:
    rows = [{"problem": "Q", "answer": "1"}, {"problem": "Q"}, {"answer": "1"}, {"problem": "R", "answer": ""}]
    path = write(tmp_path / "a.jsonl", [*rows, {"problem": "S", "answer": "2"}])
    assert fault(f"math500={path}") == (
        f"data.train: {path} line 2 has no field 'solution'; correct it, or set data.bad_rows=skip"
    )
    found = load(f"math500={path}", bad_rows="skip")
    assert [row[0] for row in found.rows] == ["Q", "S"] and found.places == ["line 1", "line 5"]
    assert found.summary() == (
        f"{path}: 2 of 5 rows; 1 left out: has no field 'solution' (line 2)"
        "; 1 left out: has no field 'problem' or 'question' or 'prompt' (line 3)"
        "; 1 left out: field 'answer' is empty (line 4)"
    )
    bad = write(tmp_path / "b.jsonl", rows[1:3])
    assert "has no rows that can be used; 1 rows: has no field" in fault(f"math500={bad}", bad_rows="skip")


def test_a_report_names_the_first_places_only(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"problem": "Q", "answer": "1"}] + [{"problem": "Q", "answer": ""}] * 7)
    found = load(f"math={path}", bad_rows="skip")
    assert len(found.left_out["field 'answer' is empty"]) == 7
    assert found.summary().endswith("7 left out: field 'answer' is empty (line 2, line 3, line 4, line 5, line 6, ...)")


def test_rows_of_another_kind_are_never_an_error(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "U"}]
    code = {"prompt": chat, "ability": "code", "reward_model": {"ground_truth": '{"inputs": ["1"], "outputs": ["2"]}'}}
    mathematics = {"prompt": chat, "ability": "math", "reward_model": {"ground_truth": "3"}}
    found = load(f"eurus_code={write(tmp_path / 'a.jsonl', [mathematics, code])}")
    assert found.reward == "code" and len(found.rows) == 1 and found.left_out == {"has ability 'math'": ["line 1"]}


def test_references_are_read_when_data_loads(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "Q", "answer": "1"}, {"prompt": "Q", "answer": " $ $ "}])
    assert len(load(path).rows) == 2  # any text is an answer to `exact`
    assert fault(path, reward="math").startswith(f"data.train: {path} line 2 has an empty reference answer")
    odd = write(tmp_path / "b.jsonl", [{"prompt": "Q", "answer": "1", "tolerance": [0.1]}])
    assert f"{odd} line 1 has a tolerance that is no" in fault(odd, reward="math")


def test_left_out_rows_are_booked_by_reason() -> None:
    found = DataSet(
        "a", "a.jsonl", "", None, [("Q", "", {}), ("R", "", {})], ["line 1", "line 3"], 3, {"bad": ["line 2"]}
    )
    less = found.without([None, "too long"])
    assert (less.rows, less.places) == ([("Q", "", {})], ["line 1"])
    assert less.left_out == {"bad": ["line 2"], "too long": ["line 3"]} and found.left_out == {"bad": ["line 2"]}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (r"Find $x$ if $x + 1 = 2$.", r"find \(x\) if \( x+1=2 \)", True),
        (r"$\left( 1, 2 \right)$", "(1,2)", True),
        (r"a\,b\!c\ d", "abcd", True),
        ("x\uff0d1", "x-1", True),  # a full-width minus sign
        ("x + 1", "x - 1", False),
        (r"\leftarrow", "arrow", False),
        ("2.5", "25", False),
        ("f(x)", "f x", False),
    ],
)
def test_spelling(one: str, other: str, same: bool) -> None:
    assert (normalized_problem(one) == normalized_problem(other)) == same


@given(text=st.text(max_size=30))
def test_normalisation_ignores_spaces_and_ends_there(text: str) -> None:
    key = normalized_problem(text)
    assert normalized_problem(f"  {text} \n") == key
    assert not any(character.isspace() for character in key)


def test_duplicates_and_overlap() -> None:
    exact, spelled = "same problem as an earlier row, exactly", "same problem as an earlier row, up to spelling"
    assert duplicate_reasons(made_of("a b", "c", "a b ", "A  b", "c.", "d")) == [
        None,
        None,
        exact,
        spelled,
        spelled,
        None,
    ]
    held_out = [made_of("a", "b", name="one"), made_of("b", "C.", name="two")]
    assert overlap_reasons(made_of("a", "B", "c", "d"), held_out) == [
        "problem of the evaluation set one, exactly",
        "problem of the evaluation set one, up to spelling",
        "problem of the evaluation set two, up to spelling",
        None,
    ]


def test_tests_of_programs_without_a_layout(tmp_path: Path) -> None:
    """As docs/rewards.md says: in the column `tests`, or as the answer, an object or JSON."""
    tests = {"inputs": ["1\n"], "outputs": ["2\n"]}
    path = write(tmp_path / "a.jsonl", [{"prompt": "P", "tests": tests}])
    assert load(path, reward="code").rows == [("P", "", {"tests": tests})]
    for answer in (tests, json.dumps(tests)):
        path = write(tmp_path / "b.jsonl", [{"prompt": "P", "answer": answer}])
        ((problem, text, _),) = load(path, reward="code").rows
        assert problem == "P" and json.loads(text) == tests
    assert "has no field 'answer'" in fault(write(tmp_path / "c.jsonl", [{"prompt": "P"}]), reward="code")
    path = write(tmp_path / "d.jsonl", [{"prompt": "P", "answer": tests}])
    assert "is a dict, not a text" in fault(path)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": " ", "answer": "1"}, "field 'prompt' is empty"),
        ({"prompt": "P", "answer": " "}, "field 'answer' is empty"),
        ({"prompt": "P", "answer": float("nan")}, "field 'answer' is nan, which is no answer"),
    ],
)
def test_rows_without_problem_or_answer(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "Q", "answer": "1"}, row])
    assert f"line 2 {reason}" in fault(path)
    if row["answer"] == " ":  # a reward of one's own may need none
        assert len(load(path, reward="mine.f").rows) == 2
