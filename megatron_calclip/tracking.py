"""Where a run's numbers and texts go: files in its folder, TensorBoard, Weights & Biases, MLflow, terminal.

Rank 0 alone writes. `metrics.jsonl` is the complete record, one line a step; everything else is a view of it.
A number that is not finite is `null` there, because JSON has no other word for it. What a killed run left
half written, and rows of steps that a resumed run repeats, are dropped when it starts again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from megatron_calclip.config import Config
from megatron_calclip.config_file import config_to_dict, config_to_yaml
from megatron_calclip.errors import EXIT_FAILED, UserError
from megatron_calclip.evaluation import SetResult
from megatron_calclip.evaluation_report import ReportWriter
from megatron_calclip.metrics import is_known
from megatron_calclip.versions import versions

Row = Mapping[str, float]

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


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Errors of the file system as the user's."""
    try:
        yield
    except OSError as error:
        raise UserError(
            "run_dir",
            f"cannot be written ({error}); free space, or give a writable folder",
            exit_code=EXIT_FAILED,
        ) from None


class Tracker:
    """Rank 0's writers; on other ranks every method does nothing.

    Args:
        config: the run's configuration.
        active: whether this rank writes.
        first_step: steps already done (a resumed run); rows of later steps are dropped from the files.

    Raises:
        UserError: when the run's folder cannot be written, or a chosen tracker is not installed.
    """

    def __init__(self, config: Config, *, active: bool, first_step: int) -> None:
        self.active, self.run_dir, self.num_steps = active, Path(config.run_dir), config.train.num_steps
        self.console = Console(quiet=not active, highlight=False)
        self.first_step = first_step
        self.first_row: dict[str, float] = {}
        self.last_row: dict[str, float] = {}
        self._writers: list[Callable[[int, Row], None]] = []
        self._progress: Progress | None = None
        self._exit = contextlib.ExitStack()
        t = config.tracking
        if t.wandb_project is not None:
            _require("wandb", "wandb", "tracking.wandb_project")
        if t.mlflow_experiment is not None:
            _require("mlflow", "mlflow", "tracking.mlflow_experiment")
        if not active:
            return
        with _writing():
            self.run_dir.mkdir(parents=True, exist_ok=True)
            (self.run_dir / "config.yaml").write_text(config_to_yaml(config), encoding="utf-8")
            (self.run_dir / "versions.json").write_text(json.dumps(versions(), indent=1) + "\n", encoding="utf-8")
            self.rewind(first_step)
            if t.tensorboard:
                self._open_tensorboard()
        if t.wandb_project is not None:
            self._open_wandb(t.wandb_project, config)
        if t.mlflow_experiment is not None:
            self._open_mlflow(t.mlflow_experiment)

    def rewind(self, step: int) -> None:
        """Drop the rows, dumps and evaluations of later steps, which come again."""
        if self.active:
            for name in ("metrics", "samples", "calibration", "outliers"):
                _drop_rows_after(self.run_dir / f"{name}.jsonl", step)
            for name in ("dumps", "eval", "nonfinite"):
                _drop_steps_after(self.run_dir / name, step)

    def _open_tensorboard(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        def open_after(step: int) -> SummaryWriter:
            return SummaryWriter(str(self.run_dir / "tensorboard"), purge_step=step + 1)

        board, last = open_after(self.first_step), self.first_step - 1

        def write(step: int, row: Row) -> None:
            nonlocal board, last
            if step <= last:  # the run went back: what came after is not to be shown
                board.close()
                board = open_after(step - 1)
            last = step
            for name, value in row.items():
                board.add_scalar(name, value, step)

        self._exit.callback(lambda: board.close())
        self._writers.append(write)

    def _open_wandb(self, project: str, config: Config) -> None:
        import wandb

        run = wandb.init(project=project, dir=str(self.run_dir), config=config_to_dict(config))
        self._exit.callback(run.finish)
        # An axis of our own: W&B's must never fall, and a run that is rolled back comes to a step again.
        run.define_metric("train/step")
        run.define_metric("*", step_metric="train/step")
        self._writers.append(lambda step, row: run.log({**row, "train/step": step}))

    def _open_mlflow(self, experiment: str) -> None:
        import mlflow

        mlflow.set_experiment(experiment)
        self._exit.enter_context(mlflow.start_run())
        self._writers.append(lambda step, row: mlflow.log_metrics(dict(row), step=step))

    def __enter__(self) -> Tracker:
        if self.active and self.console.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._task = self._progress.add_task("", total=self.num_steps, completed=self.first_step)
            self._exit.enter_context(self._progress)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    def say(self, message: str) -> None:
        """One line in the terminal."""
        self.console.print(message, markup=False, soft_wrap=True)

    def log(self, row: Row) -> None:
        """Record one step's metrics; `row["step"]` counts from 1 (0 is the evaluation before training)."""
        if not self.active:
            return
        unknown = [name for name in row if not is_known(name)]
        assert not unknown, f"metrics without an entry in metrics.METRICS: {unknown}"
        self.last_row = dict(row)
        self.first_row = self.first_row or dict(row)
        step = int(row["step"])
        self._append("metrics.jsonl", [row])
        for write in self._writers:
            write(step, {name: value for name, value in row.items() if name != "step"})
        shown = "  ".join(f"{label} {row[name]:.4g}" for label, name in _SHOWN.items() if name in row)
        if "eval/score" in row:
            shown += f"  eval {row['eval/score']:.3f}"
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=shown)
        else:
            self.say(f"step {step}/{self.num_steps}  {shown.strip()}")

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append completions, with their rewards, to `samples.jsonl`."""
        if self.active and rows:
            self._append("samples.jsonl", [{"step": step, **row} for row in rows])

    def evaluation(self, step: int, results: Sequence[SetResult], config: Config) -> None:
        """Report and completions of an evaluation, in `eval/step_<step>`."""
        if self.active:
            model = {"path": str(self.run_dir), "step": step, "kind": "run"}
            with _writing():
                ReportWriter(self.run_dir / "eval" / f"step_{step}", config, model=model).write(results)

    def outliers(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append sequences on which sampler and learner disagree to `outliers.jsonl`."""
        if self.active and rows:
            self._append("outliers.jsonl", [{"step": step, **row} for row in rows])

    def calibration(self, row: Mapping[str, Any]) -> None:
        """Append one measured step, with its report, to `calibration.jsonl`."""
        if self.active:
            self._append("calibration.jsonl", [row])

    def _append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(_jsonable(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        with _writing(), (self.run_dir / name).open("a", encoding="utf-8") as file:
            file.write(text)

    def summary(self, rows: Mapping[str, str]) -> None:
        """The closing table; plain lines where the output is not a terminal."""
        self._exit.close()
        if not self.console.is_terminal:
            for name, value in rows.items():
                self.say(f"{name}: {value}")
            return
        table = Table(title=escape(f"run {self.run_dir}"), show_header=False)
        for name, value in rows.items():
            table.add_row(name, escape(value))
        self.console.print(table)


def _jsonable(value: Any) -> Any:
    """The value with null for every number that is not finite."""
    if isinstance(value, Mapping):
        return {name: _jsonable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _drop_rows_after(path: Path, step: int) -> None:
    """Remove rows of steps past `step`, which come again after a resume; all of them at a fresh start."""
    if not path.is_file():
        return
    kept = []
    # Not splitlines: a text in JSON may hold other characters that it takes for the end of a line.
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        with contextlib.suppress(ValueError, KeyError, TypeError):  # half a line, written when the run was killed
            if step > 0 and json.loads(line)["step"] <= step:
                kept.append(line)
    aside = path.with_suffix(".partial")
    aside.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    aside.rename(path)


def _drop_steps_after(folder: Path, step: int) -> None:
    """Remove `step_N`, `step_N.safetensors`, `step_N_minibatch_M.json` of steps N past `step`; all of them at a fresh start."""
    for path in folder.glob("step_*"):
        number = re.split(r"[._]", path.name.removeprefix("step_"))[0]
        if number.isdecimal() and (step == 0 or int(number) > step):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


@contextlib.contextmanager
def profiled(config: Config, step: int, *, active: bool) -> Iterator[None]:
    """Record a step with torch's profiler when it lies in `tracking.profile`'s window."""
    window = config.tracking.profile
    if not active or not window.start_step <= step < window.start_step + window.num_steps:
        yield
        return
    with torch.profiler.profile() as profiler:
        yield
    folder = Path(config.run_dir) / "profile"
    with _writing():
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"step_{step + 1}.json"))
