"""The command line: one line for a user's error, nothing heavy for help; `replay` against the library it calls."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_calclip import cli
from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.calibration_settings import CalibrationSettings
from megatron_calclip.algorithms.replay import CalibrationDump, replay
from megatron_calclip.commands.replay import AS_RUN, load_dumps, variants
from megatron_calclip.errors import UserError

SETTINGS = CalibrationSettings.robust(min_tail_tokens=3)


def dump_of(step: int, settings: CalibrationSettings = SETTINGS) -> CalibrationDump:
    """Log-normal ratios with FP8 noise, 600 tokens of 30 sequences."""
    random = torch.Generator().manual_seed(step)
    noise = torch.randn(2, 600, generator=random)
    rows = torch.arange(30).repeat_interleave(20)
    return CalibrationDump.pack(
        step=step,
        bounds=settings.start,
        settings=settings,
        weight_scale=1.0,
        minibatch=0,
        update=0,
        ratio8=(0.12 * noise[0] + 0.15 * noise[1]).exp(),
        ratio16=(0.12 * noise[0]).exp(),
        advantages=torch.where(rows % 2 == 0, 1.0, -1.0),
        importance_weights=torch.ones(600),
        loss_weights=torch.ones(600),
        entropy=torch.ones(600),
        response_mask=torch.ones(600, dtype=torch.bool),
        sequence_ids=rows,
    )


def make_run(folder: Path, steps: tuple[int, ...] = (20, 40, 100)) -> Path:
    """A run's folder with dumps."""
    (folder / "dumps").mkdir(parents=True)
    for step in steps:
        dump_of(step).save(folder / "dumps" / f"step_{step}.safetensors")
    return folder


def failure(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int | str | None, str]:
    """Exit status and stderr of a command that fails."""
    with pytest.raises(SystemExit) as stopped:
        cli.main([str(argument) for argument in argv])
    return stopped.value.code, capsys.readouterr().err


def test_help_lists_the_commands_and_imports_no_torch():
    code = "import sys; from megatron_calclip import cli\ntry: cli.main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for name, command in cli.COMMANDS.items():
        assert name in done.stdout
        assert command.summary.split(",")[0] in done.stdout


def test_usage_errors_exit_with_2(capsys):
    for argv in ([], ["nonsense"], ["replay"], ["replay", "x", "--preset", "nonsense"]):
        code, error = failure(capsys, *argv)
        assert code == 2
        assert error.splitlines()[-1].startswith("megatron-calclip")


def test_a_users_error_is_one_line(capsys, monkeypatch):
    def fail(arguments):
        raise UserError("some.setting", "has two\nlines", exit_code=1)

    monkeypatch.setattr("megatron_calclip.commands.replay.run", fail)
    assert failure(capsys, "replay", "x") == (1, "error: some.setting: has two lines\n")


def test_replay_prints_and_writes_what_the_library_finds(tmp_path, capsys):
    folder = make_run(tmp_path / "run")
    json_file, plot_file = tmp_path / "rows.json", tmp_path / "bounds.svg"
    cli.main(
        [
            *("replay", str(folder), "--preset", "paper", "--set", "interval=20,40", "--follow-schedule"),
            *("--json", str(json_file), "--plot", str(plot_file)),
        ]
    )
    table = capsys.readouterr().out
    found = json.loads(json_file.read_text())
    assert found["steps"] == [20, 40, 100]  # by step, not by name
    assert [row["name"] for row in found["settings"]] == [AS_RUN, "paper interval=20", "paper interval=40"]
    dumps = [dump_of(step) for step in (20, 40, 100)]
    expected = replay(dumps, CalibrationSettings.paper(interval=40), follow_schedule=True)
    row = found["settings"][2]
    assert row["num_calibrations"] == 1
    assert row.items() >= expected.as_row().items()
    assert row["calibrations"] == [report.as_row() for report in expected.reports]
    assert f"{row['next_lower_multiple']:.2f}" in table
    assert "interval=40" in table
    assert "<svg" in plot_file.read_text()


def test_plot_shows_each_bound_after_its_calibration(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "run")
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path: figures.append(figure))
    cli.main(["replay", str(folder), "--plot", str(tmp_path / "bounds.png")])
    upper, lower = figures[0].axes
    reports = replay(load_dumps([folder]), SETTINGS).reports
    assert lower.lines[0].get_xdata().tolist() == [20, 40, 100]
    assert lower.lines[0].get_ydata().tolist() == [report.lower.after for report in reports]
    assert upper.lines[0].get_ydata().tolist() == [report.upper.after for report in reports]


def test_variants_are_all_combinations():
    own = replace(SETTINGS, interval=5, reference=ClipBounds(0.8, 1.28))
    found = variants(own, ["paper"], ["grid_lower=0.5:0.9:0.02,0.2:0.9:0.02", "balance_ratio_cap=null,2"])
    assert list(found) == [
        AS_RUN,
        "paper grid_lower=0.5:0.9:0.02 balance_ratio_cap=null",
        "paper grid_lower=0.5:0.9:0.02 balance_ratio_cap=2",
        "paper grid_lower=0.2:0.9:0.02 balance_ratio_cap=null",
        "paper grid_lower=0.2:0.9:0.02 balance_ratio_cap=2",
    ]
    assert found[AS_RUN] == own
    assert list(found.values())[3] == CalibrationSettings.paper("dapo", grid_lower=(0.2, 0.9, 0.02))
    changes = ["start=0.8:1.24", "hold_unsolvable=false", "schedule=drift", "delta_lower=0.02"]
    (_, changed) = variants(own, [], changes).values()
    assert changed == replace(
        own, start=ClipBounds(0.8, 1.24), hold_unsolvable=False, schedule="drift", delta_lower=0.02
    )
    assert list(variants(own, [], [])) == [AS_RUN]
    # A preset has its own start: the run's may lie outside the preset's grid.
    low = replace(own, grid_lower=(0.2, 0.9, 0.02), start=ClipBounds(0.4, 1.8))
    assert variants(low, ["paper"], [])["paper"] == CalibrationSettings.paper("dapo")
    sequences = CalibrationSettings.robust("gspo")
    assert variants(sequences, ["paper"], [])["paper"] == CalibrationSettings.paper("gspo")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("intervall=5", "--set: 'intervall' is no setting of `calibration`; did you mean interval?"),
        ("interval", "--set: 'interval' gives no values; write interval=V1,V2"),
        ("interval=5,", "--set: 'interval=5,' gives no values"),
        ("interval=soon", "calibration.interval: 'soon' is no value of it"),
        ("interval=0", "calibration.interval: 0 is not allowed; choose at least 1"),
        ("delta_lower=inf", "calibration.delta_lower: 'inf' is no value of it: give 1 finite number"),
        ("start=0.8", "calibration.start: '0.8' is no value of it: give 2 finite number"),
        ("start=1.8:0.6", "calibration.start: '1.8:0.6' is no value of it: clip bounds [1.8, 0.6] do not enclose"),
        ("hold_unsolvable=maybe", "calibration.hold_unsolvable: 'maybe' is no value of it: choose true or false"),
        ("schedule=often", "calibration.schedule: often is not allowed"),
        ("interval=" + ",".join(map(str, range(1, 300))), "--set: 299 combinations are more than 200"),
    ],
)
def test_wrong_changes_are_named(change, message):
    with pytest.raises(UserError) as error:
        variants(SETTINGS, [], [change])
    assert str(error.value).startswith(message)


def test_dumps_that_cannot_be_replayed_are_named(tmp_path, capsys):
    run, other = make_run(tmp_path / "run"), make_run(tmp_path / "other")
    empty, damaged = tmp_path / "empty", tmp_path / "damaged.safetensors"
    empty.mkdir()
    damaged.write_bytes((run / "dumps" / "step_20.safetensors").read_bytes()[:-1])
    file = run / "dumps" / "step_20.safetensors"
    for paths, message in (
        ([tmp_path / "none"], f"{tmp_path / 'none'}: there is no such file"),
        ([empty], f"{empty}: holds no calibration dumps; set calibration.dump=true"),
        ([damaged], f"{damaged}: not a calibration dump"),
        ([run, other], f"{other / 'dumps'}, {run / 'dumps'}: these dumps are of several runs"),
    ):
        code, error = failure(capsys, "replay", *paths)
        assert code == 2
        assert error.startswith(f"error: {message}")
        assert error.count("\n") == 1
    # A file that is named twice counts once; a copy under another name does not pass.
    assert [dump.step for dump in load_dumps([file, run])] == [20, 40, 100]
    (run / "dumps" / "copy.safetensors").write_bytes(file.read_bytes())
    code, error = failure(capsys, "replay", run)
    assert (code, error) == (
        2,
        f"error: {run / 'dumps'}: step 20 is there twice; keep the dumps of one run in a folder\n",
    )
    sequence_mode = CalibrationSettings.robust("gspo")
    dump_of(30, sequence_mode).save(run / "dumps" / "copy.safetensors")
    assert "dumped in modes 'token' and 'sequence'" in failure(capsys, "replay", run)[1]


def test_options_that_cannot_be_used_are_named(tmp_path, capsys, monkeypatch):
    run = make_run(tmp_path / "run")
    late = failure(capsys, "replay", run, "--set", "start_step=1000", "--follow-schedule")
    assert late == (2, "error: start_step=1000: calibrates on none of 3 dumps; relax the schedule\n")
    code, error = failure(capsys, "replay", run, "--json", tmp_path / "none" / "rows.json")
    assert code == 1
    assert error.startswith("error: --json: ") and "No such file or directory" in error
    assert "names no picture" in failure(capsys, "replay", run, "--plot", "bounds.gif")[1]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, error = failure(capsys, "replay", run, "--plot", "bounds.png")
    assert (code, error) == (
        2,
        "error: --plot: needs matplotlib: pip install 'megatron-calclip[plot]', or leave --plot out\n",
    )
