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
from megatron_calclip.rewards.math_numbers import Number, equal_numbers, parse_number, split_unit, unit_factor
from megatron_calclip.rewards.math_text import TEXT, bare, closing, split, words

_COMMA = r"[,;]"
_JOIN = r",\s|;|(?:,\s*)?(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])"
_GROUPED = re.compile(r"(?<![\d.])(\d{1,3})((?:,\d{3})+)(?!\d)")
_NAME = re.compile(
    r"(?:[a-zA-Z]|\\[a-zA-Z]+(?: [A-Z]{1,3})?|\\text\{[^{}]*\}|[a-zA-Z]{2,}(?: [a-zA-Z]+){0,3})\s*(?:_\{[^{}]*\}|')*\s*"
    r"(?:\(\s*[a-zA-Z](?:\s*,\s*[a-zA-Z])*\s*\))?|\(\s*[a-zA-Z](?:\s*,\s*[a-zA-Z])+\s*\)"
)
_MATRIX = re.compile(
    r"[(\[]?\s*\\begin\{([pb]?matrix|array|smallmatrix)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}\s*[)\]]?", re.DOTALL
)
_SYSTEM = re.compile(r"(?:\\\{)?\s*\\begin\{(cases|aligned|align\*?|array)\}(?:\{[lcr]*\})?(.*)\\end\{\1\}", re.DOTALL)
_CHOICE = re.compile(
    r"(?:(?:choice|option|answer)\s+)?(?:\(([A-Za-z])\).*|([A-Za-z])(?:[).:].*)?)", re.DOTALL | re.IGNORECASE
)
_CONDITION = re.compile(
    r"[a-zA-Z](?:\s*,\s*[a-zA-Z])*\s*\\in\s*\\mathbb\s*\{?[A-Z]\}?.*"
    r"|\\text\{.*\b(?:integer|real|constant|any|where|for)\b.*",
    re.DOTALL,
)
_NONE = {
    "no solution", "no solutions", "none", "no real solution", "no real solutions", "empty set", "does not exist", "dne",
}  # fmt: skip
_REALS = {"all real numbers", "all reals", "real numbers", "reals", "all real number", "all real x"}
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


@lru_cache(maxsize=8192)
def elements(text: str, *, strict: bool = False) -> tuple[str, ...]:
    r"""Several answers, one by one: separated by commas, `and`, `or`, or meant by \pm.

    Args:
        text: normalised.
        strict: whether every comma separates, also one before three digits.
    """
    if system := _SYSTEM.fullmatch(text):
        text = re.sub(r"\\\\|&", lambda match: ", " if match[0] != "&" else "", system[2])
    parts: list[str] = []
    for joined in split(text, _JOIN):
        ungrouped = _GROUPED.sub(lambda match: match[0].replace(",", ""), joined)
        parts += split(joined, _COMMA) if strict else split(ungrouped, _COMMA)
        if not strict and len(split(ungrouped, _COMMA)) > 1:  # 1,234,5 is a list, and so is all of it
            parts[-len(split(ungrouped, _COMMA)) :] = split(joined, _COMMA)
    kept = [part for part in parts if part and not _CONDITION.fullmatch(part)] or [part for part in parts if part]
    found: list[str] = []
    for part in kept:
        if r"\pm" in part or r"\mp" in part:
            for plus, minus in (("+", "-"), ("-", "+")):
                variant = re.sub(r"\\pm(?![a-zA-Z])", plus, part)
                found.append(re.sub(r"^\s*\+", "", re.sub(r"\\mp(?![a-zA-Z])", minus, variant)).strip())
        else:
            found.append(part)
    return tuple(found) or (text,)


def _equal_several(gold: str, answer: str, expected: Sequence[str], given: Sequence[str], rules: Rules) -> bool:
    """Lists of answers; or a list and one collection of as many."""
    if len(expected) == 1 or len(given) == 1:
        single, several = (expected[0], given) if len(expected) == 1 else (given[0], expected)
        if len(expected) == 1 and all(_equal_single(single, part, rules) for part in given):
            return True  # one answer, written twice
        outer = _outer(_named(single)[1])
        if outer is not None and outer[0] in ("{", "("):
            inner = elements(outer[1])
            if len(inner) == len(several):
                left, right = (inner, several) if len(expected) == 1 else (several, inner)
                ordered = outer[0] == "(" and (len(expected) == 1 or all(_named(part)[0] for part in several))
                return _in_order(left, right, rules) if ordered else _in_any_order(left, right, rules)
        return _equal_as_sets(gold, answer)
    if len(expected) != len(given):
        return False
    named, given_named = [_named(part) for part in expected], [_named(part) for part in given]
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
    (gold_name, gold_value), (name, value) = _named(gold), _named(answer)
    gold, answer = _unwrapped(gold) if gold_name else gold_value, _unwrapped(answer) if name else value
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
    if math_symbols.split_relation(gold)[1] and math_symbols.split_relation(answer)[1]:
        return math_symbols.equal_relations(gold, answer)
    return _equal_symbols(gold, answer, rules)


@lru_cache(maxsize=8192)
def _unwrapped(text: str) -> str:
    r"""Without what only introduces: `x \in`, a leading `=`, an equation's chain, `\approx` after a value, {x | ...}."""
    text = text.strip()
    while text.startswith("{") and closing(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    text = re.sub(r"^(?:=|:|\\therefore|\\implies|\\Rightarrow|\\text\{[^{}]*(?:\bis|\bare|=|:)\s*\})\s*", "", text)
    if words(text) in _REALS:
        return r"\mathbb{R}"
    membership = re.fullmatch(r"[a-zA-Z](?:_\{\w+\})?\s*\\in\s*(.+)", text, re.DOTALL)
    if membership and not _CONDITION.fullmatch(text):
        text = membership[1]
    builder = re.fullmatch(r"\\\{\s*[a-zA-Z]\s*(?:\\in\s*\\mathbb\{?R\}?\s*)?[|:]\s*(.+)\\\}", text, re.DOTALL)
    if builder:
        text = builder[1].strip()
    sides = split(text, r"\\approx(?![a-zA-Z])")
    if len(sides) > 1:
        text = sides[1] if _NAME.fullmatch(sides[0]) else sides[0]
    return text.strip()


@lru_cache(maxsize=8192)
def _named(text: str) -> tuple[str, str]:
    """A name and its value, `x = 3`; an empty name for anything else. Of a chain the last value counts."""
    text = _unwrapped(text)
    sides, relations = math_symbols.split_relation(text)
    if not relations or set(relations) != {"="}:
        return "", text
    if _NAME.fullmatch(sides[0].strip()):
        return sides[0].strip(), sides[-1]
    value = math_symbols.constant(sides[0])  # 2 + 2 = 4
    if value is not None and value == math_symbols.constant(sides[-1]):
        return "", sides[-1]
    return "", text


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
    expected, given = _matrix(gold), _matrix(answer)
    if expected is not None or given is not None:
        return _equal_matrices(expected, given, gold, answer, rules)
    left, right = _outer(gold), _outer(answer)
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
    if (
        left is not None
        or right is not None
        or any(r"\cup" in t or r"\cap" in t or r"\setminus" in t for t in (gold, answer))
    ):
        return True if _equal_as_sets(gold, answer) else (None if r"\{" not in gold + answer else False)
    return None


def _unique(parts: Sequence[str], rules: Rules) -> list[str]:
    kept: list[str] = []
    for part in parts[:_MAX_UNORDERED]:
        if not any(_equal(part, other, rules) for other in kept):
            kept.append(part)
    return kept + list(parts[_MAX_UNORDERED:])


@lru_cache(maxsize=8192)
def _outer(text: str) -> tuple[str, str, str] | None:
    r"""Opening bracket, inside and closing bracket of a text that stands in one pair; braces are those of \{ \}."""
    text = text.strip()
    start = 1 if text.startswith(r"\{") else 0
    if text[start : start + 1] not in ("(", "[") and start == 0:
        return None
    end = closing(text, start)
    if end != len(text) - 1:
        return None
    if start:
        return "{", text[2:-2].strip(), "}"
    return text[0], text[1:-1].strip(), text[-1]


def _equal_as_sets(gold: str, answer: str) -> bool:
    """Intervals, unions, set-builders and inequalities as sets of real numbers."""
    expected, given = _as_set(gold), _as_set(answer)
    return expected is not None and given is not None and math_symbols.equal_sets(expected, given)


@lru_cache(maxsize=4096)
def _as_set(text: str) -> Any:
    text = _unwrapped(text)
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
    outer = _outer(text)
    if outer is None:
        parts = split(text, _COMMA)
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


@lru_cache(maxsize=4096)
def _matrix(text: str) -> tuple[tuple[str, ...], ...] | None:
    match = _MATRIX.fullmatch(text.strip())
    if match is None:
        return None
    rows = [row for row in split(re.sub(r"\\hline", "", match[2]), r"\\\\") if row]
    return tuple(split(row, "&") for row in rows)


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
    outer = _outer(other)
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
