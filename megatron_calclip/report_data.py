"""What a report is made from: the files of run folders, read so that a damaged or unfinished run still gives its part.

What: `metrics.jsonl`, `calibration.jsonl`, `eval/step_*/report.json`, `config.yaml` and `versions.json` of each run. Files are
the record of a program that may have been killed, may still be running, or may be of another version: whatever cannot be used
is left out and becomes a note that the report shows. Only a run that is not there, and runs without any step, are errors.

Left out on purpose: completions and outliers, which `megatron-calclip samples` and a text editor show better; TensorBoard's
files, which hold nothing that `metrics.jsonl` does not.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_calclip.errors import UserError

MAX_RUNS = 24
"""As many as colours and dashes tell apart (`report_style`)."""
_EVALUATION_FILE = "report.json"
"""`evaluation_report.REPORT_FILE`, whose module needs torch."""
_LARGEST = 1e300
"""Numbers beyond it count as not finite: differences of others stay within floating point."""
_LARGEST_STEP = 2**53
"""Exact as floating point."""

Point = tuple[int, float | None]
"""A step and its value; None where it was not finite."""


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of a run."""

    step: int
    """RL steps done before it."""
    sets: Mapping[str, Mapping[str, Any]]
    """Estimates by name (`avg@4`, ...) of each set: objects of `value`, `low` and `high`."""


@dataclass(frozen=True)
class Run:
    """The readable part of a run's folder."""

    label: str
    """Names the run in the report; unique."""
    rows: tuple[Mapping[str, Any], ...]
    """Of `metrics.jsonl`, a row a step, ascending."""
    calibrations: tuple[Mapping[str, Any], ...]
    """Of `calibration.jsonl`, likewise."""
    evaluations: tuple[Evaluation, ...]
    """Ascending."""
    config: Mapping[str, str]
    """Settings by dotted name, as text."""
    versions: Mapping[str, str]
    """Versions by the name of the package."""
    notes: tuple[str, ...]
    """What could not be used, in sentences."""

    @property
    def num_steps(self) -> int:
        """RL steps done."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    def points(self, name: str) -> tuple[Point, ...]:
        """A metric over the steps that logged it."""
        return tuple((int(row["step"]), number(row[name])) for row in self.rows if name in row)

    def values(self, name: str) -> list[float]:
        """Its finite values, by step."""
        return [value for _, value in self.points(name) if value is not None]


def load_runs(folders: Sequence[Path]) -> list[Run]:
    """Read run folders.

    Args:
        folders: in the order of the report.

    Raises:
        UserError: for a folder that is not there or given twice, for too many, and when no run has a step.
    """
    if len(folders) > MAX_RUNS:
        raise UserError("RUN", f"{len(folders)} runs cannot be told apart in a plot; give at most {MAX_RUNS}")
    for folder in folders:
        if not os.path.isdir(folder):
            raise UserError("RUN", f"no folder {str(folder)!r}; give the folders of runs")
    runs = [_load(folder, label) for folder, label in zip(folders, labels(folders), strict=True)]
    if not any(run.rows for run in runs):
        raise UserError("RUN", "no step in metrics.jsonl yet; give a run that has done one")
    return runs


def labels(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart.

    Raises:
        UserError: when two are the same folder.
    """
    paths = [Path(os.path.abspath(folder)).parts for folder in folders]
    for length in range(1, max(map(len, paths)) + 1):
        ends = ["/".join(parts[-length:]) for parts in paths]
        if len(set(ends)) == len(ends):
            return ends
    raise UserError("RUN", "a folder is given twice; give each run once")


def number(value: Any) -> float | None:
    """A finite number from a file, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= _LARGEST else None  # false for NaN


def _load(folder: Path, label: str) -> Run:
    notes: list[str] = []
    rows = _read_rows(folder / "metrics.jsonl", notes)
    # Written by the measured steps only; a run without calibration has none.
    expected = any("clip_fp8/num_low" in row for row in rows)
    calibrations = _read_rows(folder / "calibration.jsonl", notes, expected=expected)
    if not rows:
        notes.append("no step yet")
    return Run(
        label=label,
        rows=rows,
        calibrations=calibrations,
        evaluations=_read_evaluations(folder / "eval", notes),
        config=_read_config(folder / "config.yaml", notes),
        versions=_read_versions(folder / "versions.json", notes),
        notes=tuple(notes),
    )


def _read_text(path: Path, notes: list[str], *, expected: bool = True) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        if expected:
            notes.append(f"{path.name} is not there")
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({error.strerror})")
    return None


def _parse(text: str) -> Any:
    """JSON; None for what is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _read_rows(path: Path, notes: list[str], *, expected: bool = True) -> tuple[Mapping[str, Any], ...]:
    """Rows by ascending step; of rows of the same step the last."""
    # Not splitlines: a text in JSON may hold other characters that it takes for the end of a line.
    lines = [line for line in (_read_text(path, notes, expected=expected) or "").split("\n") if line.strip()]
    by_step: dict[int, Mapping[str, Any]] = {}
    num_bad = num_repeated = 0
    for line in lines:
        row = _parse(line)
        step = row.get("step") if isinstance(row, dict) else None
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= _LARGEST_STEP:
            num_bad += 1
            continue
        num_repeated += step in by_step
        by_step[step] = row
    if num_bad:
        notes.append(f"{path.name}: {num_bad} of {len(lines)} lines left out, no rows (the run writes, or was killed)")
    if num_repeated:
        notes.append(f"{path.name}: {num_repeated} steps came again; the last row of each counts")
    return tuple(by_step[step] for step in sorted(by_step))


def _read_evaluations(folder: Path, notes: list[str]) -> tuple[Evaluation, ...]:
    found = []
    for path in folder.glob("step_*"):
        step = re.fullmatch(r"step_(\d{1,18})", path.name)
        # A folder without a report is an evaluation that did not end.
        text = _read_text(path / _EVALUATION_FILE, notes, expected=False) if step else None
        if step is None or text is None:
            continue
        sets = mapping(_parse(text)).get("sets")
        estimates = {
            str(mapping(one).get("name")): {
                str(name): mapping(estimate) for name, estimate in mapping(mapping(one).get("estimates")).items()
            }
            for one in (sets if isinstance(sets, list) else [])
        }
        if estimates:
            found.append(Evaluation(int(step[1]), estimates))
        else:
            notes.append(f"eval/{path.name}/{_EVALUATION_FILE} is no report of an evaluation")
    return tuple(sorted(found, key=lambda one: one.step))


def _read_config(path: Path, notes: list[str]) -> dict[str, str]:
    # Not `load_config`: the settings of another version are shown as they are.
    text = _read_text(path, notes)
    if text is None:
        return {}
    try:
        values = yaml.safe_load(text)
        if isinstance(values, dict):
            return _flat(values)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):  # a list can hold itself, and odd keys
        pass
    notes.append(f"{path.name} holds no settings")
    return {}


def _flat(values: Mapping[Any, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings by dotted name."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return flat


def _read_versions(path: Path, notes: list[str]) -> dict[str, str]:
    text = _read_text(path, notes)
    return {} if text is None else {str(name): str(value) for name, value in mapping(_parse(text)).items()}


def mapping(value: Any) -> Mapping[str, Any]:
    """An object from a file; empty where it is none."""
    return value if isinstance(value, dict) else {}
