r"""The forms that an answer can have, as they are written: lists, names with values, brackets, matrices.

Everything takes normalised text (`math_text.normalize`) and returns pieces of it; nothing is evaluated but the two
sides of `2 + 2 = 4`. Results are cached, because a group's samples repeat each other and all repeat the reference.
"""

from __future__ import annotations

import re
from functools import lru_cache

from megatron_calclip.rewards import math_symbols
from megatron_calclip.rewards.math_text import closing, split, words

COMMA = r"[,;]"
"""Between answers, or between elements."""
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
_CONDITION = re.compile(
    r"[a-zA-Z](?:\s*,\s*[a-zA-Z])*\s*\\in\s*\\mathbb\s*\{?[A-Z]\}?.*"
    r"|\\text\{.*\b(?:integer|real|constant|any|where|for)\b.*",
    re.DOTALL,
)
_REALS = {"all real numbers", "all reals", "real numbers", "reals", "all real number", "all real x"}


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
        parts += split(joined, COMMA) if strict else split(ungrouped, COMMA)
        if not strict and len(split(ungrouped, COMMA)) > 1:  # 1,234,5 is a list, and so is all of it
            parts[-len(split(ungrouped, COMMA)) :] = split(joined, COMMA)
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


@lru_cache(maxsize=8192)
def unwrapped(text: str) -> str:
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
def name_and_value(text: str) -> tuple[str, str]:
    """A name and its value, `x = 3`; an empty name for anything else. Of a chain the last value counts."""
    text = unwrapped(text)
    sides, relations = math_symbols.split_relation(text)
    if not relations or set(relations) != {"="}:
        return "", text
    if _NAME.fullmatch(sides[0].strip()):
        return sides[0].strip(), sides[-1]
    value = math_symbols.constant(sides[0])  # 2 + 2 = 4
    if value is not None and value == math_symbols.constant(sides[-1]):
        return "", sides[-1]
    return "", text


@lru_cache(maxsize=8192)
def brackets(text: str) -> tuple[str, str, str] | None:
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


@lru_cache(maxsize=4096)
def matrix_rows(text: str) -> tuple[tuple[str, ...], ...] | None:
    """The entries of a matrix, row by row; None for anything else. The kind of its brackets does not matter."""
    match = _MATRIX.fullmatch(text.strip())
    if match is None:
        return None
    rows = [row for row in split(re.sub(r"\\hline", "", match[2]), r"\\\\") if row]
    return tuple(split(row, "&") for row in rows)
