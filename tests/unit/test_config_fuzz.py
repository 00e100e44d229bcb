"""Damaged copies of the shipped configurations: each is a clean `--dry-run`, or one line that says what is wrong.

Files are mutated as text and as YAML, by a seeded generator: keys dropped and renamed, values of wrong types, huge and
non-finite numbers, odd strings, nested lists, anchors and aliases, lines cut and repeated. In this process for speed; some
go through a process of their own.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml

from megatron_calclip import launch
from megatron_calclip.config_file import load_config
from megatron_calclip.errors import EXIT_USAGE, UserError

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(path for path in (ROOT / "conf").glob("*.yaml")) + sorted((ROOT / "conf" / "paper").glob("*.yaml"))
NUM_MUTATIONS = 300
NUM_PROCESSES = 8
MAX_DEPTH = 4
HANG_SECONDS = 60  # a mutation takes milliseconds

VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    2**31,
    10**30,
    -(10**400),
    1e308,
    5e-324,
    float("nan"),
    float("inf"),
    -float("inf"),
    "",
    " ",
    "\n",
    "null",
    "1e400",
    "nan",
    "характер",
    "🙂" * 50,
    "x" * 100_000,
    "../" * 2000 + "etc/passwd",
    "a\tb\x7f\u202e",
    "http://[",
    [],
    [[]],
    [[[[[["deep"]]]]]],
    list(range(1000)),
    {},
    {"": {"": {"": None}}},
    {"train": {"train": {}}},
    {1: 2},
    {None: []},
]
TEXTS = [
    "&a",
    "*a",
    "*undefined",
    "<<: *a",
    "!!binary aGk=",
    "!!set {a, b}",
    "!!python/name:os.system",
    "!custom x",
    "? [complex, key]",
    "---",
    "...",
    "%YAML 9.9",
    "\ttab: 1",
    "key: value: value",
    "'unclosed",
    "[1, 2",
    "{a: 1",
    "- item",
    "| block",
    "extends: [a]",
    "extends: .",
    "extends: nowhere.yaml",
    "\ufeff",
    "\x00",
    "\x85",
    "=",
    "0x1F",
    "1_000",
    "12:30:45",
    "2024-01-01",
]


def all_paths(values: dict[str, Any], prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all sections and settings."""
    found: list[tuple[Any, ...]] = []
    for key, value in values.items():
        found.append((*prefix, key))
        if isinstance(value, dict) and len(prefix) < MAX_DEPTH:  # an earlier mutation may have closed a circle
            found += all_paths(value, (*prefix, key))
    return found


def mutate_values(draw: random.Random, values: dict[str, Any]) -> None:
    """One change of the parsed configuration, in place."""
    *parents, last = draw.choice(all_paths(values))
    target = values
    for key in parents:
        target = target[key]
    kind = draw.choice(["replace", "drop", "rename", "duplicate", "share", "recurse", "nest"])
    if kind == "replace":
        target[last] = draw.choice(VALUES)
    elif kind == "drop":
        del target[last]
    elif kind == "rename":
        letters = list(str(last))
        draw.shuffle(letters)
        target[draw.choice(["".join(letters), str(last).upper(), f"{last} ", f"{last}.{last}"])] = target.pop(last)
    elif kind == "duplicate":
        values[draw.choice(["train", "model", "algorithm", "nonsense"])] = target[last]
    elif kind == "share":  # an anchor and an alias
        shared = draw.choice([{"num_steps": 1}, ["a"], {"a": {"b": 1}}])
        values["train"], values[draw.choice(["data", "eval", "anything"])] = shared, shared
    elif kind == "recurse":  # an anchor that contains itself
        loop: Any = draw.choice([[], {}])
        (loop.append if isinstance(loop, list) else lambda item: loop.setdefault("a", item))(loop)
        target[last] = loop
    else:
        target[last] = [{"a": target[last]}]


def mutate_text(draw: random.Random, text: str) -> str:
    """One change of the file's text."""
    lines = text.splitlines()
    index = draw.randrange(len(lines))
    kind = draw.choice(["insert", "append", "cut", "repeat", "swap", "byte"])
    if kind == "insert":
        lines.insert(index, draw.choice(TEXTS))
    elif kind == "append":
        lines[index] += " " + draw.choice(TEXTS)
    elif kind == "cut":
        lines[index] = lines[index][: draw.randrange(len(lines[index]) + 1)]
    elif kind == "repeat":
        lines.insert(index, lines[index])
    elif kind == "swap":
        other = draw.randrange(len(lines))
        lines[index], lines[other] = lines[other], lines[index]
    else:
        place = draw.randrange(len(lines[index]) + 1)
        lines[index] = (
            lines[index][:place] + chr(draw.choice([0, 1, 9, 39, 58, 91, 123, 160, 8232])) + lines[index][place:]
        )
    return "\n".join(lines) + "\n"


def mutation(seed: int) -> tuple[Path, str]:
    """A shipped configuration and its damaged text."""
    draw = random.Random(seed)
    path = draw.choice(SHIPPED)
    text = path.read_text()
    for _ in range(draw.randint(1, 3)):
        if draw.random() < 0.5:
            text = mutate_text(draw, text)
            continue
        try:
            values = yaml.safe_load(text)
        except Exception:  # damaged already
            continue
        if isinstance(values, dict) and values:
            mutate_values(draw, values)
            text = yaml.safe_dump(values, allow_unicode=True, sort_keys=False)
    return path, text


@contextmanager
def no_hang() -> Iterator[None]:
    """Fails when the block takes far too long."""

    def fail(*_: Any) -> NoReturn:
        raise AssertionError(f"hangs: {HANG_SECONDS} s passed")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(HANG_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Ended(Exception):
    """In the place of the process's end."""


def dry_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> UserError | None:
    """`--dry-run` of a file in this process; the user's error, if there was one."""
    errors: list[UserError] = []

    def end(error: UserError) -> NoReturn:
        errors.append(error)
        raise Ended

    monkeypatch.setattr(launch, "_exit", end)
    with no_hang():
        try:
            launch.main([str(path), "--dry-run"])
        except Ended:
            return errors[0]
    return None


def place(folder: Path, path: Path, text: str) -> Path:
    """The damaged text where `extends` still finds what the original names."""
    for other in SHIPPED:
        if other.parent == path.parent and other != path and not (folder / other.name).exists():
            (folder / other.name).write_bytes(other.read_bytes())
    target = folder / path.name
    target.write_bytes(text.encode("utf-8", errors="surrogatepass"))
    return target


def test_every_mutation_is_a_clean_dry_run_or_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = {"valid": 0, "refused": 0}
    for seed in range(NUM_MUTATIONS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        file = place(folder, *mutation(seed))
        try:
            error = dry_run(file, monkeypatch)
        except BaseException as wrong:
            raise AssertionError(f"mutation {seed}: {file.read_text(errors='replace')[:2000]}") from wrong
        out = capsys.readouterr().out
        if error is None:
            assert isinstance(yaml.safe_load(out), dict), seed
        else:
            line = " ".join(str(error).split())
            assert line.isprintable() and len(line) < 2000 and error.exit_code == EXIT_USAGE, (seed, line[:200])
            assert out == "", seed
        outcomes["refused" if error else "valid"] += 1
    # Mutations that all fail, or all pass, would test little.
    assert min(outcomes.values()) > NUM_MUTATIONS / 10, outcomes


@pytest.mark.parametrize("seed", range(NUM_PROCESSES))
def test_mutations_in_processes_of_their_own(seed: int, tmp_path: Path) -> None:
    file = place(tmp_path, *mutation(1000 + seed))
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "grpo_fp8.py"), str(file), "--dry-run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    if done.returncode:
        assert done.returncode == EXIT_USAGE and done.stdout == ""
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    else:
        assert isinstance(yaml.safe_load(done.stdout), dict)


def laughs(levels: int) -> str:
    """Aliases that stand for ten times as much on each level."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "where", ["{laughs}", "run_dir: 1\n{laughs}", "{laughs}\nrun_dir: *a11", "{laughs}\ntrain: *a11"]
)
def test_aliases_do_not_multiply(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "laughs.yaml"
    file.write_text(where.format(laughs=laughs(12)))
    error = dry_run(file, monkeypatch)
    assert error is not None and len(str(error)) < 2000


def test_overrides_are_held_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(7)
    for _ in range(60):
        text = draw.choice(TEXTS) if draw.random() < 0.5 else yaml.safe_dump(draw.choice(VALUES)).strip()
        with no_hang():
            try:
                load_config("tiny_cpu", [f"train.num_steps={text}", f"parallel={text}"])
            except UserError as error:
                assert " ".join(str(error).split()).isprintable()
