"""The calibrator inside somebody else's training loop: settings from a mapping, a step's measurement, state in a file.

An adapter's step::

    measurement = controller.begin(step, num_updates=...)      # None on a step without calibration
    ...                                                        # shadow pass over the step's tokens: log pi_old^16
    for each update:
        ...                                                    # shadow pass over its tokens: log pi_theta^16
        measurement.add(PairedLogProbs(...), weights_unmoved=first)  # with what the training forward computed
    controller.finish(measurement)                             # one all-reduce; new bounds from the next step on

Left out on purpose: sequence-level ratios (GSPO), measuring only a part of a step's tokens, and instruments that decide
nothing; this project's own trainer has them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.calibration import CalibrationReport, ClipCalibrator
from megatron_calclip.algorithms.calibration_settings import CalibrationSettings
from megatron_calclip.algorithms.ratio import bounded_exp, masked_log_ratio
from megatron_calclip.algorithms.statistics import RatioStatistics
from megatron_calclip.errors import UserError

_NOT_OFFERED = (
    "mode",
    "sequence_grid_quantile",
    "sequence_grid_width",
    "sequence_max_move",
    "minibatches",
    "token_fraction",
)
SETTINGS = (
    "enabled",
    "preset",
    "algorithm",
    *(f.name for f in fields(CalibrationSettings) if f.name not in _NOT_OFFERED),
)
"""Keys of a `calclip` mapping: on or off, `robust` or `paper`, `grpo` or `dapo`, and fields of `CalibrationSettings`."""


def settings_from(values: Mapping[str, Any], *, where: str) -> CalibrationSettings | None:
    """Calibration settings from a framework's configuration.

    Args:
        values: keys of `SETTINGS`; bounds and grids as lists.
        where: name of the mapping in that configuration, for messages.

    Returns:
        None when `enabled` is false or the mapping is empty.

    Raises:
        UserError: for an unknown key or values that do not go together.
    """
    for key in values:
        if key not in SETTINGS:
            raise UserError(f"{where}.{key}", f"no such setting; choose among {', '.join(SETTINGS)}")
    if not values or not values.get("enabled", True):
        return None
    algorithm, preset = values.get("algorithm", "grpo"), values.get("preset", "robust")
    if algorithm not in ("grpo", "dapo"):
        raise UserError(f"{where}.algorithm", f"{algorithm!r} is not offered here; choose grpo or dapo")
    if preset not in ("robust", "paper"):
        raise UserError(f"{where}.preset", f"{preset!r} is unknown; choose robust or paper")
    changes = {key: value for key, value in values.items() if key not in ("enabled", "preset", "algorithm")}
    try:
        for key in changes:
            if key in ("reference", "start"):
                changes[key] = ClipBounds(*changes[key])
            elif key in ("grid_lower", "grid_upper"):
                changes[key] = tuple(changes[key])
        make = CalibrationSettings.paper if preset == "paper" else CalibrationSettings.robust
        return make(algorithm, **changes)
    except (TypeError, ValueError) as error:
        raise UserError(where, str(error)) from None


def epsilons(bounds: ClipBounds) -> tuple[float, float]:
    """Distances of the bounds from 1, as most frameworks write them: 0.2 and 0.28 for [0.8, 1.28]."""
    return round(1.0 - bounds.lower, 9), round(bounds.upper - 1.0, 9)


@dataclass(frozen=True)
class PairedLogProbs:
    """What one micro-batch adds to a measurement. All but the ids broadcast to the shape of `log_probs`, [B, S]."""

    log_probs: Tensor
    """[B, S] nats: log pi_theta of the training forward, which the loss clips."""
    old_log_probs: Tensor
    """[B, S] nats: log pi_old as the loss uses it."""
    shadow_log_probs: Tensor
    """[B, S] nats: log pi_theta^16, at the same weights as `log_probs`."""
    shadow_old_log_probs: Tensor
    """[B, S] nats: log pi_old^16."""
    advantages: Tensor
    importance_weights: Tensor
    """>= 0, as the loss multiplies them in."""
    loss_weights: Tensor
    """> 0: each token's weight in the loss, up to a factor common to all ranks and updates of the step. Their mean has
    to lie between 4e-6 and 2e4, where the fixed point of the statistics is exact enough."""
    response_mask: Tensor
    """Non-zero for the tokens that the policy generated."""
    sequence_ids: Tensor
    """int64 [B], a number of each sequence of the global batch."""


@dataclass
class Measurement:
    """The paired ratios of one calibration step on this rank."""

    step: int
    statistics: RatioStatistics

    @torch.no_grad()
    def add(self, tokens: PairedLogProbs, *, weights_unmoved: bool) -> None:
        """Add a micro-batch. Each token of the step is added by exactly one rank.

        Args:
            tokens: the micro-batch.
            weights_unmoved: True for the step's first update, where every ratio should be 1.
        """
        shape = tokens.log_probs.shape
        mask = (tokens.response_mask.detach().cpu() != 0).expand(shape).reshape(-1)

        def flat(values: Tensor) -> Tensor:
            return values.detach().cpu().expand(shape).reshape(-1)

        def ratio(new: Tensor, old: Tensor) -> Tensor:
            return bounded_exp(masked_log_ratio(flat(new), flat(old), mask))

        self.statistics.update(
            ratio(tokens.log_probs, tokens.old_log_probs),
            ratio(tokens.shadow_log_probs, tokens.shadow_old_log_probs),
            advantages=flat(tokens.advantages),
            importance_weights=flat(tokens.importance_weights),
            loss_weights=flat(tokens.loss_weights),
            response_mask=mask,
            sequence_ids=flat(tokens.sequence_ids.unsqueeze(1)),
            weights_unmoved=weights_unmoved,
        )


class ClipController:
    """A calibrator, its schedule and its state, alike on every rank.

    Args:
        settings: of the method.
        say: where its sentences go; prints on rank 0 by default.
    """

    def __init__(self, settings: CalibrationSettings, *, say: Callable[[str], None] | None = None) -> None:
        self.calibrator = ClipCalibrator(settings)
        self.last_step = 0
        """The last step that began, counted from 1."""
        self.last_report: CalibrationReport | None = None
        self._say = say or _print_on_rank_0
        self._warned = False

    @classmethod
    def from_settings(cls, values: Mapping[str, Any], *, where: str = "calclip") -> Self | None:
        """A controller for a framework's mapping, None when that switches calibration off; see `settings_from`."""
        settings = settings_from(values, where=where)
        if settings is None:
            return None
        controller = cls(settings)
        for line in controller.calibrator.describe():
            controller._say(line)
        return controller

    @property
    def bounds(self) -> ClipBounds:
        """The bounds that the loss has to use now."""
        return self.calibrator.bounds

    def begin(self, step: int, *, num_updates: int) -> Measurement | None:
        """Begin a training step; a measurement where it calibrates.

        Args:
            step: number of the step, from 1; all ranks alike.
            num_updates: optimizer steps that will be taken on the step's rollouts.
        """
        self.last_step = step
        if num_updates == 1 and not self._warned:
            self._warned = True
            self._say(
                "NO-OP: with one update per rollout every ratio is 1, nothing is clipped and nothing can be calibrated; "
                "train on smaller batches than are rolled out, or for several epochs"
            )
        if num_updates == 1 or not self.calibrator.due(step):
            return None
        return Measurement(step, self.calibrator.new_statistics())

    def finish(self, measurement: Measurement) -> CalibrationReport:
        """Add up over all ranks of the default process group (collective) and choose the bounds of the next step."""
        measurement.statistics.load(_sum_over_world(measurement.statistics.state()))
        report = self.last_report = self.calibrator.calibrate(measurement.statistics, measurement.step)
        for line in report.log_lines:
            self._say(line)
        return report

    def metrics(self) -> dict[str, float]:
        """Bounds in force and the numbers of the last calibration, for the framework's logger."""
        row: dict[str, Any] = {"lower": self.bounds.lower, "upper": self.bounds.upper}
        if self.last_report is not None:
            row |= self.last_report.as_row()
        return {name: float(value) for name, value in row.items() if isinstance(value, int | float)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state into one safetensors file, complete or not at all. One rank of all writes it."""
        state = self.calibrator.state_dict()
        pool = {f"pool.{index}": item.contiguous() for index, item in enumerate(state.pop("pool"))}
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".partial")
        save_file(pool, aside, metadata={"calclip": json.dumps({**state, "last_step": self.last_step})})
        os.replace(aside, path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Continue from a file that `save` wrote; every rank reads it.

        A checkpoint of a run without calibration has none: it goes on from the bounds of the start.

        Raises:
            UserError: when its bounds do not fit the present grids.
        """
        if not Path(path).is_file():
            self._say(f"no calibration state in {path}: bounds begin at [{self.bounds.lower}, {self.bounds.upper}]")
            return
        with safe_open(path, framework="pt") as file:
            state = json.loads(file.metadata()["calclip"])
            pool = [file.get_tensor(f"pool.{index}") for index in range(len(file.keys()))]
        self.last_step = state.pop("last_step")
        try:
            self.calibrator.load_state_dict({**state, "pool": pool})
        except ValueError as error:
            raise UserError(str(path), str(error)) from None


class StateFolder:
    """States of a run by step, for frameworks whose checkpoints cannot hold any: bounds change at calibrations only, so
    the newest state that is not newer than a checkpoint belongs to it.

    Args:
        folder: made when the first state is saved.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def save(self, controller: ClipController) -> None:
        """Write the state after a calibration, on rank 0 alone."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            controller.save(self.folder / f"step_{controller.last_step:08d}.safetensors")

    def load(self, controller: ClipController, step: int) -> None:
        """Continue after a step: the newest state up to it, or the start where none had been calibrated yet.

        Later states belong to steps that will be taken again, and are removed.
        """
        step_of = {
            path: int(path.stem.removeprefix("step_")) for path in sorted(self.folder.glob("step_*.safetensors"))
        }
        earlier = [path for path, saved_step in step_of.items() if saved_step <= step]
        if earlier:
            controller.load(earlier[-1])
        controller.last_step = step
        if not dist.is_initialized() or dist.get_rank() == 0:
            for path in step_of.keys() - set(earlier):
                path.unlink()


def _sum_over_world(state: Tensor) -> Tensor:
    if not dist.is_initialized():
        return state
    # NCCL reduces what lies on its GPU, gloo what lies in host memory; a group of both reduces either.
    on_cpu = dist.get_backend() == "gloo" or not torch.cuda.is_available()
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    total = state.to(device, copy=True)
    dist.all_reduce(total)
    return total.cpu()


def _print_on_rank_0(line: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"calclip: {line}", flush=True)
