"""Alarms by hand, skipped updates with their dumps, the watchdog's table, signals."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_calclip.batch import Completion, Prompt, TrainingBatch, Trajectories
from megatron_calclip.config import AlarmsConfig
from megatron_calclip.errors import EXIT_FAILED, UserError
from megatron_calclip.guards.alarms import Alarms
from megatron_calclip.guards.preemption import Preemption, stand_down
from megatron_calclip.guards.skipped import MAX_DUMPS, SkippedUpdates
from megatron_calclip.guards.watchdog import Standing, Watchdog, standing, table

RULES = AlarmsConfig(window=4, entropy_factor=2.0, entropy_rise=0.3, loss_deviations=10.0, min_loss_distance=0.1)


def fed(rows: list[tuple[float, float]], rules: AlarmsConfig = RULES) -> tuple[Alarms, list[dict[str, str]]]:
    alarms = Alarms(rules)
    return alarms, [alarms.check({"entropy": entropy, "loss": loss}) for entropy, loss in rows]


STEADY = [(0.5, 0.01), (0.4, -0.01), (0.6, 0.02), (0.5, -0.02)]


def test_nothing_rings_before_the_window_is_full() -> None:
    _, found = fed([(0.1, 0.0), (5.0, 3.0), (9.0, -4.0)])
    assert found == [{}, {}, {}]


def last(rows: list[tuple[float, float]]) -> dict[str, str]:
    return fed(rows)[1][-1]


def test_entropy_surge() -> None:
    """The median of the four is 0.5: both twice as much and 0.3 more make the limit 1.0."""
    assert last([*STEADY, (1.0, 0.0)]) == {}
    found = last([*STEADY, (1.01, 0.0)])
    assert list(found) == ["alarm/entropy"]
    assert found["alarm/entropy"] == "entropy 1.01 nats, above 1; the median of the last 4 steps is 0.5"
    # Twice almost nothing is no surge.
    low = [(0.01, 0.0)] * 4
    assert last([*low, (0.3, 0.0)]) == {} and list(last([*low, (0.32, 0.0)])) == ["alarm/entropy"]


def test_loss_spike() -> None:
    """Median 0, median absolute deviation 0.015: ten deviations are 0.22239."""
    assert last([*STEADY, (0.5, 0.22)]) == {} and list(last([*STEADY, (0.5, -0.23)])) == ["alarm/loss"]
    calm = [(0.5, 0.0)] * 4
    assert last([*calm, (0.5, 0.09)]) == {} and list(last([*calm, (0.5, -0.11)])) == ["alarm/loss"]
    assert last([(0.5, float("nan"))]) == {"alarm/loss": "loss nan"}


def test_alarms_do_not_move_the_yardstick_and_survive_a_checkpoint() -> None:
    alarms, _ = fed([*STEADY, *[(3.0, 0.0)] * 5])
    other = Alarms(RULES)
    other.load_state_dict(json.loads(json.dumps(alarms.state_dict())))
    for one in (alarms, other):
        assert "median of the last 4 steps is 0.5" in one.check({"entropy": 3.0, "loss": 0.0})["alarm/entropy"]


def make_batch() -> TrainingBatch:
    """Three prompts of one token with answers of 1, 2 and 3."""
    prompts = [Prompt(id=10 + i, token_ids=(i + 1,), text="", answer="") for i in range(3)]
    answers = [[Completion((7,) * (i + 1), (-0.5,) * (i + 1), finished=True, policy_version=0)] for i in range(3)]
    trajectories = Trajectories.from_completions(prompts, answers)
    old = torch.where(trajectories.response_mask, -0.4, 0.0)
    old[-1] = torch.nan
    return TrainingBatch(trajectories, torch.tensor([0.0, 1.0, 1.0]), torch.zeros(9), old)


def test_skipped_updates_are_dumped_and_end_the_run_in_a_row(tmp_path: Path) -> None:
    guard = SkippedUpdates(tmp_path, max_in_a_row=3, writes=True)
    numbers = {"loss": float("nan"), "grad_norm": float("inf")}
    guard.skipped(4, 1, make_batch(), [2, 0], **numbers)
    tensors = load_file(tmp_path / "nonfinite" / "step_4_minibatch_1.safetensors")
    assert tensors["tokens"].tolist() == [1, 7, 3, 7, 7, 7] and tensors["lengths"].tolist() == [2, 4]
    assert tensors["sample_ids"].tolist() == [10, 12] and tensors["rewards"].tolist() == [0.0, 1.0]
    note = json.loads((tmp_path / "nonfinite" / "step_4_minibatch_1.json").read_text())
    assert note == {"loss": "nan", "grad_norm": "inf", "sample_ids": [10, 12], "not_finite_before": [12]}
    guard.applied()
    guard.skipped(5, 0, make_batch(), [1], **numbers)
    guard.skipped(5, 1, make_batch(), [1], **numbers)
    with pytest.raises(UserError, match=r"train\.max_skipped_updates: 3 updates in a row.*step 5.*nonfinite") as error:
        guard.skipped(5, 2, make_batch(), [1], **numbers)
    assert error.value.exit_code == EXIT_FAILED


def test_a_broken_run_does_not_fill_the_disk(tmp_path: Path) -> None:
    guard = SkippedUpdates(tmp_path, max_in_a_row=1000, writes=True)
    for step in range(MAX_DUMPS + 5):
        guard.skipped(step, 0, make_batch(), [0], loss=0.0, grad_norm=0.0)
    assert len(list((tmp_path / "nonfinite").glob("*.safetensors"))) == MAX_DUMPS
    silent = SkippedUpdates(tmp_path / "other", max_in_a_row=5, writes=False)
    silent.skipped(1, 0, make_batch(), [0], loss=0.0, grad_norm=0.0)
    assert not (tmp_path / "other").exists()


def test_the_table_puts_the_rank_that_hangs_first() -> None:
    lines = table(
        {
            0: Standing(0, "reward", 61.0, "trainer.py:5 run", waits=True),
            1: Standing(1, "reward", 61.0, "my/reward.py:22 score", waits=False),
            2: None,
        }
    )
    assert lines == [
        "rank 1: HANGS in stage 'reward' for 61 s, at my/reward.py:22 score",
        "rank 2: no sign of life",
        "rank 0: waits for others in stage 'reward' for 61 s, at trainer.py:5 run",
    ]


def test_a_stack_inside_a_collective_waits() -> None:
    source = "def all_reduce(frames):\n    import sys\n    frames.append(sys._getframe())\n"
    frames: list[Any] = []
    scope: dict[str, Any] = {}
    exec(compile(source, "/site-packages/torch/distributed/distributed_c10d.py", "exec"), scope)

    def stage() -> None:
        scope["all_reduce"](frames)

    stage()
    waiting = standing(3, "sync", 1.0, frames[0])
    assert waiting.waits and waiting.place.endswith(" stage") and "test_guards.py" in waiting.place
    assert not standing(3, "sync", 1.0, sys._getframe()).waits


def test_the_watchdog_ends_a_stage_that_takes_too_long(capfd: pytest.CaptureFixture[str]) -> None:
    ended = threading.Event()
    watchdog = Watchdog(0, 1, 1.5, end=ended.set)  # all stages together take longer, none does
    for stage in ("rollout", "reward", "update"):
        watchdog.enter(stage)
        time.sleep(0.6)
    assert not ended.is_set()
    watchdog.enter("sync")
    assert ended.wait(10)
    watchdog.close()
    error = capfd.readouterr().err
    assert "error: no progress for" in error and "train.hang_timeout_seconds" in error
    assert "rank 0: HANGS in stage 'sync'" in error


class Lone:
    """A rank on its own."""

    def any_rank(self, flag: bool) -> bool:
        return flag


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_noted(signum: signal.Signals) -> None:
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        preemption = Preemption(Lone())  # type: ignore[arg-type]
        assert not preemption.requested()
        os.kill(os.getpid(), signum)
        assert preemption.requested() and preemption.received is signum
        assert stand_down() and signal.getsignal(signum) is signal.SIG_DFL
        assert not stand_down()
        Preemption(Lone())  # type: ignore[arg-type]
        assert not stand_down()  # none had come
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
