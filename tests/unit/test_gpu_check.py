"""`tools/gpu_check.sh` where there is no GPU: what it would run, what it says of mistakes, and every check at tiny sizes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "gpu_check.sh"
TIMEOUT_SECONDS = 600  # a hang is a failure


@pytest.fixture(scope="module")
def gpu_check() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "tools" / "gpu_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu_check"]


def run(*arguments: str, python: str = sys.executable, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        cwd=folder,
        env=kept | {"PYTHON": python, "OMP_NUM_THREADS": "1"},
    )


def test_dry_run_lists_every_check_and_what_is_missing(gpu_check: ModuleType, tmp_path: Path) -> None:
    done = run("--dry-run", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in gpu_check.CHECKS:
        assert f"\n{name}: " in f"\n{done.stdout}"
    assert "missing packages: none" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_missing_packages_are_named(gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "megatron" else find(name))
    assert gpu_check.missing_packages() == ["megatron.core"]  # of a package that is not there no module is looked for


def test_wheels_are_installed_aside_and_options_handed_on(tmp_path: Path) -> None:
    """Wheels come first, as files or folders; what follows belongs to the checks."""
    log, python, wheels = tmp_path / "log", tmp_path / "python", tmp_path / "wheels"
    python.write_text(f'#!/bin/sh\necho "PYTHONPATH=$PYTHONPATH" "$@" >> {log}\n')
    python.chmod(0o755)
    wheels.mkdir()
    for name in ("a.whl", "b.whl", "notes.txt"):
        (wheels / name).touch()
    done = run(str(tmp_path / "megatron_core.whl"), str(wheels), "--tiny", "--only", "gemms", python=str(python))
    assert done.returncode == 0, done.stderr
    install, check = log.read_text().splitlines()
    files = [str(tmp_path / "megatron_core.whl"), str(wheels / "a.whl"), str(wheels / "b.whl")]
    assert "--no-index --no-deps" in install and install.endswith(" ".join(files))
    site = install.split("--target ")[1].split()[0]
    assert check.startswith(f"PYTHONPATH={ROOT}:{site}") and check.endswith("gpu_check.py --tiny --only gemms")
    assert not Path(site).exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = run(folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: there is no GPU; use --tiny or --dry-run\n"


def test_table_by_hand(gpu_check: ModuleType) -> None:
    rows = [
        gpu_check.Row("|dlogp|", "0.1", "at most 1", True),
        gpu_check.Row("b", "2"),
        gpu_check.Row("c", "3", "4", False),
    ]
    assert gpu_check.markdown(rows, "H200") == (
        "H200\n\n| check | measured | expected | |\n|---|---|---|---|\n"
        "| \\|dlogp\\| | 0.1 | at most 1 | holds |\n| b | 2 |  |  |\n| c | 3 | 4 | FAILS |\n"
    )


def test_a_check_that_raises_is_a_row(gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(bench: Any) -> Iterator[Any]:
        yield gpu_check.Row("first", "1", "1", True)
        raise RuntimeError("CUDA error:\n  no kernel image")

    monkeypatch.setitem(gpu_check.CHECKS, "gemms", broken)
    first, last = gpu_check.run_check("gemms", None)
    assert first.holds
    assert last == gpu_check.Row("gemms", "RuntimeError: CUDA error: no kernel image", "no error", False)


def test_a_speed_is_judged_on_a_gpu_alone(gpu_check: ModuleType) -> None:
    class Fake:
        tokens_per_second = {"bf16": 100.0, "tensorwise": 110.0, "rowwise te": 120.0}  # noqa: RUF012
        on_gpu = True

    assert [gpu_check.speedup(Fake, name).holds for name in ("tensorwise", "rowwise te")] == [False, True]
    Fake.on_gpu = False
    assert gpu_check.speedup(Fake, "tensorwise").holds is None


def test_every_check_at_tiny_sizes(gpu_check: ModuleType, tmp_path: Path) -> None:
    """The same code as on a GPU; `torch._scaled_mm` multiplies on a CPU, too."""
    table = tmp_path / "table.md"
    done = run("--tiny", "--output", str(table))
    text = table.read_text()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILS" not in text
    for start in (
        "tensorwise: codes",
        "rowwise: y, dx, dw",
        "learner bf16",
        "learner rowwise over bf16",
        "shadow pass",
    ):
        assert f"| {start}" in text
    assert text.count("| holds |") >= 9
