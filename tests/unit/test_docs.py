"""The documentation: every page in the site's navigation, every link and name right, the reference up to date, the site built."""

from __future__ import annotations

import importlib
import importlib.util
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_calclip import cli

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
NAME = re.compile(r"`(megatron_calclip(?:\.\w+)+)`")


def nav_files(entry: Any) -> Iterator[str]:
    """File names anywhere in mkdocs.yml's `nav`."""
    if isinstance(entry, str):
        yield entry
    else:
        for child in entry.values() if isinstance(entry, dict) else entry:
            yield from nav_files(child)


def test_every_page_is_in_the_navigation_once() -> None:
    files = list(nav_files(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(files) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text()) if "://" not in target]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


def test_the_configuration_reference_is_up_to_date() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "make_config_reference.py"))["make_page"]()
    assert made == (DOCS / "configuration.md").read_text(), "run python tools/make_config_reference.py"


def test_the_configuration_reference_by_hand() -> None:
    """Lines that a reader relies on, typed here, so that the generator cannot drift together with its page."""
    page = (DOCS / "configuration.md").read_text()
    for line in (
        "| `parallel.tp` | integer >= 1 | `1` | Tensor-parallel size. |",
        "| `algorithm.clip.lower` | number > 0 and < 1 | `0.8` |",
        "| `rollout.canary_prompts` | integer >= 0 and <= 64 | `4` |",
        "| `rollout.kv_cache` | `auto`, `fp8_e4m3`, `fp8_e5m2` | `auto` |",
        "| `calibration.start` | [number > 0 and < 1, number > 1] or null | `null` |",
        "| `calibration.start` | `[0.6, 1.8]` | `[0.6, 1.8]` |",
        "| `calibration.balance_ratio_cap` | `2` | `none` |",
        "| `rollout.vllm.urls` | list of text | `[]` |",
        "### rollout.vllm\n",
    ):
        assert line in page, line


def test_public_names_exist() -> None:
    names = NAME.findall((DOCS / "api.md").read_text())
    assert len(names) > 30
    for name in names:
        module, _, attribute = name.rpartition(".")
        found = getattr(importlib.import_module(module), attribute, None)
        assert found is not None and found.__module__ == module, name


def test_every_command_is_documented() -> None:
    text = "".join(page.read_text() for page in PAGES)
    missing = [name for name in cli.COMMANDS if f"megatron-calclip {name}" not in text]
    assert not missing


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra `docs`")
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    # Not --quiet: it keeps warnings from being counted.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rollout.vllm.urls" in (tmp_path / "site" / "configuration" / "index.html").read_text()
