"""Configuration files: defaults -> YAML (with `extends:`) -> `key=value` overrides -> checked dataclasses, and back.

Errors are one line that names the setting, the nearest known one, or what would be right. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from megatron_calclip.config import Config
from megatron_calclip.config_check import check
from megatron_calclip.errors import UserError

_FLOAT = r"[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?|[-+]?\d[\d_]*[eE][-+]?\d+|[-+]?\.inf|\.nan"


class _Loader(yaml.SafeLoader):
    """YAML 1.2's idea of a plain value: `1e-6` is a number; `no`, `010`, `12:30` and a date are words.

    PyYAML follows YAML 1.1, which has all of them the other way round. A key that comes twice is an error.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML declares it so)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping whose keys differ."""
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", "true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][\d_]*)", list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
    ("merge", "<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^({_pattern})$", re.ASCII), _first)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or `_Loader` would take for something else."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^({_FLOAT})$", re.ASCII), list("-+.0123456789"))


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except Exception as error:  # PyYAML's constructors let through whatever Python raises, RecursionError too
        problem = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(str(error).split()))
        raise UserError(where, f"is not valid YAML ({problem}); correct it") from None


def find_config(name: str) -> Path:
    """A path, or the name of a shipped configuration (with or without `.yaml`).

    Raises:
        UserError: when neither exists; it lists the shipped names.
    """
    if os.path.isfile(name):  # pathlib's raises for a name that is too long
        return Path(name)
    folder = shipped_folder()
    if folder is None:
        raise UserError("CONFIG", f"no file {name!r}; give the path of a YAML file")
    for candidate in (folder / name, folder / f"{name}.yaml"):
        if os.path.isfile(candidate):
            return candidate
    # nemo_rl holds another framework's files
    shipped = sorted(str(p.relative_to(folder)) for p in folder.rglob("*.yaml") if p.parent.name != "nemo_rl")
    raise UserError("CONFIG", f"no file {name!r}; give a path, or one of {', '.join(shipped)}")


def shipped_folder() -> Path | None:
    """Where the shipped configurations are: in an installed wheel, or in a checkout."""
    package = Path(__file__).parent
    return next((folder for folder in (package / "conf", package.parent / "conf") if folder.is_dir()), None)


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Deep merge of nested mappings; `over` wins."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return merged


def _read_file(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """One YAML file with what it extends (paths relative to the file that names them)."""
    if path.resolve() in seen:
        raise UserError(str(path), "extends itself; break the circle of `extends:`")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(str(path), f"cannot be read ({error}); give a readable YAML file") from None
    values = _parse_yaml(text, str(path))
    if values is None:
        values = {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(str(path), "must hold sections at its top level, such as `train:`")
    parent = values.pop("extends", None)
    if parent is None:
        return values
    if not isinstance(parent, str) or not os.path.isfile(path.parent / parent):
        raise UserError(f"{path}: extends", f"{parent!r} is no file; give a YAML file's path relative to this one")
    return _merge(_read_file(path.parent / parent, (*seen, path.resolve())), values)


def _apply_override(values: dict[str, Any], override: str) -> dict[str, Any]:
    key, equals, text = override.partition("=")
    key = key.removeprefix("++").removeprefix("+")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", key):
        raise UserError(override, "is no setting; an override has the form section.key=value")
    nested: Any = _parse_yaml(text, key)
    for part in reversed(key.split(".")):
        nested = {part: nested}
    return _merge(values, nested)


def names_setting(overrides: Sequence[str], setting: str) -> bool:
    """Whether `section.key=value` strings give a setting a value, by its own name or within its section's."""
    values: Any = {}
    for override in overrides:
        values = _apply_override(values, override)
    for part in setting.split("."):
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


def _known_keys(cls: type, prefix: str = "") -> list[str]:
    """Dotted names of all settings under a config dataclass."""
    names: list[str] = []
    hints = get_type_hints(cls)
    for f in dataclasses.fields(cls):
        names.append(prefix + f.name)
        for t in (hints[f.name], *getattr(hints[f.name], "__args__", ())):  # a section may be optional
            if dataclasses.is_dataclass(t):
                names += _known_keys(t, f"{prefix}{f.name}.")  # type: ignore[arg-type]
    return names


def _unknown_key(where: str) -> str:
    """What to say of a setting that does not exist: the nearest one that does."""
    parent, _, last = where.rpartition(".")
    known = _known_keys(Config)
    siblings = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == parent]
    near = (
        [f"{parent}.{name}".lstrip(".") for name in difflib.get_close_matches(last, siblings, 1)]
        or [key for key in known if key.rpartition(".")[2] == last]
        or difflib.get_close_matches(where, known, 1, 0.75)
    )
    if near:
        return f"no such setting; did you mean {' or '.join(near)}?"
    return f"no such setting; known here: {', '.join(siblings)}"


def _shown(value: Any, longest: int = 60) -> str:
    """A value in an error line. YAML's aliases can make small files into huge values, so nested ones are cut short."""
    shortened = reprlib.Repr()
    shortened.maxlevel, shortened.maxstring, shortened.maxother = 3, 2 * longest, 2 * longest
    try:
        text = shortened.repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits
        text = f"a {type(value).__name__} too large to print"
    return text if len(text) <= longest else f"{text[:longest]}..."


def _setting_of(location: Sequence[int | str]) -> str:
    """The setting that a complaint is about: without the kinds of value (`bool`, `literal['auto']`) that pydantic tried."""
    parts = [str(part) for part in location]
    known = _known_keys(Config)
    sections = {key.rpartition(".")[0] for key in known}
    for length in range(len(parts), 0, -1):
        if (key := ".".join(parts[:length])) in known and key not in sections:
            parts = parts[:length] + [part for part in parts[length:] if part.isdigit()]
            break
    return ".".join(part if part.isprintable() else repr(part) for part in parts) or "configuration"


def _user_error(error: ValidationError) -> UserError:
    """Pydantic's first complaint as one line; of a setting that may be of several kinds, what it says of each."""
    details = error.errors()
    detail, where = details[0], _setting_of(details[0]["loc"])
    if detail["type"] == "unexpected_keyword_argument":
        return UserError(where, _unknown_key(where))
    if detail["type"] == "dataclass_type":
        problem = "is a section: should hold settings"
    else:
        same = [one["msg"] for one in details if _setting_of(one["loc"]) == where]
        told = [
            text.removeprefix("Value error, ").removeprefix("Input ").replace("valid tuple", "list") for text in same
        ]
        problem = " or ".join(dict.fromkeys(told))
    return UserError(where, f"{problem} (got {_shown(detail['input'])}); correct the value")


def load_config(name: str | None, overrides: Sequence[str] = (), *, world_size: int | None = None) -> Config:
    """Read, merge and check a configuration.

    Args:
        name: path of a YAML file, or the name of a shipped one; None starts from the defaults.
        overrides: `section.key=value` strings, applied in order; values are YAML.
        world_size: ranks of the launch; None takes `cluster` (--dry-run).

    Raises:
        UserError: one line naming the setting and what to do.
    """
    values = {} if name is None else _read_file(find_config(name))
    for override in overrides:
        values = _apply_override(values, override)
    config = config_from_dict(values)
    if world_size is None:
        world_size = config.cluster.num_nodes * config.cluster.gpus_per_node
    check(config, world_size=world_size)
    return config


def config_from_dict(values: Mapping[str, Any]) -> Config:
    """A validated configuration from nested mappings; missing settings take their defaults.

    Raises:
        UserError: for an unknown setting or a value of the wrong type or range.
    """
    try:
        return TypeAdapter(Config).validate_python(values)
    except ValidationError as error:
        raise _user_error(error) from None


def config_to_dict(config: Config) -> dict[str, Any]:
    """The resolved configuration as nested plain values."""
    return dataclasses.asdict(config)


def config_to_yaml(config: Config) -> str:
    """The resolved configuration as YAML that `load_config` reads back."""
    return yaml.dump(config_to_dict(config), Dumper=_Dumper, sort_keys=False)


def launch_world_size() -> int:
    """Number of ranks that torchrun started (1 outside it)."""
    return int(os.environ.get("WORLD_SIZE", "1"))
