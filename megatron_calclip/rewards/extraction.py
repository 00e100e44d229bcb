r"""Which part of a completion is its answer: the last `\boxed{...}`, or the last "Answer: ...".

Only the final statement counts, whatever was boxed on the way. Boxes that belong to one statement ("\boxed{2} and
\boxed{3}", "\boxed{6}. Or \boxed{7}?") are read as several answers at once: right when several are asked for,
hedging, and so wrong, when one is. The text is the policy's: everything here takes time linear in it.

Left out on purpose: guessing an answer from prose. A completion that is one short line, or one formula, is its own
answer; any other without a box or an "Answer:" has none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Up to here a line without a marker is taken for an answer, not for reasoning.
MAX_BARE_ANSWER = 200
# How much of a text after "Answer:" is looked at.
_MAX_STATEMENT = 2000
# Boxes further apart than this are separate statements.
_MAX_GAP = 60

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}\\]|[{}]|\\boxed\s*[^\s{\\]")
# Words between two boxes after which the second one replaces the first instead of joining it.
_STEP = re.compile(
    r"\b(?:so|then|thus|hence|therefore|finally|final|now|next|wait|no|not|actually|correct\w*|instead|mistake|but|check\w*)\b",
    re.IGNORECASE,
)
_MARKER = re.compile(
    r"\b(?:final\s+|correct\s+)?answers?[\s*_]{0,8}(?:(?:is|are)\b(?:\s{0,4}:)?|:|=|\uff1a)[\s*_]{0,8}", re.IGNORECASE
)
_LINE_MARKER = re.compile(r"(?:^|\n)[\s>*_#-]{0,8}(?:the\s+)?(?:final\s+)?answer[\s*_]{0,8}:", re.IGNORECASE)
_FORMULA = re.compile(r"\$\$([^$]+)\$\$|(?<!\\)\$((?:\\\$|[^$])+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_JOINT = re.compile(r"[\s*_]*(?:,|;|and|or|,\s*and|,\s*or)?[\s*_]*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=[^\d\s])\.(?=\s)|\.(?=\s+[A-Z])|\n|\s(?:because|since|as)\s", re.IGNORECASE)


@dataclass(frozen=True)
class Box:
    """One boxed expression."""

    start: int
    end: int
    """Where the text goes on."""
    content: str


def final_answer(completion: str) -> str | None:
    """The expression that a completion gives as its answer; None when it gives none."""
    text = completion.rpartition("</think>")[2].strip()
    boxes = find_boxes(text)
    if boxes:
        after = boxes[-1].end
        marker = _LINE_MARKER.search(text, after)
        if marker is None or not text[marker.end() :].strip(" *_.\n"):
            return _joined(text, boxes)
    if not boxes and r"\boxed" in text:  # cut off before its end
        return None
    markers = list(_MARKER.finditer(text))
    if markers:
        return _statement(text[markers[-1].end() :].lstrip(" *_\n:"))
    formula = _FORMULA.fullmatch(text)
    if formula:
        return _content(formula)
    if 0 < len(text) <= MAX_BARE_ANSWER and "\n" not in text:
        return _statement(text.rpartition(" is ")[2])
    return None


def reference_answer(answer: str) -> str:
    """The expression that a reference answer holds: boxed, after GSM8K's `####`, or the whole of it."""
    text = answer.rpartition("####")[2].strip()
    boxes = find_boxes(text)
    return _joined(text, boxes) if boxes else undelimited(text)


def find_boxes(text: str) -> list[Box]:
    r"""The outermost closed `\boxed{...}` and `\fbox{...}`, in order; braces are matched."""
    boxes: list[Box] = []
    opened: list[re.Match[str]] = []
    for token in _BRACES.finditer(text):
        symbol = token.group()
        if symbol[-1] == "{" and symbol != r"\{":
            opened.append(token)
        elif symbol == "}":
            start = opened.pop() if opened else None
            if start is not None and len(start.group()) > 1:
                while boxes and boxes[-1].start > start.start():
                    boxes.pop()  # a box within this one
                boxes.append(Box(start.start(), token.end(), text[start.end() : token.start()].strip()))
        elif symbol.startswith(r"\boxed"):  # \boxed 7
            boxes.append(Box(token.start(), token.end(), symbol[-1]))
    return boxes


def undelimited(text: str) -> str:
    r"""The text without the delimiters of formulas ($, \(, \[)."""
    return re.sub(r"\\\(|\\\)|\\\[|\\\]|(?<!\\)\$", " ", text).strip()


def _joined(text: str, boxes: list[Box]) -> str:
    """The contents of the boxes that make the last statement, separated by commas; equal ones count once."""
    statement = [boxes[-1]]
    for before, after in zip(boxes[-2::-1], boxes[:0:-1], strict=True):
        gap = text[before.end : after.start]
        if len(gap) > _MAX_GAP or _STEP.search(gap):
            break
        statement.append(before)
    contents = list(dict.fromkeys(undelimited(box.content) for box in reversed(statement)))
    return " , ".join(contents)


def _statement(text: str) -> str:
    """What a line states: its formulas up to the first one that does not join on, or the line without its prose."""
    text = text[:_MAX_STATEMENT]
    formulas = list(_FORMULA.finditer(text))
    if formulas and (formulas[0].start() < MAX_BARE_ANSWER):
        pieces, end = [_content(formulas[0])], formulas[0].end()
        for formula in formulas[1:]:
            if not _JOINT.fullmatch(text[end : formula.start()]):
                break
            pieces.append(_content(formula))
            end = formula.end()
        # "20 $cm^2$", "$x = $ 5": a formula with more of the answer around it
        start, rest = text[: formulas[0].start()].strip(" *_"), _SENTENCE_END.split(text[end:])[0].strip(" *_.,")
        before = start if re.search(r"\d$", start) else ""
        after = rest if len(pieces) == 1 and len(rest) < 20 else ""
        return f"{before} {' , '.join(pieces)} {after}".strip()
    return undelimited(_SENTENCE_END.split(text)[0]).strip(" *_").removesuffix(".").strip(" *_")


def _content(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None).strip()
