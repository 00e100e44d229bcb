"""The mathematics reward: pairs of answers, the golds of benchmark sets, extraction, numbers, and hostile text."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("math_verify", reason="the reward `math` needs math-verify")

from megatron_calclip.batch import Prompt
from megatron_calclip.config import MathRewardConfig, RewardConfig
from megatron_calclip.rewards import RewardSample, check_gold, make_scorer
from megatron_calclip.rewards.extraction import final_answer, find_boxes, reference_answer
from megatron_calclip.rewards.math_answer import MathReward
from megatron_calclip.rewards.math_compare import elements
from megatron_calclip.rewards.math_numbers import Number, equal_numbers, parse_number, split_unit, unit_factor
from megatron_calclip.rewards.math_symbols import TooLarge, parse
from megatron_calclip.rewards.math_text import bare, normalize, split

PAIRS = [
    json.loads(line) for line in (Path(__file__).parents[1] / "data" / "answer_pairs.jsonl").read_text().splitlines()
]
DATA = os.environ.get("MEGATRON_CALCLIP_DATA")
# file -> column of the reference answer
GOLDS = {
    "math500.jsonl": "answer",
    "gaokao2023en.jsonl": "answer",
    "minerva_math.jsonl": "solution",
    "olympiadbench.jsonl": "final_answer",
    "amc23.jsonl": "answer",
    "aime24.jsonl": "answer",
    "aime25.jsonl": "answer",
    "gsm8k_test.jsonl": "answer",
}
LARGE_GOLDS = {"gsm8k_train.jsonl": "answer", "math_train.json": "answer", "deepmath_5k.jsonl": "ground_truth"}
# Neighbours in a file that differ in spelling and not in what they say; all were read.
SAME = {
    frozenset(pair)
    for pair in (
        ("5", "x=5"), ("-2", r"\{-2\}"), ("8", "K=8"), ("25", "25%"), ("120", r"120^{\circ}"), ("21", r"21\text{dogs}"),
        ("18", r"18\text{degrees}"), ("Yes", "yes"), ("0", r"\{0\}"), ("1", "y=1"),
    )
}  # fmt: skip

grade = MathReward(relative_tolerance=1e-6)


def right(gold: str, answer: str, **metadata: Any) -> bool:
    return grade(rf"\boxed{{{answer}}}", gold, metadata) == 1.0


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair['about']}: {pair['gold'][:20]} {pair['answer'][:20]}")
def test_pairs(pair: dict[str, Any]) -> None:
    assert grade(pair["answer"], pair["gold"], {}) == float(pair["equal"])


def golds(file: str, column: str) -> list[str]:
    text = (Path(str(DATA)) / file).read_text()
    rows = (
        json.loads(text) if file.endswith(".json") else [json.loads(line) for line in text.splitlines() if line.strip()]
    )
    values = [row[column] for row in rows]
    return [", ".join(value) if isinstance(value, list) else str(value) for value in values]


def check_golds(file: str, column: str) -> int:
    """Every gold equals itself, and not its neighbour in the file unless the two say the same; the number of empty ones."""
    num_empty, before = 0, None
    for gold in golds(file, column):
        try:
            check_gold("math", gold, {})
        except ValueError:
            num_empty += 1
            continue
        reference = reference_answer(gold)
        assert right(gold, reference), gold
        if before is not None:
            pair = bare(normalize(reference)), bare(normalize(before))
            if pair[0] != pair[1] and frozenset(pair) not in SAME:
                assert not right(gold, before), (gold, before)
        before = reference
    return num_empty


@pytest.mark.skipif(DATA is None, reason="MEGATRON_CALCLIP_DATA is not set")
@pytest.mark.parametrize("file", GOLDS)
def test_golds(file: str) -> None:
    assert check_golds(file, GOLDS[file]) == (2 if file == "gaokao2023en.jsonl" else 0)


@pytest.mark.slow
@pytest.mark.skipif(DATA is None, reason="MEGATRON_CALCLIP_DATA is not set")
@pytest.mark.parametrize("file", LARGE_GOLDS)
def test_large_golds(file: str) -> None:
    assert check_golds(file, LARGE_GOLDS[file]) == (2 if file == "math_train.json" else 0)


# Extraction.


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"\boxed{a} \boxed{b}", "a , b"),
        (r"\boxed{a}" + 80 * "." + r"\boxed{b}", "b"),
        (r"\boxed{a}. Wait, \boxed{b}", "b"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed {5}", "5"),
        (r"\boxed 5", "5"),
        (r"\boxed{5", None),
        ("\\boxed{5}\nAnswer: 6", "6"),
        ("Answer: 6\n\\boxed{5}", "5"),
        ("text\nFinal Answer: $x = 3$.", "x = 3"),
        ("text\n**Answer**: 3 dogs.", "3 dogs"),
        ("the answer is $2$ and $3$, because", "2 , 3"),
        ("the answer is 3.5. Then we stop.", "3.5"),
        ("Answer:\n\n7", "7"),
        ("17", "17"),
        ("$17$", "17"),
        (r"\(17\)", "17"),
        ("one\ntwo 17", None),
        ("", None),
        ("<think>Answer: 3</think>", None),
    ],
)
def test_final_answer(completion: str, answer: str | None) -> None:
    assert final_answer(completion) == answer


def test_boxes_within_boxes() -> None:
    (box,) = find_boxes(r"a \boxed{b \boxed{c} d} e")
    assert (box.content, box.start, box.end) == (r"b \boxed{c} d", 2, 23)


# Numbers.


@pytest.mark.parametrize(
    ("text", "value", "decimals"),
    [
        ("12", Fraction(12), None),
        ("-0.50", Fraction(-1, 2), 2),
        ("1,234.5", Fraction(12345, 10), 1),
        (r"\frac{3}{4}", Fraction(3, 4), None),
        ("3/4", Fraction(3, 4), None),
        (r"-2\frac{1}{3}", Fraction(-7, 3), None),
        ("2 1/3", Fraction(7, 3), None),
        ("6.02e23", Fraction(602 * 10**21), -21),
        (r"1.4\times10^{-3}", Fraction(14, 10000), 4),
        (r"10^{-2}", Fraction(1, 100), 2),
        (r"0.1\overline{6}", Fraction(1, 6), None),
        ("2^{10}", Fraction(1024), None),
        ("(5)", Fraction(5), None),
    ],
)
def test_parse_number(text: str, value: Fraction, decimals: int | None) -> None:
    number = parse_number(text)
    assert number is not None and (number.value, number.decimals) == (value, decimals)


@pytest.mark.parametrize(
    "text", ["", "x", "1/0", r"\frac{1}{0}", "1.2.3", "10^{999999}", "9^{99999}", "--3", "e5", "9" * 5000]
)
def test_what_is_no_number(text: str) -> None:
    assert parse_number(text) is None


@given(st.integers(-(10**12), 10**12), st.integers(1, 10**6))
def test_fractions_are_exact(numerator: int, denominator: int) -> None:
    number = parse_number(rf"\frac{{{numerator}}}{{{denominator}}}")
    assert number is not None and number.value == Fraction(numerator, denominator)
    assert right(f"{numerator}/{denominator}", rf"\frac{{{numerator}}}{{{denominator}}}")
    assert not right(f"{numerator}/{denominator}", rf"\frac{{{numerator + 1}}}{{{denominator}}}")


@given(st.integers(0, 10**15))
@settings(max_examples=50)
def test_whole_numbers_in_every_spelling(value: int) -> None:
    for spelling in (f"{value:,}", f"{value:,}".replace(",", "{,}"), f"{value:,}".replace(",", r",\!"), f"00{value}", f"{value}.0", f"{value}.", rf"\text{{{value}}}", f" {value} "):  # fmt: skip
        assert right(str(value), spelling), spelling
    assert not right(str(value), str(value + 1))


@given(st.floats(1e-40, 1e40), st.integers(-3, 3))
@settings(max_examples=100)
def test_tolerance_follows_the_size_of_the_reference(value: float, steps: int) -> None:
    """Twelve digits, the last of which moves: equal at every size; moved by a hundredth: unequal."""
    gold = f"{value:.11e}"
    assert right(gold, f"{value * (1 + steps * 1e-12):.11e}")
    assert not right(gold, f"{value * 1.01:.11e}")


def test_equal_numbers_by_hand() -> None:
    third, tenth = Number(Fraction(1, 3), None), Number(Fraction(3333333, 10**7), 7)
    assert equal_numbers(third, tenth, relative_tolerance=1e-6)
    assert not equal_numbers(third, tenth, relative_tolerance=1e-8)
    assert equal_numbers(
        Number(Fraction(100), None, True), Number(Fraction(101), None, True), relative_tolerance=0.0, tolerance=1.0
    )


def test_a_row_may_bring_tolerance_and_unit() -> None:
    assert right("3.0", "3.05", tolerance="1e-1") and not right("3.0", "3.15", tolerance=0.1)
    assert right("3", "3.05", tolerance=0.1)
    assert right("5", r"5\text{ km}", unit="km") and not right("5", r"5\text{ miles}", unit="km")
    assert right("90", r"90^\circ", unit=r"^{\circ}") and right("5", "5", unit="$cm^2$")


def test_units_by_hand() -> None:
    assert (split_unit(r"5 \text{ cm}^{2}").value, split_unit(r"5 \text{ cm}^{2}").unit) == ("5", "cm^2")
    assert unit_factor("m^2", "cm^2") == Fraction(1, 10**4) and unit_factor("m", "kg") is None
    assert unit_factor("", "kg") == 1


# Text.


def test_split_respects_brackets() -> None:
    assert split(r"(1,2), \{3,4\}, [5,6), \frac{1,2}{3}", ",") == ("(1,2)", r"\{3,4\}", "[5,6)", r"\frac{1,2}{3}")
    assert elements("1,234, 5") == ("1234", "5") and elements("1,2") == ("1", "2") and elements("1,234") == ("1234",)
    assert elements(r"\pm 2") == ("2", "- 2")


@given(st.text(alphabet=r"\{}()[]^_$,.;:+-*/=<>|&%~! 0123456789abxyzfrcsqtpimoe", max_size=60))
@settings(max_examples=400)
def test_any_text_gets_a_verdict(text: str) -> None:
    """No exception, and a text that is its own answer is right whenever it says anything at all."""
    answer = normalize(text)
    assert normalize(answer) == normalize(normalize(answer))
    assert grade(rf"\boxed{{{text}}}", "12345", {}) in (0.0, 1.0)
    assert grade(text, "12345", {}) in (0.0, 1.0)


@pytest.mark.parametrize(
    "text",
    [r"\(" * 20_000, "{" * 50_000, r"\boxed{" * 10_000, r"\frac" * 10_000, "answer: " * 10_000, "final " * 20_000, "$" * 50_000, "-" * 50_000, r"\text{" * 10_000, "(" * 4000 + ")" * 4000, r"\boxed{" + "((" * 2000 + "))" * 2000 + "}"],
    ids=lambda text: text[:8],
)  # fmt: skip
def test_long_hostile_text_takes_linear_time(text: str) -> None:
    start = time.process_time()
    assert grade(text, "7", {}) == 0.0
    assert time.process_time() - start < 3


@pytest.mark.parametrize(
    "text", ["9^{9^{9}}", "2^{2^{2^{2^{2^{2}}}}}", "(10^{10})!", r"\binom{10^{9}}{10^{8}}", "9^{-9^{9}}"]
)
def test_exploding_numbers_are_never_evaluated(text: str) -> None:
    with pytest.raises(TooLarge):
        parse(text)
    assert not right("7", text) and right(text, text)


@pytest.mark.parametrize("text", ["__import__('os').system('true')", r"\text{exec}(1)", "lambda: 0"])
def test_text_is_never_evaluated_as_code(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "system", lambda _: pytest.fail("evaluated"))
    assert not right("0", text)


# Rows.


@pytest.mark.parametrize(("answer", "metadata", "complaint"), [
    ("", {}, "empty"), ("$ $", {}, "empty"), (r"\boxed{}", {}, "empty"), ("####", {}, "empty"), (".", {}, "empty"),
    ("3", {"tolerance": "wide"}, "tolerance"), ("3", {"tolerance": -1}, "tolerance"), ("3", {"tolerance": "inf"}, "tolerance"),
])  # fmt: skip
def test_golds_that_say_nothing(answer: str, metadata: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_gold("math", answer, metadata)


@pytest.mark.parametrize("answer", ["0", "x", r"\emptyset", r"\text{none}", r"\infty", r"\{\}"])
def test_golds_that_say_something(answer: str) -> None:
    check_gold("math", answer, {"tolerance": None})
    check_gold("exact", "", {})


# In the pool.


@pytest.fixture(scope="module")
def scorer() -> Iterator[Any]:
    made = make_scorer(RewardConfig("math", num_workers=2, timeout_seconds=1.0, math=MathRewardConfig(1e-3)))
    yield made
    made.close()


def test_scores_in_the_pool(scorer: Any) -> None:
    prompt = Prompt(
        id=0, token_ids=(1,), text="", answer=r"\frac{1}{2}", metadata={"tolerance": 0.1, "other": object()}
    )
    texts = [r"\boxed{0.5}", r"\boxed{1}", "", r"\boxed{9^{9^{9}}}", r"\boxed{0.55}"]
    scores = scorer.score([RewardSample(prompt, text, 1, True) for text in texts])
    assert [score.value for score in scores] == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert not any(score.timed_out for score in scores)


def test_relative_tolerance_is_a_setting(scorer: Any) -> None:
    prompt = Prompt(id=0, token_ids=(1,), text="", answer="3.1416")
    assert [
        s.value for s in scorer.score([RewardSample(prompt, rf"\boxed{{{x}}}", 1, True) for x in (r"\pi", "3.15")])
    ] == [1.0, 0.0]


def test_an_answer_that_sympy_never_finishes_is_wrong_and_counted(scorer: Any) -> None:
    """A sum of ten million terms without a closed form."""
    prompt = Prompt(id=0, token_ids=(1,), text="", answer="3.5")
    endless = r"\boxed{\sum_{n=1}^{10000000} \frac{\sin(n^2)}{n!+1}}"
    (first, second) = scorer.score([RewardSample(prompt, text, 1, True) for text in (endless, r"\boxed{3.5}")])
    assert (first.value, first.timed_out) == (0.0, True) and (second.value, second.timed_out) == (1.0, False)
