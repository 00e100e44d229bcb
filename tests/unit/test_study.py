"""The study's arms are valid configurations, and its tables hold what the runs logged."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from examples.study.__main__ import CONFIG, folder_of  # noqa: E402
from examples.study.arms import ARMS, RECIPE_OVERRIDES, RECIPES, VARIANTS  # noqa: E402
from examples.study.tables import FIRST_STEP, Run, summarise, write_tables  # noqa: E402
from megatron_calclip.config_file import load_config  # noqa: E402


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_arm_is_a_valid_configuration(recipe: str) -> None:
    for overrides in ARMS.values():
        config = load_config(CONFIG, [f"precision.recipe={recipe}", *RECIPE_OVERRIDES.get(recipe, ()), *overrides])
        assert config.calibration.measure == "every_step"
    assert all(arm in ARMS for variant in VARIANTS.values() for arms in variant.recipes.values() for arm in arms)


def write_run(runs: Path, arm: str, seed: int, *, score: float, fp8: int, bf16: int) -> Run:
    folder = folder_of(runs, "tensorwise", arm, seed)
    folder.mkdir(parents=True)
    rows = [{"step": 0, "eval/score": 0.1}]
    for step in range(1, 10):
        early = step < FIRST_STEP  # counts of early steps must not count
        clips = {"clip_fp8/num_low": 1000 if early else fp8, "clip_bf16/num_low": 1 if early else bf16}
        rows.append({"step": step, "reward/mean": float(step), "entropy": 2.0, "clip/lower": 0.8, **clips})
    rows[-1]["eval/score"] = score
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
    assert arm["eval/score"]["mean"] == pytest.approx(0.6) and arm["eval/score"]["stderr"] == pytest.approx(0.1)
    assert arm["overclip low"]["mean"] == pytest.approx(4.0) and arm["overclip low"]["seeds"] == 2
    assert arm["reward/mean"]["mean"] == pytest.approx(8.0)  # of the last three steps
    assert arm["overclip high"] is None
    lone = results["arms"]["tensorwise"]["fp8, calibrated"]
    assert lone["overclip low"] is None and lone["eval/score"] == {"mean": 0.6, "stderr": None, "seeds": 1}
    text = write_tables(results, tmp_path / "tables.md")
    assert "| fp8 | 2 | 0.6 +- 0.1 | 8 +- 0 |" in text and "| fp8, calibrated | 1 | 0.6 |" in text
    assert (tmp_path / "tables.md").read_text() == text + "\n"


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    assert Run.steps_done(tmp_path / "none") == 0
    assert summarise([]) == {"arms": {}, "replays": {}}
