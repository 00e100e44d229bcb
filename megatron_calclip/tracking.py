"""Where a run's numbers and texts go: files in its folder, TensorBoard, Weights & Biases, MLflow, the terminal.

Rank 0 alone writes. `metrics.jsonl` is the complete record, one line a step; everything else is a view of it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from megatron_calclip.config import Config, config_to_dict, config_to_yaml
from megatron_calclip.errors import EXIT_FAILED, UserError
from megatron_calclip.metrics import METRICS

_SHOWN = {
    "reward": "reward/mean",
    "entropy": "entropy",
    "clip-": "clip/low_negative",
    "clip+": "clip/high_positive",
    "tok/s": "throughput/tokens_per_s",
}


def _require(module: str, extra: str, where: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise UserError(where, f"needs {module}: pip install 'megatron-calclip[{extra}]', or set it to null")


class Tracker:
    """Rank 0's writers; on other ranks every method does nothing.

    Args:
        config: the run's configuration.
        active: whether this rank writes.
        first_step: steps already done (a resumed run); rows of later steps in `metrics.jsonl` are dropped.

    Raises:
        UserError: when the run's folder cannot be written, or a chosen tracker is not installed.
    """

    def __init__(self, config: Config, *, active: bool, first_step: int) -> None:
        self.active, self.run_dir, self.num_steps = active, Path(config.run_dir), config.train.num_steps
        self.console = Console(quiet=not active, highlight=False)
        self.first_row: dict[str, float] = {}
        self.last_row: dict[str, float] = {}
        self._writers: list[Any] = []
        self._exit = contextlib.ExitStack()
        t = config.tracking
        if t.wandb_project is not None:
            _require("wandb", "wandb", "tracking.wandb_project")
        if t.mlflow_experiment is not None:
            _require("mlflow", "mlflow", "tracking.mlflow_experiment")
        if not active:
            return
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            (self.run_dir / "config.yaml").write_text(config_to_yaml(config))
            _drop_rows_after(self.run_dir / "metrics.jsonl", first_step)
            _drop_rows_after(self.run_dir / "samples.jsonl", first_step)
        except OSError as error:
            raise UserError("run_dir", f"cannot be written ({error}); give a writable folder", exit_code=EXIT_FAILED) from None
        if t.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            board = SummaryWriter(str(self.run_dir / "tensorboard"), purge_step=first_step + 1)
            self._exit.callback(board.close)
            self._writers.append(lambda step, row: [board.add_scalar(k, v, step) for k, v in row.items()])
        if t.wandb_project is not None:
            import wandb

            run = wandb.init(project=t.wandb_project, dir=str(self.run_dir), config=config_to_dict(config))
            self._exit.callback(run.finish)
            self._writers.append(lambda step, row: run.log(dict(row), step=step))
        if t.mlflow_experiment is not None:
            import mlflow

            mlflow.set_experiment(t.mlflow_experiment)
            self._exit.enter_context(mlflow.start_run())
            self._writers.append(lambda step, row: mlflow.log_metrics(dict(row), step=step))
        self._progress: Progress | None = None
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._task = self._progress.add_task("", total=self.num_steps, completed=first_step)
            self._exit.enter_context(self._progress)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._exit.close()

    def say(self, message: str) -> None:
        """One line in the terminal."""
        self.console.print(message, markup=False)

    def log(self, row: Mapping[str, float]) -> None:
        """Record one step's metrics; `row["step"]` counts from 1 (0 is the evaluation before training)."""
        if not self.active:
            return
        unknown = [name for name in row if name not in METRICS]
        assert not unknown, f"metrics without an entry in metrics.METRICS: {unknown}"
        self.last_row = dict(row)
        self.first_row = self.first_row or dict(row)
        step = int(row["step"])
        with (self.run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(dict(row)) + "\n")
        for write in self._writers:
            write(step, {name: value for name, value in row.items() if name != "step"})
        shown = "  ".join(f"{label} {row[name]:.4g}" for label, name in _SHOWN.items() if name in row)
        if "eval/score" in row:
            shown += f"  eval {row['eval/score']:.3f}"
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=shown)
        else:
            self.say(f"step {step}/{self.num_steps}  {shown}")

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Append completions, with their rewards, to `samples.jsonl`."""
        if self.active and rows:
            with (self.run_dir / "samples.jsonl").open("a") as file:
                file.writelines(json.dumps({"step": step, **row}, ensure_ascii=False) + "\n" for row in rows)

    def summary(self, rows: Mapping[str, str]) -> None:
        """The closing table."""
        table = Table(title=f"run {self.run_dir}", show_header=False)
        for name, value in rows.items():
            table.add_row(name, value)
        self._exit.close()
        self.console.print(table)


def _drop_rows_after(path: Path, step: int) -> None:
    """Remove rows of steps past `step` (they come again after a resume), whole or not."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError):
            continue  # half a line, written while the run was killed
    if step == 0:
        kept = []
    aside = path.with_suffix(".partial")
    aside.write_text("".join(line + "\n" for line in kept))
    aside.rename(path)


@contextlib.contextmanager
def profiled(config: Config, step: int, *, active: bool) -> Any:
    """Record a step with torch's profiler when it lies in `tracking.profile`'s window."""
    window = config.tracking.profile
    if not active or not window.start_step <= step < window.start_step + window.num_steps:
        yield
        return
    folder = Path(config.run_dir) / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    with torch.profiler.profile() as profiler:
        yield
    profiler.export_chrome_trace(str(folder / f"step_{step + 1}.json"))
