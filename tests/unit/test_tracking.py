"""What a run writes: rows, samples, resuming, trackers, and a folder that cannot be written."""

from __future__ import annotations

import importlib.machinery
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from megatron_calclip.config import Config
from megatron_calclip.config_file import config_from_dict, load_config
from megatron_calclip.errors import UserError
from megatron_calclip.tracking import Tracker, profiled


def make_config(run_dir: Path, **tracking: Any) -> Config:
    values = {"tensorboard": False} | tracking
    model = {"shape": {}, "tokenizer": "characters"}
    return config_from_dict({"model": model, "run_dir": str(run_dir), "tracking": values, "train": {"num_steps": 3}})


def rows_of(path: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().split("\n") if line]


def test_rows_samples_and_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config(tmp_path / "deep" / "run")
    run = Path(config.run_dir)
    with Tracker(config, active=True, first_step=0) as tracker:
        tracker.log({"step": 0, "eval/score": 0.25})
        tracker.log({"step": 1, "reward/mean": 0.5, "entropy": 1.25, "grad_norm": math.inf})
        tracker.samples(1, [{"prompt": "1+1=", "completion": "\u2028é"}])
        tracker.samples(2, [])
        assert tracker.first_row == {"step": 0, "eval/score": 0.25} and tracker.last_row["step"] == 1
    # What is not finite is null: JSON has no word for it.
    step_1 = {"step": 1, "reward/mean": 0.5, "entropy": 1.25, "grad_norm": None}
    assert rows_of(run / "metrics.jsonl") == [{"step": 0, "eval/score": 0.25}, step_1]
    assert rows_of(run / "samples.jsonl") == [{"step": 1, "prompt": "1+1=", "completion": "\u2028é"}]
    assert load_config(str(run / "config.yaml")) == config
    assert capsys.readouterr().out.splitlines() == [
        "step 0/3  eval 0.250",
        "step 1/3  reward 0.5  entropy 1.25",
    ]


def test_lines_stay_whole_where_the_output_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = Tracker(make_config(tmp_path), active=True, first_step=0)
    tracker.say("word " * 60 + "[bold]")
    tracker.summary({"metrics": "/long" * 40})
    assert capsys.readouterr().out.splitlines() == ["word " * 60 + "[bold]", "metrics: " + "/long" * 40]


def test_unknown_metric(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rewards/mean"):
        Tracker(make_config(tmp_path), active=True, first_step=0).log({"step": 1, "rewards/mean": 1.0})


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Tracker(make_config(tmp_path / "run"), active=False, first_step=0) as tracker:
        tracker.log({"step": 1})
        tracker.samples(1, [{"prompt": ""}])
        tracker.say("hello")
        tracker.summary({"steps": "1"})
    assert not (tmp_path / "run").exists() and capsys.readouterr().out == ""


def test_resuming_drops_rows_that_come_again_and_what_is_torn(tmp_path: Path) -> None:
    def line(step: int, text: str) -> bytes:
        return (json.dumps({"step": step, "completion": text}, ensure_ascii=False) + "\n").encode()

    # U+2028 and U+0085 end a line for `splitlines`, but not in JSON; the last line broke off within an `é`.
    kept = line(1, "a\u2028b") + line(2, "c\u0085d")
    torn = line(2, "é").split("é".encode())[0] + "é".encode()[:1]
    (tmp_path / "samples.jsonl").write_bytes(kept + line(3, "again") + b"[1]\n" + b"{}\n" + torn)
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    Tracker(make_config(tmp_path), active=True, first_step=2)
    assert (tmp_path / "samples.jsonl").read_bytes() == kept
    assert rows_of(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]


def test_fresh_start_in_a_used_folder_drops_all_rows(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("metrics.jsonl", "samples.jsonl", "calibration.jsonl")]
    for file in files:
        file.write_text('{"step": 0}\n{"step": 1}\n')
    Tracker(make_config(tmp_path), active=True, first_step=0)
    assert [file.read_text() for file in files] == ["", "", ""]


def test_dumps_and_evaluations_of_later_steps_go_too(tmp_path: Path) -> None:
    def folders() -> list[str]:
        return sorted(
            str(path.relative_to(tmp_path)) for name in ("dumps", "eval") for path in (tmp_path / name).iterdir()
        )

    for step in (0, 5, 20, 100):
        (tmp_path / "eval" / f"step_{step}").mkdir(parents=True)
        (tmp_path / "eval" / f"step_{step}" / "report.json").write_text("{}")
        (tmp_path / "dumps").mkdir(exist_ok=True)
        (tmp_path / "dumps" / f"step_{step}.safetensors").write_text("")
    (tmp_path / "eval" / "step_mine").mkdir()
    Tracker(make_config(tmp_path), active=True, first_step=20)
    kept = ["dumps/step_0.safetensors", "dumps/step_20.safetensors", "dumps/step_5.safetensors"]
    assert folders() == [*kept, "eval/step_0", "eval/step_20", "eval/step_5", "eval/step_mine"]
    Tracker(make_config(tmp_path), active=True, first_step=0)
    assert folders() == ["eval/step_mine"]


def test_a_number_that_is_not_finite_is_null_at_any_depth(tmp_path: Path) -> None:
    tracker = Tracker(make_config(tmp_path), active=True, first_step=0)
    tracker.calibration({"step": 5, "report": {"alpha": math.nan, "kept": 1.5}, "table": [[math.inf, 2]]})
    expected = {"step": 5, "report": {"alpha": None, "kept": 1.5}, "table": [[None, 2]]}
    assert rows_of(tmp_path / "calibration.jsonl") == [expected]


@pytest.mark.parametrize("below", ["file/run", "file"])
def test_folder_that_cannot_be_written(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^run_dir: cannot be written") as caught:
        Tracker(make_config(tmp_path / below), active=True, first_step=0)
    assert caught.value.exit_code == 1


def test_disk_that_fails_during_the_run(tmp_path: Path) -> None:
    tracker = Tracker(make_config(tmp_path), active=True, first_step=0)
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"^run_dir: cannot be written"):
        tracker.log({"step": 1})


def test_tensorboard(tmp_path: Path) -> None:
    with Tracker(make_config(tmp_path, tensorboard=True), active=True, first_step=0) as tracker:
        tracker.log({"step": 1, "reward/mean": 0.5})
        tracker.log({"step": 2, "reward/mean": 0.75})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.5), (2, 0.75)]


@pytest.mark.parametrize(("setting", "module"), [("wandb_project", "wandb"), ("mlflow_experiment", "mlflow")])
@pytest.mark.parametrize("active", [True, False])
def test_tracker_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, module: str, active: bool
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == module else importlib.machinery)
    complaint = rf"^tracking\.{setting}: needs {module}: pip install 'megatron-calclip\[{module}\]'"
    with pytest.raises(UserError, match=complaint):
        Tracker(make_config(tmp_path, **{setting: "x"}), active=active, first_step=0)


def test_wandb_and_mlflow_get_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    run = types.SimpleNamespace(
        define_metric=lambda name, step_metric=None: calls.append((name, step_metric)),
        log=lambda row: calls.append(("wandb", row)),
        finish=lambda: calls.append("finish"),
    )
    wandb, mlflow = types.ModuleType("wandb"), types.ModuleType("mlflow")
    wandb.init = lambda **settings: run  # type: ignore[attr-defined]
    mlflow.set_experiment = lambda name: calls.append(name)  # type: ignore[attr-defined]
    mlflow.start_run = lambda: torch.no_grad()  # type: ignore[attr-defined]  # any context manager
    mlflow.log_metrics = lambda row, step: calls.append(("mlflow", step, row))  # type: ignore[attr-defined]
    for name, module in (("wandb", wandb), ("mlflow", mlflow)):
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    config = make_config(tmp_path, wandb_project="p", mlflow_experiment="e")
    with Tracker(config, active=True, first_step=0) as tracker:
        tracker.log({"step": 1, "reward/mean": 0.5})
    row = {"reward/mean": 0.5}
    assert calls == [
        *(("train/step", None), ("*", "train/step")),
        *("e", ("wandb", {**row, "train/step": 1}), ("mlflow", 1, row), "finish"),
    ]


def test_tensorboard_after_a_rollback(tmp_path: Path) -> None:
    """Steps that are done again replace those before."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Tracker(make_config(tmp_path, tensorboard=True), active=True, first_step=0) as tracker:
        for step, value in ((0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3)):
            tracker.log({"step": step, "reward/mean": value})
        tracker.rewind(1)
        for step, value in ((2, 0.9), (3, 0.9)):
            tracker.log({"step": step, "reward/mean": value})
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    shown = [(event.step, round(event.value, 3)) for event in board.Scalars("reward/mean")]
    assert shown == [(0, 0.0), (1, 0.1), (2, 0.9), (3, 0.9)]


def test_profiler_records_its_window_only(tmp_path: Path) -> None:
    config = make_config(tmp_path, profile={"start_step": 1, "num_steps": 1})
    for step in range(3):
        for active in (True, False):
            with profiled(config, step, active=active):
                torch.zeros(1)
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["step_2.json"]
