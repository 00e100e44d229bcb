"""Updates that were skipped because loss or gradient was not finite: what was in them, and when to give up.

A single one (a freak sequence, an overflow) costs one update. Several in a row mean that the weights or the data are
broken, and every further step is wasted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_calclip.batch import TrainingBatch
from megatron_calclip.errors import EXIT_FAILED, UserError

MAX_DUMPS = 16
"""Of a run: a broken run must not fill the disk."""


class SkippedUpdates:
    """Counts them, and writes the sequences of each to `run_dir/nonfinite`.

    Args:
        run_dir: the run's folder.
        max_in_a_row: skipped updates in a row that end the run.
        writes: whether this rank writes.
    """

    def __init__(self, run_dir: Path, *, max_in_a_row: int, writes: bool) -> None:
        self.folder, self.max_in_a_row, self.writes = run_dir / "nonfinite", max_in_a_row, writes
        self.num_in_a_row = 0

    def applied(self) -> None:
        """An update went through."""
        self.num_in_a_row = 0

    def skipped(
        self, step: int, minibatch: int, batch: TrainingBatch, sequences: list[int], *, loss: float, grad_norm: float
    ) -> None:
        """An update did not.

        Args:
            step: RL step, counted from 1.
            minibatch: of the step.
            batch: the whole step's.
            sequences: indices of the mini-batch's.
            loss: of the update, NaN where this rank does not compute it.
            grad_norm: of the update.

        Raises:
            UserError: when it is one too many in a row.
        """
        self.num_in_a_row += 1
        if self.writes and len(list(self.folder.glob("*.json"))) < MAX_DUMPS:
            self._dump(f"step_{step}_minibatch_{minibatch}", batch, sequences, {"loss": loss, "grad_norm": grad_norm})
        if self.num_in_a_row >= self.max_in_a_row:
            raise UserError(
                "train.max_skipped_updates",
                f"{self.num_in_a_row} updates in a row had a loss or a gradient that is not finite, the last in step "
                f"{step}; their sequences are in {self.folder}. Resume from an earlier checkpoint with a lower "
                "optimizer.lr, or leave the data out that they point to",
                exit_code=EXIT_FAILED,
            )

    def _dump(self, name: str, batch: TrainingBatch, sequences: list[int], numbers: dict[str, float]) -> None:
        trajectories = batch.trajectories
        chosen = torch.isin(trajectories.sequence_ids, torch.tensor(sequences))
        per_token: dict[str, Any] = {
            "tokens": trajectories.tokens,
            "response_mask": trajectories.response_mask,
            "sampler_log_probs": trajectories.sampler_log_probs,
            "old_log_probs": batch.old_log_probs,
            "advantages": batch.advantages,
        }
        index = torch.tensor(sequences)
        per_sequence = {
            "lengths": trajectories.lengths,
            "sample_ids": trajectories.sample_ids,
            "rewards": batch.rewards,
        }
        # Per-token values follow the batch's order of sequences, whatever the order in the mini-batch.
        order = index.sort().values
        self.folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: value[chosen].contiguous() for name, value in per_token.items() if value is not None}
            | {name: value[order].contiguous() for name, value in per_sequence.items()},
            self.folder / f"{name}.safetensors",
        )
        suspects = [
            int(trajectories.sample_ids[i])
            for i in order.tolist()
            if not all(
                bool(value[trajectories.sequence_ids == i].isfinite().all())
                for value in per_token.values()
                if value is not None and value.is_floating_point()
            )
        ]
        text = {
            key: value if value == value and abs(value) != float("inf") else str(value)
            for key, value in numbers.items()
        }
        (self.folder / f"{name}.json").write_text(
            json.dumps({**text, "sample_ids": trajectories.sample_ids[order].tolist(), "not_finite_before": suspects})
            + "\n"
        )
