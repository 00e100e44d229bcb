"""A data set as a run uses it: rows that were read and checked, what was left out and why, duplicates and overlap.

A name is `[LAYOUT=]PLACE`: a layout of `data_presets` (without one: the columns that `data.prompt_field` and
`data.answer_field` name), and a place that `data_files` finds. A layout's name alone is also the place: `aime24` is
`aime24.jsonl`, `.json` or `.parquet`.

A row that cannot be used is named by its place in the file; whether it ends the run or is left out is `data.bad_rows`.
Nothing is ever left out silently. Reference answers are parsed here, so that an answer which the reward cannot read shows
before the run and not as a problem that nobody ever solves.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import PurePath

from megatron_calclip.config import DataConfig
from megatron_calclip.data_files import HUB_PREFIX, RawRow, RowFile, open_rows
from megatron_calclip.data_presets import PRESETS, NotOfThisLayout, Preset, RawMapping, answer_text, problem_text
from megatron_calclip.errors import UserError
from megatron_calclip.rewards import check_gold
from megatron_calclip.tasks import Row

_MAX_NAMED = 5
"""Places of left-out rows that a line of a report names, for each reason."""
# Spelling that does not make another problem: delimiters and sizes of formulas, spaces, the full stop at the end.
_SPELLING = re.compile(r"\$|\\[()\[\]]|\\left(?![a-z])|\\right(?![a-z])|\\[,;:!> ]|\\displaystyle|[\s*]|[.?!:]+$")


@dataclass(frozen=True)
class DataSet:
    """Rows of one file, all usable."""

    name: str
    """Short: the layout, or the file's name without its suffix."""
    source: str
    """Path, or hub name, that was read."""
    sha256: str
    preset: Preset | None
    """The known layout; None for columns that the configuration names."""
    rows: list[Row]
    places: list[str]
    """Of each row, its place in the file."""
    num_read: int
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> places of the rows with it."""

    @property
    def reward(self) -> str | None:
        """The built-in reward that its answers are for; None where the configuration says."""
        return None if self.preset is None else self.preset.reward

    def without(self, reasons: Sequence[str | None]) -> DataSet:
        """A copy without the rows that have a reason, which are booked under it.

        Args:
            reasons: for each row, why it is left out, or None.
        """
        left_out = {reason: list(places) for reason, places in self.left_out.items()}
        for place, reason in zip(self.places, reasons, strict=True):
            if reason is not None:
                left_out.setdefault(reason, []).append(place)
        kept = [index for index, reason in enumerate(reasons) if reason is None]
        rows, places = [self.rows[index] for index in kept], [self.places[index] for index in kept]
        return replace(self, rows=rows, places=places, left_out=left_out)

    def summary(self) -> str:
        """One line: rows, and what was left out with the first places of each reason."""
        parts = [f"{self.source}: {len(self.rows)} of {self.num_read} rows"]
        for reason, places in self.left_out.items():
            named = ", ".join(places[:_MAX_NAMED]) + (", ..." if len(places) > _MAX_NAMED else "")
            parts.append(f"{len(places)} left out: {reason} ({named})")
        return "; ".join(parts)


def load_data_set(name: str, *, where: str, data: DataConfig, reward: str) -> DataSet:
    """Read a data set and check every row of it.

    Args:
        name: `[LAYOUT=]PLACE`.
        where: the setting that gives the name, for errors.
        data: fields of a set without a layout, and what becomes of bad rows.
        reward: `reward.name`, for the answers of a set without a layout.

    Raises:
        UserError: when there is no such set, it has no usable row, or a row is bad and `data.bad_rows` is `error`.
    """
    layout, equals, place = name.partition("=")
    if layout not in PRESETS:
        layout, place = "", name
    elif not equals:
        place = layout
    try:
        file = open_rows(place, where=where)
    except UserError as error:
        known = f"{error.problem}. Layouts for LAYOUT=FILE: {', '.join(PRESETS)}" if "=" in place else error.problem
        raise UserError(error.where, known, exit_code=error.exit_code) from None
    preset = PRESETS.get(layout)
    found = _checked_rows(file, preset, where=where, data=data, reward=preset.reward if preset else reward)
    return DataSet(layout or _short_name(place), file.name, file.sha256(), preset, *found)


def _short_name(place: str) -> str:
    name = PurePath(place.removeprefix(HUB_PREFIX)).name
    return name.partition(".")[0] or name


def _checked_rows(
    file: RowFile, preset: Preset | None, *, where: str, data: DataConfig, reward: str
) -> tuple[list[Row], list[str], int, dict[str, list[str]]]:
    """Rows, their places, how many were read, and reason -> places of the others."""
    rows: list[Row] = []
    places: list[str] = []
    left_out: dict[str, list[str]] = {}
    num_read = 0
    try:
        for raw in file.rows():
            num_read += 1
            try:
                rows.append(_usable_row(raw, preset, data, reward))
                places.append(raw.place)
            except NotOfThisLayout as reason:
                left_out.setdefault(str(reason), []).append(raw.place)
            except ValueError as reason:
                if data.bad_rows == "error":
                    raise UserError(
                        where, f"{file.name} {raw.place} {reason}; correct it, or set data.bad_rows=skip"
                    ) from None
                left_out.setdefault(str(reason), []).append(raw.place)
    except (OSError, ValueError) as error:
        raise UserError(where, f"{file.name} cannot be read ({error}); give a readable data file") from None
    if not rows:
        reasons = "".join(f"; {len(places)} rows: {reason}" for reason, places in left_out.items())
        raise UserError(where, f"{file.name} has no rows that can be used{reasons}; give a file with at least one")
    return rows, places, num_read, left_out


def _usable_row(raw: RawRow, preset: Preset | None, data: DataConfig, reward: str) -> Row:
    """The row, with an answer that its reward can read.

    Raises:
        ValueError: with the reason, as a predicate.
    """
    if isinstance(raw.value, ValueError):
        raise raw.value
    if not isinstance(raw.value, dict):
        raise ValueError(f"is a {type(raw.value).__name__}, not an object with fields")
    problem, answer, metadata = preset.row(raw.value) if preset else _named_fields(raw.value, data, reward)
    f"{problem}{answer}".encode()  # raises for half of a surrogate pair, which is JSON but no text
    if reward == "math":
        tolerance = metadata.get("tolerance")
        _check_math_reference(answer, None if tolerance is None else str(tolerance))
    else:
        check_gold(reward, answer, metadata)
    return problem, answer, metadata


@lru_cache(maxsize=1 << 16)
def _check_math_reference(answer: str, tolerance: str | None) -> None:
    """Parsed once, where a set has an answer many times."""
    check_gold("math", answer, {"tolerance": tolerance})


def _named_fields(row: RawMapping, data: DataConfig, reward: str) -> Row:
    """A row whose columns the configuration names; all other columns are kept. Programs are scored by the column `tests`, or by
    an answer that holds the tests, as text or as an object."""
    for setting, name in (("data.prompt_field", data.prompt_field), ("data.answer_field", data.answer_field)):
        if name not in row and not (reward == "code" and name == data.answer_field and "tests" in row):
            raise ValueError(f"has no field {name!r} (named by {setting})")
    problem = problem_text(row, data.prompt_field)
    rest = {key: value for key, value in row.items() if key not in (data.prompt_field, data.answer_field)}
    answer = row.get(data.answer_field, "")
    if reward == "code" and isinstance(answer, dict):
        return problem, json.dumps(answer), rest
    text = answer_text(answer, data.answer_field)
    if reward in ("exact", "scratchpad") and not text.strip():
        raise ValueError(f"field {data.answer_field!r} is empty")
    return problem, text, rest


@lru_cache(maxsize=1 << 16)  # some sets repeat each problem a hundred times
def normalized_problem(text: str) -> str:
    """A problem without what spelling may change: Unicode forms, case, spaces, delimiters and sizes of formulas."""
    return _SPELLING.sub("", unicodedata.normalize("NFKC", text).casefold().strip())


def duplicate_reasons(data_set: DataSet) -> list[str | None]:
    """For each row, whether an earlier one has the same problem, exactly or after normalisation."""
    exact: set[str] = set()
    normalized: set[str] = set()
    reasons: list[str | None] = []
    for problem, _, _ in data_set.rows:
        text, key = problem.strip(), normalized_problem(problem)
        if text in exact:
            reasons.append("same problem as an earlier row, exactly")
        else:
            reasons.append("same problem as an earlier row, up to spelling" if key in normalized else None)
        exact.add(text)
        normalized.add(key)
    return reasons


def overlap_reasons(data_set: DataSet, held_out: Iterable[DataSet]) -> list[str | None]:
    """For each row, in which evaluation set its problem is, exactly or after normalisation."""
    exact: dict[str, str] = {}
    normalized: dict[str, str] = {}
    for other in held_out:
        for problem, _, _ in other.rows:
            exact.setdefault(problem.strip(), other.name)
            normalized.setdefault(normalized_problem(problem), other.name)
    reasons: list[str | None] = []
    for problem, _, _ in data_set.rows:
        text, key = problem.strip(), normalized_problem(problem)
        if text in exact:
            reasons.append(f"problem of the evaluation set {exact[text]}, exactly")
        else:
            reasons.append(
                f"problem of the evaluation set {normalized[key]}, up to spelling" if key in normalized else None
            )
    return reasons


def counted(reasons: Iterable[str | None]) -> dict[str, int]:
    """How many rows have each reason."""
    return dict(Counter(reason for reason in reasons if reason is not None))
