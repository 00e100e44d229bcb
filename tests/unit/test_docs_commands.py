"""Every shell command in README, CONTRIBUTING and docs: run where it is cheap, else read by the program it is for, else marked.

*Run*: `--help`, `--dry-run`, `plan`. *Read*: a real parser takes the arguments, files and settings that are named exist, and a
training command is run with `--dry-run` added. *Marked*: what neither can say anything about, with the reason. A command of
a kind that is not known here fails, so that nobody adds one unseen. Left out on purpose: training itself, which
tests/distributed does.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_calclip import cli, launch
from megatron_calclip.config_file import find_config, load_config
from megatron_calclip.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # a benchmark imported before

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
PROGRAMS = r"torchrun|python3?|pip|megatron-calclip|sbatch|pytest|ruff|mypy|mkdocs|pre-commit|docker|tools/[\w./]+"
COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{PROGRAMS})(?=\s|$)")
SYNOPSIS = re.compile(r"\[\.\.\.\]|\[-|\[section|\]\.\.\.|RUN\.\.\.|\w\|\w")
"""What stands in usage lines only: optional parts, repetitions, alternatives."""
TOOLS = {"ruff": ("check", "format"), "mypy": (), "mkdocs": ("build", "serve"), "pre-commit": ("install", "run")}
"""Development tools, whose commands are theirs to test."""
MARKED = {
    "docker run": "needs a GPU and NVIDIA's container",
    "pip install --no-build-isolation 'transformer-engine[pytorch]": "needs a GPU: compiled against CUDA",
    "pip install 'torch": "needs the network",
    ".venv-vllm/bin/pip install": "needs the network",
    "python -c 'import torch, transformer_engine": "needs a GPU",
    "tools/gpu_check.sh WHEELS": "needs a GPU",
}


FRAMEWORKS = re.compile(r"(?:\.\.\./)?(examples/(?:nemo_aligner|nemo_rl|megatron_rl|verl)/\w+\.py)")
"""Scripts that need another framework's environment: they are there, and tests/integrations runs them."""


@dataclass(frozen=True)
class Command:
    """One command of a page."""

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        """As a shell would split it, without variables before it."""
        lexer = shlex.shlex(self.text, posix=True, punctuation_chars="&")
        lexer.whitespace_split = True
        words = list(lexer)
        while re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        return words


def fenced_commands(page: Path) -> Iterator[Command]:
    """Commands in shell fences, and those in fences without a language that begin with a known program."""
    for _, language, body in FENCE.findall(page.read_text()):
        if language not in ("", "bash"):
            continue
        for line in body.replace("\\\n", " ").splitlines():
            for part in re.split(r" && ", re.sub(r"\s#.*", "", line)):
                text = " ".join(part.split())
                if text and (language or COMMAND.match(text)) and not SYNOPSIS.search(text):
                    yield Command(page.name, text)


def inline_commands(page: Path) -> Iterator[Command]:
    """Commands within sentences, which may be cut short: of these only names are checked."""
    prose = FENCE.sub("", page.read_text())
    for text in re.findall(r"`([^`]+)`", prose):
        if COMMAND.match(text := " ".join(text.split())):
            yield Command(page.name, text)


def pages(find: Callable[[Path], Iterator[Command]]) -> list[Any]:
    """Test parameters without repetitions."""
    commands = dict.fromkeys(command for page in PAGES for command in find(page))
    return [pytest.param(command, id=f"{command.page}: {command.text[:60]}") for command in commands]


class Parsed(Exception):
    """A parser took its arguments."""


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are typed there; a wrong configuration is a failure instead of this process's end."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(launch, "_exit", lambda error: pytest.fail(str(error)))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object], list[str]], None]:
    """A function that starts a program and stops it where its parser has taken the arguments."""

    def start(program: Callable[[], object], argv: list[str]) -> None:
        with monkeypatch.context() as patch:
            for name in ("parse_args", "parse_intermixed_args"):
                original = getattr(argparse.ArgumentParser, name)

                def stop(self: Any, *args: Any, original: Any = original, **options: Any) -> None:
                    original(self, *args, **options)
                    raise Parsed

                patch.setattr(argparse.ArgumentParser, name, stop)
            patch.setattr(sys, "argv", argv)
            with pytest.raises(Parsed):
                program()

    return start


def shipped(config: str) -> bool:
    """Whether it is a configuration of this repository, not a placeholder."""
    with contextlib.suppress(UserError):
        return find_config(config).is_file()
    return False


def check_torchrun(words: list[str], read: Any) -> None:
    """The launcher's own options, then what it launches."""
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args(words)
    program, arguments = options.training_script, list(options.training_script_args)
    if options.no_python:
        check(program, arguments, read)
    elif program != "examples/grpo_fp8.py":
        check("python", [program, *arguments], read)
    elif shipped(arguments[0]):
        launch.main([*arguments, *([] if "--dry-run" in arguments else ["--dry-run"])])
    else:
        read(launch.main, [program, *arguments])


def check_python(words: list[str], read: Any) -> None:
    """A module or a script; run if that is cheap."""
    if (script := FRAMEWORKS.match(words[0])) is not None:
        assert (ROOT / script[1]).is_file(), words[0]
        assert all((ROOT / word).is_file() for word in words if word.startswith("conf/")), words
    elif words[0] == "-c":
        compile(words[1], "docs", "exec")
    elif words[:2] == ["-m", "venv"]:
        assert len(words) == 3
    elif words[0] == "-m":
        read(lambda: runpy.run_module(words[1], run_name="__main__"), words[1:])
    elif {"--help", "--dry-run"} & set(words):
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=120)
    else:
        assert (ROOT / words[0]).is_file(), words[0]
        read(lambda: runpy.run_path(str(ROOT / words[0]), run_name="__main__"), words)


def check_pip(words: list[str]) -> None:
    """Only this project, its extras and its constraints."""
    assert words.pop(0) == "install"
    extras = PYPROJECT["project"]["optional-dependencies"]
    for option, value in zip(words, [*words[1:], ""], strict=True):
        if option == "-c":
            assert (ROOT / value).is_file()
        elif (found := re.fullmatch(r"(?:\.|megatron-calclip)(?:\[([\w,]+)\])?", option)) is not None:
            assert not found[1] or set(found[1].split(",")) <= set(extras), option


def check_pytest(words: list[str]) -> None:
    """Markers and paths that exist."""
    markers = {marker.partition(":")[0] for marker in PYPROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    for option, value in zip(["", *words], words, strict=False):
        if option == "-m":
            assert set(re.findall(r"\w+", value)) - {"not", "and", "or"} <= markers, value
        elif "/" in value:
            assert (ROOT / value.partition("::")[0]).exists(), value


def check_sbatch(words: list[str]) -> None:
    """The script, and its configuration with all overrides."""
    script, config, *overrides = [word for word in words if not word.startswith("--")]
    assert (ROOT / script).is_file()
    load_config(config, overrides)


def check(program: str, words: list[str], read: Any) -> None:
    """Run or read one command."""
    if program == "torchrun":
        check_torchrun(words, read)
    elif program in ("python", "python3"):
        check_python(words, read)
    elif program == "megatron-calclip":
        if words[0] == "--help":
            with pytest.raises(SystemExit) as stop:
                cli.main(words)
            assert stop.value.code == 0
        elif words[0] == "plan" and shipped(words[1]):
            cli.main(words)
        else:
            read(lambda: cli.main(words), [program, *words])
    elif program == "pip":
        check_pip(words)
    elif program == "pytest":
        check_pytest(words)
    elif program == "sbatch":
        check_sbatch(words)
    elif program in ("cd", "export"):
        pass
    elif program in TOOLS:
        assert not words or words[0] in TOOLS[program], words
    elif program.endswith(".sh"):
        subprocess.run(["bash", "-n", str(ROOT / program)], check=True)
    else:
        assert (program, words) == (".", [".venv/bin/activate"]), f"no rule for this kind of command: {program}"


@pytest.mark.parametrize("command", pages(fenced_commands))
def test_fenced_command(command: Command, read: Any) -> None:
    if any(command.text.startswith(start) for start in MARKED):
        return
    program, *words = command.words
    check(program, words, read)


@pytest.mark.parametrize("command", pages(inline_commands))
def test_names_in_an_inline_command_exist(command: Command) -> None:
    program, *words = re.sub(r"^(?:[A-Z_]+=\S+ )*", "", command.text).split()
    for word in [program, *words]:
        if word.startswith(("tools/", "tests/", "examples/", "conf/", "benchmarks/")):
            assert (ROOT / word.partition("::")[0]).exists(), word
    if program == "megatron-calclip" and words:
        assert words[0] in cli.COMMANDS or words[0] == "--help"
    elif words[:1] == ["-m"] and words[1].startswith("benchmarks"):
        assert (ROOT / words[1].replace(".", "/")).with_suffix(".py").is_file() or words[1] == "benchmarks"
    elif program == "pytest":
        check_pytest(words)


def test_marks_are_used() -> None:
    texts = [command.text for page in PAGES for command in fenced_commands(page)]
    assert all(any(text.startswith(start) for text in texts) for start in MARKED)


def test_commands_are_found() -> None:
    """By hand, so that the search cannot come back empty."""
    readme = [command.text for command in fenced_commands(ROOT / "README.md")]
    assert (
        "torchrun --nproc-per-node 2 examples/grpo_fp8.py conf/tiny_cpu.yaml" in readme
        and "pytest -n 2 --dist loadfile" in readme
    )
    assert Command("", "A=1 python -c 'a b' x").words == ["python", "-c", "a b", "x"]
    inline = [command.text for command in inline_commands(ROOT / "docs" / "scaling.md")]
    assert "python -m benchmarks.calibration" in inline


@pytest.mark.parametrize(
    "text",
    [
        "torchrun --nproc-per-node 2 examples/grpo_fp8.py tiny_cpu train.num_stepz=3",
        "torchrun --no-such-option examples/grpo_fp8.py tiny_cpu",
        "megatron-calclip eval MODEL --sets a --no-such-option",
        "python tools/no_such_file.py",
        "python -m benchmarks --no-such-option",
        "pip install 'megatron-calclip[no_such_extra]'",
        "pytest -m no_such_marker",
        "sbatch examples/slurm/train.sbatch qwen25_32b train.num_stepz=3",
        "rm -r runs",
    ],
)
def test_a_wrong_command_is_noticed(text: str, read: Any) -> None:
    program, *words = Command("", text).words
    with pytest.raises((AssertionError, UserError, SystemExit, pytest.fail.Exception)):
        check(program, words, read)
