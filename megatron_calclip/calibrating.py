"""Calibrated clipping inside the loop: shadow passes, paired ratios, statistics, new bounds, instruments, ledger.

On a measured step the BF16 shadow runs twice over the tokens: once before the first update (pi_old), and once
mini-batch by mini-batch right before each update (pi_theta), at the very weights whose FP8 ratios that update
clips. The first mini-batch needs no second pass: its weights have not moved, so its BF16 ratio is 1. FP8 ratios are
those that the training forward computed; there is no extra FP8 pass.

All ranks take part in the shadow passes; the ranks that report tokens add them up, and one all-reduce of a few
kilobytes makes the statistics global, so that every rank derives the same bounds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_calclip.algorithms.bootstrap import sample_sequences
from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.calibration import CalibrationReport, ClipCalibrator
from megatron_calclip.algorithms.gspo import SequenceLevel, sequence_level
from megatron_calclip.algorithms.overclip import (
    ENTROPY_EDGES,
    LENGTH_EDGES,
    PROBABILITY_EDGES,
    OverclipSums,
    PairedRatios,
    attribution_sums,
    attribution_table,
    no_attribution,
    overclip_sums,
    response_lengths,
    response_positions,
)
from megatron_calclip.algorithms.replay import CalibrationDump
from megatron_calclip.algorithms.statistics import RatioStatistics
from megatron_calclip.batch import Trajectories
from megatron_calclip.config import Config
from megatron_calclip.config_calibration import calibration_settings
from megatron_calclip.errors import UserError
from megatron_calclip.learner.learner import Learner, PreparedBatch, UpdateResult
from megatron_calclip.objective import PolicyTokens
from megatron_calclip.planning.flops import run_forwards
from megatron_calclip.tracking import Tracker

ATTRIBUTIONS = {
    "entropy": ENTROPY_EDGES,
    "probability": PROBABILITY_EDGES,
    "position": LENGTH_EDGES,
    "length": LENGTH_EDGES,
}


@dataclass
class Ledger:
    """What calibration has cost so far, on rank 0's clock."""

    forwards_per_token: float
    """A step's work on a token in forward passes, without shadow passes (`planning.flops`)."""
    shadow_seconds: float = 0.0
    """Shadow passes that a calibration needed."""
    study_seconds: float = 0.0
    """Shadow passes for measurement alone (`calibration.measure: every_step`, the oracle)."""
    shadow_tokens: int = 0
    """Tokens (prompts included) through shadow passes of either kind, over all ranks."""
    run_seconds: float = 0.0
    """Whole training steps, everything included."""
    run_tokens: int = 0
    """Tokens (prompts included) of all training steps."""

    def row(self) -> dict[str, float]:
        """Metrics."""
        whole = self.shadow_tokens + self.forwards_per_token * self.run_tokens
        return {
            "ledger/shadow_seconds": self.shadow_seconds,
            "ledger/study_seconds": self.study_seconds,
            "ledger/shadow_tokens": self.shadow_tokens,
            "ledger/shadow_share": self.shadow_seconds / self.run_seconds if self.run_seconds else 0.0,
            "ledger/flops_share": self.shadow_tokens / whole if whole else 0.0,
        }


@dataclass
class Measurement:
    """The paired ratios of one step, filled mini-batch by mini-batch; flat [T] on the CPU, zero where not measured."""

    step: int
    """Counted from 1."""
    prepared: PreparedBatch
    tokens: PolicyTokens
    trajectories: Trajectories
    statistics: RatioStatistics
    """Edges of the present bounds."""
    calibrates: bool
    """Whether new bounds follow, or the step is measured for a study alone."""
    measured: Tensor
    """bool [N]: sequences that shadow passes run on."""
    minibatches: tuple[int, ...]
    """Mini-batches that are measured."""
    positions: Tensor
    """float32 [T]: place of each token among its sequence's response tokens."""
    lengths: Tensor
    """float32 [T]: response tokens of each token's sequence."""
    shadow_old: Tensor
    """float32 [T]: log pi_old^16."""
    shadow_new: Tensor
    """float32 [T]: log pi_theta^16, at each token's own update."""
    overclip: OverclipSums
    attribution: dict[str, Tensor]
    dumps: list[CalibrationDump] = field(default_factory=list)

    def ratio16(self) -> Tensor:
        """float32 [T]: exp(shadow_new - shadow_old)."""
        return (self.shadow_new - self.shadow_old).exp()


class CalibrationLoop:
    """The calibrator of a run with its shadow passes.

    Args:
        config: the run's configuration.
        learner: what is measured.
        tracker: where its lines and records go.
    """

    def __init__(self, config: Config, learner: Learner, tracker: Tracker) -> None:
        self.config, self.learner, self.tracker = config, learner, tracker
        self.settings = calibration_settings(config)
        self.calibrator = ClipCalibrator(self.settings)
        self.ledger = Ledger(run_forwards(config))
        self.run_dir = Path(config.run_dir)
        if config.calibration.enabled:
            for line in self.calibrator.describe():
                tracker.say(f"calibration: {line}")
            updates = config.algorithm.num_minibatches * config.algorithm.num_epochs
            if updates == 1:
                tracker.say(
                    "calibration: NO-OP: with one update per rollout every ratio is 1, nothing is clipped and nothing can be "
                    "calibrated; raise algorithm.num_minibatches or num_epochs"
                )

    @property
    def bounds(self) -> ClipBounds:
        """Clip bounds for the next step: calibrated ones, or those of `algorithm.clip`."""
        if self.config.calibration.enabled:
            return self.calibrator.bounds
        clip = self.config.algorithm.clip
        return ClipBounds(clip.lower, clip.upper)

    def begin(
        self, step: int, prepared: PreparedBatch, tokens: PolicyTokens, trajectories: Trajectories
    ) -> Measurement | None:
        """The first shadow pass of a step (counted from 1), before any update; None on a step without measurement."""
        enabled = self.config.calibration.enabled
        calibrates = enabled and self.calibrator.due(step)
        study = self.config.calibration.measure == "every_step" or self.config.algorithm.loss == "oracle"
        if not calibrates and not study:
            return None
        measured = torch.ones(trajectories.num_sequences, dtype=torch.bool)
        if self.settings.token_fraction < 1.0 and not study:
            fraction = self.settings.token_fraction
            measured = sample_sequences(trajectories.sample_ids, fraction=fraction, seed=step)
            prepared = self.learner.pack_plan(trajectories, prepared.plan.only(measured.tolist()))
        count = len(prepared.minibatches)
        # The oracle clips every mini-batch by its BF16 ratios.
        every = self.settings.minibatches == "all" or self.config.algorithm.loss == "oracle"
        minibatches = tuple(range(count)) if every else (count - 1,)
        sequence_mode = self.settings.mode == "sequence"
        num_units = trajectories.num_sequences if sequence_mode else trajectories.num_response_tokens
        # Of whole sequences, which context parallelism divides among ranks.
        layout = (trajectories.response_mask, trajectories.sequence_ids)
        measurement = Measurement(
            step=step,
            prepared=prepared,
            tokens=tokens,
            trajectories=trajectories,
            statistics=self.calibrator.new_statistics(weight_scale=num_units / count),
            calibrates=calibrates,
            measured=measured,
            minibatches=minibatches,
            positions=response_positions(*layout, num_sequences=trajectories.num_sequences).float(),
            lengths=response_lengths(*layout, num_sequences=trajectories.num_sequences).float(),
            shadow_old=torch.zeros(prepared.num_tokens),
            shadow_new=torch.zeros(prepared.num_tokens),
            overclip=OverclipSums.empty(),
            attribution={name: no_attribution(edges) for name, edges in ATTRIBUTIONS.items()},
        )
        for minibatch in minibatches:
            measurement.shadow_old += self._shadow(measurement, minibatch)
        return measurement

    def _shadow(self, measurement: Measurement, minibatch: int) -> Tensor:
        """Shadow log-probabilities of one mini-batch [T], booked in the ledger."""
        started = time.perf_counter()
        log_probs = self.learner.shadow_log_probs(measurement.prepared, minibatch=minibatch).log_probs
        seconds = time.perf_counter() - started
        if measurement.calibrates:
            self.ledger.shadow_seconds += seconds
        else:
            self.ledger.study_seconds += seconds
        plan, lengths = measurement.prepared.plan, measurement.trajectories.lengths
        self.ledger.shadow_tokens += int(lengths[plan.sequences(minibatch)].sum())
        return log_probs

    def before_update(self, measurement: Measurement, minibatch: int, *, weights_unmoved: bool) -> None:
        """The second shadow pass of one mini-batch, at the weights that its update starts from."""
        if minibatch not in measurement.minibatches:
            return
        index = torch.cat([micro.index for micro in measurement.prepared.minibatches[minibatch]])
        if weights_unmoved:
            measurement.shadow_new[index] = measurement.shadow_old[index]
        else:
            measurement.shadow_new[index] = self._shadow(measurement, minibatch)[index]

    def after_update(
        self,
        measurement: Measurement,
        minibatch: int,
        result: UpdateResult,
        *,
        update: int,
        bounds: ClipBounds,
    ) -> None:
        """Add the paired ratios of an update (counted in the step, from 0) to the statistics and instruments."""
        if minibatch not in measurement.minibatches or not self.learner.runtime.reports_tokens:
            return
        for record in result.extras:
            self._add(measurement, minibatch, record, update=update, bounds=bounds)

    def _add(self, m: Measurement, minibatch: int, record: Any, *, update: int, bounds: ClipBounds) -> None:
        index = record.index
        mask = m.measured[m.tokens.sequence_ids[index]]
        local_ids = m.tokens.sequence_ids[index]
        common = dict(
            ratio8=record.ratio.cpu(),
            ratio16=m.ratio16()[index],
            advantages=m.tokens.advantages[index],
            importance_weights=m.tokens.importance.weights[index],
            loss_weights=m.tokens.loss_weights[index],
            response_mask=mask,
            sequence_ids=m.trajectories.sample_ids[local_ids],
        )
        log_probs16, ratio16 = m.shadow_new[index], common["ratio16"]
        if self.settings.mode == "sequence":
            ratio16 = self._add_sequences(m, common, local_ids, update=update)
        else:
            m.statistics.update(**common, weights_unmoved=update == 0)
        pairs = PairedRatios(
            ratio8=common["ratio8"],
            ratio16=ratio16,
            advantages=common["advantages"],
            response_mask=mask,
            bounds8=bounds,
            bounds16=self.settings.reference,
        )
        m.overclip = m.overclip.merge(
            overclip_sums(
                pairs,
                weights=common["importance_weights"],
                log_probs8=record.log_probs.cpu(),
                log_probs16=log_probs16,
            )
        )
        covariates = {
            "entropy": record.entropy.cpu(),
            "probability": log_probs16.exp(),
            "position": m.positions[index],
            "length": m.lengths[index],
        }
        for name, edges in ATTRIBUTIONS.items():
            m.attribution[name] += attribution_sums(pairs, covariates[name], edges=edges)
        if m.calibrates and self.config.calibration.dump:
            m.dumps.append(
                CalibrationDump.pack(
                    step=m.step,
                    bounds=bounds,
                    settings=self.settings,
                    weight_scale=m.trajectories.num_response_tokens / len(m.prepared.minibatches),
                    minibatch=minibatch,
                    update=update,
                    entropy=record.entropy.cpu(),
                    **common,
                )
            )

    def _add_sequences(self, m: Measurement, tokens: Mapping[str, Tensor], local_ids: Tensor, *, update: int) -> Tensor:
        """GSPO clips whole sequences, in both precisions: one ratio for each counts; returns it for each token [T] in BF16."""
        sequences, slots = torch.unique(local_ids, return_inverse=True)
        own = {name: tokens[name] for name in SequenceLevel._fields}
        whole = sequence_level(**own, sequence_ids=slots, num_sequences=len(sequences))
        m.statistics.update(
            **whole._asdict(),
            response_mask=m.measured[sequences],
            sequence_ids=m.trajectories.sample_ids[sequences],
            weights_unmoved=update == 0,
        )
        return whole.ratio16[slots]

    def finish(self, measurement: Measurement) -> dict[str, float]:
        """Reduce, calibrate where due, write the step's record; returns its metrics."""
        runtime = self.learner.runtime
        sums = OverclipSums(runtime.sum_over_world(measurement.overclip.sums).cpu())
        row = sums.finalize()
        report = None
        if measurement.calibrates:
            statistics = measurement.statistics
            statistics.load(runtime.sum_over_world(statistics.state()).cpu())
            report = self.calibrator.calibrate(statistics, measurement.step)
            for line in report.log_lines:
                self.tracker.say(line)
            row |= _report_metrics(report)
            row["calibration/bytes"] = statistics.num_bytes
            self._save_dump(measurement)
        tables = {
            name: attribution_table(runtime.sum_over_world(counts).cpu(), edges=ATTRIBUTIONS[name])
            for name, counts in measurement.attribution.items()
        }
        self.tracker.calibration(
            {
                "step": measurement.step,
                "report": report.as_row() if report else None,
                "log": report.log_lines if report else (),
                "attribution": {name: [asdict(line) for line in table] for name, table in tables.items()},
            }
        )
        return row

    def _save_dump(self, measurement: Measurement) -> None:
        if not self.config.calibration.dump:
            return
        parts = [part for rank in self.learner.runtime.gather_objects(measurement.dumps) for part in rank]
        if self.learner.runtime.rank == 0 and parts:
            folder = self.run_dir / "dumps"
            folder.mkdir(exist_ok=True)
            CalibrationDump.merge(parts).save(folder / f"step_{measurement.step}.safetensors")

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """JSON values and tensors for a checkpoint."""
        state = self.calibrator.state_dict()
        tensors = {f"calibrator.pool.{index}": item for index, item in enumerate(state.pop("pool"))}
        return {"calibrator": state, "ledger": asdict(self.ledger)}, tensors

    def load_state_dict(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Continue where a checkpoint left off.

        Raises:
            UserError: when its bounds do not fit the present grids.
        """
        num_pooled = sum(name.startswith("calibrator.pool.") for name in tensors)
        pool = [tensors[f"calibrator.pool.{index}"] for index in range(num_pooled)]
        try:
            self.calibrator.load_state_dict({**state["calibrator"], "pool": pool})
        except ValueError as error:
            raise UserError("calibration", str(error)) from None
        self.ledger = Ledger(**state["ledger"] | {"forwards_per_token": self.ledger.forwards_per_token})


def _report_metrics(report: CalibrationReport) -> dict[str, float]:
    """The numbers of a report that are worth a curve."""
    values = {
        "calibration/alpha": report.alpha,
        "calibration/tail_tokens": report.num_tail_tokens,
        "calibration/lower_choice": report.lower.choice,
        "calibration/upper_choice": report.upper.choice,
        "calibration/lower_after": report.lower.after,
        "calibration/upper_after": report.upper.after,
        "calibration/lower_multiple": report.lower.overclip_multiple,
        "calibration/upper_multiple": report.upper.overclip_multiple,
        "calibration/balance_target": report.balance_target,
        "calibration/balance_after": report.balance_after,
        "calibration/lower_at_edge": float(report.lower.status == "edge"),
        "calibration/upper_at_edge": float(report.upper.status == "edge"),
        "calibration/lower_held": float(report.lower.status == "held"),
        "calibration/upper_held": float(report.upper.status == "held"),
    }
    return {name: float(value) for name, value in values.items() if value is not None}
