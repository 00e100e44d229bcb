"""The shipped runs: each passes `--dry-run` and fits its cluster, the paper's have the paper's constants, and arms differ in
what they are named after alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_calclip import launch
from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.config import Config
from megatron_calclip.config_calibration import calibration_settings
from megatron_calclip.config_file import config_to_dict, load_config
from megatron_calclip.data_presets import PRESETS
from megatron_calclip.hf import read_hf_config
from megatron_calclip.planning.model import planned_model
from megatron_calclip.planning.plan import make_plan
from megatron_calclip.precision.backend import _check_hardware

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
LARGE = [CONF / "qwen25_32b.yaml", *sorted((CONF / "paper").glob("*.yaml"))]
MODELS = ("qwen3_8b_grpo", "qwen25_32b_grpo", "qwen3_14b_dapo")
RECIPES = {"tensorwise": "fp8_per_tensor", "rowwise": "fp8_per_channel", "blockwise": "fp8_per_block"}
ARMS = ["bf16", "bf16_fp8_rollout", *RECIPES, *(f"{recipe}_calibrated" for recipe in RECIPES)]


def paper(name: str) -> Config:
    return load_config(str(CONF / "paper" / f"{name}.yaml"))


def differences(a: Any, b: Any, prefix: str = "") -> set[str]:
    """Dotted names of the settings in which two configurations differ."""
    if not isinstance(a, dict):
        return {prefix} if a != b else set()
    return set().union(*(differences(a[key], b[key], f"{prefix}.{key}".lstrip(".")) for key in a))


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_dry_run_and_plan(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launch.main([str(path), "--dry-run"])
    out = capsys.readouterr().out
    assert "# memory: fits: " in out and yaml.safe_load(out)["model"]["hf"].startswith("models/")
    config = load_config(str(path))
    plan = make_plan(config, planned_model(config).shape)
    assert plan.fits and plan.seconds is not None
    assert plan.num_ranks == config.cluster.num_nodes * config.cluster.gpus_per_node
    assert ("shadow" in plan.seconds) == config.calibration.enabled


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_transformer_engine_takes_it_on_a_gpu(path: Path) -> None:
    """The rules that `backend.check` applies where there is a GPU; not yet run on one."""
    config = load_config(str(path))
    if config.precision.recipe != "bf16":
        backend = "te" if config.precision.backend == "auto" else config.precision.backend
        _check_hardware(config, planned_model(config).shape, backend)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_data_sets_have_known_layouts(path: Path) -> None:
    config = load_config(str(path))
    for place in (config.data.train, *config.eval_sets):
        layout, equals, file = place.partition("=")
        assert layout in PRESETS and equals and file.startswith("data/"), place


@pytest.mark.parametrize("model", MODELS)
def test_every_arm_of_every_model_is_there(model: str) -> None:
    assert {path.stem for path in (CONF / "paper").glob(f"{model}_*.yaml")} >= {f"{model}_{arm}" for arm in ARMS}


@pytest.mark.parametrize("path", sorted((CONF / "paper").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_papers_constants(path: Path) -> None:
    config = load_config(str(path))
    assert (config.optimizer.lr, config.train.prompts_per_step) == (1e-6, 256)
    importance = config.algorithm.importance
    assert (importance.level, importance.cap, importance.mode) == ("token", 2.0, "truncate")
    dapo = "dapo" in path.stem
    assert config.algorithm.aggregation == ("token_mean" if dapo else "sequence_mean")
    assert (config.algorithm.clip.lower, config.algorithm.clip.upper) == (0.8, 1.28 if dapo else 1.24)
    assert config.algorithm.dynamic_sampling.enabled == dapo and (config.reward.overlong_buffer is not None) == dapo
    settings = calibration_settings(config)
    assert config.calibration.preset == "paper" and settings.interval == 20
    assert settings.start == ClipBounds(0.6, 1.8) and settings.reference == ClipBounds(0.8, 1.28 if dapo else 1.24)
    assert (tuple(settings.grid_lower), tuple(settings.grid_upper)) == ((0.5, 0.9, 0.02), (1.2, 2.0, 0.02))
    assert (settings.delta_lower, settings.delta_upper) == (0.05, 0.1)
    assert config.run_dir == f"runs/paper/{path.stem}"


@pytest.mark.parametrize("model", MODELS)
def test_arms_differ_in_what_they_are_named_after(model: str) -> None:
    base = config_to_dict(paper(f"{model}_bf16"))

    def changed(arm: str, than: dict[str, Any] = base) -> set[str]:
        return differences(than, config_to_dict(paper(f"{model}_{arm}"))) - {"run_dir"}

    assert changed("bf16_fp8_rollout") == {"rollout.precision"}
    for recipe, sampler in RECIPES.items():
        config = paper(f"{model}_{recipe}")
        assert changed(recipe) - {"precision.backend"} == {"precision.recipe", "rollout.precision"}
        assert (config.precision.recipe, config.rollout.precision) == (recipe, sampler)
        assert changed(f"{recipe}_calibrated", config_to_dict(config)) == {"calibration.enabled"}


@pytest.mark.parametrize("loss", ["cispo", "bapo"])
def test_baselines_on_rowwise_fp8(loss: str) -> None:
    rowwise = config_to_dict(paper("qwen3_8b_grpo_rowwise"))
    baseline = paper(f"qwen3_8b_grpo_rowwise_{loss}")
    assert differences(rowwise, config_to_dict(baseline)) == {"algorithm.loss", "run_dir"}
    assert baseline.algorithm.loss == loss


def test_the_32b_run_is_what_it_says() -> None:
    config = load_config("qwen25_32b")
    assert (config.parallel.tp, config.parallel.pp) == (8, 2)
    assert (config.cluster.num_nodes, config.cluster.gpus_per_node, config.cluster.num_rollout_nodes) == (8, 8, 4)
    assert config.precision.recipe != "bf16" != config.rollout.precision and config.calibration.enabled


def test_every_line_of_the_32b_run_is_explained() -> None:
    def keys(values: dict[str, Any], prefix: str = "") -> list[str]:
        nested = [
            keys(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]
            for key, value in values.items()
        ]
        return [key for group in nested for key in group]

    explained = (ROOT / "docs" / "qwen25_32b.md").read_text()
    missing = [
        key for key in keys(yaml.safe_load((CONF / "qwen25_32b.yaml").read_text())) if f"`{key}`" not in explained
    ]
    assert not missing


@pytest.mark.parametrize("name", ["qwen2.5-32b", "qwen3-8b", "qwen3-14b"])
def test_shipped_model_configurations_are_read(name: str) -> None:
    config = load_config("qwen25_32b", ["model.max_sequence_length=8192"])
    assert read_hf_config(config, CONF / "hf" / name).model_type in ("qwen2", "qwen3")
