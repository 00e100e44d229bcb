r"""Whether two answers are the same, by taking them apart as they are written.

Several answers, tuples, intervals, sets, matrices, relations, numbers with units and words are told apart by their
spelling, and each is compared by the means that suit it: exact numbers before anything else, sympy (`math_symbols`)
where nothing simpler decides. Most answers of a benchmark never reach sympy.

The rules, in short: several answers count in any order, a tuple's elements in their own; `x = 3` is 3; two answers are
not the one answer asked for; an interval is the inequality that describes it; a choice is its letter; units matter when
both sides name one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from megatron_calclip.rewards import math_symbols
from megatron_calclip.rewards.math_forms import COMMA, brackets, elements, matrix_rows, name_and_value, unwrapped
from megatron_calclip.rewards.math_numbers import Number, equal_numbers, parse_number, split_unit, unit_factor
from megatron_calclip.rewards.math_text import TEXT, bare, split, words

_CHOICE = re.compile(
    r"(?:(?:choice|option|answer)\s+)?(?:\(([A-Za-z])\)(?!\s*[-+*/^=_<>,]).*|([A-Za-z])(?:[).:].*)?)",
    re.DOTALL | re.IGNORECASE,
)
_NONE = {
    "no solution", "no solutions", "none", "no real solution", "no real solutions", "empty set", "does not exist", "dne",
}  # fmt: skip
_NOT_WORDS = r"\\(?!text\{)[a-zA-Z]+|\d|[=<>^_]"
# More answers than this are compared in order, because any order takes quadratic time.
_MAX_UNORDERED = 64


@dataclass(frozen=True)
class Rules:
    """How numbers are compared."""

    relative_tolerance: float = 1e-6
    """For decimals, as a share of the reference."""
    tolerance: float | None = None
    """Absolute, for all numbers; takes the place of the relative one."""


def equal(gold: str, answer: str, rules: Rules) -> bool:
    """Whether an answer is the reference; both normalised by `math_text.normalize`."""
    if bare(gold) == bare(answer):
        return bare(gold) != ""
    try:
        return _equal(gold, answer, rules)
    except math_symbols.TooLarge:
        return False


def _equal(gold: str, answer: str, rules: Rules) -> bool:
    if bare(gold) == bare(answer):
        return True
    expected, given = elements(gold), elements(answer)
    if len(expected) != len(given):  # 100,200 may be two numbers after all
        strict = elements(gold, strict=True), elements(answer, strict=True)
        if len(strict[0]) == len(strict[1]):
            expected, given = strict
    if len(expected) == len(given) == 1:
        return _equal_single(expected[0], given[0], rules)
    return _equal_several(gold, answer, expected, given, rules)


def _equal_several(gold: str, answer: str, expected: Sequence[str], given: Sequence[str], rules: Rules) -> bool:
    """Lists of answers; or a list and one collection of as many."""
    if len(expected) == 1 or len(given) == 1:
        single, several = (expected[0], given) if len(expected) == 1 else (given[0], expected)
        if len(expected) == 1 and all(_equal_single(single, part, rules) for part in given):
            return True  # one answer, written twice
        outer = brackets(name_and_value(single)[1])
        if outer is not None and outer[0] in ("{", "("):
            inner = elements(outer[1])
            if len(inner) == len(several):
                left, right = (inner, several) if len(expected) == 1 else (several, inner)
                ordered = outer[0] == "(" and (len(expected) == 1 or all(name_and_value(part)[0] for part in several))
                return _in_order(left, right, rules) if ordered else _in_any_order(left, right, rules)
        return _equal_as_sets(gold, answer)
    if len(expected) != len(given):
        return False
    named, given_named = [name_and_value(part) for part in expected], [name_and_value(part) for part in given]
    names, given_names = [name for name, _ in named], [name for name, _ in given_named]
    if all(names) and len(set(names)) == len(names):  # x = 1, y = 2
        if all(given_names):
            values = dict(given_named)
            return set(names) == set(values) and all(_equal(value, values[name], rules) for name, value in named)
        if not any(given_names):
            return _in_order([value for _, value in named], given, rules)
    if _in_any_order(expected, given, rules):
        return True
    # n = 2, 3, 4: the name stands before the first alone
    if len(set(filter(None, names))) <= 1 and len(set(filter(None, given_names))) <= 1:
        same = not (any(names) and any(given_names)) or set(filter(None, names)) == set(filter(None, given_names))
        bare_values = [value for _, value in named], [value for _, value in given_named]
        if same and _in_any_order(*bare_values, rules):
            return True
    return _equal_as_sets(gold, answer)


def _in_order(expected: Sequence[str], given: Sequence[str], rules: Rules) -> bool:
    return len(expected) == len(given) and all(_equal(a, b, rules) for a, b in zip(expected, given, strict=True))


def _in_any_order(expected: Sequence[str], given: Sequence[str], rules: Rules) -> bool:
    if len(expected) != len(given):
        return False
    if len(expected) > _MAX_UNORDERED:
        return _in_order(expected, given, rules)
    left = list(given)
    for part in expected:
        match = next((i for i, other in enumerate(left) if _equal(part, other, rules)), None)
        if match is None:
            return False
        del left[match]
    return True


def _equal_single(gold: str, answer: str, rules: Rules) -> bool:
    (gold_name, gold_value), (name, value) = name_and_value(gold), name_and_value(answer)
    gold, answer = unwrapped(gold) if gold_name else gold_value, unwrapped(answer) if name else value
    if bare(gold) == bare(answer):
        return True
    if gold_name and name and bare(gold_name) == bare(name):
        return _equal(gold_value, value, rules)
    if name and not gold_name and not math_symbols.split_relation(gold)[1]:
        return _equal(gold, value, rules)
    if gold_name and not name and not math_symbols.split_relation(answer)[1]:
        return _equal(gold_value, answer, rules)
    if (verdict := _equal_quantities(gold, answer, rules)) is not None:
        return verdict
    if (verdict := _equal_words(gold, answer)) is not None:
        return verdict
    if (verdict := _equal_collections(gold, answer, rules)) is not None:
        return verdict
    relations = [bool(math_symbols.split_relation(text)[1]) for text in (gold, answer)]
    if all(relations):
        return math_symbols.equal_relations(gold, answer)
    return not any(relations) and _equal_symbols(gold, answer, rules)


def _equal_quantities(gold: str, answer: str, rules: Rules) -> bool | None:
    """Numbers with their units; None where one side is none."""
    expected = split_unit(gold)
    given = split_unit(answer, letters=parse_number(expected.value) is not None)
    number, other = parse_number(expected.value), parse_number(given.value)
    if number is None or other is None:
        return None
    if "%" in (expected.unit, given.unit) and expected.unit != given.unit:
        if expected.unit and given.unit:
            return False
        hundredth = Number(other.value / 100, (other.decimals or 0) + 2)
        part = hundredth if given.unit else Number(other.value * 100, other.decimals, other.whole)
        return _same(number, other, rules) or _same(number, part, rules)
    factor = unit_factor(expected.unit, given.unit)
    if factor is None:
        return False
    if factor != 1:
        other = Number(other.value * factor, other.decimals)
    return _same(number, other, rules)


def _same(gold: Number, answer: Number, rules: Rules) -> bool:
    return equal_numbers(gold, answer, relative_tolerance=rules.relative_tolerance, tolerance=rules.tolerance)


def _equal_words(gold: str, answer: str) -> bool | None:
    """Choices, times and words; None where both sides are mathematics."""
    clean, given = re.sub(TEXT, r"\1", gold).strip(), re.sub(TEXT, r"\1", answer).strip()
    choice = re.fullmatch(r"\(?([A-Z])\)?", clean)
    if choice:
        match = _CHOICE.fullmatch(given)
        letter = (match[1] or match[2]) if match else ""
        return letter.upper() == choice[1] and (letter.isupper() or ")" in clean + given)
    if re.fullmatch(r"\d+(?:\s*:\s*\d+)+(?:\s*[ap]\.?\s*m\.?)?", clean, re.IGNORECASE):
        return _equal_times(clean, given)
    left, right = words(gold), words(answer)
    for one, other in ((left, answer), (right, gold)):
        if one in _NONE and (bare(other) in (r"\emptyset", r"\{\}") or words(other) in _NONE):
            return True
    wordy = [text for text in (clean, given) if re.search(r"[a-zA-Z]{3}", re.sub(r"\\[a-zA-Z]+", "", text))]
    if not wordy and r"\text" not in gold + answer:
        return None
    if left == right:
        return left != ""
    if re.search(_NOT_WORDS, clean) or re.search(_NOT_WORDS, given):
        return None
    return False


def _equal_times(gold: str, answer: str) -> bool:
    """12:00 and ratios, compared digit group by digit group; a.m. and p.m. where both say it."""
    parts = [re.fullmatch(r"(\d+(?:\s*:\s*\d+)+)\s*(.*)", text) for text in (gold, answer)]
    if parts[0] is None or parts[1] is None:
        return False
    numbers = [[int(group) for group in re.findall(r"\d+", part[1])] for part in parts if part]
    halves = [re.sub(r"[\s.]", "", part[2]).casefold() for part in parts if part]
    return numbers[0] == numbers[1] and (halves[0] == halves[1] or "" in halves)


def _equal_collections(gold: str, answer: str, rules: Rules) -> bool | None:
    """Matrices, tuples, intervals and sets; None where neither side is one."""
    expected, given = matrix_rows(gold), matrix_rows(answer)
    if expected is not None or given is not None:
        return _equal_matrices(expected, given, gold, answer, rules)
    left, right = brackets(gold), brackets(answer)
    for outer, other, single in ((left, right, answer), (right, left, gold)):
        if outer is not None and other is None and outer[0] == "{" and len(elements(outer[1])) == 1:
            pair = (outer[1], single) if outer is left else (single, outer[1])
            return _equal(*pair, rules) or _equal_as_sets(gold, answer)
    if left is not None and right is not None and (left[0] != "(" or len(elements(left[1])) > 1 or right[0] != "("):
        inner = elements(left[1]), elements(right[1])
        if len(inner[0]) != len(inner[1]):
            inner = elements(left[1], strict=True), elements(right[1], strict=True)
        if left[0] == right[0] == "{":
            unique = [_unique(part, rules) for part in inner]
            return _in_any_order(unique[0], unique[1], rules)
        if (left[0], left[2]) == (right[0], right[2]):
            return _in_order(inner[0], inner[1], rules)
        return False
    sets = _is_collection(gold), _is_collection(answer)
    if not any(sets):
        return None
    relation = math_symbols.split_relation(answer if sets[0] else gold)[1]
    return bool(all(sets) or relation) and _equal_as_sets(gold, answer)


def _is_collection(text: str) -> bool:
    """Whether text is a set, or several elements in brackets."""
    if re.search(r"\\(?:cup|cap|setminus)(?![a-zA-Z])|\\mathbb", text):
        return True
    outer = brackets(text)
    return outer is not None and (outer[0] == "{" or len(elements(outer[1])) > 1)


def _unique(parts: Sequence[str], rules: Rules) -> list[str]:
    kept: list[str] = []
    for part in parts[:_MAX_UNORDERED]:
        if not any(_equal(part, other, rules) for other in kept):
            kept.append(part)
    return kept + list(parts[_MAX_UNORDERED:])


def _equal_as_sets(gold: str, answer: str) -> bool:
    """Intervals, unions, set-builders and inequalities as sets of real numbers."""
    expected, given = _as_set(gold), _as_set(answer)
    return expected is not None and given is not None and math_symbols.equal_sets(expected, given)


@lru_cache(maxsize=4096)
def _as_set(text: str) -> Any:
    text = unwrapped(text)
    if bare(text) in (r"\mathbb{R}", r"(-\infty,\infty)"):
        return math_symbols.REALS
    for pattern, combine in (
        (r"\\cup(?![a-zA-Z])|(?<![a-zA-Z\\])(?:or|U)(?![a-zA-Z])", math_symbols.union),
        (r"\\cap(?![a-zA-Z])|(?<![a-zA-Z\\])and(?![a-zA-Z])", math_symbols.intersection),
        (r"\\setminus(?![a-zA-Z])|\\backslash(?![a-zA-Z])", math_symbols.complement),
    ):
        parts = split(text, pattern)
        if len(parts) > 1:
            sets = [_as_set(part) for part in parts]
            return None if None in sets else combine(sets)
    outer = brackets(text)
    if outer is None:
        parts = split(text, COMMA)
        if len(parts) > 1:
            sets = [_as_set(part) for part in parts]
            return None if None in sets else math_symbols.union(sets)
        return math_symbols.solution_set(text)
    inside = elements(outer[1])
    if outer[0] == "{":
        return math_symbols.finite_set(list(inside))
    if len(inside) != 2:
        return None
    return math_symbols.interval(*inside, left_open=outer[0] == "(", right_open=outer[2] == ")")


def _equal_matrices(
    expected: tuple[tuple[str, ...], ...] | None,
    given: tuple[tuple[str, ...], ...] | None,
    gold: str,
    answer: str,
    rules: Rules,
) -> bool:
    """Entry by entry; a row or a column is also the tuple of its entries."""
    if expected is not None and given is not None:
        same_shape = [len(row) for row in expected] == [len(row) for row in given]
        return same_shape and all(_in_order(a, b, rules) for a, b in zip(expected, given, strict=True))
    matrix, other, is_gold = (expected, answer, True) if expected is not None else (given, gold, False)
    assert matrix is not None
    outer = brackets(other)
    if outer is None or outer[0] == "{" or (len(matrix) > 1 and any(len(row) > 1 for row in matrix)):
        return False
    entries = [entry for row in matrix for entry in row]
    inside = elements(outer[1])
    return _in_order(entries, inside, rules) if is_gold else _in_order(inside, entries, rules)


def _equal_symbols(gold: str, answer: str, rules: Rules) -> bool:
    """Expressions, with units; a decimal may stand for a constant that it is a rounding of."""
    expected, given = split_unit(gold), split_unit(answer)
    if r"\text" in expected.value + given.value or unit_factor(expected.unit, given.unit) is None:
        return False
    if "degree" in (expected.unit, given.unit) and any(
        r"\pi" in one.value and not one.unit for one in (expected, given)
    ):
        expected, given = (
            replace(one, value=rf"({one.value}) \cdot \frac{{\pi}}{{180}}") if one.unit else one
            for one in (expected, given)
        )
    if math_symbols.equal_expressions(expected.value, given.value):
        return True
    values = [math_symbols.constant(text) for text in (expected.value, given.value)]
    if values[0] is None or values[1] is None:
        return False
    tolerance = rules.tolerance
    if tolerance is None:
        decimal = any("." in text for text in (expected.value, given.value))
        tolerance = rules.relative_tolerance * math_symbols.distance(values[0]) if decimal else 0.0
    return 0 < tolerance < math.inf and math_symbols.distance(values[0], values[1]) <= tolerance
