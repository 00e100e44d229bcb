"""Bad input to the main job: one line that names the setting, an exit code, no traceback, no waiting ranks.

What is wrong with the configuration itself shows within a second, before anything heavy is imported, so each
such case is a launch of the real script. What shows only once the libraries are there (data, weights and the
like) goes through `check_bad_input.py`, which pays for the imports once, and twice through torchrun.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from launching import ROOT, command, environment, kill

SCRIPT = ROOT / "examples" / "grpo_fp8.py"
CHECK = Path(__file__).with_name("check_bad_input.py")
LIMIT_SECONDS = 30.0  # from the fault to the end of all ranks
IMPORT_SECONDS = 240.0  # what a busy machine may need before it

SHAPE = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
}
CONFIG: dict[str, Any] = {
    "model": {"shape": SHAPE, "tokenizer": "characters", "max_sequence_length": 32},
    "rollout": {"max_new_tokens": 4},
    "algorithm": {"num_minibatches": 2},
    "train": {"num_steps": 1, "prompts_per_step": 4, "samples_per_prompt": 2},
    "eval": {"num_prompts": 4},
    "tracking": {"tensorboard": False},
}
ROW = '{"prompt": "1+1=", "answer": 2}\n'

REWARDS = """
import os

def fails(sample):
    raise RuntimeError("the scorer\\nis away")

def fails_on_rank_1(sample):
    if os.environ["RANK"] == "1":
        fails(sample)
    return 0.0
"""


@dataclass(frozen=True)
class Outcome:
    """How a launch ended."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def errors(self) -> list[str]:
        """Our error lines."""
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


def launch(*arguments: str, num_processes: int = 1, timeout: float = LIMIT_SECONDS, **env: str) -> Outcome:
    """The main script, from another folder, as a user starts it."""
    start = time.monotonic()
    process = subprocess.Popen(
        command(SCRIPT, *arguments, num_processes=num_processes),
        env=environment(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill(process)
        raise
    return Outcome(process.returncode, out, err, time.monotonic() - start)


def tracebacks(outcome: Outcome) -> list[str]:
    """Lines of tracebacks that go through the main script (torchrun prints one of its own)."""
    return [line for line in outcome.err.splitlines() if f'{SCRIPT.name}", line' in line]


def assert_one_line(outcome: Outcome, pattern: str, *, code: int) -> None:
    """One line `error: setting: what is wrong; what to do`, and nothing of ours besides."""
    assert outcome.code == code, outcome.err
    assert len(outcome.errors) == 1, outcome.err
    assert re.fullmatch(rf"error: {pattern}.*; .*", outcome.errors[0]), outcome.errors[0]
    assert "Traceback" not in outcome.err
    assert outcome.seconds < LIMIT_SECONDS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid configuration, and everything that is wrong."""
    folder = tmp_path_factory.mktemp("bad_input")
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG | {"run_dir": str(folder / "run")}))
    (folder / "rewards_of_a_user.py").write_text(REWARDS)
    (folder / "empty.jsonl").write_text("\n")
    (folder / "bad_row.jsonl").write_text(ROW + '{"prompt": "1+2=", "answer"\n')
    (folder / "long.jsonl").write_text(ROW + ROW.replace("1+1=", "1" * 29))  # 28 fit before 4 new tokens
    (folder / "no_config").mkdir()
    (folder / "no_object").mkdir()
    (folder / "no_object" / "latest_checkpoint.json").write_text("[]")
    (folder / "damaged").mkdir()
    (folder / "damaged" / "state.json").write_text('{"step"')
    for name, weights in (("no_weights", None), ("truncated", b"\x40\x00\x00\x00\x00\x00\x00\x00{")):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(hf_config()))
        if weights is not None:
            (folder / name / "model.safetensors").write_bytes(weights)
    return folder


def hf_config() -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }


# The configuration itself: the script, at once.


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["absent.yaml"], r"CONFIG: no file 'absent\.yaml'"),
        (["{config}", "train.samples_per_prompt=1"], r"train\.samples_per_prompt: a group needs at least 2"),
        (
            ["{config}", "train.num_stps=1"],
            r"train\.num_stps: no such setting",
        ),
        (["{config}", "optimizer.lr=-1"], r"optimizer\.lr: should be greater than 0 \(got -1\)"),
        (["{config}", "algorithm.clip.upper=0.7"], r"algorithm\.clip\.upper: should be greater than 1"),
        (["{config}", "train.seed"], r"train\.seed: is no setting"),
        (["{config}", "precision.fp8_param=true"], r"precision\.fp8_param: needs an FP8 recipe"),
        (["{config}", "calibration.balance_ratio_cap=1.5"], r"calibration\.balance_ratio_cap: 1\.5"),
        (["{config}", "rollout.max_new_tokens=32"], r"rollout\.max_new_tokens: leaves no room for a prompt"),
        (
            ["{config}", "--dry-run", "cluster.gpus_per_node=3", "parallel.tp=2"],
            r"parallel: tp 2 .* the 3 ranks",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value),
)
def test_configuration(folder: Path, arguments: list[str], pattern: str) -> None:
    outcome = launch(*(argument.format(config=folder / "config.yaml") for argument in arguments))
    assert_one_line(outcome, pattern, code=2)
    assert outcome.out == "" and outcome.err.count("\n") == 1


def test_world_size_that_does_not_fit(folder: Path) -> None:
    outcome = launch(str(folder / "config.yaml"), "parallel.tp=2", WORLD_SIZE="3", RANK="0")
    assert_one_line(outcome, r"parallel: tp 2 x pp 1 x cp 1 = 2 does not divide the 3 ranks", code=2)
    assert not (folder / "run").exists()


def test_dry_run_reads_back(folder: Path, tmp_path: Path) -> None:
    printed = launch(str(folder / "config.yaml"), "optimizer.lr=1e-5", "--dry-run", "train.seed=3")
    assert printed.code == 0 and printed.err == ""
    (tmp_path / "again.yaml").write_text(printed.out)
    again = launch(str(tmp_path / "again.yaml"), "--dry-run")
    assert again.out == printed.out
    values = yaml.safe_load(printed.out)
    assert (values["optimizer"]["lr"], values["train"]["seed"]) == (1e-5, 3)
    assert not (folder / "run").exists()


@pytest.mark.parametrize("arguments", [[], ["--no-such-flag", "x.yaml"]])
def test_wrong_usage(arguments: list[str]) -> None:
    outcome = launch(*arguments)
    assert outcome.code == 2 and "usage: " in outcome.err and "Traceback" not in outcome.err


# What shows once the libraries are there.

LATE = {
    "data set absent": (["data.train={folder}/absent.jsonl"], r"data\.train: no file .*absent\.jsonl", 2),
    "data set empty": (["data.train={folder}/empty.jsonl"], r"data\.train: .*empty\.jsonl has no rows", 2),
    "bad row": (
        ["data.train={folder}/bad_row.jsonl"],
        r"data\.train: .*bad_row\.jsonl line 2 is not JSON",
        2,
    ),
    "prompt too long": (
        ["data.train={folder}/long.jsonl"],
        r"model\.max_sequence_length: a prompt of 29 tokens .* exceeds 32",
        2,
    ),
    "held-out data set absent": (["eval.sets=[{folder}/absent.jsonl]"], r"eval\.sets: no file", 2),
    "tokenizer unknown": (
        ["model.tokenizer=no/such-tokenizer"],
        r"model\.tokenizer: cannot load 'no/such-token",
        2,
    ),
    "tokenizer folder empty": (["model.tokenizer={folder}/no_config"], r"model\.tokenizer: cannot load", 2),
    "reward absent": (
        ["reward.name=no_such_package.f"],
        r"reward\.name: cannot import 'no_such_package\.f'",
        2,
    ),
    "reward raises": (
        ["reward.name=rewards_of_a_user.fails"],
        r"reward\.name: rewards_of_a_user\.fails raised RuntimeError: the scorer is away",
        1,
    ),
    "run_dir below a file": (["run_dir={folder}/config.yaml/run"], r"run_dir: cannot be written", 1),
    "run_dir's name too long": (["run_dir=" + 300 * "x"], r"run_dir: File name too long", 2),
    "tracker that names nothing": (
        ["run_dir={folder}/no_object"],
        r"checkpoint\.resume: no checkpoint is whole .*latest_checkpoint\.json: cannot be read",
        2,
    ),
    "checkpoint damaged": (
        ["checkpoint.resume={folder}/damaged"],
        r"checkpoint\.resume: .*damaged is damaged \(has no manifest\.json\)",
        2,
    ),
    "checkpoint absent": (
        ["checkpoint.resume={folder}/absent"],
        r"checkpoint\.resume: .* is no checkpoint",
        2,
    ),
    "model folder without config": (
        ["model.shape=null", "model.hf={folder}/no_config"],
        r"model\.hf: .* has no config\.json",
        2,
    ),
    "model folder without weights": (
        ["model.shape=null", "model.hf={folder}/no_weights"],
        r"model\.hf: .*no_weights: has neither model\.safetensors",
        2,
    ),
    "weights cut short": (
        ["model.shape=null", "model.hf={folder}/truncated"],
        r"model\.hf: .*truncated/model\.safetensors: is cut short",
        2,
    ),
}


@pytest.fixture(scope="module")
def late_outcomes(folder: Path) -> dict[str, Outcome]:
    """All late cases, in one process."""
    cases, results = folder / "cases.json", folder / "results.json"
    lines = [
        [str(folder / "config.yaml"), *(argument.format(folder=folder) for argument in arguments)]
        for arguments, _, _ in LATE.values()
    ]
    cases.write_text(json.dumps(lines))
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), "HF_ENDPOINT": "http://127.0.0.1:9"}
    completed = subprocess.run(
        command(CHECK, str(cases), str(results), num_processes=1),
        env=environment() | env,
        capture_output=True,
        text=True,
        timeout=IMPORT_SECONDS + LIMIT_SECONDS * len(LATE),
    )
    assert completed.returncode == 0, completed.stderr
    return dict(zip(LATE, (Outcome(**result) for result in json.loads(results.read_text())), strict=True))


@pytest.mark.parametrize("name", LATE)
def test_late(late_outcomes: dict[str, Outcome], name: str) -> None:
    _, pattern, code = LATE[name]
    assert_one_line(late_outcomes[name], pattern, code=code)


# Two ranks under torchrun. Its own report of the failure follows ours and names the exit code of the rank.


def test_what_all_ranks_find_is_said_once(folder: Path) -> None:
    outcome = launch(
        str(folder / "config.yaml"),
        f"data.train={folder}/empty.jsonl",
        num_processes=2,
        timeout=IMPORT_SECONDS,
    )
    assert [line for line in outcome.errors if "(rank" not in line] == outcome.errors, outcome.err
    assert len(outcome.errors) == 1 and "data.train: " in outcome.errors[0]
    assert re.search(r"exitcode\s*: 2 ", outcome.err), outcome.err
    assert outcome.code != 0 and not tracebacks(outcome)


def test_reward_that_raises_on_one_rank_stops_all(folder: Path) -> None:
    outcome = launch(
        str(folder / "config.yaml"),
        "reward.name=rewards_of_a_user.fails_on_rank_1",
        f"run_dir={folder}/two_ranks",
        num_processes=2,
        timeout=IMPORT_SECONDS,
        PYTHONPATH=os.pathsep.join([str(ROOT), str(folder)]),
    )
    assert outcome.code != 0
    (line,) = outcome.errors
    assert "reward.name: rewards_of_a_user.fails_on_rank_1 raised RuntimeError" in line and line.endswith("(rank 1)")
    assert re.search(r"exitcode\s*: 1 ", outcome.err), outcome.err
    assert not tracebacks(outcome)
