"""`megatron-calclip replay`: the bounds that other calibration settings would have chosen on a run's dumps.

    megatron-calclip replay runs/noisy_cpu --set grid_lower=0.5:0.9:0.02,0.2:0.9:0.02 --preset paper --plot bounds.svg

What: a run with `calibration.dump` leaves each calibration's tokens in `run_dir/dumps`. Every setting calibrates on the
same tokens, from its start bounds, and its bounds are judged on the next dump, which did not choose them. The first row
is the run's own settings, the others are all combinations of what is asked for. Why on the same tokens: two runs differ
in much more than one setting.

Left out on purpose: how training would have gone on under other bounds, which no dump can tell.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import math
import os
import typing
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.calibration_report import BoundReport, Status
from megatron_calclip.algorithms.calibration_settings import START, CalibrationSettings
from megatron_calclip.algorithms.replay import CalibrationDump, Replay, replay
from megatron_calclip.commands.output import check_plot, writing
from megatron_calclip.errors import UserError

AS_RUN = "as the run"
"""Name of the run's own settings."""

_PRESETS = {"paper": CalibrationSettings.paper, "robust": CalibrationSettings.robust}
_MAX_SETTINGS = 200
"""More combinations than anybody reads; a slip in --set would otherwise replay for hours."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="DUMP_OR_RUN", help="a run's folder, or some of the files in its dumps/"
    )
    parser.add_argument(
        "--set",
        dest="changes",
        action="append",
        default=[],
        metavar="NAME=V1,V2",
        help="values of a setting of `calibration` to compare; repeated, all combinations. Parts of a grid or of a "
        "pair of bounds are joined by colons (grid_lower=0.2:0.9:0.02, start=0.8:1.24), no value is `null`",
    )
    parser.add_argument(
        "--preset", action="append", default=[], choices=_PRESETS, help="start from a preset instead of the run's own"
    )
    parser.add_argument(
        "--follow-schedule",
        action="store_true",
        help="calibrate only at the steps that each setting's schedule asks for, not on every dump",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows and calibrations")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot the bounds over the steps (.png, .svg, .pdf)")


def run(arguments: argparse.Namespace) -> None:
    """Replay, print the table, write the files.

    Raises:
        UserError: for paths, settings or files that cannot be used.
    """
    if arguments.plot is not None:
        check_plot(arguments.plot)
    dumps = load_dumps(arguments.paths)
    replays: dict[str, Replay] = {}
    for name, settings in variants(dumps[0].settings, arguments.preset, arguments.changes).items():
        try:
            replays[name] = replay(dumps, settings, follow_schedule=arguments.follow_schedule)
        except ValueError as error:
            raise UserError(name, str(error)) from None
    Console(highlight=False).print(_table(dumps, replays))
    if arguments.json is not None:
        with writing(arguments.json, "--json"):
            arguments.json.write_text(json.dumps(_as_json(dumps, replays), indent=1) + "\n", encoding="utf-8")
    if arguments.plot is not None:
        with writing(arguments.plot, "--plot"):
            plot(replays, arguments.plot)


def load_dumps(paths: Sequence[Path]) -> list[CalibrationDump]:
    """The dumps of one run, by step.

    Args:
        paths: a run's folder, its `dumps` folder, or files.

    Raises:
        UserError: when there are none, one is damaged, or they are not of one run.
    """
    files: list[Path] = []
    for path in paths:
        if os.path.isdir(path):
            found = sorted(path.glob("*.safetensors")) or sorted((path / "dumps").glob("*.safetensors"))
            if not found:
                raise UserError(str(path), "holds no calibration dumps; set calibration.dump=true when training")
            files += found
        elif os.path.isfile(path):
            files.append(path)
        else:
            raise UserError(str(path), "there is no such file or folder; name a run's folder or some of its dumps")
    folders = {file.resolve().parent for file in files}
    if len(folders) > 1:
        names = ", ".join(sorted(str(folder) for folder in folders))
        raise UserError(names, "these dumps are of several runs; replay one run at a time")
    dumps = []
    for file in dict.fromkeys(files):  # a file that is named twice counts once
        try:
            dumps.append(CalibrationDump.load(file))
        except ValueError as error:
            where, _, problem = str(error).partition(": ")
            raise UserError(where, problem) from None
    dumps.sort(key=lambda dump: dump.step)
    for one, other in itertools.pairwise(dumps):
        if one.step == other.step:
            raise UserError(
                str(folders.pop()), f"step {one.step} is there twice; keep the dumps of one run in a folder"
            )
        if one.settings.mode != other.settings.mode:
            raise UserError(
                str(folders.pop()),
                f"steps {one.step} and {other.step} were dumped in modes {one.settings.mode!r} and "
                f"{other.settings.mode!r}; replay those of one mode",
            )
    return dumps


def variants(
    own: CalibrationSettings, presets: Sequence[str], changes: Sequence[str]
) -> dict[str, CalibrationSettings]:
    """Settings by name: the run's own first, then all combinations of presets and changes.

    Args:
        own: the run's. A preset keeps its references and mode, which belong to the algorithm.
        presets: names; empty stands for the run's own settings.
        changes: `name=v1,v2`.

    Raises:
        UserError: for an unknown name, or values that are none.
    """
    # The start that the presets have for tokens means nothing for sequences, whose bounds lie close to 1.
    start = START if own.mode == "token" else own.reference
    named_presets = {name: _PRESETS[name](reference=own.reference, start=start, mode=own.mode) for name in presets}
    options = [_options(change) for change in changes]
    num_settings = max(len(named_presets), 1) * math.prod(len(option) for option in options)
    if num_settings > _MAX_SETTINGS:
        raise UserError("--set", f"{num_settings} combinations are more than {_MAX_SETTINGS}; compare fewer values")
    named = {AS_RUN: own}
    for base, *chosen in itertools.product((named_presets or {"": own}).items(), *options):
        name = " ".join([base[0], *(option.text for option in chosen)]).strip()
        try:
            named[name or AS_RUN] = replace(base[1], **{option.name: option.value for option in chosen})
        except ValueError as error:
            where, _, problem = str(error).partition(": ")
            raise UserError(where, problem) from None
    return named


class _Option(NamedTuple):
    """One value of a setting."""

    text: str
    name: str
    value: Any


def _options(change: str) -> list[_Option]:
    """The values of one --set."""
    name, equals, values = change.partition("=")
    hints = typing.get_type_hints(CalibrationSettings)
    if name not in hints:
        nearest = difflib.get_close_matches(name, hints, n=1)
        known = f"did you mean {nearest[0]}?" if nearest else f"choose from {', '.join(hints)}"
        raise UserError("--set", f"{name!r} is no setting of `calibration`; {known}")
    if not equals or not all(values.split(",")):
        raise UserError("--set", f"{change!r} gives no values; write {name}=V1,V2")
    return [_Option(f"{name}={text}", name, _value(name, text, hints[name])) for text in values.split(",")]


def _value(name: str, text: str, hint: Any) -> Any:
    """A text as the type of its setting; words of a choice are checked by the settings themselves."""
    alternatives = typing.get_args(hint)
    if NoneType in alternatives and text == "null":
        return None
    try:
        if hint is ClipBounds:
            return ClipBounds(*_numbers(text, 2))
        if typing.get_origin(hint) is tuple:
            return tuple(_numbers(text, len(alternatives)))
        if typing.get_origin(hint) is Literal:
            return text
        if hint is bool:
            return {"true": True, "false": False}[text]
        return int(text) if hint is int else _numbers(text, 1)[0]
    except KeyError:
        problem = "choose true or false"
    except ValueError as error:
        problem = str(error)
    raise UserError(f"calibration.{name}", f"{text!r} is no value of it: {problem}")


def _numbers(text: str, count: int) -> list[float]:
    numbers = [float(part) for part in text.split(":")]
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise ValueError(f"give {count} finite number(s), joined by colons")
    return numbers


def _table(dumps: Sequence[CalibrationDump], replays: dict[str, Replay]) -> Table:
    """A row for each setting."""
    table = Table(
        title=f"{len(dumps)} dumps, steps {dumps[0].step} to {dumps[-1].step}",
        caption="m moved, u unchanged, e at the edge of the grid, h held\n"
        "next: tokens of the next dump that FP8 clips at the new bound, over those that BF16 clips at the reference\n"
        "false: share that FP8 clips of those that BF16 keeps",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("settings", no_wrap=True)
    for bound in ("L", "H"):
        for title in (bound, "status", "next", "false"):
            table.add_column(title, justify="right", no_wrap=title != "status")
    for name, result in replays.items():
        row = result.as_row()
        cells = [name.replace(" ", "\n") if "=" in name else name]
        for side in ("lower", "upper"):
            counts = {status: row[f"num_{side}_{status}"] for status in typing.get_args(Status)}
            cells += [
                f"{row[side]:.5g}",
                " ".join(f"{count}{status[0]}" for status, count in counts.items() if count),
                _number(row[f"next_{side}_multiple"], ".2f"),
                _number(row[f"next_{side}_false_clips"], ".2%"),
            ]
        table.add_row(*cells)
    return table


def _number(value: float | int | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _as_json(dumps: Sequence[CalibrationDump], replays: dict[str, Replay]) -> dict[str, Any]:
    """Everything of the table, and each calibration's numbers."""
    return {
        "steps": [dump.step for dump in dumps],
        "settings": [
            {"name": name, **result.as_row(), "calibrations": [report.as_row() for report in result.reports]}
            for name, result in replays.items()
        ],
    }


def plot(replays: dict[str, Replay], path: Path) -> None:
    """The bounds that hold after each calibration over the steps, H above L; crosses mark held ones, triangles the edge.

    Args:
        replays: by the name of their settings.
        path: of the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    for name, result in replays.items():
        for axis, side in zip(axes, ("upper", "lower"), strict=True):
            steps = [report.step for report in result.reports]
            bounds: list[BoundReport] = [getattr(report, side) for report in result.reports]
            line = axis.step(steps, [bound.after for bound in bounds], where="post", label=name)[0]
            for status, marker in (("held", "x"), ("edge", "^"), ("moved", "o"), ("unchanged", "o")):
                marked = [index for index, bound in enumerate(bounds) if bound.status == status]
                axis.plot(
                    [steps[index] for index in marked],
                    [bounds[index].after for index in marked],
                    marker,
                    color=line.get_color(),
                )
    axes[0].set_ylabel("upper bound H")
    axes[1].set_ylabel("lower bound L")
    axes[1].set_xlabel("step (x: held, triangle: at the edge of the grid)")
    axes[0].legend(fontsize="small", loc="upper left")
    figure.savefig(path)
