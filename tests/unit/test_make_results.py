"""Figures in the documentation: equal to the files of docs/measured, and every way to make them differ is noticed."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import picture, tables, tables_runs
from benchmarks.__main__ import BENCHMARKS
from benchmarks.results import Result, environment
from megatron_calclip.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "make_results.py"
PAGE = (
    "Before <!-- measured: {name} -->\n\nold\n\n<!-- end --> after <!-- measured: dlogp rowwise -->old<!-- end -->.\n"
)


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("make_results", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_results"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["make_results"]


def report(*results: Result, command: str = "python -m benchmarks.rollout", **details: Any) -> dict[str, Any]:
    """What a benchmark writes."""
    origin = environment() | {"command": command}
    return json.loads(json.dumps({"results": [asdict(one) for one in results], "environment": origin, **details}))


SPEED = Result("sampling", "generate", "x speed", 1.376, 1.0, "higher", (1.2, 1.5))
SLOW = Result("loading", "a copy", "x time", 0.63, 0.2, "lower")


@pytest.fixture
def root(tmp_path: Path, tool: ModuleType) -> Path:
    """A checkout of one page and one file, up to date."""
    (tmp_path / "docs" / "measured").mkdir(parents=True)
    (tmp_path / "README.md").write_text("No figures.\n")
    (tmp_path / "docs" / "page.md").write_text(PAGE.format(name="rollout"))
    (tmp_path / "docs" / "measured" / "rollout.json").write_text(json.dumps(report(SPEED, SLOW)))
    assert check(tmp_path) == 1 and run(tmp_path) == 0 and check(tmp_path) == 0
    return tmp_path


def run(root: Path, *options: str) -> int:
    return int(sys.modules["make_results"].main(["--root", str(root), *options]))


def check(root: Path) -> int:
    return run(root, "--check")


def cells(text: str, begin: str) -> list[str]:
    """The cells of a table's line."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {begin} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_pages_are_up_to_date(tool: ModuleType) -> None:
    for path, text in tool.make(ROOT).items():
        assert path.read_text() == text, f"{path.name}: run python tools/make_results.py"


def test_every_block_has_a_place_and_every_picture_is_shown(tool: ModuleType) -> None:
    used = {match["name"] for path in tool.pages(ROOT) for match in tool.MARKER.finditer(path.read_text())}
    assert used == {*tool.BLOCKS, "headlines", "gpu"}
    assert {block.file for block in tool.BLOCKS.values()} == set(tool.COMMANDS)
    assert set(BENCHMARKS) <= set(tool.COMMANDS)
    for name in tool.PICTURES:
        assert f"]({name})" in (ROOT / "README.md").read_text() and (ROOT / name).is_file()


def test_markers_are_in_pairs() -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = path.read_text()
        assert text.count("<!-- measured:") == text.count("<!-- end -->"), path.name


def test_the_script_tells_by_its_status(root: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--root", str(root), "--check"]
    assert subprocess.run(command, cwd=ROOT, timeout=300).returncode == 0
    (root / "docs" / "page.md").write_text(PAGE.format(name="rollout"))
    done = subprocess.run(command, cwd=ROOT, timeout=300, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "docs/page.md is not up to date\n")


def test_a_changed_number_in_the_page_is_noticed(root: Path) -> None:
    page = root / "docs" / "page.md"
    page.write_text(page.read_text().replace("1.38x", "1.39x", 1))
    assert check(root) == 1 and run(root) == 0 and "1.39x" not in page.read_text()


def test_a_changed_number_in_the_file_is_noticed(root: Path) -> None:
    file = root / "docs" / "measured" / "rollout.json"
    file.write_text(file.read_text().replace("1.376", "1.476"))
    assert check(root) == 1 and run(root) == 0
    assert "1.48x" in (root / "docs" / "page.md").read_text()


def test_a_file_that_is_missing_leaves_its_command(root: Path) -> None:
    (root / "docs" / "measured" / "rollout.json").unlink()
    assert run(root) == 0
    text = (root / "docs" / "page.md").read_text()
    assert "\n\nNot measured in this form yet: `python -m benchmarks.rollout`.\n\n<!-- end --> after" in text
    assert "<!-- measured: dlogp rowwise -->not measured yet<!-- end -->." in text


def test_a_picture_is_drawn_and_compared(root: Path) -> None:
    (root / "docs" / "assets").mkdir()
    file = root / "docs" / "measured" / "regime.json"
    file.write_text(json.dumps(report(command="python -m benchmarks.regime", arms=ARMS)))
    drawn = root / "docs" / "assets" / "ratios.svg"
    assert check(root) == 1 and run(root) == 0 and check(root) == 0
    drawn.write_text(drawn.read_text().replace("FP8 clips 6", "FP8 clips 7"))
    assert check(root) == 1


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("rollout", {"environment": {"command": "python -m benchmarks.rollout"}}, "does not say its date, commit"),
        ("rollout", {"results": [], "environment": environment() | {"command": "x --quick"}}, "of a quick run"),
        (
            "rollout",
            {"results": [], "environment": environment() | {"command": "x --runs /a"}},
            "a path of one machine",
        ),
        ("nothing", report(SPEED), "no page shows such a file"),
    ],
)
def test_a_file_that_cannot_be_checked_is_refused(
    root: Path, tool: ModuleType, name: str, change: dict[str, Any], message: str
) -> None:
    (root / "docs" / "measured" / f"{name}.json").write_text(json.dumps(change))
    with pytest.raises(UserError, match=message):
        tool.read_reports(root / "docs" / "measured")
    assert check(root) != 0


def test_an_unknown_block_is_an_error(root: Path, tool: ModuleType) -> None:
    (root / "README.md").write_text(PAGE.format(name="rolout"))
    with pytest.raises(UserError, match="no such block"):
        tool.make(root)


def test_a_table_within_a_line_is_an_error(root: Path, tool: ModuleType) -> None:
    (root / "README.md").write_text("So <!-- measured: rollout --><!-- end -->.\n")
    with pytest.raises(UserError, match="lines of their own"):
        tool.make(root)


def test_a_cell_is_written_in_its_line(root: Path, tool: ModuleType) -> None:
    recipes = [{"recipe": "rowwise", "unmoved": {"mean_abs_dlogp": 0.1984}}]
    file = root / "docs" / "measured" / "diagnose.json"
    file.write_text(json.dumps(report(command="python -m benchmarks.diagnose", layouts={"TP 1": {"recipes": recipes}})))
    assert "after <!-- measured: dlogp rowwise -->0.198<!-- end -->.\n" in tool.make(root)[root / "docs" / "page.md"]


def test_the_gpus_table_is_taken_as_it_is(root: Path, tool: ModuleType) -> None:
    (root / "README.md").write_text(PAGE.format(name="gpu"))
    assert "Not yet run on a GPU: `tools/gpu_check.sh" in tool.make(root)[root / "README.md"]
    (root / "docs" / "measured" / "gpu_check.md").write_text("H200\n\n| check |\n|---|\n")
    assert "-->\n\nH200\n\n| check |\n|---|\n\n<!--" in tool.make(root)[root / "README.md"]


def test_numbers_by_hand() -> None:
    assert [tables.number(value) for value in (0.02334, 1.5, 29.64, 150.4, 1317.3)] == [
        "0.0233",
        "1.50",
        "29.6",
        "150",
        "1317",
    ]
    units = ("x speed", "x time", "of its seconds", "s")
    assert [tables.amount(0.5, unit) for unit in units] == [
        "0.500x",
        "0.500x the time",
        "50.00% of its seconds",
        "0.500 s",
    ]


def test_goals_are_judged_from_the_file() -> None:
    text = tables.comparisons(report(SPEED, SLOW))
    assert cells(text, "sampling") == ["sampling", "generate", "1.38x", "1.20 to 1.50", "at least 1.00x"]
    assert cells(text, "loading") == ["loading", "a copy", "0.630x the time (missed)", "", "at most 0.200x the time"]
    assert text.endswith("Goals met: 1 of 2; the others are marked.")
    assert f"`python -m benchmarks.rollout`, {environment()['date']}, commit `{environment()['commit']}`" in text
    assert tables.comparisons(report(SPEED)).endswith("Goals met: 1 of 1.")


def test_peers_are_columns() -> None:
    cases = [
        Result("step, a", "trl", "x speed", 1.4, 1.5),
        Result("step, a", "sorted", "x speed", 1.1),
        Result("step, b", "trl", "x speed", 1.6, 1.5),
        Result("step, b", "sorted", "x speed", 0.9),
    ]
    text = tables.by_peer(report(*cases))
    assert cells(text, "a") == ["a", "1.40x (missed)", "1.10x", "at least 1.50x"]
    assert cells(text, "b") == ["b", "1.60x", "0.900x", "at least 1.50x"]


def test_precision_by_hand() -> None:
    row = {"model": "4M", "recipe": "rowwise", "step": 1.3, "step_goal": 1.35, "shadow": 1.2, "shadow_goal": 1.1}
    rows = [row | {"fp8_param": False}, row | {"fp8_param": True, "step": 1.4, "shadow_goal": None}]
    text = tables.precision(report(rows=rows, tokens=2048))
    assert cells(text, "rowwise")[1:] == [
        "1.30x",
        "1.40x (missed)",
        "at most 1.35x",
        "1.20x (missed)",
        "1.20x",
        "at most 1.10x",
    ]


ARMS = {
    "vanilla": {
        "low_fp8": 50,
        "low_bf16": 10,
        "low_multiple": 5.0,
        "low_multiple, seed 0": 4.0,
        "low_multiple, seed 1": 6.0,
    },
    "calibrated": {
        **{"low_fp8": 12, "low_bf16": 10, "low_multiple": 1.2, "low_multiple, replayed at the references": 4.5},
        **{
            "low_multiple, replayed on the paper's grid": 2.0,
            "L by status on the paper's grid": {"edge": 3, "held": 1},
        },
        **{"H by status": {"held": 4}, "balance at the new bounds, largest error": 0.0123, "L, seed 0": [0.4, 0.38]},
        **{"settled after step, seed 0": 9, "settled after step, seed 1": None},
        "ratios of A < 0": {
            **{"edges": [0.1, 0.5, 0.8, 1.0, 3.0], "fp8": [6, 14, 100, 4], "bf16": [1, 4, 110, 2], "seed": 0},
            **{"reference": [0.8, 1.24], "bounds": [0.5, 1.8]},
            **{"fp8 under the reference": 20, "bf16 under the reference": 5, "fp8 under the bound": 6},
        },
    },
    "bf16": {"multiples": 8, "all_exactly_one": True},
}


def test_regime_by_hand() -> None:
    text = tables_runs.regime(report(arms=ARMS))
    assert "| FP8, bounds fixed at the references | 50 / 10 | 5.00 | 4.00, 6.00 |" in text
    assert (
        "L settled in 1 of 2 seeds, which alone count above, and ended at 0.38; on the paper's grid it was edge in 3, held in 1 calibrations."
        in text
    )
    assert "within 1.2% of BF16's. Without FP8 all 8 multiples are exactly 1." in text


def test_the_picture_holds_the_counts() -> None:
    drawn = picture.ratios(report(arms=ARMS))
    root = ElementTree.fromstring(drawn)
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"fixed L = 0.8", "FP8 clips 20, BF16 5", "calibrated L = 0.5", "FP8 clips 6"} <= set(words)
    assert not re.search(r"<script|href|url\(", drawn) and "prefers-color-scheme: dark" in drawn
    bars = root.findall("{http://www.w3.org/2000/svg}path")[0].attrib["d"]
    heights = sorted({float(point.split()[1]) for point in bars.removesuffix(" Z").removeprefix("M").split(" L")})
    assert heights[0] == pytest.approx(picture.place_y(110, 1.6 * 110), abs=0.1)
    assert picture.place_x(picture.LOW) == picture.LEFT and picture.place_x(picture.HIGH) == pytest.approx(
        picture.RIGHT
    )


def test_tiny_run_by_hand() -> None:
    seed = {"seed": 3, "steps": 60, "start": {"score": 0.2, "stderr": 0.03}, "end": {"score": 0.7, "stderr": 0.04}}
    seed |= {"gain": 0.5, "standard_errors": 10.0, "seconds_to_first_step": 43.2, "seconds": 98.7}
    text = tables_runs.tiny_run(report(seeds=[seed]))
    found = ["3", "0.200 +- 0.030", "0.700 +- 0.040", "0.500 (10.0 standard errors)", "43", "99"]
    assert cells(text, "3") == found and "after 60 steps" in text


def test_faults_and_plan_by_hand() -> None:
    def test_of(name: str, outcome: str = "passed", **found: Any) -> dict[str, Any]:
        return {"test": f"tests/x.py::{name}", "outcome": outcome, "seconds": 1.0, **found}

    kill = "test_a_killed_rank_costs_nothing"
    rows = [
        test_of(f"{kill}[a]", stage="sync", step=2, seconds_to_end=30.4),
        test_of(f"{kill}[b]", stage="sync", step=4, seconds_to_end=41.0),
        test_of(f"{kill}[c]", "failed", stage="eval", step=2),
        test_of("test_a_dead_rank_ends_all", seconds_to_end=8.2),
        test_of("test_a_signal_saves_and_leaves[workers]", seconds_to_leave=17.0),
    ]
    text = tables_runs.faults(report(tests=rows))
    assert "2 of 3 killed runs" in text and "in 30 to 41 s" in text and "4 of 5 tests passed" in text
    assert (
        "| sync | 2 | 2, 4 | 30, 41 |" in text
        and "within 8 s; after a signal the run had saved and left within 17 s" in text
    )

    ranks = [
        {
            "case": case,
            "rank": 0,
            "parameters": 10**6 * size,
            **dict.fromkeys(("update", "log-probs", "shadow", "held", "FLOPs"), ratio),
        }
        for case, size, ratio in (("TP2", 2, 0.95), ("PP2", 3, 1.07))
    ]
    text = tables_runs.plan(report(tests=[test_of("test_parameters_bytes_and_flops[1]", rows=ranks)]))
    assert "2 ranks of 2 cases, 2.0M to 3.0M" in text
    assert cells(text, "FLOPs of an update")[1:] == ["0.950 (TP2)", "1.070 (PP2)", "within 5%"]


def test_diagnosis_by_hand() -> None:
    def shares(outside: float) -> dict[str, float]:
        return {"outside": outside, "clipped": outside / 2, "low_negative": 0.11, "high_positive": 0.12}

    def update(lr: float, amplification: float) -> dict[str, Any]:
        noise = {"lr": lr, "nmae_p": 0.08, "nmae_r": 0.17, "amplification": amplification}
        return noise | {"fp8": shares(0.25), "bf16": shares(0.0125)}

    recipe = {
        **{"recipe": "tensorwise", "unmoved": {"mean_abs_dlogp": 0.2027, "p95_abs_dlogp": 0.674, "nmae_p": 0.5}},
        **{"updates": [update(4e-8, 9.0), update(4e-7, 2.125)], "repeated": shares(0.0), "floor": shares(0.3)},
        "layers": {"mean_abs_dlogp": 0.2, "edges_bf16": 0.18, "one_layer": [0.05, 0.01, 0.07, 0.06]},
    }
    layout = {
        "bounds": [0.8, 1.2],
        "num_sequences": 24,
        "num_tokens": 2621,
        "recipes": [recipe],
        "bf16_floor": shares(0.011),
    }
    seconds = Result("all recipes, one process", "no peer", "s", 700.0, 600.0, "lower")
    given = report(seconds, layouts={"TP 1": layout, "PP 2": layout})
    text = tables_runs.diagnose_recipes(given)
    found = ["0.203 / 0.67", "8.0%", "17.0%", "2.12", "2.90", "25.0%", "12.5%", "11.0%", "12.0%"]
    assert cells(text, "tensorwise")[1:] == found and cells(text, "BF16")[-4:] == ["1.2%", "0.6%", "11.0%", "12.0%"]
    assert "took 700 s (missed), asked at most 600 s." in text
    assert cells(tables_runs.diagnose_updates(given), "4e-08") == ["4e-08", "9.00", "1.2%"]
    assert cells(tables_runs.diagnose_layouts(given), "PP 2") == ["PP 2", "0.2027, 2.12", "1.2%"]
    floor = cells(tables_runs.diagnose_floor(given), "tensorwise")
    assert floor[1:] == ["0.0%", "30.0%", "10%", "3: 0.070, 4: 0.060, 1: 0.050"]


def test_seconds_and_rates_by_hand() -> None:
    row = {"title": "forward", "dtype": "bf16", "time_share": 0.1, "max_time_share": 0.2, "memory_share": 0.02}
    row |= {"max_memory_share": 0.05, "error": 2e-6, "met": False}
    text = tables.logprobs(report(summary=[row], tokens=8, vocab=1000))
    assert cells(text, "forward")[2:] == ["10.00x (asked 5.00x)", "2.0% (asked 5%)", "2.0e-06", "missed"]

    rate = {"gb_per_second": 0.16, "copy_gb_per_second": 1.2, "ratio": 0.1333}
    summary = {"bytes": 1.06e9, "largest_tensor": 1.5e8, "peak_limit": 1.4e9, "stream TP2": rate}
    summary |= {
        "hf_to_megatron --tp 2 --pp 2": rate | {"peak_bytes": 1.5e9},
        "megatron_to_hf": rate | {"peak_bytes": 6e8},
    }
    text = tables.weights(report(summary=summary))
    assert cells(text, "hf_to_megatron --tp 2 --pp 2")[1:] == ["0.160", "1.200", "0.13", "1.50 GB (missed)"]
    assert cells(text, "megatron_to_hf")[-1] == "0.60 GB" and cells(text, "stream TP2")[-1] == ""

    run = {"ours_per_second": 640.2, "peer_per_second": 231.52, "ours_accuracy": 1.0, "peer_accuracy": None}
    speed = Result("math rewards, ordinary", "math-verify", "x speed", 1.5, 1.6, "higher", (1.0, 2.0))
    text = tables.rewards(report(speed, runs={"ordinary": [run]}, answers=2000, num_workers=2, timeout_seconds=2))
    found = ["640", "231.5", "1.50x (missed) (1.00 to 2.00)", "at least 1.60x", "100.00%", "never ended"]
    assert cells(text, "ordinary")[1:] == found

    run = {name: {"num_bytes": count} for name, count in (("ours, no bootstrap", 2728), ("ours, bootstrap", 271528))}
    assert tables.calibration_bytes(report(runs=[run])) == "2,728, with bootstrap replicates 271,528"


def test_recorded_figures_by_hand() -> None:
    tests = [
        {"test": "a", "outcome": "passed", "seconds": 3.0, "update, ms": [116.2, 71.0], "nats": 0.0634},
        {"test": "b", "outcome": "skipped", "seconds": 1.4},
    ]
    text = tables_runs.recorded(report(tests=tests))
    assert "1 passed, 1 skipped, 4 s." in text
    assert cells(text, "update, ms")[1] == "71.0 to 116" and cells(text, "nats")[1] == "0.0634"


def test_study_by_hand() -> None:
    found = {"mean": 0.0438, "half": 0.012, "stderr": 0.003, "seeds": 3}
    arms = {
        "fp8": {"clip/low_negative": found, "overclip low": found | {"mean": 6.431, "half": None}, "eval/score": None}
    }
    text = tables_runs.study(report(arms={"tensorwise": arms}))
    assert cells(text, "fp8") == ["fp8", "3", "-", "-", "4.38 ± 1.2", "6.43", "-", "-"] and "tensorwise" in text


def test_headlines_say_what_is_missing_and_what_is_missed() -> None:
    found = Result("stall, saved in the background", "saved at once", "x time", 0.63, 0.2, "lower")
    text = tables_runs.headlines({"checkpoint": report(found)})
    assert text.count("not measured yet") == len(tables_runs.HEADLINES) - 1
    assert "| a save at once | 0.630x the time (missed) | at most 0.200x the time |" in text
    with pytest.raises(AssertionError, match="no comparison"):
        tables_runs.headlines({"checkpoint": report(SPEED)})


def test_tests_record_what_they_measured(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(
        "import pytest\n\n\ndef test_fast(record_property):\n    record_property('ms', 3.5)\n\n\n"
        "@pytest.mark.skip\ndef test_skipped():\n    pass\n\n\ndef test_wrong():\n    assert False\n"
    )
    output = tmp_path / "new" / "it.json"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-c",
        "/dev/null",
        "--rootdir",
        str(tmp_path),
        "--record",
        str(output),
    ]
    done = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    written = json.loads(output.read_text())
    assert [(row["test"].rpartition("::")[2], row["outcome"]) for row in written["tests"]] == [
        *(("test_fast", "passed"), ("test_skipped", "skipped"), ("test_wrong", "failed"))
    ]
    assert written["tests"][0]["ms"] == 3.5 and "--record" not in written["environment"]["command"]
