"""Writes docs/configuration.md from the dataclasses of `megatron_calclip/config.py`.

    python tools/make_config_reference.py            # write it
    python tools/make_config_reference.py --check    # exit with status 1 when the file is not up to date

Type, range and default come from the dataclasses, which also validate a run; the meaning is the string below each field. So
the page cannot say anything else than the code, and a test fails when it was not written again. Left out on purpose: rules
between settings, which `config_check.py` explains where they are broken.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import math
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo

from megatron_calclip import config as settings
from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.calibration_settings import CalibrationSettings

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
NAMES = {int: "integer", float: "number", bool: "true or false", str: "text", type(None): "null"}
SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
INTRODUCTION = """\
# Configuration

<!-- Written by tools/make_config_reference.py from megatron_calclip/config.py: change it there. -->

Every setting with its type and range, its default, and what it means. A configuration is a YAML file with these sections; it
may start from another one (`extends: FILE`), and the command line comes last (`section.key=value`, the value as YAML). An
unknown setting, a value out of its range, and values that do not go together end a run before it starts, in one line.
`torchrun examples/grpo_fp8.py CONFIG --dry-run` prints a configuration with all its defaults.

| environment variable | what |
|---|---|
| `MEGATRON_CALCLIP_DATA` | folder in which names of data files are looked up that are not found from the working directory |
| `MEGATRON_CALCLIP_CACHE` | folder of supervised starts (`model.warm_start`); default `~/.cache/megatron_calclip` |
| `MEGATRON_CALCLIP_VLLM_KEY` | key of vLLM servers on other machines: [security.md](security.md) |
| `MEGATRON_CALCLIP_SETTINGS` | YAML file with the settings of the verl hook: [verl](integrations/verl.md) |
"""


def field_texts() -> dict[str, dict[str, str]]:
    """The string below each field, by class and field."""
    texts: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(settings)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        texts[node.name] = {}
        for field, below in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                assert isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant), ast.unparse(field)
                texts[node.name][field.target.id] = str(below.value.value)
    return texts


def type_text(hint: Any) -> str:
    """A type in words: `integer >= 1`, `one of a, b`, `text or null`."""
    if get_origin(hint) is Annotated:
        kind, *notes = get_args(hint)
        limits = [rule for note in notes if isinstance(note, FieldInfo) for rule in note.metadata]
        signs = [
            f"{sign} {getattr(rule, name):g}"
            for rule in limits
            for name, sign in SIGNS.items()
            if getattr(rule, name, settings._LARGEST) != settings._LARGEST
        ]
        return " ".join([type_text(kind), " and ".join(sorted(signs, reverse=True))]).strip()
    if get_origin(hint) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(type_text, get_args(hint))))
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        return f"list of {type_text(parts[0])}" if parts[-1] is Ellipsis else f"[{', '.join(map(type_text, parts))}]"
    return NAMES[hint]


def value_text(value: Any) -> str:
    """A value as one writes it in YAML."""
    if isinstance(value, ClipBounds):
        value = (value.lower, value.upper)
    if isinstance(value, tuple):
        return f"[{', '.join(map(value_text, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return value if re.fullmatch(r"[\w./-]+", value) else f"'{value}'"
    if value == math.inf:
        return ".inf"
    return f"{value:g}" if isinstance(value, float) else str(value)


def escape(text: str) -> str:
    """Prose in a cell of a table: one line, Markdown's own characters harmless outside of code."""
    parts = " ".join(text.split()).split("`")
    parts[::2] = [part.replace("<", "&lt;").replace("*", "\\*") for part in parts[::2]]
    return "`".join(parts).replace("|", "\\|")


def sections(cls: type, name: str = "") -> Iterator[tuple[str, type]]:
    """The dotted name of each section and its class, in the order of the file."""
    for field in dataclasses.fields(cls):
        hint = get_type_hints(cls)[field.name]
        inner = next((kind for kind in (hint, *get_args(hint)) if dataclasses.is_dataclass(kind)), None)
        if inner is not None:
            dotted = f"{name}.{field.name}".lstrip(".")
            yield dotted, typing.cast(type, inner)
            yield from sections(typing.cast(type, inner), dotted)


def table(cls: type, name: str, texts: dict[str, dict[str, str]]) -> list[str]:
    """The settings of one section that are no sections themselves."""
    hints = get_type_hints(cls, include_extras=True)
    nested = {dotted.rpartition(".")[2] for dotted, _ in sections(cls) if "." not in dotted}
    lines = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(cls):
        if field.name in nested:
            continue
        key = f"{name}.{field.name}".lstrip(".")
        kind = type_text(hints[field.name]).replace("|", "\\|")
        lines.append(
            f"| `{key}` | {kind} | `{value_text(field.default)}` | {escape(texts[cls.__name__][field.name])} |"
        )
    return lines


def presets() -> list[str]:
    """What null stands for in `calibration`, by preset."""
    robust, paper = CalibrationSettings.robust("grpo"), CalibrationSettings.paper("grpo")
    lines = [
        "What null stands for, by `calibration.preset`, with `algorithm.aggregation: sequence_mean`; for `token_mean` (DAPO) the",
        "reference is [0.8, 1.28], and GSPO's grids follow its own spread ([calibration.md](calibration.md)):",
        "",
        "| setting | robust | paper |",
        "|---|---|---|",
    ]
    for field in dataclasses.fields(settings.CalibrationConfig):
        if field.default is None and hasattr(robust, field.name):
            ours, theirs = (
                value_text(getattr(preset, field.name)).replace("null", "none") for preset in (robust, paper)
            )
            lines.append(f"| `calibration.{field.name}` | `{ours}` | `{theirs}` |")
    return lines


def make_page() -> str:
    """The whole page."""
    texts = field_texts()
    lines = [INTRODUCTION, *table(settings.Config, "", texts), ""]
    for name, cls in sections(settings.Config):
        assert cls.__doc__ is not None
        lines += [f"{'#' * (2 + name.count('.'))} {name}", "", escape(cls.__doc__.split("\n\n")[0]), ""]
        if len(rows := table(cls, name, texts)) > 2:
            lines += [*rows, ""]
        if cls is settings.CalibrationConfig:
            lines += [*presets(), ""]
    return "\n".join(lines)


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 when the file is not up to date")
    arguments = parser.parse_args()
    page = make_page()
    if arguments.check:
        current = PAGE.is_file() and PAGE.read_text() == page
        print(f"{PAGE.name} is {'' if current else 'not '}up to date")
        return int(not current)
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
