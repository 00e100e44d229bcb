"""The wheel: it is built, and what is in it is found by name without the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
from pathlib import Path
import megatron_calclip
from megatron_calclip import cli
from megatron_calclip.config_file import find_config, load_config

site = Path(sys.argv[1])
assert Path(megatron_calclip.__file__).is_relative_to(site), megatron_calclip.__file__
assert find_config("tiny_cpu") == site / "megatron_calclip" / "conf" / "tiny_cpu.yaml"
load_config("paper/qwen3_8b_grpo_rowwise_calibrated")  # extends another file
cli.main(["plan", "qwen25_32b"])  # takes conf/hf
cli.main(["--help"])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl"))


def test_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next(name for name in names if name.endswith("dist-info/entry_points.txt"))
        assert "megatron-calclip = megatron_calclip.cli:main" in archive.read(metadata).decode()
    expected = {f"megatron_calclip/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*") if path.is_file()}
    assert any("conf/nemo_rl/" in name for name in expected) and any("conf/hf/" in name for name in expected)
    expected |= {
        str(path.relative_to(ROOT))
        for path in (ROOT / "megatron_calclip").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "megatron_calclip/py.typed" in expected
    assert {name for name in names if ".dist-info/" not in name} == expected


def test_it_runs_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """Unpacked, with the checkout out of reach; an installation with all dependencies is left to a release."""
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(site)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "fits" in done.stdout and "usage: megatron-calclip" in done.stdout
