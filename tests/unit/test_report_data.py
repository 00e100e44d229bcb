"""Reading run folders: damaged, unfinished, empty and odd ones."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
from pathlib import Path

import pytest
from report_runs import calibration_row, metrics_row, write_run

from megatron_calclip.config_file import config_from_dict
from megatron_calclip.errors import UserError
from megatron_calclip.report_data import MAX_RUNS, labels, load_runs, number
from megatron_calclip.tracking import Tracker
from megatron_calclip.versions import versions


def test_a_whole_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [metrics_row(1), metrics_row(2)], calibrations=[calibration_row(2)])
    for step, value in ((10, 0.5), (2, 0.25)):
        place = folder / "eval" / f"step_{step}"
        place.mkdir(parents=True)
        report = {"sets": [{"name": "sums", "estimates": {"avg@4": {"value": value, "low": 0.1, "high": 0.9}}}]}
        (place / "report.json").write_text(json.dumps(report))
    (folder / "eval" / "step_20").mkdir()  # it did not end
    (run,) = load_runs([folder])
    assert (run.label, run.num_steps, run.notes) == ("run", 2, ())
    assert run.points("reward/mean") == ((1, 0.1), (2, 0.2)) and run.points("no") == ()
    assert [row["step"] for row in run.calibrations] == [2]
    assert [(one.step, one.sets["sums"]["avg@4"]["value"]) for one in run.evaluations] == [(2, 0.25), (10, 0.5)]
    assert run.config == {"train.num_steps": "9", "train.lr": "[1, 2]", "run_dir": "x"}
    assert run.versions == {"torch": "2.13"}


def test_what_cannot_be_used_becomes_a_note(tmp_path: Path) -> None:
    lines = [
        metrics_row(2, **{"reward/mean": None}),
        '{"step": 1, "reward/mean": NaN, "entropy": 1e999}\n',
        "[1]\n",
        '{"step": true}\n{"step": "3"}\n{"step": -1}\n',
        f'{{"step": 4, "entropy": {"9" * 400}, "loss": "x", "kl/k3": true}}\n',
        "[" * 100_000 + "\n",
        metrics_row(2, entropy=7.0),
        '{"step": 5, "rew',
    ]
    folder = write_run(tmp_path / "run", lines, config="- a\n")
    (folder / "versions.json").unlink()
    bad = folder / "eval" / "step_3"
    bad.mkdir(parents=True)
    (bad / "report.json").write_text('{"sets": 3}')
    (run,) = load_runs([folder])
    assert [row["step"] for row in run.rows] == [1, 2, 4]
    assert run.points("reward/mean") == ((1, None), (2, 0.2))
    assert run.points("entropy") == ((1, None), (2, 7.0), (4, None))
    assert run.values("entropy") == [7.0] and run.values("loss") == run.values("kl/k3") == []
    assert run.notes == (
        "metrics.jsonl: 6 of 10 lines left out, no rows (the run writes, or was killed)",
        "metrics.jsonl: 1 steps came again; the last row of each counts",
        "calibration.jsonl is not there",
        "eval/step_3/report.json is no report of an evaluation",
        "config.yaml holds no settings",
        "versions.json is not there",
    )


def test_a_run_without_steps_is_noted_beside_others(tmp_path: Path) -> None:
    empty = write_run(tmp_path / "empty", config=None)
    with pytest.raises(UserError, match=r"RUN: no step in metrics\.jsonl yet"):
        load_runs([empty])
    runs = load_runs([empty, write_run(tmp_path / "run", [{"step": 1}])])
    assert runs[0].notes == ("metrics.jsonl is not there", "no step yet", "config.yaml is not there")
    assert runs[0].num_steps == 0
    assert runs[1].notes == ()  # it measured nothing, so that it has no calibrations


@pytest.mark.parametrize(
    "config", ["a: [", "{{}: 1}", "a: &x [*x]", "a: &x {b: *x}", "a: [{2000-01-01: 1}]", "\x00", "3"]
)
def test_settings_that_are_none(tmp_path: Path, config: str) -> None:
    (run,) = load_runs([write_run(tmp_path / "run", [{"step": 1}], config=config)])
    assert "config.yaml holds no settings" in run.notes and run.config == {}


def test_labels_are_the_shortest_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert labels([Path("a"), Path("x/b/"), Path(".")]) == ["a", "b", tmp_path.name]
    assert labels([Path("x/run"), Path("y/run"), Path("y/b")]) == ["x/run", "y/run", "y/b"]
    with pytest.raises(UserError, match="given twice"):
        labels([Path("x"), Path("y"), Path("./y/../x")])


def test_errors_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="RUN: no folder"):
        load_runs([tmp_path / "absent"])
    with pytest.raises(UserError, match="cannot be told apart"):
        load_runs([tmp_path / str(index) for index in range(MAX_RUNS + 1)])


def test_numbers() -> None:
    assert [number(value) for value in (1, -2.5, True, "1", None, float("nan"), float("-inf"), 10**400, 1e301)] == [
        1.0,
        -2.5,
        *[None] * 7,
    ]


def test_what_the_tracker_writes_is_read(tmp_path: Path) -> None:
    model = {"shape": {}, "tokenizer": "characters"}
    values = {"model": model, "run_dir": str(tmp_path / "run"), "tracking": {"tensorboard": False}}
    with Tracker(config_from_dict(values), active=True, first_step=0) as tracker:
        tracker.log({"step": 1, "entropy": 1.5, "grad_norm": math.inf})
        tracker.calibration({"step": 1, "report": None, "log": (), "attribution": {}})
    (run,) = load_runs([tmp_path / "run"])
    assert run.points("entropy") == ((1, 1.5),) and run.points("grad_norm") == ((1, None),)
    assert len(run.calibrations) == 1 and run.config["tracking.tensorboard"] == "false"
    assert run.versions == versions() and run.notes == ()
    assert (run.versions["torch"], run.versions["python"]) == (
        importlib.metadata.version("torch"),
        platform.python_version(),
    )
    assert all(name in ("megatron_calclip", "python") or importlib.metadata.version(name) for name in run.versions)
