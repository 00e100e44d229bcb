"""The configuration: merging, overrides, errors that name the setting, cross-checks, and no heavy imports."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_calclip.config import Config
from megatron_calclip.config_calibration import calibration_settings
from megatron_calclip.config_check import check, check_shape
from megatron_calclip.config_file import (
    config_from_dict,
    config_to_dict,
    config_to_yaml,
    find_config,
    load_config,
    names_setting,
)
from megatron_calclip.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
# conf/nemo_rl holds another framework's files.
SHIPPED = sorted(path for path in (ROOT / "conf").rglob("*.yaml") if path.parent.name != "nemo_rl")
SHAPE = {"num_layers": 4, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 64}


def valid(**sections: Any) -> dict[str, Any]:
    """A small valid configuration with the given sections replaced."""
    return {
        "model": {"shape": dict(SHAPE), "tokenizer": "characters", "max_sequence_length": 32},
        "train": {"prompts_per_step": 8, "samples_per_prompt": 4},
    } | sections


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.fixture
def base(tmp_path: Path) -> str:
    return write(tmp_path, "base.yaml", yaml.safe_dump(valid()))


def error_of(values: dict[str, Any], *, world_size: int = 1) -> UserError:
    with pytest.raises(UserError) as caught:
        check(config_from_dict(values), world_size=world_size)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    return caught.value


# Files and what they extend.


def test_defaults_file_override(base: str) -> None:
    config = load_config(base, ["train.num_steps=7", "optimizer.lr=1e-4"], world_size=1)
    assert config.optimizer.weight_decay == 0.01  # default
    assert config.train.prompts_per_step == 8  # file
    assert (config.train.num_steps, config.optimizer.lr) == (7, 1e-4)  # override
    assert config.sequences_per_step == 32


def test_extends_merges_deeply_and_the_extending_file_wins(tmp_path: Path, base: str) -> None:
    (tmp_path / "sub").mkdir()
    middle = "extends: ../base.yaml\ntrain: {num_steps: 5, seed: 3}\n"
    write(tmp_path, "sub/middle.yaml", middle)
    top = write(tmp_path, "top.yaml", "extends: sub/middle.yaml\ntrain: {seed: 4}\n")
    config = load_config(top, world_size=1)
    assert (config.train.prompts_per_step, config.train.num_steps, config.train.seed) == (8, 5, 4)


def test_extends_itself(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "extends: b.yaml\n")
    write(tmp_path, "b.yaml", "extends: a.yaml\n")
    with pytest.raises(UserError, match="extends itself"):
        load_config(str(tmp_path / "a.yaml"))


@pytest.mark.parametrize("parent", ["absent.yaml", "[a, b]", "3", "."])
def test_extends_no_file(tmp_path: Path, parent: str) -> None:
    path = write(tmp_path, "a.yaml", f"extends: {parent}\n")
    with pytest.raises(UserError, match=f"{re.escape(path)}: extends: .* is no file"):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("train: {num_steps: 1", "not valid YAML"),
        ("train: {num_steps: 1}\ntrain: {seed: 1}", "'train' is given twice"),
        ("train: {seed: 1, seed: 2}", "'seed' is given twice"),
        ("- train", "sections at its top level"),
        ("train", "sections at its top level"),
        ("1: {}", "sections at its top level"),
        ("a: " + "[" * 1000, "not valid YAML"),
        ("a: !!timestamp x", "not valid YAML"),
        ("a: !!python/object/apply:os.getcwd []", "not valid YAML"),
        ("a: " + "9" * 5000, "not valid YAML"),
        ("a: \x00", "not valid YAML"),
    ],
)
def test_broken_file(tmp_path: Path, text: str, problem: str) -> None:
    path = write(tmp_path, "a.yaml", text)
    with pytest.raises(UserError, match=problem) as caught:
        load_config(path)
    assert caught.value.where == path and "\n" not in str(caught.value)


def test_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read"):
        load_config(str(tmp_path / "a.yaml"))


def test_empty_file_is_all_defaults(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model: give exactly one of model\.hf"):
        load_config(write(tmp_path, "a.yaml", "# nothing\n"))


def test_find_config_by_name_and_path() -> None:
    assert find_config("tiny_cpu") == find_config("tiny_cpu.yaml") == ROOT / "conf" / "tiny_cpu.yaml"
    assert find_config(str(ROOT / "conf" / "tiny_cpu.yaml")) == ROOT / "conf" / "tiny_cpu.yaml"


@pytest.mark.parametrize("name", ["absent", "", "conf", "/", "x" * 5000])
def test_find_config_lists_what_is_shipped(name: str) -> None:
    with pytest.raises(UserError, match=r"CONFIG: no file .* one of .*tiny_cpu\.yaml"):
        find_config(name)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configurations_are_valid_and_read_back(path: Path, tmp_path: Path) -> None:
    config = load_config(str(path))
    assert load_config(write(tmp_path, "again.yaml", config_to_yaml(config))) == config


# Overrides and YAML values.


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("checkpoint.resume=no", "no"),
        ("checkpoint.resume=off", "off"),
        ("checkpoint.resume=010", "010"),
        ("checkpoint.resume=12:30", "12:30"),
        ("checkpoint.resume=2024-13-45", "2024-13-45"),
        ("checkpoint.resume=a=b", "a=b"),
        ("checkpoint.resume='1e-6'", "1e-6"),
        ("++optimizer.lr=1e-6", 1e-6),
        ("+optimizer.lr=2.5E-3", 2.5e-3),
        ("optimizer.lr=.5", 0.5),
        ("optimizer.lr=1_000.5", 1000.5),
        ("optimizer.lr=3", 3.0),
        ("train.num_steps=1_000", 1000),
        ("train.num_steps=1e3", 1000),
        ("train.deterministic=TRUE", True),
        ("train.deterministic=no", False),
        ("tracking.wandb_project=null", None),
        ("tracking.wandb_project=", None),
        ("algorithm.clip={lower: 0.7, upper: 1.3}", {"lower": 0.7, "upper": 1.3, "dual": None}),
    ],
)
def test_override(base: str, override: str, value: Any) -> None:
    config = config_to_dict(load_config(base, [override], world_size=1))
    section, _, name = override.partition("=")[0].lstrip("+").rpartition(".")
    assert config[section][name] == value if section != "algorithm" else config[section]["clip"] == value


def test_later_overrides_win(base: str) -> None:
    assert load_config(base, ["train.seed=1", "train.seed=2"], world_size=1).train.seed == 2


@pytest.mark.parametrize("override", ["train.seed", "=3", "train..seed=3", "train.=3", ".seed=3", "a b=3", "--x=3"])
def test_malformed_override(base: str, override: str) -> None:
    with pytest.raises(UserError, match=r"section\.key=value"):
        load_config(base, [override])


def test_override_that_is_no_yaml(base: str) -> None:
    with pytest.raises(UserError, match=r"^data\.arithmetic\.operators: is not valid YAML"):
        load_config(base, ["data.arithmetic.operators=*"])


# Types, ranges, unknown names.


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("train.num_stps=3", r"train\.num_stps: no such setting; did you mean train\.num_steps\?"),
        ("trian.num_steps=3", r"trian: no such setting; did you mean train\?"),
        ("train.lr=3", r"train\.lr: .*did you mean .*optimizer\.lr"),
        ("algorithm.lower=0.9", r"algorithm\.lower: .*did you mean algorithm\.clip\.lower\?"),
        ("algorithm.clip.uper=2", r"algorithm\.clip\.uper: .*did you mean algorithm\.clip\.upper\?"),
        ("model.shape.layers=2", r"model\.shape\.layers: .*did you mean model\.shape\.num_layers\?"),
        ("zzz=1", r"zzz: no such setting; known here: model, data, rollout"),
        ("train.zzz=1", r"train\.zzz: no such setting; known here: num_steps, prompts_per_step"),
        ("train=3", r"train: is a section: should hold settings \(got 3\)"),
        ("train=", r"train: is a section: should hold settings \(got None\)"),
        ("train=[1]", r"train: is a section"),
        ("train={1: 2}", r"train\.1: "),
        ("train.num_steps=0", r"train\.num_steps: should be greater than or equal to 1 \(got 0\)"),
        ("train.num_steps=1.5", r"train\.num_steps: should be a valid integer.* \(got 1\.5\)"),
        ("train.num_steps=true", r"train\.num_steps: should be a number \(got True\)"),
        ("train.num_steps='3'", r"train\.num_steps: should be a number \(got '3'\)"),
        ("train.num_steps=many", r"train\.num_steps: should be a number \(got 'many'\)"),
        ("train.num_steps=null", r"train\.num_steps: should be a valid integer"),
        ("train.num_steps={a: 1}", r"train\.num_steps: should be a valid integer"),
        ("train.num_steps=99999999999", r"train\.num_steps: should be less than or equal to 2147483647"),
        ("train.seed=-1", r"train\.seed: should be greater than or equal to 0"),
        ("train.deterministic=3", r"train\.deterministic: should be a valid boolean"),
        ("optimizer.lr=0", r"optimizer\.lr: should be greater than 0"),
        ("optimizer.lr=.inf", r"optimizer\.lr: should be a finite number"),
        ("optimizer.lr=.nan", r"optimizer\.lr: should be"),
        ("optimizer.lr=1e999", r"optimizer\.lr: should be a finite number"),
        ("optimizer.lr=fast", r"optimizer\.lr: should be a number"),
        ("optimizer.beta1=1", r"optimizer\.beta1: should be less than 1"),
        ("eval.temperature=-0.1", r"eval\.temperature: should be greater than or equal to 0"),
        ("algorithm.clip.lower=1.0", r"algorithm\.clip\.lower: should be less than 1"),
        ("algorithm.clip.upper=1", r"algorithm\.clip\.upper: should be greater than 1"),
        ("algorithm.clip.upper=.inf", r"algorithm\.clip\.upper: should be a finite number"),
        ("algorithm.aggregation=mean", r"algorithm\.aggregation: should be 'token_mean', .* \(got 'mean'\)"),
        ("model.warm_start.noise=1", r"model\.warm_start\.noise: should be less than 1"),
        ("calibration.start=[1.1, 1.3]", r"calibration\.start\.0: should be less than 1"),
        ("calibration.reference=[0.8, 0.9]", r"calibration\.reference\.1: should be greater than 1"),
        ("calibration.grid_lower=[0.5, 0.9]", r"calibration\.grid_lower"),
        ("calibration.grid_upper=[1.0, .nan, 0.1]", r"calibration\.grid_upper\.1: should be a finite number"),
        ("parallel.vpp=1", r"parallel\.vpp: should be greater than or equal to 2"),
        (
            "data.arithmetic.num_operands=1",
            r"data\.arithmetic\.num_operands: should be greater than or equal",
        ),
        ("run_dir=2024", r"run_dir: should be a valid string \(got 2024\)"),
        ("run_dir=''", r"run_dir: .*at least 1 character"),
        ('run_dir="a\\0b"', r"run_dir: String should match"),
        ("model.tokenizer=''", r"model\.tokenizer: "),
        (f"train.num_steps=[{'1, ' * 100}]", r"train\.num_steps: [^\n]{1,140}$"),  # long values are cut
    ],
)
def test_wrong_value(base: str, override: str, complaint: str) -> None:
    with pytest.raises(UserError, match=f"^{complaint}"):
        load_config(base, [override], world_size=1)


# Checks between settings.


@pytest.mark.parametrize(
    ("sections", "where"),
    [
        ({"model": {}}, "model"),
        ({"model": {"hf": "x", "shape": SHAPE, "tokenizer": "characters"}}, "model"),
        ({"model": {"shape": SHAPE}}, "model.tokenizer"),
        ({"model": {"hf": "x", "warm_start": {"num_steps": 1}}}, "model.warm_start.num_steps"),
        (
            {
                "model": {"shape": SHAPE, "tokenizer": "t", "warm_start": {"num_steps": 1}},
                "data": {"instruction": "Sums modulo 10."},
            },
            "data.instruction",
        ),
        (
            {
                "model": {"shape": SHAPE, "tokenizer": "t", "warm_start": {"num_steps": 1}},
                "data": {"train": "x"},
            },
            "model.warm_start.num_steps",
        ),
        (
            {"model": {"shape": SHAPE, "tokenizer": "characters", "characters": "0123456789+=="}},
            "model.characters",
        ),
        ({"model": {"shape": SHAPE, "tokenizer": "characters", "characters": ""}}, "model.characters"),
        (
            {"model": {"shape": SHAPE, "tokenizer": "characters", "characters": "012345678+="}},
            "model.characters",
        ),
        (
            {"model": {"shape": SHAPE, "tokenizer": "characters", "characters": "0123456789="}},
            "model.characters",
        ),
        ({"data": {"train": "scratchpad"}}, "model.characters"),
        (
            {
                "model": {"shape": SHAPE, "tokenizer": "characters", "characters": "0123456789+=^_abcdefgh"},
                "data": {"scratchpad": {"num_digits": 2048 - 8}},
                "eval": {"sets": ["scratchpad"]},
            },
            "data.scratchpad.num_digits",
        ),
        (
            {
                "model": {"shape": SHAPE, "tokenizer": "characters", "characters": "0123456789+=^_abcdefgh"},
                "data": {"scratchpad": {"num_digits": 1000}},
                "eval": {"sets": ["scratchpad"]},
                "rollout": {"max_new_tokens": 4096 - 2000},
            },
            "model.max_sequence_length",
        ),
        ({"data": {"chat_template": True}}, "data.chat_template"),
        ({"data": {"system_prompt": "Be brief."}}, "data.system_prompt"),
        ({"eval": {"max_new_tokens": 10**6}}, "eval.max_new_tokens"),
        ({"data": {"arithmetic": {"operators": "+/"}}}, "data.arithmetic.operators"),
        ({"data": {"arithmetic": {"operators": ""}}}, "data.arithmetic.operators"),
        ({"rollout": {"max_new_tokens": 32}}, "rollout.max_new_tokens"),
        ({"rollout": {"top_p": 0.9}}, "rollout.top_p"),
        ({"train": {"samples_per_prompt": 1}}, "train.samples_per_prompt"),
        ({"algorithm": {"num_minibatches": 3}}, "algorithm.num_minibatches"),
        ({"algorithm": {"clip": {"dual": 1.2}}}, "algorithm.clip.dual"),
        ({"parallel": {"sequence_parallel": True}}, "parallel.sequence_parallel"),
        ({"parallel": {"vpp": 2}}, "parallel.vpp"),
        ({"parallel": {"overlap_param_gather": True}}, "parallel.overlap_param_gather"),
        ({"schedule": {"min_lr": 1.0}}, "schedule.min_lr"),
        ({"precision": {"fp8_param": True, "params_dtype": "fp32"}}, "precision.fp8_param"),
        ({"precision": {"emulation": {"channel_outlier": 3.0}}}, "precision.emulation.channel_outlier"),
        (
            {"precision": {"emulation": {"first_token_outlier": 1.5}}},
            "precision.emulation.first_token_outlier",
        ),
        ({"schedule": {"warmup_steps": 100}}, "schedule.warmup_steps"),
        ({"model": {"shape": SHAPE | {"num_query_groups": 3}, "tokenizer": "t"}}, "model.shape"),
        ({"model": {"shape": SHAPE | {"hidden_size": 126}, "tokenizer": "t"}}, "model.shape"),
        ({"model": {"shape": SHAPE | {"head_dim": 33}, "tokenizer": "t"}}, "model.shape"),
    ],
)
def test_cross_check(sections: dict[str, Any], where: str) -> None:
    assert error_of(valid(**sections)).where == where


@pytest.mark.parametrize(
    ("parallel", "world_size", "where"),
    [
        ({"tp": 2, "pp": 2}, 6, "parallel"),
        ({"tp": 2}, 1, "parallel"),
        ({"cp": 3}, 4, "parallel"),
        ({"tp": 4}, 4, "parallel.tp"),  # 2 query groups
        ({"pp": 3}, 3, "parallel.pp"),  # 4 layers
        ({"pp": 2, "vpp": 4}, 2, "parallel.pp"),  # 4 layers in 8 chunks
        ({}, 16, "algorithm.num_minibatches"),  # 32 sequences / 4 = 8 for 16 ranks
    ],
)
def test_layout_check(parallel: dict[str, int], world_size: int, where: str) -> None:
    assert error_of(valid(parallel=parallel), world_size=world_size).where == where


@pytest.mark.parametrize(
    ("parallel", "world_size"),
    [({}, 1), ({}, 8), ({"tp": 2}, 4), ({"tp": 2, "pp": 2, "cp": 2}, 8), ({"pp": 2, "vpp": 2}, 2)],
)
def test_layouts_that_fit(parallel: dict[str, int], world_size: int) -> None:
    check(config_from_dict(valid(parallel=parallel)), world_size=world_size)


def test_warm_start_batch_must_divide_only_where_there_is_one() -> None:
    model = valid()["model"]
    values = valid(model=model | {"warm_start": {"num_steps": 1, "batch_size": 9}})
    assert error_of(values, world_size=2).where == "model.warm_start.batch_size"
    check(config_from_dict(valid(model=model | {"warm_start": {"batch_size": 9}})), world_size=2)


def test_arithmetic_problems_must_fit_the_context() -> None:
    # Two operands of up to two digits, one operator, one `=`: 6 characters; 5 new tokens: 11 in all.
    model = valid()["model"] | {"max_sequence_length": 11}
    task = {"arithmetic": {"max_operand": 99}}
    check(config_from_dict(valid(model=model, data=task, rollout={"max_new_tokens": 5})), world_size=1)
    error = error_of(valid(model=model, data=task, rollout={"max_new_tokens": 6}))
    assert error.where == "model.max_sequence_length" and "raise it to 12" in str(error)


def test_a_shape_from_a_model_folder_is_named_so() -> None:
    config = config_from_dict(valid(model={"shape": SHAPE | {"num_query_groups": 3}, "tokenizer": "t"}))
    assert config.model.shape is not None
    with pytest.raises(UserError, match=r"^model\.hf: num_query_groups 3 does not divide num_attention_heads 4"):
        check_shape(config.model.shape, config, where="model.hf")


@pytest.mark.parametrize(
    ("setting", "word", "precision", "other"),
    [
        ("rollout.vllm", "urls", {}, {"rollout": {"engine": "vllm"}}),
        (
            "rollout.vllm",
            "not both",
            {},
            {"rollout": {"engine": "vllm", "vllm": {"urls": ["http://x:1"], "launch": True}}},
        ),
        (
            "rollout.canary_prompts",
            "temperature",
            {},
            {"rollout": {"engine": "vllm", "temperature": 0.7, "vllm": {"launch": True}}},
        ),
        (
            "reward.overlong_buffer",
            "lower it",
            {},
            {"rollout": {"max_new_tokens": 4}, "reward": {"overlong_buffer": 5}},
        ),
        ("precision.fp8_param", "recipe", {"recipe": "bf16", "fp8_param": True}, {}),
        ("precision.output_layer", "recipe", {"recipe": "bf16", "output_layer": True}, {}),
        ("precision.fp8_param", "bf16", {"fp8_param": True, "params_dtype": "fp32"}, {}),
        ("precision.power_of_two_scales", "null", {"recipe": "tensorwise_delayed", "power_of_two_scales": True}, {}),
        ("precision.power_of_two_scales", "null", {"recipe": "mxfp8", "power_of_two_scales": False}, {}),
        ("precision.first_last_layers_bf16", "4 layers", {"first_last_layers_bf16": 2}, {}),
        ("precision.output_layer", "histories", {"recipe": "tensorwise_delayed", "output_layer": True}, {}),
        ("precision.output_layer", "fused_head", {"output_layer": True}, {"train": {"fused_head": True}}),
        ("precision.emulation.channel_outlier", "power of two", {"emulation": {"channel_outlier": 3.0}}, {}),
        ("precision.emulation.first_token_outlier", "power of two", {"emulation": {"first_token_outlier": 3.0}}, {}),
        (
            "parallel.recompute",
            "selective",
            {"recipe": "tensorwise_delayed"},
            {"parallel": {"recompute": "full"}},
        ),
        (
            "parallel.recompute",
            "selective",
            {"emulation": {"first_token_outlier": 4.0}},
            {"parallel": {"recompute": "full", "pp": 2}},
        ),
    ],
)
def test_settings_that_do_not_go_together(
    setting: str, word: str, precision: dict[str, Any], other: dict[str, Any]
) -> None:
    error = error_of(valid(precision={"recipe": "tensorwise"} | precision, **other), world_size=2)
    assert error.where == setting and word in str(error)


def test_calibration_values_that_do_not_go_together() -> None:
    error = error_of(valid(calibration={"grid_lower": [0.5, 0.9, 0.02], "start": [0.4, 1.8]}))
    assert error.where.startswith("calibration.")


@pytest.mark.parametrize(
    ("train", "sets", "expected"),
    [
        ("scratchpad", "auto", ("scratchpad",)),
        ("rows.jsonl", "auto", ()),
        ("rows.jsonl", ["arithmetic", "aime24"], ("arithmetic", "aime24")),
        ("arithmetic", [], ()),
    ],
)
def test_held_out_problems_are_of_the_trained_task(train: str, sets: Any, expected: tuple[str, ...]) -> None:
    assert config_from_dict({"data": {"train": train}, "eval": {"sets": sets}}).eval_sets == expected


def test_evaluation_samples_by_its_own_settings() -> None:
    config = config_from_dict(valid(rollout={"max_new_tokens": 4}))
    assert config.for_evaluation == config
    other = config_from_dict(valid(rollout={"max_new_tokens": 4}, eval={"max_new_tokens": 9, "top_p": 0.9}))
    assert (other.for_evaluation.rollout.max_new_tokens, other.for_evaluation.rollout.top_p) == (9, 0.9)
    assert (other.rollout.max_new_tokens, other.rollout.top_p) == (4, 1.0)
    check(other, world_size=1)


def test_world_size_of_a_dry_run_is_the_cluster(base: str) -> None:
    overrides = ["parallel.tp=2", "cluster.num_nodes=3", "cluster.gpus_per_node=4"]
    assert load_config(base, overrides).parallel.tp == 2  # 12 ranks
    with pytest.raises(UserError, match="parallel: tp 2"):
        load_config(base, overrides, world_size=3)


# Reading back, and whatever a user may write.


def paths_of(values: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Paths of all sections and settings."""
    found = []
    for key, value in values.items():
        found.append((*prefix, key))
        if isinstance(value, dict):
            found += paths_of(value, (*prefix, key))
    return found


@given(text=st.text(min_size=1).filter(lambda text: "\0" not in text))
@settings(max_examples=40)
def test_any_text_reads_back(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    config = config_from_dict(valid(run_dir=text, data={"prompt_field": text}, checkpoint={"resume": text}))
    path = write(tmp_path_factory.getbasetemp(), "text.yaml", config_to_yaml(config))
    assert load_config(path) == config


@pytest.mark.parametrize("text", ["1e-6", "1e5", "no", "true", "null", "010", "12:30", "2024-01-01", "=", "<<", ".5"])
def test_texts_that_look_like_something_else_read_back(text: str, tmp_path: Path) -> None:
    config = config_from_dict(valid(run_dir=text))
    assert load_config(write(tmp_path, "text.yaml", config_to_yaml(config))).run_dir == text


@given(
    lr=st.floats(min_value=1e-300, max_value=1e300),
    seed=st.integers(min_value=0, max_value=2**31 - 1),
)
@settings(max_examples=40)
def test_any_number_reads_back(lr: float, seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    config = config_from_dict(valid(optimizer={"lr": lr}, train={"seed": seed}))
    path = write(tmp_path_factory.getbasetemp(), "number.yaml", config_to_yaml(config))
    assert load_config(path) == config


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from(
        [0, -1, 10**400, -(10**5000), 1 << 62, math.inf, -math.inf, math.nan, 1e-320, "", "\0", "characters"]
    ),
    st.floats(),
    st.text(),
    st.binary(),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=8) | st.integers(), st.integers(), max_size=3),
    st.sampled_from(
        ["arithmetic", "auto", "token", "off", "full", "1e3", "+-*", "+/", "exact", "bf16", "te", "emulated"]
    ),
)


@given(data=st.data())
@settings(max_examples=300)
def test_any_mutation_is_a_configuration_or_a_user_error(data: st.DataObject) -> None:
    values = config_to_dict(load_config(str(data.draw(st.sampled_from(SHIPPED)))))
    paths = paths_of(values)
    for _ in range(data.draw(st.integers(1, 3))):
        *parents, last = data.draw(st.sampled_from(paths))
        target: Any = values
        for key in parents:
            if not isinstance(target.get(key), dict):
                target[key] = {}
            target = target[key]
        action = data.draw(st.sampled_from(["replace", "rename", "delete"]))
        if action == "replace":
            target[last] = data.draw(VALUES)
        elif action == "delete":
            target.pop(last, None)
        else:
            target[data.draw(st.text() | st.just(last[:-1]))] = target.pop(last, None)
    try:
        config = config_from_dict(values)
        check(config, world_size=data.draw(st.sampled_from([1, 2, 8])))
        config_to_yaml(config)
    except UserError as error:
        assert str(error).isprintable()


@given(text=st.text() | st.text(alphabet="!&*{}[]:,-'\"#|>?%@` \n0aeE.+_<=~"))
@settings(max_examples=100)
def test_any_yaml_text_is_a_configuration_or_a_user_error(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode(errors="surrogatepass"))
    for arguments in ((str(path), []), (str(ROOT / "conf" / "tiny_cpu.yaml"), [f"train.seed={text}"])):
        try:
            config = load_config(*arguments)
        except UserError:
            continue
        assert isinstance(config, Config)


# What is not imported.


def test_configuration_and_command_line_import_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, megatron_calclip\n"
        "from megatron_calclip.launch import main\n"
        "main(['tiny_cpu', '--dry-run'])\n"
        "heavy = {'torch', 'transformers', 'megatron', 'numpy', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    completed = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert completed.returncode == 0, completed.stderr
    assert yaml.safe_load(completed.stdout)["model"]["tokenizer"] == "characters"


def test_a_balance_without_a_cap() -> None:
    """`.inf`: nowhere; null would be the preset's."""
    config = config_from_dict({"model": {}, "calibration": {"balance_ratio_cap": math.inf}})
    assert calibration_settings(config).balance_ratio_cap is None
    assert config_from_dict(yaml.safe_load(config_to_yaml(config))) == config
    for wrong in (0, -1, math.nan, "inf"):
        with pytest.raises(UserError, match=r"^calibration.balance_ratio_cap: "):
            config_from_dict({"model": {}, "calibration": {"balance_ratio_cap": wrong}})


def test_an_importance_cap_below_one_is_refused() -> None:
    with pytest.raises(UserError, match=r"^algorithm.importance.cap: "):
        config_from_dict({"model": {}, "algorithm": {"importance": {"cap": 0.5}}})


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("eval.sets=math500", "eval.sets: should be 'auto' or should be a list (got 'math500'); correct the value"),
        ("data.chat_template=5", "data.chat_template: should be a valid boolean, "),
        ("eval.sets=[1]", "eval.sets: should be 'auto'"),
    ],
)
def test_a_setting_of_several_kinds_is_called_by_its_name(override: str, complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config("tiny_cpu", [override])
    assert str(caught.value).startswith(complaint)


def test_settings_that_overrides_name() -> None:
    for overrides in (["data.x=1"], ["data={y: 2, x: null}"], ["+data.x=1"], ["data.x.z=1"]):
        assert names_setting(overrides, "data.x")
    for overrides in ([], ["data.y=1"], ["data={y: 2}"], ["data=1"], ["x=1"], ["data.x=1", "data=null"]):
        assert not names_setting(overrides, "data.x")
