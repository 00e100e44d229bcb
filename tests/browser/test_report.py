"""The report in a real browser: it fits a phone and a desktop, follows light and dark, loads nothing, hides runs.

    pytest -m browser tests/browser

The page is put into frames of a page of the test, whose script measures them; the report itself has none. Chromium prints
the result with `--dump-dom`. Skipped where no Chromium is installed (Debian: `apt-get install chromium`).
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_calclip.report_data import load_runs
from megatron_calclip.report_page import page
from megatron_calclip.report_style import DARK, LIGHT

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from report_runs import calibration_row, metrics_row, write_run

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason=f"no browser on PATH (looked for {', '.join(NAMES)})"),
]
PHONE, DESKTOP = 380, 1400
SCHEMES = {"dark": 0, "light": 1}
"""Blink's numbers of them."""

MEASURE = """
const frame = document.createElement('iframe');
frame.style.cssText = 'border: 0; height: 900px; width: ' + WIDTH + 'px';
frame.srcdoc = PAGE;
frame.onload = () => {
  const view = frame.contentWindow, page = frame.contentDocument, root = page.documentElement;
  const colour = (element, name) => view.getComputedStyle(element)[name];
  const all = (selector) => Array.from(page.querySelectorAll(selector));
  const box = (element) => element.getBoundingClientRect();
  const shown = (selector) => all(selector).filter((element) => element.getClientRects().length).length;
  all('details').forEach((element) => { element.open = true; });
  const found = {
    mode: page.compatMode, width: root.scrollWidth, visible: root.clientWidth, columns: new Set(all('figure').map((f) => box(f).left)).size,
    outside: all('svg text, svg path').filter((e) => {
      const own = box(e), frame = box(e.closest('svg'));
      return own.left < frame.left - 3 || own.right > frame.right + 3 || own.top < frame.top - 3 || own.bottom > frame.bottom + 3;
    }).length,
    overlapping: all('figure svg').filter((svg) => {
      const labels = Array.from(svg.querySelectorAll('text')).map(box);
      return labels.some((one, i) => labels.some((other, j) => i < j && one.left < other.right && other.left < one.right
        && one.top + 2 < other.bottom && other.top + 2 < one.bottom));
    }).length,
    smallest: Math.min(...all('svg text').map((e) => box(e).height)),
    scrolling: all('.scroll').filter((e) => e.scrollWidth > e.clientWidth && colour(e, 'overflowX') == 'auto').length,
    paper: colour(page.body, 'backgroundColor'), ink: colour(page.body, 'color'),
    line: colour(page.querySelector('.r0 .line'), 'stroke'), card: colour(page.querySelector('figure'), 'backgroundColor'),
    loaded: view.performance.getEntriesByType('resource').length,
    before: [shown('figure g.r0'), shown('figure g.r1'), shown('tr.r0')],
  };
  page.querySelector('#show0').click();
  found.after = [shown('figure g.r0'), shown('figure g.r1'), shown('tr.r0')];
  document.getElementById('found').textContent = JSON.stringify(found);
};
document.body.append(frame);
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two runs, one with a name that no phone is wide enough for."""
    folder = tmp_path_factory.mktemp("runs")
    measured = [calibration_row(step) for step in (5, 10, 20)]
    config = "model: {hf: /a/rather/long/path/to/some/model/that/somebody/has/somewhere}\ntrain: {num_steps: 40}\n"
    runs = [
        write_run(folder / "vanilla", [metrics_row(step) for step in range(1, 31)], config="train: {num_steps: 30}\n"),
        write_run(
            folder / ("calibrated_" * 9 + "<b>"),
            [metrics_row(step, **{"reward/mean": 1e6 * step}) for step in range(1, 41)],
            calibrations=measured,
            config=config,
        ),
    ]
    return page(load_runs(runs))


def measure(report: str, folder: Path, *, width: int, scheme: str) -> dict[str, Any]:
    """What the browser says of a page in a window of some width."""
    script = MEASURE.replace("WIDTH", str(width)).replace("PAGE", json.dumps(report).replace("</", "<\\/"))
    place = folder / "measure.html"
    place.write_text(f'<!doctype html><meta charset="utf-8"><body><pre id="found"></pre><script>{script}</script>')
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        "--headless",
        "--disable-gpu",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
        f"--user-data-dir={folder / 'profile'}",
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--window-size={width + 50},1000",
        "--virtual-time-budget=10000",
        "--dump-dom",
        place.as_uri(),
    ]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r'<pre id="found">(.*?)</pre>', shown, re.DOTALL)
    assert found is not None and found[1], "the page's script did not end"
    measured: dict[str, Any] = json.loads(html.unescape(found[1]))
    return measured


def luminance(colour: str) -> float:
    channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_report(report: str, tmp_path: Path, width: int, scheme: str) -> None:
    found = measure(report, tmp_path, width=width, scheme=scheme)
    assert found["mode"] == "CSS1Compat" and found["loaded"] == 0
    # The page is no wider than the window; what is wider scrolls within itself.
    assert found["width"] <= found["visible"] <= width
    assert (found["scrolling"] > 0) == (width == PHONE)
    assert found["columns"] == (1 if width == PHONE else 3)
    assert found["outside"] == 0 and found["overlapping"] == 0
    assert found["smallest"] >= 10
    # Dark is dark, and everything can be read on it.
    paper, card = luminance(found["paper"]), luminance(found["card"])
    assert (paper < 0.05) == (card < 0.05) == (scheme == "dark")
    for name, ground, least in (("ink", paper, 7), ("line", card, 3)):
        dark, light = sorted((luminance(found[name]), ground))
        assert (light + 0.05) / (dark + 0.05) >= least
    expected = (DARK if scheme == "dark" else LIGHT)[0]
    assert [int(part) for part in re.findall(r"\d+", found["line"])] == list(bytes.fromhex(expected[1:]))
    # The box of the first run hides it, and nothing of the other.
    first, second, rows = found["before"]
    assert first > 5 and second > 5 and rows > 0
    assert found["after"] == [0, second, 0]
