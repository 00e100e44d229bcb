r"""One spelling for each piece of mathematics, and the pieces of an answer.

`normalize` maps LaTeX, Unicode and the plain text that models mix into one form, in which `\frac`, `\sqrt` and
exponents have braces, sizes and spacing commands are gone, and words stand in `\text{}`. The split functions then
respect brackets. All patterns are linear in the text.
"""

# ruff: noqa: RUF001 (look-alike characters are what it maps)
from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_VULGAR = {"½": (1, 2), "⅓": (1, 3), "⅔": (2, 3), "¼": (1, 4), "¾": (3, 4), "⅕": (1, 5), "⅛": (1, 8), "⅙": (1, 6)}
_UNICODE = {
    "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "λ": r"\lambda ", "√": r"\sqrt ",
    "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "−": "-", "–": "-", "—": "-", "≤": r"\le ",
    "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
    "°": r"^{\circ}", "º": r"^{\circ}", "±": r"\pm ", "∓": r"\mp ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "′": "'",
    "…": r"\ldots ", "€": "", "£": "",
}  # fmt: skip
# Spellings of one command; what has no entry stays.
_COMMANDS = {
    "dfrac": r"\frac", "tfrac": r"\frac", "cfrac": r"\frac", "leq": r"\le", "leqslant": r"\le", "geq": r"\ge",
    "geqslant": r"\ge", "neq": r"\ne", "lt": "<", "gt": ">", "ast": r"\cdot", "div": "/", "varnothing": r"\emptyset",
    "colon": ":", "mid": "|", "vert": "|", "lvert": "|", "rvert": "|", "lbrace": r"\{", "rbrace": r"\}",
    "lbrack": "[", "rbrack": "]", "land": " and ", "lor": " or ", "dots": r"\ldots", "cdots": r"\ldots",
    "degree": r"^{\circ}", "degrees": r"^{\circ}", "approxeq": r"\approx", "simeq": r"\approx",
    "textdegree": r"^{\circ}", "infin": r"\infty", "Re": r"\operatorname{Re}", "dbinom": r"\binom", "tbinom": r"\binom",
    "lnot": r"\neg", "arcctg": r"\arccot", "tg": r"\tan", "ctg": r"\cot", "vec": r"\overrightarrow",
    "bf": "", "rm": "", "it": "", "displaystyle": "", "textstyle": "", "limits": "", "left": "", "right": "",
    "big": "", "Big": "", "bigg": "", "Bigg": "", "bigl": "", "bigr": "", "Bigl": "", "Bigr": "", "quad": " ",
    "qquad": " ", "thinspace": " ", "nobreak": "", "hspace": " ", "phantom": " ", "rangle": ")", "langle": "(",
    "boldsymbol": "", "mathbf": "", "bm": "", "mathit": "", "mathsf": "", "mathcal": "", "hphantom": " ",
}  # fmt: skip
_TEXT_COMMAND = re.compile(
    r"\\(?:text(?:bf|it|rm|normal|sf|tt|up)?|mbox|mathrm|hbox|operatorname\*?)\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
TEXT = r"\\text\{((?:[^{}]|\{[^{}]*\})*)\}"
"""Words in normalised text."""
_COMMAND = re.compile(r"\\([a-zA-Z]+)\s?")
_FUNCTIONS = r"sqrt|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|ln|log|exp|pi|infty|infinity|inf"
_PLAIN_FUNCTION = re.compile(rf"(?<![a-zA-Z\\])({_FUNCTIONS})(?![a-zA-Z])")
_OPEN, _CLOSE = "([{", ")]}"
_TOKEN = re.compile(r"\\begin\{\w+\*?\}|\\end\{\w+\*?\}|\\[a-zA-Z]+|\\.|.", re.DOTALL)


def normalize(text: str) -> str:
    """The text in the one spelling of this module, without a full stop at its end."""
    text = _ascii(text)
    text = re.sub(r"\\[!]\s*", "", text)
    text = re.sub(r"(?<=\d)\{,\}(?=\d{3})", "", text)
    text = re.sub(r"(?<=\d)(?:\\[,;:]|\\ |~)(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"(?<!\\)\\[,;:>\s]|~", " ", text)
    text = _TEXT_COMMAND.sub(_text, text)
    text = _COMMAND.sub(_command, text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", r"^{\\circ}", text)
    text = _PLAIN_FUNCTION.sub(lambda m: "\\infty " if m[1].startswith("inf") else f"\\{m[1]} ", text)
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = text.replace("**", "^").replace(r"\%", "%")
    text = re.sub(r"\^\s*\(([^()]*)\)", r"^{\1}", text)
    text = re.sub(r"\^\s*([+-]?\d+|[a-zA-Z]|\\[a-zA-Z]+)", r"^{\1}", text)
    text = re.sub(r"_\s*(\d+|[a-zA-Z])", r"_{\1}", text)
    text = _braced(text)
    text = re.sub(r"\s+", " ", text).strip()
    return re.sub(r"(?<!\\)[.,;:]+$", "", text).strip() if len(text) > 1 else text


def _ascii(text: str) -> str:
    if text.isascii():
        return text
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda match: "^{" + match[0].translate(_SUPERSCRIPTS) + "}", text)
    text = re.sub(r"[₀₁₂₃₄₅₆₇₈₉]+", lambda match: "_{" + match[0].translate(_SUBSCRIPTS) + "}", text)
    for character, (numerator, denominator) in _VULGAR.items():
        text = text.replace(character, rf"\frac{{{numerator}}}{{{denominator}}}")
    for character, command in _UNICODE.items():
        text = text.replace(character, command)
    return unicodedata.normalize("NFKC", text)


def _command(match: re.Match[str]) -> str:
    replacement = _COMMANDS.get(match[1])
    if replacement is None:
        return match[0]
    return replacement + " " if replacement[-1:].isalpha() else replacement


def _text(match: re.Match[str]) -> str:
    """Words in upright letters: numbers and single letters are mathematics, all else stays text."""
    content = match[1].strip()
    if match[0].startswith(r"\operatorname"):
        return f"\\{content} "
    if content in ("and", "or"):
        return f" {content} "
    if re.fullmatch(r"[-+\d.,/\s]+|[eid]", content) or not content:
        return content
    return rf"\text{{{content}}}"


def _braced(text: str) -> str:
    r"""Arguments of \frac, \binom and \sqrt in braces: \frac12 -> \frac{1}{2}, \sqrt3 -> \sqrt{3}."""
    pieces: list[str] = []
    position = 0
    for match in re.finditer(r"\\(?:frac|binom|sqrt)(?![a-zA-Z])\s*", text):
        if match.start() < position:
            continue
        pieces.append(text[position : match.start()] + match[0].rstrip())
        position = match.end()
        if match[0].startswith(r"\sqrt") and text[position : position + 1] == "[":
            end = text.find("]", position) + 1
            pieces.append(text[position:end])
            position = max(position, end)
        for _ in range(1 if match[0].startswith(r"\sqrt") else 2):
            while text[position : position + 1] == " ":
                position += 1
            token = _TOKEN.match(text, position)
            if token is None or token[0] == "{":
                if token is None or (end := closing(text, position)) < 0:
                    break
                pieces.append("{" + _braced(text[position + 1 : end]) + "}")
                position = end + 1
            elif token[0] in ("\\frac", "\\sqrt"):
                break
            else:
                pieces.append("{" + token[0] + "}")
                position = token.end()
    return "".join(pieces) + text[position:]


def closing(text: str, start: int) -> int:
    """Position of the bracket that closes the one at `start`; -1 when there is none."""
    depth = 0
    position = start
    while position < len(text):
        character = text[position]
        if character == "\\" and text[position + 1 : position + 2] not in ("{", "}"):
            position += 1
        elif character in _OPEN:
            depth += 1
        elif character in _CLOSE:
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return -1


@lru_cache(maxsize=4096)
def split(text: str, pattern: str) -> tuple[str, ...]:
    """The parts between matches of `pattern` outside all brackets and environments, stripped."""
    separator = re.compile(pattern)
    parts: list[str] = []
    depth = start = position = 0
    while position < len(text):
        if depth == 0 and (match := separator.match(text, position)) and match.end() > position:
            parts.append(text[start : match.start()].strip())
            start = position = match.end()
            continue
        token = _TOKEN.match(text, position)
        assert token is not None
        symbol = token[0]
        if symbol in ("(", "[", "{", r"\{") or symbol.startswith(r"\begin"):
            depth += 1
        elif symbol in (")", "]", "}", r"\}") or symbol.startswith(r"\end"):
            depth -= 1
        position = token.end()
    return (*parts, text[start:].strip())


def bare(text: str) -> str:
    """The text without spaces, but for those between digits (1 1/4), for comparison letter by letter."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def words(text: str) -> str:
    r"""Text as words: without \text{}, punctuation, articles and capitals."""
    text = re.sub(TEXT, r" \1 ", text)
    text = re.sub(r"[^\w\s+\-/*^=<>\\.:]|\.(?!\d)", " ", text).casefold()
    return " ".join(word for word in text.split() if word not in ("the", "a", "an"))
