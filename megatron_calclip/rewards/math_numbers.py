r"""Numbers as they are written: exact values, their precision, their units, and when two of them are equal.

A number is exact unless it is written with a decimal point: whole numbers and fractions must agree exactly, and a
decimal agrees with what it is a rounding of, within a tolerance relative to the reference. So 6.63e-34 is not 1.1e-30,
33.3 is not 100/3, and 0.333333 is 1/3.

Units are compared where both sides have one, converted where they measure the same; where one side has none it is
the problem's. A percentage is equal to the number with the sign left out, and to its value.

Left out on purpose: dimensional analysis beyond the units of school problems.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from megatron_calclip.rewards.math_text import TEXT

# Powers of ten beyond this are compared as text: an exponent costs the policy few characters and us memory.
_MAX_EXPONENT = 5000
_MAX_DIGITS = 4000

# Two decimals as near as this differ by how they were computed, not by what was meant.
_NOISE = Fraction(1, 10**9)

_DECIMAL = r"\d+(?:,\d{3})+(?:\.\d*)?|\d+\.?\d*|\.\d+"
_PLAIN = re.compile(rf"([+-]?)\s*({_DECIMAL})")
_SCIENTIFIC = re.compile(
    rf"([+-]?)\s*(?:({_DECIMAL})\s*(?:\\times|\\cdot|\*|x)\s*)?10\s*\^\s*\{{\s*([+-]?\d+)\s*\}}"
    rf"|([+-]?)\s*({_DECIMAL})\s*[eE]\s*([+-]?\d+)"
)
_FRACTION = re.compile(rf"([+-]?)\s*\\frac\{{\s*([+-]?(?:{_DECIMAL}))\s*\}}\{{\s*([+-]?(?:{_DECIMAL}))\s*\}}")
_RATIO = re.compile(rf"([+-]?)\s*({_DECIMAL})\s*/\s*({_DECIMAL})")
_MIXED = re.compile(
    r"([+-]?)\s*(\d+)\s*\\frac\{\s*(\d+)\s*\}\{\s*(\d+)\s*\}|([+-]?)\s*(\d+)\s+(?:and\s+)?(\d+)\s*/\s*(\d+)"
)
_RECURRING = re.compile(r"([+-]?)\s*(\d*)\.(\d*)\\overline\{(\d+)\}")
_POWER = re.compile(r"([+-]?)\s*(\d+)\s*\^\s*\{\s*(-?\d+)\s*\}")
_GROUPED = re.compile(r"[+-]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_MULTIPLES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}

# name -> (what it measures, size); other spellings below.
_UNITS = {
    "mm": ("length", "0.001"), "cm": ("length", "0.01"), "dm": ("length", "0.1"), "m": ("length", "1"),
    "km": ("length", "1000"), "inch": ("imperial", "1"), "foot": ("imperial", "12"), "yard": ("imperial", "36"),
    "mile": ("imperial", "63360"), "mg": ("mass", "0.001"), "g": ("mass", "1"), "kg": ("mass", "1000"),
    "s": ("time", "1"), "minute": ("time", "60"), "hour": ("time", "3600"), "day": ("time", "86400"),
    "week": ("time", "604800"), "ml": ("volume", "0.001"), "l": ("volume", "1"), "cent": ("money", "1"),
    "dollar": ("money", "100"), "%": ("percent", "1"), "degree": ("angle", "1"),
}  # fmt: skip
_SPELLINGS = {
    "millimeter": "mm", "centimeter": "cm", "decimeter": "dm", "meter": "m", "kilometer": "km", "in": "inch",
    "inche": "inch", "ft": "foot", "feet": "foot", "yd": "yard", "mi": "mile", "milligram": "mg", "gram": "g",
    "kilogram": "kg", "sec": "s", "second": "s", "min": "minute", "hr": "hour", "h": "hour", "milliliter": "ml",
    "liter": "l", "buck": "dollar", "usd": "dollar", "percent": "%", "percentage": "%", "pct": "%", "deg": "degree",
    r"^{\circ}": "degree", "metre": "m", "centimetre": "cm", "kilometre": "km", "litre": "l", "¢": "cent",
}  # fmt: skip
_SHORT = r"mm|cm|dm|km|ft|in|yd|mi|mg|kg|sec|min|hr|ml|mL|mph"
_LETTER = r"[mgshlLNJWVAKCΩ]"
_UNIT = re.compile(
    r"(?P<degree>\^\{\\circ\})\s*(?P<scale>[CF]?)$"
    r"|(?P<percent>%)$"
    rf"|(?P<words_in_text>(?:{TEXT.replace('(', '(?:', 1)}\s*(?:\^\{{-?\d\}})?\s*[/.]?\s*)+)$"
    rf"|(?<=[\d\s}}])(?P<short>(?:sq\.?\s+)?(?:{_SHORT})\s*(?:\^\{{\d\}})?(?:\s*/\s*(?:{_SHORT}|{_LETTER})(?:\^\{{\d\}})?)?)$"
    rf"|(?<=\s)(?P<letter>{_LETTER}(?:\s*/\s*{_LETTER})?(?:\^\{{-?\d\}})?)$"
    r"|(?<=\s)(?P<words>[a-zA-Z]{3}[a-zA-Z.]*(?:[\s/]+[a-zA-Z.]+){0,4}\s*(?:\^\{\d\})?)$"
    r"|(?<=\d)_\{(?P<base>\d+)\}$"
)


@dataclass(frozen=True)
class Number:
    """A number as written."""

    value: Fraction
    decimals: int | None
    """Digits after the decimal point, its power of ten counted in; None for whole numbers and fractions."""
    whole: bool = False
    """Written as a whole number."""


@dataclass(frozen=True)
class Quantity:
    """Text of a value, and of its unit in one spelling."""

    value: str
    unit: str = ""


@lru_cache(maxsize=8192)
def parse_number(text: str) -> Number | None:
    """The number that normalised text writes; None for anything else, and for what is too long to expand."""
    text = text.strip()
    while text[:1] in ("(", "{") and text[-1:] == {"(": ")", "{": "}"}[text[0]] and not set(text[1:-1]) & set("(){}"):
        text = text[1:-1].strip()
    if len(text) > _MAX_DIGITS or not any(character.isdigit() for character in text):
        return None
    if _GROUPED.fullmatch(text):
        text = text.replace(" ", "")
    if match := _PLAIN.fullmatch(text):
        return _signed(match[1], _decimal(match[2]))
    if match := _SCIENTIFIC.fullmatch(text):
        sign, mantissa, exponent = (match[1], match[2] or "1", match[3]) if match[3] else match.groups()[3:]
        return _shifted(_signed(sign, _decimal(mantissa)), int(exponent)) if len(exponent) < 6 else None
    if match := _FRACTION.fullmatch(text) or _RATIO.fullmatch(text):
        return _quotient(match[1], match[2], match[3])
    if match := _MIXED.fullmatch(text):
        sign, whole, numerator, denominator = match.groups()[:4] if match[2] else match.groups()[4:]
        if int(denominator) == 0:
            return None
        return _signed(sign or "", Number(int(whole) + Fraction(int(numerator), int(denominator)), None))
    if match := _RECURRING.fullmatch(text):
        head, fixed, period = match[2] or "0", match[3], match[4]
        value = Fraction(int(head + fixed), 10 ** len(fixed))
        value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
        return _signed(match[1], Number(value, None))
    if (match := _POWER.fullmatch(text)) and len(match[2]) < 10 and len(match[3]) < 5:
        return _power(match[1], int(match[2]), int(match[3]))
    return None


def _power(sign: str, base: int, exponent: int) -> Number | None:
    if base == 0 or base.bit_length() * abs(exponent) > 4 * _MAX_EXPONENT:
        return None
    value = Fraction(base) ** exponent
    return _signed(sign, Number(value, None, whole=value.denominator == 1))


def _decimal(text: str) -> Number:
    text = text.replace(",", "")
    if "." not in text:
        return Number(Fraction(int(text)), None, whole=True)
    head, _, tail = text.partition(".")
    return Number(Fraction(int(head + tail or "0"), 10 ** len(tail)), len(tail))


def _signed(sign: str | None, number: Number) -> Number:
    return replace(number, value=-number.value) if sign == "-" else number


def _shifted(number: Number, exponent: int) -> Number | None:
    if abs(exponent) > _MAX_EXPONENT:
        return None
    decimals = None if number.whole and exponent >= 0 else (number.decimals or 0) - exponent
    return Number(number.value * Fraction(10) ** exponent, decimals, whole=number.whole and exponent >= 0)


def _quotient(sign: str, numerator: str, denominator: str) -> Number | None:
    parts = [_signed(text[:1], _decimal(text.lstrip("+-").strip())) for text in (numerator, denominator)]
    if parts[1].value == 0:
        return None
    return _signed(sign, Number(parts[0].value / parts[1].value, None))


def equal_numbers(gold: Number, answer: Number, *, relative_tolerance: float, tolerance: float | None = None) -> bool:
    """Whether an answer is the reference's number.

    Args:
        gold: the reference.
        answer: what is compared with it.
        relative_tolerance: for decimals, as a share of the reference.
        tolerance: absolute, in place of the above and for any numbers.
    """
    distance = abs(gold.value - answer.value)
    if tolerance is not None:
        return distance <= Fraction(str(tolerance))
    if distance == 0:
        return True
    if gold.whole or answer.whole or (gold.decimals is None and answer.decimals is None):
        return False
    if distance > Fraction(str(relative_tolerance)) * abs(gold.value):
        return False
    if gold.decimals is None or answer.decimals is None:
        return True
    if distance <= _NOISE * abs(gold.value):
        return True
    coarse, fine = sorted((gold, answer), key=lambda number: number.decimals or 0)
    unit = Fraction(10) ** -(coarse.decimals or 0)
    return abs(coarse.value - fine.value) <= unit / 2


@lru_cache(maxsize=8192)
def split_unit(text: str, *, letters: bool = False) -> Quantity:
    """A value and its unit, from normalised text; multiples (`million`) go into the value.

    Args:
        text: "10 \\text{cm}", "3 apples", "90^{\\circ}".
        letters: whether a single letter after a space is a unit ("10 m") and not a variable.
    """
    text = text.strip()
    dollar = re.match(r"([+-]?)\s*\\?\$\s*(?=[\d.])", text)
    if dollar:
        rest = split_unit(dollar[1] + text[dollar.end() :], letters=letters)
        return Quantity(rest.value, rest.unit or "dollar")
    match = _UNIT.search(text)
    if match is None or not (value := text[: match.start()].strip().rstrip(" \\")):
        return Quantity(text)
    kind, found = match.lastgroup or "", match[0]
    if match["base"]:
        return Quantity(value, f"base {match['base']}")
    if match["degree"]:
        in_function = re.search(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])", value)
        return Quantity(text) if in_function else Quantity(value, "degree")
    if match["letter"] and not (letters and parse_number(value)):
        return Quantity(text)
    if kind == "words" and (not re.search(r"\d\}?\)?$", value) or re.search(r"\b(?:or|and|to|is|mod)\b", found)):
        return Quantity(text)
    name = re.sub(TEXT, r" \1 ", found)
    first, _, others = name.strip().casefold().partition(" ")
    if first in _MULTIPLES and parse_number(value):
        scaled = f"{value} \\times 10^{{{_MULTIPLES[first]}}}"
        rest = split_unit(f"1 \\text{{{others}}}") if others else Quantity("1")
        return Quantity(scaled, rest.unit)
    return Quantity(value, _unit_name(name))


def _unit_name(text: str) -> str:
    text = re.sub(r"\b([a-z])\s?\.\s?m\b\.?", r"\1m", text.casefold().replace(",", " "))
    power = match[1] if (match := re.search(r"\^\{(-?\d)\}", text)) else ""
    text = re.sub(r"\^\{-?\d\}", "", text).replace(" per ", "/").replace(".", "")
    names: list[str] = []
    for word in re.findall(r"[^\s/]+|/", text):
        if word in ("square", "sq", "cubic", "cu"):
            power = "2" if word.startswith("s") else "3"
            continue
        word = _SPELLINGS.get(word, word)
        single = word[:-1] if len(word) > 2 and word.endswith("s") else word
        names.append(_SPELLINGS.get(single, single))
    return " ".join(names) + (f"^{power}" if power else "")


def unit_factor(gold: str, answer: str) -> Fraction | None:
    """What an answer's value must be multiplied by to be in the reference's unit; None when it cannot be.

    Where one side has no unit, that is 1.
    """
    if gold == answer or not gold or not answer:
        return Fraction(1)
    (gold_name, _, gold_power), (answer_name, _, power) = gold.partition("^"), answer.partition("^")
    known, given = _UNITS.get(gold_name), _UNITS.get(answer_name)
    if known is None or given is None or known[0] != given[0] or gold_power != power:
        return None
    return (Fraction(given[1]) / Fraction(known[1])) ** int(power or "1")
