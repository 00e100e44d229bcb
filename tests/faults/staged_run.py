"""The main job with one fault in it, at a stage that is named beforehand. Started like examples/grpo_fp8.py.

`FAULT` is JSON: `kind`, `rank`, `step` (counted from 1), `stage` (as in `timing/<stage>`), `delay` in seconds from the
stage's beginning, and `flag`, a file that is made when it happens, so that it happens once:

- `kill`: SIGKILL to this rank itself;
- `hang`: its main thread stands still;
- `poison`: advantages of the step's first sequence become NaN (`stage` is not looked at; `steps` for several);
- `surge`: the step's logged entropy is 50 nats (the same);
- `disk`: from then on no file may grow beyond `bytes`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

FAULT: dict[str, Any] = json.loads(os.environ.get("FAULT", "{}"))
RANK = int(os.environ.get("RANK", "0"))


def strike() -> None:
    """Let the fault happen."""
    flag = Path(FAULT["flag"])
    if flag.exists():
        return
    flag.touch()
    if FAULT["kind"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT["kind"] == "disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (FAULT["bytes"], FAULT["bytes"]))
    if FAULT["kind"] == "hang":
        time.sleep(3600)


def install() -> None:
    """Put the fault in place."""
    from megatron_calclip import trainer
    from megatron_calclip.metrics import Stopwatch

    plain_stage = Stopwatch.stage
    present: dict[str, int] = {"step": 0}
    plain_step = trainer.Trainer.train_step

    def train_step(self: Any) -> Any:
        present["step"] = self.step + 1
        return plain_step(self)

    @contextlib.contextmanager
    def stage(self: Stopwatch, name: str) -> Iterator[None]:
        here = (name, present["step"], RANK) == (FAULT.get("stage"), FAULT.get("step"), FAULT.get("rank"))
        with plain_stage(self, name):
            if here and FAULT["kind"] == "kill":
                threading.Timer(FAULT["delay"], strike).start()
            elif here:
                strike()
            yield

    plain_advantages = trainer.Trainer.with_advantages

    def with_advantages(self: Any, trajectories: Any, rewards: torch.Tensor) -> Any:
        batch = plain_advantages(self, trajectories, rewards)
        if FAULT["kind"] == "poison" and present["step"] in FAULT["steps"]:
            batch.advantages[: int(trajectories.lengths[0])] = math.nan
        return batch

    plain_metrics = trainer.Trainer.metrics

    def metrics(self: Any, *arguments: Any) -> Any:
        row = plain_metrics(self, *arguments)
        if FAULT["kind"] == "surge" and present["step"] in FAULT["steps"] and not Path(FAULT["flag"]).exists():
            self.runtime.barrier()
            Path(FAULT["flag"]).touch()
            row["entropy"] = 50.0
        return row

    trainer.Trainer.train_step = train_step  # type: ignore[method-assign]
    trainer.Trainer.with_advantages = with_advantages  # type: ignore[method-assign]
    trainer.Trainer.metrics = metrics  # type: ignore[method-assign]
    Stopwatch.stage = stage  # type: ignore[method-assign]


if __name__ == "__main__":
    from megatron_calclip.launch import main
    from megatron_calclip.learner import cpu

    if FAULT:
        cpu.install()
        install()
    main()
