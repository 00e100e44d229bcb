"""The frozen reference policy of a KL penalty.

Kept as one copy of this rank's weight shard in host memory (2 bytes a parameter, divided over TP and PP), swapped
into the live model for a forward pass and back out again, so that it costs no device memory beyond what the learner
has. On disk it is written once, to `run_dir/reference`, in Megatron's distributed format, and read back when a run
is resumed, also in another layout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_calclip.learner import checkpoint
from megatron_calclip.learner.learner import Learner, PreparedBatch


class ReferencePolicy:
    """The weights that the learner holds when this is made, or, of a run that resumes, those of its first start.

    Args:
        learner: with its initial weights; loading a checkpoint comes after this.
        run_dir: the run's folder.
        resumes: whether the run goes on from a checkpoint; one that starts over has no use for another run's reference.
    """

    def __init__(self, learner: Learner, run_dir: Path, *, resumes: bool) -> None:
        self.learner = learner
        folder = run_dir / "reference"
        with learner.fp8_params_set_aside():
            if resumes and learner.runtime.gather_objects((folder / "metadata.json").is_file())[0]:
                live = self._copies()
                checkpoint.load_model(folder, learner)
                self.weights = self._copies()
                self._write(live)
            else:
                self.weights = self._copies()
                checkpoint.save_model(folder, learner)

    def log_probs(self, batch: PreparedBatch) -> Tensor:
        """Log-probabilities [T] under the reference; filled where this rank scored tokens."""
        with self._in_place():
            return self.learner.log_probs(batch).log_probs

    def _parameters(self) -> list[Tensor]:
        return [parameter for chunk in self.learner.chunks for parameter in chunk.parameters()]

    def _copies(self) -> list[Tensor]:
        return [parameter.detach().to("cpu", copy=True) for parameter in self._parameters()]

    @torch.no_grad()
    def _write(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self._parameters(), values, strict=True):
            parameter.copy_(value)

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        self.learner.gather_parameters()
        with self.learner.fp8_params_set_aside():
            live = self._copies()
            self._write(self.weights)
            try:
                yield
            finally:
                self._write(live)
