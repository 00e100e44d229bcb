"""Runs with a fault in them: killed ranks, signals, hangs, NaN, surges, a full disk. Minutes; `pytest -m faults`.

`MEGATRON_CALCLIP_NUM_KILLS` sets how many random moments of a run are tried (default 20).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_calclip.checkpoint_files import find

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("staged_run.py")
NUM_KILLS = int(os.environ.get("MEGATRON_CALCLIP_NUM_KILLS", "20"))
NUM_STEPS = 5
LONGEST_SECONDS = 300
LEAVE_SECONDS = 25
"""A run that was told to stop must have left after so long."""
CLOCKS = ("timing/", "throughput/", "ledger/shadow_seconds", "ledger/shadow_share", "ledger/study_seconds")
SETTINGS = [
    str(ROOT / "conf" / "tiny_cpu.yaml"),
    "model.warm_start.num_steps=6",
    "model.warm_start.batch_size=16",
    "reward.name=staged_reward.share_of_digits",
    "calibration={enabled: true, start_step: 1, interval: 2, start: [0.8, 1.24], min_tail_tokens: 1}",
    "optimizer.lr=3e-3",
    "train.prompts_per_step=4",
    "train.samples_per_prompt=4",
    "train.tokens_per_microbatch=64",
    "train.deterministic=true",
    "eval={num_prompts: 8, every: 2}",
    "checkpoint={save_every: 1, keep: 3, async_save: true}",
    "tracking.tensorboard=false",
]

Record = Callable[[str, object], None]
"""pytest's `record_property`: figures for `--record` (tests/conftest.py)."""

pytestmark = pytest.mark.faults


class Runs:
    """Runs of one job, which share a cache of warm starts.

    Args:
        folder: holds the cache and the runs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(
        self, name: str, *overrides: str, fault: dict[str, Any] | None = None, restarts: int = 0, steps: int = NUM_STEPS
    ) -> subprocess.Popen[str]:
        """Start one on two processes."""
        if fault is not None:
            fault = {"flag": str(self.folder / f"{name}.flag"), **fault}
        kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
        path = os.pathsep.join([str(ROOT), str(SCRIPT.parent)])
        extra = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "MEGATRON_CALCLIP_CACHE": str(self.folder / "cache")}
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        return subprocess.Popen(
            [
                *(sys.executable, *launcher, "--max-restarts", str(restarts), str(SCRIPT), *SETTINGS),
                *(f"train.num_steps={steps}", *overrides, f"run_dir={self.folder / name}"),
            ],
            env=kept | extra | ({"FAULT": json.dumps(fault)} if fault else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, name: str, *overrides: str, expect: int | None = 0, **options: Any) -> str:
        """Run one to its end; its output."""
        process = self.start(name, *overrides, **options)
        output = wait(process, LONGEST_SECONDS)
        assert expect is None or process.returncode == expect, output
        return output

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Its metrics, without what a clock measured."""
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if not k.startswith(CLOCKS)} for line in lines]

    def files(self, name: str, step: int = NUM_STEPS) -> dict[str, bytes]:
        """Weights, masters and moments of a checkpoint."""
        folder = self.folder / name / f"step_{step}"
        return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.distcp"))}


def wait(process: subprocess.Popen[str], seconds: float) -> str:
    """Wait for the end, and return the output; a process that hangs fails the test."""
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        for pid in [*workers_of(process), process.pid]:
            os.kill(pid, signal.SIGKILL)
        pytest.fail(f"still there after {seconds} s\n{process.communicate()[0]}")


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """The ranks of a launcher, in order."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
    return sorted(map(int, listed.stdout.split()))


def wait_for_rows(run_dir: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Until a run has logged so many steps."""
    deadline = time.monotonic() + LONGEST_SECONDS
    path = run_dir / "metrics.jsonl"
    while not path.is_file() or len(path.read_text().splitlines()) < count:
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"the run never came so far\n{wait(process, 1)}")
        time.sleep(0.05)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All runs of this module; the first one is whole."""
    made = Runs(tmp_path_factory.mktemp("runs"))
    made.run("whole")
    return made


def moments() -> list[tuple[str, int, int, float]]:
    """Random moments of a run: stage, step, rank, seconds from the stage's beginning."""
    rng = random.Random(20)
    # The checkpoint's files are written while the next step runs: those stages are moments of the save as well.
    stages = ["rollout", "reward", "log_probs", "update", "sync", "checkpoint", "eval"]
    found = []
    for index in range(NUM_KILLS):
        stage = stages[index % len(stages)]
        step = rng.choice([2, 4]) if stage == "eval" else rng.randint(1, NUM_STEPS)
        found.append((stage, step, rng.randint(0, 1), round(rng.uniform(0.0, 0.15), 3)))
    return found


@pytest.mark.parametrize(("stage", "step", "rank", "delay"), moments())
def test_a_killed_rank_costs_nothing(
    runs: Runs, stage: str, step: int, rank: int, delay: float, record_property: Record
) -> None:
    """torchrun starts the job anew, which goes on by itself, and ends as the run that was never killed."""
    name = f"killed-{stage}-{step}-{rank}-{delay}"
    fault = {"kind": "kill", "stage": stage, "step": step, "rank": rank, "delay": delay}
    began = time.monotonic()
    runs.run(name, fault=fault, restarts=1)
    assert (runs.folder / f"{name}.flag").exists(), "the fault never happened"
    assert runs.rows(name) == runs.rows("whole")
    assert runs.files(name) == runs.files("whole") != {}
    assert not list((runs.folder / name).glob("*.partial"))
    for what, value in {**fault, "seconds_to_end": time.monotonic() - began}.items():
        record_property(what, value)


def test_a_dead_rank_ends_all(runs: Runs, record_property: Record) -> None:
    process = runs.start("dead", steps=1000)
    wait_for_rows(runs.folder / "dead", 2, process)
    workers = workers_of(process)
    os.kill(workers[1], signal.SIGKILL)
    began = time.monotonic()
    wait(process, 60)
    record_property("seconds_to_end", time.monotonic() - began)
    assert process.returncode != 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


@pytest.mark.parametrize("whom", ["workers", "launcher"])
def test_a_signal_saves_and_leaves(runs: Runs, whom: str, record_property: Record) -> None:
    """SIGUSR1 to the ranks, as Slurm sends it; SIGTERM to the launcher, which hands it on and reports it itself."""
    name = f"signal-{whom}"
    process = runs.start(name)
    wait_for_rows(runs.folder / name, 3, process)
    began = time.monotonic()
    for pid in workers_of(process) if whom == "workers" else [process.pid]:
        os.kill(pid, signal.SIGUSR1 if whom == "workers" else signal.SIGTERM)
    output = wait(process, LEAVE_SECONDS)
    record_property("seconds_to_leave", time.monotonic() - began)
    assert "stopped by a signal after step" in output
    assert (process.returncode == 0) == (whom == "workers"), output
    done = len(runs.rows(name)) - 1
    assert 2 <= done < NUM_STEPS and find(runs.folder / name, "auto") == runs.folder / name / f"step_{done}"
    assert f"after step {done}" in runs.run(name)
    assert runs.rows(name) == runs.rows("whole") and runs.files(name) == runs.files("whole")


def test_a_rank_that_hangs_is_named(runs: Runs) -> None:
    fault = {"kind": "hang", "stage": "update", "step": 2, "rank": 1}
    output = runs.run("hangs", "train.hang_timeout_seconds=6", fault=fault, expect=None)
    assert "no progress for" in output and "(train.hang_timeout_seconds)" in output
    assert "rank 1: HANGS in stage 'update'" in output and "faults/staged_run.py" in output
    assert "rank 0: waits for others in stage 'update'" in output


def test_an_update_that_is_not_finite_is_skipped_and_dumped(runs: Runs) -> None:
    output = runs.run("poisoned", fault={"kind": "poison", "steps": [2]})
    rows = runs.rows("poisoned")
    assert [row.get("updates/skipped") for row in rows] == [None, 0, 1, 0, 0, 0], output
    dumped = sorted(path.name for path in (runs.folder / "poisoned" / "nonfinite").iterdir())
    assert len(dumped) == 2 and dumped[0].startswith("step_2_minibatch_")
    note = json.loads((runs.folder / "poisoned" / "nonfinite" / dumped[0]).read_text())
    assert len(note["not_finite_before"]) == 1 and note["not_finite_before"][0] in note["sample_ids"]


def test_a_run_whose_updates_all_fail_stops(runs: Runs) -> None:
    poison = {"kind": "poison", "steps": [2, 3, 4, 5]}
    output = runs.run("ruined", "train.max_skipped_updates=2", "algorithm.num_minibatches=1", fault=poison, expect=None)
    assert "error: train.max_skipped_updates: 2 updates in a row" in output
    # That of step 2 was still being written when the run ended.
    assert find(runs.folder / "ruined", "auto") == runs.folder / "ruined" / "step_1"


@pytest.mark.parametrize("action", ["warn", "stop", "rollback"])
def test_an_entropy_surge(runs: Runs, action: str) -> None:
    name = f"surge-{action}"
    alarms = f"alarms={{window: 2, action: {action}, min_loss_distance: 100}}"
    output = runs.run(name, alarms, fault={"kind": "surge", "steps": [4]}, expect=None)
    assert "ALARM after step 4: entropy 50 nats" in output
    rows = runs.rows(name)
    if action == "stop":
        assert "error: alarms.action: the run stops after step 4" in output
        assert find(runs.folder / name, "auto") == runs.folder / name / "step_3"
    else:
        assert [row["step"] for row in rows] == list(range(NUM_STEPS + 1))
        assert ("alarm/entropy" in rows[4]) == (action == "warn")
    if action == "rollback":
        assert "rolled back to" in output and "step_3 (1 of 2)" in output
        assert rows[:4] == runs.rows("whole")[:4] and rows[4] != runs.rows("whole")[4]  # other prompts


def test_a_full_disk_leaves_older_checkpoints(runs: Runs) -> None:
    fault = {"kind": "disk", "stage": "update", "step": 3, "rank": 0, "bytes": 200_000}
    output = runs.run("full", "checkpoint={save_every: 1, keep: 3}", fault=fault, expect=None)
    assert "error: run_dir: cannot write a checkpoint" in output and "free space or fix it" in output
    assert find(runs.folder / "full", "auto") == runs.folder / "full" / "step_2"
    assert not list((runs.folder / "full").glob("*.partial"))
    runs.run("full")
    assert runs.rows("full") == runs.rows("whole") and runs.files("full") == runs.files("whole")
