r"""Expressions, equations, inequalities and sets, compared with sympy.

The parser is math-verify's (latex2sympy2_extended: a grammar, no `eval`). Two expressions are equal when they agree to
high precision at several points, a test of identity (Schwartz-Zippel) that is faster than simplification and misses
less; constants are compared relative to their size. What would not fit into memory if it were evaluated
(`9^{9^{9}}`) is found by its size before anything is evaluated, and equals nothing but its own spelling.

Left out on purpose: equality that needs assumptions, and differential or functional equations.
"""

from __future__ import annotations

import logging
import math
import re
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

from megatron_calclip.rewards.math_text import split

logging.getLogger("latex2sympy2_extended").setLevel(logging.ERROR)

# Numbers with more bits are not evaluated.
MAX_BITS = 1e5
_MAX_LENGTH = 1500
_DIGITS = 40
_EPSILON = sympy.Float("1e-25", 30)
# Values for variables: irregular, of both signs, and small, so that powers stay moderate.
_POINTS = (
    (1.37, 0.618, 2.11, 0.83),
    (0.291, 1.733, 0.547, 3.07),
    (2.39, 0.871, 1.19, 0.433),
    (-0.717, 1.57, -1.83, 0.29),
)
REALS = sympy.S.Reals
_RELATIONS = {r"\le": "<=", r"\ge": ">=", r"\ne": "!=", "<": "<", ">": ">", "=": "="}
RELATION = r"\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])|\\ne(?![a-zA-Z])|<|>|(?<![<>!])="
_MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
SYNTAX = (
    r"\frac{3\sqrt{2}}{4} + 1", r"5x^{2} - 7xy + 11", r"x^{5} - x^{4} + 2x - 1", r"(x+1)(x-1)^{2}", r"\frac{x+1}{x-1}",
    r"\sin{x} + \cos^{2} x", r"2^{10} - 1", r"e^{-2x}", r"\ln{2} + \log_{2}{8}", r"\frac{\pi^{2}}{8}", r"-\infty", r"5 - 2i",
    r"\sqrt[3]{4} \cdot 2", r"|x-1|", r"\binom{5}{2} \times 3!", r"\lfloor \frac{2n-1}{5} \rfloor", r"a_{1} + b_{n}", r"1.5x",
    r"\sum_{i=1}^{n} i", r"\left(\frac{1}{2}\right)^{3} / 4", r"\tan^{-1}{x}", r"\frac{-1 + \sqrt{5}}{2}", r"2 \pi r", r"k",
)  # fmt: skip
"""Expressions of the kinds that benchmarks have: they fill the tables that the parser builds as it meets syntax."""


class TooLarge(ArithmeticError):
    """A number that would not fit into memory."""


@lru_cache(maxsize=4096)
def parse(text: str) -> sympy.Basic | None:
    """The expression that normalised LaTeX writes; None where it writes none.

    Raises:
        TooLarge: for numbers that must not be evaluated.
    """
    if not text or len(text) > _MAX_LENGTH or r"\text" in text:
        return None
    # In trigonometric functions degrees are a factor, not a unit.
    text = re.sub(r"([\d.]+|[a-zA-Z])\s*\^\{\\circ\}", r"(\1 \\cdot \\frac{\\pi}{180})", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text).replace(r"\overrightarrow", "")
    try:
        expression = latex2sympy(text, conversion_config=ConversionConfig(lowercase_symbols=False))
    except RecursionError:
        return None
    except Exception:  # the parser reports unreadable text in many ways
        return None
    if not isinstance(expression, sympy.Expr | sympy.Set):
        return None
    _bits(expression)
    exact = {number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)}
    if exact:
        expression = expression.xreplace(exact)
    imaginary = {symbol: sympy.I for symbol in expression.free_symbols if symbol.name == "i"}
    return _evaluated(expression.xreplace(imaginary))


def warm_up() -> None:
    """Parse one expression of each kind: the parser's first ones take a hundred times as long as the later ones."""
    for text in SYNTAX:
        equal_expressions(text, text + " + 1")
    parse.cache_clear()


def _evaluated(expression: Any) -> sympy.Basic:
    try:
        return expression.doit()
    except (ValueError, TypeError, AttributeError, NotImplementedError, ZeroDivisionError):
        return expression


def _bits(node: sympy.Basic) -> float:
    """Bits of the largest number that evaluation of a tree would write, roughly, as log2 of a magnitude.

    Raises:
        TooLarge: past `MAX_BITS`.
    """
    if isinstance(node, sympy.Integer):
        bits = float(abs(int(node)).bit_length())
    elif isinstance(node, sympy.Number):
        bits = 64.0
    else:
        sizes = [_bits(argument) for argument in node.args]
        bits = max(sizes, default=1.0)
        if isinstance(node, sympy.Pow) and not node.base.free_symbols:
            exponent = sizes[1] if not node.exp.is_Integer else math.log2(abs(int(node.exp)) + 2)
            bits = 0.0 if node.base in (0, 1, -1) else sizes[0] * 2.0 ** min(exponent, 60.0)
            if not node.exp.is_number or not _whole(node.exp):
                bits = sizes[0]
        elif isinstance(node, sympy.factorial | sympy.binomial | sympy.gamma) and not node.args[0].free_symbols:
            bits = sizes[0] * 2.0 ** min(sizes[0], 60.0)
        elif isinstance(node, sympy.Mul | sympy.Add):
            bits = math.fsum(sizes)
    if bits > MAX_BITS:
        raise TooLarge(f"a number of {bits:.0f} bits")
    return bits


def _whole(node: sympy.Basic) -> bool:
    """Whether a constant exponent is a whole number as far as its form tells."""
    return all(isinstance(leaf, sympy.Integer) for leaf in node.atoms(sympy.Number)) and not node.atoms(sympy.Function)


def _value(expression: Any) -> Any:
    """The number that an expression without variables is, to `_DIGITS` digits; None where it is none."""
    value = sympy.N(expression, _DIGITS)
    finite = (
        value.is_number and not value.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo) and not value.atoms(sympy.Function)
    )
    return value if finite else None


def _close(a: Any, b: Any) -> bool:
    return bool(abs(a - b) <= _EPSILON * max(abs(a), abs(b)) or (0 in (a, b) and abs(a - b) < _EPSILON))


def constant(text: str) -> sympy.Basic | None:
    """The exact value that text writes without variables; None for anything else."""
    expression = parse(text)
    if expression is None or expression.free_symbols or not isinstance(expression, sympy.Expr):
        return None
    return expression


def distance(a: sympy.Basic, b: sympy.Basic = sympy.S.Zero) -> float:
    """|a - b| of two constants; infinite where one is no finite number."""
    left, right = _value(a), _value(b)
    return math.inf if left is None or right is None else float(abs(left - right))


def equal_expressions(gold: str, answer: str) -> bool:
    """Whether two texts write the same expression.

    Raises:
        TooLarge: when one of them must not be evaluated.
    """
    a, b = parse(gold), parse(answer)
    if a is None or b is None:
        return False
    if a == b:
        return True
    if not isinstance(a, sympy.Expr) or not isinstance(b, sympy.Expr):
        return bool(isinstance(a, sympy.Set) and isinstance(b, sympy.Set) and equal_sets(a, b))
    return _identical(a, b)


def _identical(a: Any, b: Any) -> bool:
    """Whether two expressions agree wherever both are real, or everywhere when they never are."""
    symbols = a.free_symbols | b.free_symbols
    if not symbols:
        left, right = _value(a), _value(b)
        return left is not None and right is not None and _close(left, right)
    compared = False
    complex_values: list[bool] = []
    for point in _points(symbols):
        left, right = _value(a.xreplace(point)), _value(b.xreplace(point))
        if left is None or right is None:
            continue
        same = _close(left, right)
        if not (left.is_real and right.is_real):
            complex_values.append(same)
            continue
        compared = True
        if not same:
            return False
    if compared:
        return True
    if complex_values:
        return all(complex_values)
    difference = sympy.simplify(a - b)  # functions without values, such as f(x)
    return bool(difference == 0)


def _points(symbols: Any) -> list[dict[Any, Any]]:
    names = sorted(symbols, key=lambda symbol: symbol.name)
    points: list[dict[Any, Any]] = []
    for values in _POINTS:
        # Past four variables the values go on, one larger.
        chosen = [values[index % len(values)] + index // len(values) for index in range(len(names))]
        points.append({symbol: sympy.Rational(str(round(v, 3))) for symbol, v in zip(names, chosen, strict=True)})
    return points


def split_relation(text: str) -> tuple[list[str], list[str]]:
    """Sides and relations of `a < b <= c`; one side and no relation for anything else."""
    sides = list(split(text, RELATION))
    found = [match[0] for match in re.finditer(RELATION, text)]
    if len(found) != len(sides) - 1:  # some stood within brackets
        return [text], []
    return sides, [_RELATIONS[symbol] for symbol in found]


def equal_relations(gold: str, answer: str) -> bool:
    """Whether two equations, or two inequalities, say the same.

    Equations are the same when their two sides differ by proportional amounts, or have the same solutions for a
    variable; inequalities of one variable when they hold for the same numbers.

    Raises:
        TooLarge: when a number must not be evaluated.
    """
    (gold_sides, gold_ops), (sides, ops) = split_relation(gold), split_relation(answer)
    if len(ops) == len(gold_ops) == 1:
        a, b = _difference(gold_sides), _difference(sides)
        if a is None or b is None or a.free_symbols != b.free_symbols:
            return False
        ratio = _constant_ratio(a, b)
        if ratio is not None:
            return (ops[0] if ratio > 0 else _MIRRORED[ops[0]]) == gold_ops[0]
        if ops[0] == gold_ops[0] == "=":
            return _same_solutions(a, b)
    if "=" in ops + gold_ops:
        return False
    sets = solution_set(gold), solution_set(answer)
    if sets[0] is None or sets[1] is None or _variables(gold_sides) != _variables(sides):
        return False
    return equal_sets(sets[0], sets[1])


def _difference(sides: list[str]) -> Any:
    left, right = parse(sides[0]), parse(sides[1])
    if not isinstance(left, sympy.Expr) or not isinstance(right, sympy.Expr):
        return None
    return left - right


def _variables(sides: list[str]) -> set[str]:
    expressions = [parse(side) for side in sides]
    return {symbol.name for expression in expressions if expression is not None for symbol in expression.free_symbols}


def _constant_ratio(a: Any, b: Any) -> Any:
    """a / b when it is the same non-zero number at all points; else None."""
    ratios: list[Any] = []
    for point in _points(a.free_symbols):
        left, right = _value(a.xreplace(point)), _value(b.xreplace(point))
        if left is None or right is None or left == 0 or right == 0:
            continue
        ratios.append(left / right)
    if len(ratios) < 2 or not all(_close(ratio, ratios[0]) for ratio in ratios):
        return None
    return ratios[0] if ratios[0].is_real else None


def _same_solutions(a: Any, b: Any) -> bool:
    for symbol in sorted(a.free_symbols, key=lambda symbol: symbol.name):
        try:
            left, right = sympy.solve(a, symbol), sympy.solve(b, symbol)
        except (NotImplementedError, ValueError, TypeError):
            continue
        if left and len(left) == len(right):
            return all(any(_identical(x, y) for y in right) for x in left)
    return False


def solution_set(text: str) -> Any:
    """The real numbers for which a chain of inequalities in one variable holds, as a sympy set; None for other text.

    Raises:
        TooLarge: when a number must not be evaluated.
    """
    sides, ops = split_relation(text)
    if not ops or "=" in ops:
        return None
    expressions = [parse(side) for side in sides]
    if not all(isinstance(expression, sympy.Expr) for expression in expressions):
        return None
    symbols = set().union(*(expression.free_symbols for expression in expressions))  # type: ignore[union-attr]
    if len(symbols) != 1:
        return None
    real = sympy.Symbol("x", real=True)
    variable = next(iter(symbols))
    values = [expression.xreplace({variable: real}) for expression in expressions]  # type: ignore[union-attr]
    found: Any = sympy.S.Reals
    try:
        for left, op, right in zip(values, ops, values[1:], strict=False):
            found = found.intersect(sympy.Rel(left, right, op).as_set())
    except (NotImplementedError, ValueError, TypeError, AttributeError):
        return None
    return found


def interval(left: str, right: str, *, left_open: bool, right_open: bool) -> Any:
    """A real interval as a sympy set; None when its ends are no real constants.

    Raises:
        TooLarge: when a number must not be evaluated.
    """
    ends = constant(left), constant(right)
    if any(end is None or end.is_extended_real is not True for end in ends):
        return None
    return sympy.Interval(*ends, left_open, right_open)


def finite_set(elements: list[str]) -> Any:
    """A finite set as a sympy set; None when an element is no expression."""
    parsed = [parse(element) for element in elements]
    return None if None in parsed else sympy.FiniteSet(*parsed)


def union(sets: list[Any]) -> Any:
    """The union of sympy sets."""
    return sympy.Union(*sets)


def intersection(sets: list[Any]) -> Any:
    """The intersection of sympy sets."""
    return sympy.Intersection(*sets)


def complement(sets: list[Any]) -> Any:
    """The first of the sympy sets without the others."""
    return sets[0] - sympy.Union(*sets[1:])


def equal_sets(a: Any, b: Any) -> bool:
    """Whether two sympy sets have the same elements."""
    if a == b:
        return True
    try:
        return bool(a.symmetric_difference(b).is_empty)
    except (NotImplementedError, TypeError, ValueError):
        return False
