"""When a run saves, what beside the learner is in its checkpoints, and how it comes back from one.

`learner/checkpoint.py` writes and reads a checkpoint, `checkpoint_files.py` knows which ones are whole. Here is the run's
view: the newest few stay and the best one, a save may go on in the background, and a folder is restored into all parts
that have state.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron_calclip
from megatron_calclip.calibrating import CalibrationLoop
from megatron_calclip.checkpoint_files import find, set_aside
from megatron_calclip.config import Config
from megatron_calclip.config_file import config_to_dict
from megatron_calclip.errors import EXIT_FAILED, UserError
from megatron_calclip.guards.alarms import Alarms
from megatron_calclip.learner import checkpoint
from megatron_calclip.learner.learner import Learner
from megatron_calclip.learner.runtime import Runtime


def find_checkpoint(run_dir: Path, resume: str, runtime: Runtime, say: Callable[[str], None]) -> Path | None:
    """The checkpoint to resume from, read by all ranks together; see `checkpoint_files.find`."""
    return find(
        run_dir,
        resume,
        say=say,
        share=runtime.rank,
        num_shares=runtime.world_size,
        gather_objects=runtime.gather_objects,
    )


def set_earlier_aside(run_dir: Path, runtime: Runtime, say: Callable[[str], None]) -> None:
    """For a run that starts over where another one has been: its checkpoints go to a folder of their own; collective.

    Raises:
        UserError: when they cannot be moved.
    """
    moved = problem = None
    if runtime.rank == 0:
        try:
            moved = set_aside(run_dir)
        except OSError as error:
            problem = str(error)
    if (problem := runtime.gather_objects(problem)[0]) is not None:
        raise UserError(
            "run_dir",
            f"the checkpoints of an earlier run cannot be moved aside ({problem}); give another folder",
            exit_code=EXIT_FAILED,
        )
    if moved is not None:
        say(f"this run starts over: checkpoints of an earlier one are now in {moved}")


class RunCheckpoints:
    """Saves a run's state and restores it; every method but the properties is collective.

    Args:
        config: of the run.
        learner: its weights, masters and optimizer.
        calibration: its bounds and pools.
        alarms: their yardsticks.
        tokenizer: saved beside the weights.
        best: step and score of the best evaluation so far, from the checkpoint that the run resumes from.
    """

    def __init__(
        self,
        config: Config,
        learner: Learner,
        calibration: CalibrationLoop,
        alarms: Alarms,
        tokenizer: Any,
        *,
        best: dict[str, float] | None,
    ) -> None:
        self.config, self.learner, self.calibration, self.alarms = config, learner, calibration, alarms
        self.tokenizer, self.best = tokenizer, best
        self.newest_step = -1
        """Step of the newest checkpoint of this process."""
        self._pending: checkpoint.PendingSave | None = None

    def restore(self, folder: Path) -> int:
        """Bring all parts back to a checkpoint; returns its step."""
        state, tensors = checkpoint.load(folder, self.learner)
        self.calibration.load_state_dict(state, tensors)
        self.alarms.load_state_dict(state["alarms"])
        self.best, self.newest_step = state["best"], state["step"]
        return self.newest_step

    def is_best(self, step: int, row: dict[str, float]) -> bool:
        """Whether a step's evaluation is the best so far, and its checkpoint to be kept; remembers it."""
        score = row.get("eval/score")
        if not self.config.checkpoint.keep_best or score is None:
            return False
        if self.best is not None and score <= self.best["score"]:
            return False
        self.best = {"step": step, "score": score}
        return True

    def save(self, step: int, position: int) -> None:
        """A checkpoint after a step; with `checkpoint.async_save` one that a later call completes.

        Args:
            step: RL steps done.
            position: in the stream of prompts.

        Raises:
            UserError: when it, or the one before, cannot be written.
        """
        self.finish()
        state, tensors = self.calibration.state_dict()
        state |= {
            "position": position,
            "best": self.best,
            "alarms": self.alarms.state_dict(),
            "config": config_to_dict(self.config),
            "version": megatron_calclip.__version__,
        }
        self._pending = checkpoint.begin_save(
            Path(self.config.run_dir),
            step,
            self.learner,
            tokenizer=self.tokenizer,
            state=state,
            tensors=tensors,
            keep=self.config.checkpoint.keep,
            best=self.best,
        )
        if not self.config.checkpoint.async_save:
            self.finish()

    def finish_if_written(self) -> None:
        """Let a save in the background count, when all ranks have written their files."""
        if self._pending is not None and self._pending.is_written():
            self.finish()

    def finish(self) -> None:
        """Wait for a save in the background, if there is one.

        Raises:
            UserError: when it cannot be written.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.finish()
            self.newest_step = pending.step
