"""The study's arms are valid configurations, and its tables hold what the runs logged."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from examples.study import __main__ as study  # noqa: E402
from examples.study import search  # noqa: E402
from examples.study.__main__ import CONFIG, folder_of  # noqa: E402
from examples.study.arms import ARMS, RECIPE_OVERRIDES, RECIPES, VARIANTS  # noqa: E402
from examples.study.tables import FIRST_STEP, Run, summarise, write_tables  # noqa: E402
from megatron_calclip.config_file import load_config  # noqa: E402
from megatron_calclip.errors import UserError  # noqa: E402


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_arm_is_a_valid_configuration(recipe: str) -> None:
    for overrides in ARMS.values():
        config = load_config(CONFIG, [f"precision.recipe={recipe}", *RECIPE_OVERRIDES.get(recipe, ()), *overrides])
        assert config.calibration.measure == "every_step"
    assert all(arm in ARMS for variant in VARIANTS.values() for arms in variant.recipes.values() for arm in arms)


def write_run(runs: Path, arm: str, seed: int, *, score: float, fp8: int, bf16: int, moves: bool = False) -> Run:
    folder = folder_of(runs, "tensorwise", arm, seed)
    folder.mkdir(parents=True)
    rows = [{"step": 0, "eval/score": 0.1}]
    for step in range(1, 10):
        early = step < FIRST_STEP  # counts of early steps must not count
        clips = {"clip_fp8/num_low": 1000 if early else fp8, "clip_bf16/num_low": 1 if early else bf16}
        bounds = {"clip/lower": 0.7 + 0.01 * seed if moves and step > 6 else 0.6, "clip/upper": 1.8}
        entropy = 2.0 if step < 4 else 2.5
        rows.append(
            {"step": step, "reward/mean": float(step), "entropy": entropy, "timing/step": 2.0, **bounds, **clips}
        )
    rows[-1] |= {"eval/score": score, "ledger/shadow_seconds": 1.0, "ledger/study_seconds": 8.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Run("tensorwise", arm, seed, folder)


def test_tables_by_hand(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path, "fp8", 0, score=0.5, fp8=30, bf16=10),
        write_run(tmp_path, "fp8", 1, score=0.7, fp8=50, bf16=10),
        write_run(tmp_path, "fp8, calibrated", 0, score=0.6, fp8=10, bf16=0),
    ]
    results = summarise(runs)
    arm = results["arms"]["tensorwise"]["fp8"]
    # Standard error 0.1 of 0.5 and 0.7; Student's t of two values is 12.706.
    assert arm["eval/score"] == pytest.approx({"mean": 0.6, "stderr": 0.1, "half": 1.2706, "seeds": 2})
    assert arm["overclip low"]["mean"] == pytest.approx(4.0) and arm["overclip low"]["seeds"] == 2
    assert arm["reward/mean"]["mean"] == pytest.approx(8.0)  # of the last three steps
    assert (arm["entropy first"]["mean"], arm["entropy"]["mean"], arm["entropy max"]["mean"]) == (2.0, 2.5, 2.5)
    assert arm["shadow time"]["mean"] == pytest.approx(0.1)  # 1 of 18 - 8 seconds
    assert arm["overclip high"] is None and arm["false low"] is None
    lone = results["arms"]["tensorwise"]["fp8, calibrated"]
    assert lone["overclip low"] is None
    assert lone["eval/score"] == {"mean": 0.6, "stderr": None, "half": None, "seeds": 1}
    difference = results["differences"]["tensorwise"]["fp8, calibrated"]["eval/score"]
    assert difference["mean"] == pytest.approx(0.1) and difference["seeds"] == 1  # to the same seed alone
    text = write_tables(results, tmp_path / "tables.md")
    assert "| fp8 | 2 | 0.6 ± 1.3 | 8 ± 0 |" in text and "| fp8, calibrated | 1 | 0.6 |" in text
    assert "*fp8, calibrated* less that of *fp8* 0.1: one seed, which says nothing." in text
    assert "at most 1.25 times that of its first third: no surge" in text
    assert (tmp_path / "tables.md").read_text() == text + "\n"


def test_bounds_over_time_are_the_steps_at_which_they_change(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path, "fp8", 0, score=0.5, fp8=1, bf16=1),
        *(write_run(tmp_path, "fp8, calibrated", seed, score=0.5, fp8=1, bf16=1, moves=True) for seed in (0, 1)),
    ]
    results = summarise(runs)
    assert results["bounds"]["tensorwise"].keys() == {"fp8, calibrated"}
    found = results["bounds"]["tensorwise"]["fp8, calibrated"]
    assert found == {"1": pytest.approx([0.6, 1.8]), "7": pytest.approx([0.705, 1.8])}
    assert "1: [0.6, 1.8], 7: [0.705, 1.8]" in write_tables(results, tmp_path / "tables.md")


def test_a_difference_that_seeds_tell_from_chance(tmp_path: Path) -> None:
    """Differences 0.10, 0.11, 0.12: the interval is 0.11 +- 4.303 * 0.01 / sqrt(3) = 0.025; those of 0, 0.2, 0.4 hold 0."""
    for better, says in (
        ((0.1, 0.1, 0.1), "exactly as much in every seed"),
        ((0.1, 0.11, 0.12), "more than chance"),
        ((0.0, 0.2, 0.4), "no difference"),
    ):
        folder = tmp_path / says
        runs = [write_run(folder, "fp8", seed, score=0.5, fp8=1, bf16=1) for seed in range(3)]
        runs += [
            write_run(folder, "fp8, oracle", seed, score=0.5 + more, fp8=1, bf16=1) for seed, more in enumerate(better)
        ]
        results = summarise(runs)
        assert (
            "*fp8, oracle* less that of *fp8*" in (text := write_tables(results, folder / "tables.md")) and says in text
        )
    half = summarise(runs)["differences"]["tensorwise"]["fp8, oracle"]["eval/score"]["half"]
    assert half == pytest.approx(4.303 * 0.2 / 3**0.5)


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    assert Run.steps_done(tmp_path / "none") == 0
    assert summarise([]) == {"arms": {}, "differences": {}, "bounds": {}, "replays": {}}


@pytest.mark.parametrize("name", search.SETTINGS)
def test_every_setting_of_the_search_is_a_valid_configuration(name: str) -> None:
    for arm in ("fp8", search.ORACLE, "fp8, calibrated", search.WIDE):
        config = load_config(CONFIG, search.overrides_of(search.SETTINGS[name], arm, 1, []))
        assert config.calibration.measure == "every_step" and config.train.num_steps == search.STEPS
        assert (config.algorithm.loss == "oracle") == (arm == search.ORACLE)


def test_the_search_compares_seed_by_seed(tmp_path: Path) -> None:
    """A setting of which no run is complete has no row."""
    first, second = list(search.SETTINGS)[:2]
    folders = []

    def train(_: str, overrides: Sequence[str], folder: Path) -> None:
        folders.append(folder)
        if set(search.SETTINGS[first].overrides) <= set(overrides):
            seed = next(int(one.removeprefix("train.seed=")) for one in overrides if one.startswith("train.seed="))
            score = 0.5 + 0.1 * seed + (0.02 if "algorithm.loss=oracle" in overrides else 0.0)
            rows = [{"step": step, "reward/mean": score, "entropy": 1.0} for step in range(1, search.STEPS + 1)]
            rows[-1] |= {"eval/score": score}
            folder.mkdir(parents=True)
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def train_all(runs: Sequence[tuple[str, Sequence[str], Path]]) -> None:
        for run in runs:
            train(*run)

    text = search.run_part(tmp_path, start_of=lambda *_: [], train_all=train_all)
    num_first = 2 * len(search.SETTINGS) * len(search.SEEDS)
    assert len(set(folders)) == len(folders) == num_first + 4 * len(search.NEW_SEEDS)
    row = next(line for line in text.splitlines() if line.startswith(f"| {first} | {search.ORACLE} | 3 | - | "))
    assert "| 0.6 ± " in row and "| 0.02 ± " in row and row.endswith("| 0 ± 0 |")
    assert second not in text and f"- {first}: reward of *fp8, oracle* less that of *fp8* 0.02 ± " in text
    assert (tmp_path / "tables.md").read_text() == text + "\n"


def test_runs_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as asked for at a time, each once; what is complete is not run again."""
    wanted = [(f"run {one}", ["train.num_steps=2"], tmp_path / str(one)) for one in range(5)]
    wanted[3][2].mkdir()
    (wanted[3][2] / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    together, begun = threading.Barrier(2, timeout=60), []

    def call(command: Sequence[str], output: Path) -> None:
        begun.append(output.parent)
        together.wait()  # breaks unless two run at a time, which four runs do twice

    monkeypatch.setattr(study, "call", call)
    study.train_all(wanted, jobs=2)
    assert sorted(begun) == [folder for *_, folder in wanted if folder.name != "3"]


def test_a_failed_run_begins_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one beside it ends, so that nothing of it is lost."""
    wanted = [(f"run {one}", ["train.num_steps=2"], tmp_path / str(one)) for one in range(50)]
    begun, ended, failing = [], [], threading.Event()

    def call(command: Sequence[str], output: Path) -> None:
        name = output.parent.name
        begun.append(name)
        if name == "0":
            failing.wait(60)
            raise UserError(str(output), "ends with what went wrong")
        failing.set()
        time.sleep(0.5)
        ended.append(name)

    monkeypatch.setattr(study, "call", call)
    with pytest.raises(UserError, match="what went wrong"):
        study.train_all(wanted, jobs=2)
    assert "1" in ended and sorted(begun) == sorted([*ended, "0"]) and "49" not in begun


@pytest.mark.parametrize(
    ("text", "steps"), [("", 0), ('{"step": 1}\n', 1), ('{"step": 1}\n{"step": 2}\n{"st', 2), ('{"st', 0)]
)
def test_steps_of_a_run_that_is_being_written(tmp_path: Path, text: str, steps: int) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    assert Run.steps_done(tmp_path) == steps


def test_jobs_must_be_positive(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        study.main(["--jobs", "0"])
    assert "--jobs must be at least 1" in capsys.readouterr().err
