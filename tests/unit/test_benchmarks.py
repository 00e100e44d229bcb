"""`python -m benchmarks` on stand-ins: what a result says, the table, its place for the GPU, and the exit status."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as runner
from benchmarks import regime, results
from benchmarks.results import Result, environment, read_results, write_report

STUB = """
import argparse
from pathlib import Path
from benchmarks.results import Result, write_report

parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true")
parser.add_argument("--output", type=Path)
parser.add_argument("--goal", type=float)
parser.add_argument("--status", type=int, default=0)
parser.add_argument("--silent", action="store_true")
arguments = parser.parse_args()
if not arguments.silent:
    ratios = [2.0] if arguments.quick else [1.0, 2.0, 4.0]
    write_report(arguments.output, [Result.of("a case", "a peer", "x speed", ratios, goal=arguments.goal)], extra=7)
raise SystemExit(arguments.status)
"""


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Benchmarks that meet a goal, miss one (and say so by their status), and fail; the folder for results."""
    (tmp_path / "stub_benchmark.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    stub = "stub_benchmark"
    benchmarks = {
        "good": runner.Benchmark((stub, "--goal", "1.5")),
        "missed": runner.Benchmark((stub, "--goal", "3", "--status", "1"), quick=False),
        "broken": runner.Benchmark((stub, "--silent", "--status", "3"), quick=False),
    }
    monkeypatch.setattr(runner, "BENCHMARKS", benchmarks)
    return tmp_path / "results"


def row(page: str, name: str) -> list[str]:
    line = next(line for line in page.splitlines() if line.startswith(f"| {name} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_result_by_hand() -> None:
    faster = Result.of("step", "TRL", "x speed", [3.0, 1.0, 1.5], goal=1.5)
    assert (faster.ratio, faster.spread, faster.met) == (1.5, (1.0, 3.0), True)
    assert Result.of("a", "b", "x speed", [1.4], goal=1.5).met is False
    assert Result.of("a", "b", "x time", [1.4], goal=1.5, better="lower").met is True
    assert Result.of("a", "b", "x time", [1.6], goal=1.5, better="lower").met is False
    shown = Result.of("a", "b", "x speed", [2.0])
    assert shown.met is None and shown.spread is None


def test_a_report_is_read_back(tmp_path: Path) -> None:
    results = [Result.of("a", "b", "x speed", [1.0, 2.0], goal=1.0), Result("c", "d", "x time", 0.5)]
    write_report(tmp_path / "new" / "one.json", results, detail=[1])
    report = json.loads((tmp_path / "new" / "one.json").read_text())
    assert read_results(report) == results and report["detail"] == [1]
    assert set(report["environment"]) == set(environment())


def test_table(stubs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["--output", str(stubs)]) == 1
    page = (stubs / "table.md").read_text()
    assert capfd.readouterr().out.endswith(page)
    assert row(page, "good") == ["good", "a case", "a peer", "2 x speed", "1 to 4", "at least 1.5", "yes"]
    assert row(page, "missed")[3:] == ["2 x speed", "1 to 4", "at least 3", "no"]
    assert row(page, "broken")[1:] == ["failed with exit status 3", "", "", "", "", "no"]
    assert page.endswith(
        "On a GPU:\n\nnot yet run: `tools/gpu_check.sh WHEELS --output FOLDER/gpu_check.md` measures it\n"
    )
    table = json.loads((stubs / "table.json").read_text())
    assert table["benchmarks"]["good"]["results"][0]["ratio"] == 2.0
    assert table["benchmarks"]["broken"]["error"] == "failed with exit status 3"
    assert table["environment"]["commit"] in page


def test_quick_leaves_the_long_ones_out(stubs: Path) -> None:
    assert runner.main(["--quick", "--output", str(stubs)]) == 0
    page = (stubs / "table.md").read_text()
    assert row(page, "good")[3:5] == ["2 x speed", ""]
    assert "| missed" not in page and "Quick: goals are set for the full sizes." in page


def test_results_are_reused_only_when_asked(stubs: Path) -> None:
    stubs.mkdir()
    write_report(stubs / "good.json", [Result("old", "b", "x speed", 9.0)])
    assert runner.main(["good", "--reuse", "--output", str(stubs)]) == 0
    assert row((stubs / "table.md").read_text(), "good")[1] == "old"
    assert runner.main(["good", "--output", str(stubs)]) == 0
    assert row((stubs / "table.md").read_text(), "good")[1] == "a case"


def test_a_failure_does_not_show_the_file_of_an_earlier_run(stubs: Path) -> None:
    stubs.mkdir()
    write_report(stubs / "broken.json", [Result("old", "b", "x speed", 9.0)])
    assert runner.main(["broken", "--output", str(stubs)]) == 1
    assert "old" not in (stubs / "table.md").read_text()


def test_the_gpus_table_comes_last(stubs: Path) -> None:
    stubs.mkdir()
    (stubs / "gpu_check.md").write_text("H200\n\n| check |\n")
    runner.main(["good", "--output", str(stubs)])
    page = (stubs / "table.md").read_text()
    assert page.endswith("On a GPU:\n\nH200\n\n| check |\n") and "not yet run" not in page


def test_an_unknown_name_is_wrong_usage(stubs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        runner.main(["nothing", "--output", str(stubs)])
    assert stop.value.code == 2 and "known: good, missed, broken" in capsys.readouterr().err


def test_every_benchmark_of_the_package_is_in_the_table() -> None:
    others = {"__init__", "__main__", "picture", "results", "tables", "tables_runs"}
    modules = {path.stem for path in Path(runner.__file__).parent.glob("*.py")} - others
    assert {f"benchmarks.{name}" for name in modules} == {found.command[0] for found in runner.BENCHMARKS.values()}


@pytest.mark.parametrize(("num_tokens", "met"), [(500, True), (499, None)])
def test_a_calibrated_multiple_of_few_tokens_is_not_judged(num_tokens: int, met: bool | None) -> None:
    [result] = regime.compare({"calibrated": {"low_multiple": 1.2, "low_bf16": num_tokens}})
    assert result.ratio == 1.2 and result.met is met


@pytest.mark.parametrize(
    ("moves", "step"),
    [
        ([(0.40, 0.45), (0.45, 0.47), (0.47, 0.47), (0.47, 0.42)], 9),
        ([(0.40, 0.42), (0.42, 0.47), (0.47, 0.45), (0.45, 0.46)], 12),
        ([(0.40, 0.42), (0.42, 0.42, "held"), (0.42, 0.44)], None),
        ([(0.40, 0.45)], None),
    ],
)
def test_settled_is_the_second_calibration_in_a_row_that_hardly_moved(moves: list[Any], step: int | None) -> None:
    rows = [
        {"step": 3 * number, "lower_before": before, "lower_after": after, "lower_status": (*status, "moved")[0]}
        for number, (before, after, *status) in enumerate(moves, 1)
    ]
    assert regime.settled(rows, 0.02) == step


def test_results_of_other_benchmarks_make_a_checkout_no_dirtier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    result, code = tmp_path / "docs" / "measured" / "x.json", tmp_path / "code.py"
    result.parent.mkdir(parents=True)
    result.write_text("1")
    code.write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    result.write_text("2")
    clean = results.commit()
    code.write_text("2")
    assert results.commit() == f"{clean}-dirty" and "dirty" not in clean
