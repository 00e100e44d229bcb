"""The main job, shortened, as a user starts it: what it writes, in two processes and in one, and killed and resumed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import launching
import pytest
import stalling_reward

from megatron_calclip.checkpoint_files import find
from megatron_calclip.metrics import METRICS

SCRIPT = launching.ROOT / "examples" / "grpo_fp8.py"
TIMEOUT_SECONDS = 200  # a hang is a failure; a run takes a tenth of this on two idle cores
NUM_STEPS, SAVE_EVERY = 4, 2
NUM_PROMPTS, NUM_SAMPLES, NUM_HELD_OUT = 4, 4, 8
SETTINGS = [
    str(launching.ROOT / "conf" / "tiny_cpu.yaml"),
    "model.warm_start.num_steps=6",
    "model.warm_start.batch_size=16",
    "reward={name: stalling_reward.share_of_digits, num_workers: 1, timeout_seconds: 1000}",
    "calibration={enabled: true, start_step: 1, interval: 1, start: [0.8, 1.24], min_tail_tokens: 1}",
    "optimizer.lr=3e-3",
    f"train.num_steps={NUM_STEPS}",
    f"train.prompts_per_step={NUM_PROMPTS}",
    f"train.samples_per_prompt={NUM_SAMPLES}",
    "train.tokens_per_microbatch=64",
    "train.deterministic=true",
    f"eval.num_prompts={NUM_HELD_OUT}",
    "eval.samples_per_prompt=1",
    "eval.every=0",
    f"checkpoint.save_every={SAVE_EVERY}",
]
TP2 = ["parallel.tp=2", "parallel.sequence_parallel=true"]


def repeatable(row: dict[str, Any]) -> dict[str, Any]:
    """A row of metrics without what a clock measured."""
    clocks = ("timing/", "throughput/", "ledger/shadow_seconds", "ledger/shadow_share", "ledger/study_seconds")
    return {name: value for name, value in row.items() if not name.startswith(clocks)}


def rows(path: Path) -> list[dict[str, Any]]:
    """A JSON Lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


class Job:
    """Runs of the shortened job that share one cache of warm starts.

    Args:
        folder: holds the cache and the runs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {"MEGATRON_CALCLIP_CACHE": str(folder / "cache")}

    def arguments(self, name: str, *overrides: str) -> list[str]:
        """The command line of a run."""
        return [*SETTINGS, *overrides, f"run_dir={self.folder / name}"]

    def run(self, name: str, *overrides: str, num_processes: int) -> tuple[Path, str]:
        """Run to the end; the run's folder and what it printed."""
        arguments = self.arguments(name, *overrides)
        output = launching.run(SCRIPT, *arguments, num_processes=num_processes, timeout=TIMEOUT_SECONDS, env=self.env)
        return self.folder / name, output

    def kill_in_last_step(self, name: str, *overrides: str, num_processes: int) -> Path:
        """Run until every rank scores the first completion of the last step, then SIGKILL all of it."""
        flags = self.folder / f"{name}-flags"
        flags.mkdir()
        calls = (NUM_HELD_OUT + (NUM_STEPS - 1) * NUM_PROMPTS * NUM_SAMPLES) // num_processes
        process = launching.start(
            SCRIPT,
            *self.arguments(name, *overrides),
            num_processes=num_processes,
            env=self.env | {stalling_reward.CALLS_VARIABLE: str(calls), stalling_reward.FOLDER_VARIABLE: str(flags)},
        )
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while len(list(flags.iterdir())) < num_processes:
            if process.poll() is not None or time.monotonic() > deadline:
                launching.kill(process)
                pytest.fail(f"the run never came to its last step\n{process.communicate()[0]}")
            time.sleep(0.05)
        launching.kill(process)
        return self.folder / name


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """One cache for all tests of this module."""
    return Job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def uninterrupted(job: Job) -> tuple[Path, str]:
    """A whole run in two processes."""
    return job.run("uninterrupted", *TP2, num_processes=2)


def check_record(run_dir: Path, output: str) -> None:
    """What every whole run leaves behind."""
    metrics = rows(run_dir / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(NUM_STEPS + 1))
    assert all(row.keys() <= METRICS.keys() for row in metrics)
    assert all("eval/score" in metrics[step] for step in (0, NUM_STEPS))
    always = {"reward/mean", "loss", "grad_norm", "entropy", "ratio/max", "lr", "clip/lower", "timing/step"}
    for row in metrics[1:]:
        assert always <= row.keys()
        # The job teaches something, or the other tests of this module would compare nothing.
        assert row["grad_norm"] > 0 and row["updates/applied"] == 4 and row["updates/skipped"] == 0
        assert row["ratio/min"] < 1 < row["ratio/max"]
    # Not alpha: a step may have no token with A < 0.
    assert all("calibration/bytes" in metrics[step] for step in range(1, NUM_STEPS + 1))

    samples = rows(run_dir / "samples.jsonl")
    assert sorted({row["step"] for row in samples}) == list(range(1, NUM_STEPS + 1))
    assert all(row["prompt"] and 0 <= row["reward"] <= 1 for row in samples)
    assert (run_dir / "config.yaml").is_file() and any((run_dir / "tensorboard").iterdir())

    assert find(run_dir, "auto") == run_dir / f"step_{NUM_STEPS}"  # named by the tracker, and whole
    for step in (SAVE_EVERY, NUM_STEPS):
        assert json.loads((run_dir / f"step_{step}" / "state.json").read_text())["step"] == step
        assert (run_dir / f"step_{step}" / "megatron" / "metadata.json").is_file()
        assert (run_dir / f"step_{step}" / "hf" / "config.json").is_file()
    assert not list(run_dir.glob("*.partial"))
    assert "held-out score, end" in output and "metrics.jsonl" in output


def test_two_processes(uninterrupted: tuple[Path, str]) -> None:
    check_record(*uninterrupted)


def test_one_process(job: Job, uninterrupted: tuple[Path, str]) -> None:
    run_dir, output = job.run("one", num_processes=1)
    check_record(run_dir, output)
    # Both start from the same cached weights, and sampling does not depend on the layout.
    first, other = (rows(folder / "metrics.jsonl")[0] for folder in (run_dir, uninterrupted[0]))
    assert first == other


def test_killed_and_resumed(job: Job, uninterrupted: tuple[Path, str]) -> None:
    expected, _ = uninterrupted
    run_dir = job.kill_in_last_step("killed", *TP2, num_processes=2)
    assert [row["step"] for row in rows(run_dir / "metrics.jsonl")] == list(range(NUM_STEPS))
    assert json.loads((run_dir / "latest_checkpoint.json").read_text())["step"] == SAVE_EVERY

    _, output = job.run("killed", *TP2, num_processes=2)
    assert f"after step {SAVE_EVERY}" in output
    check_record(run_dir, output)
    for actual, wanted in zip(rows(run_dir / "metrics.jsonl"), rows(expected / "metrics.jsonl"), strict=True):
        assert repeatable(actual) == repeatable(wanted)
    assert rows(run_dir / "samples.jsonl") == rows(expected / "samples.jsonl")
    # Weights, masters, moments: the files of the last checkpoint are the same, byte for byte.
    last = f"step_{NUM_STEPS}"
    files = sorted((expected / last).rglob("*.distcp"))
    assert {file.parent.name for file in files} == {"megatron", "optimizer"}
    for file in files:
        name = file.relative_to(expected)
        assert (run_dir / name).read_bytes() == file.read_bytes(), name
