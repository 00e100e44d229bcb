"""The protocol of a rollout engine: what the trainer asks of whatever writes completions.

Two engines implement it: a transformers model inside the trainer's own process (`rollout/local.py`) and vLLM
servers over HTTP. Both get the same stream of HF-named tensors, so that the export of the learner's weights
is run whichever is chosen, and both are token exact: ids in, ids and log-probabilities out, no text in
between.

Left out on purpose: tokenisation, rewards and grouping are the trainer's; an engine sees independent
requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_calclip.batch import Completion, SamplingParams


@dataclass(frozen=True)
class Request:
    """One completion to be drawn."""

    prompt_token_ids: tuple[int, ...]
    """The prompt, at least one token. Requests with equal prompts may share its computation."""
    sample_id: int
    """Unique within the run; the G completions of one prompt have G ids."""
    seed_key: tuple[int, int]
    """(seed of the run, training step). With `sample_id` it fixes every random number of this completion, so
    that a sample depends neither on the rank that asks for it nor on the requests around it."""


@dataclass(frozen=True)
class Health:
    """Whether an engine can generate now."""

    ready: bool
    """True when complete weights are loaded and whatever runs them answers."""
    detail: str
    """One line: why it is not ready, or which policy version it serves."""


@dataclass(frozen=True)
class WeightsReceipt:
    """What an engine holds after a weight sync."""

    policy_version: int
    """Version of the weights."""
    fingerprints: dict[str, int]
    """For each HF name that was sent, the fingerprint (`rollout.fingerprint`) of the tensor that is held now."""


class RolloutEngine(Protocol):
    """Draws completions from the newest complete weights that it was given."""

    @property
    def policy_version(self) -> int | None:
        """Version of the loaded weights; None while there are none, or only a part of them."""
        ...

    @property
    def works_beside_training(self) -> bool:
        """Whether `generate` may run on a thread of its own while this process computes something else."""
        ...

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        """Draw one completion for each request.

        Args:
            requests: N requests, in any order.
            sampling: how tokens are drawn and when a completion ends, the same for all.

        Returns:
            N completions in the order of the requests. Log-probabilities are those of the distribution that
            the tokens were drawn from: temperature applied, and with top_p < 1 renormalised over the nucleus.
            At temperature 0, where that is a single point, they are the model's own (temperature 1).

        Raises:
            ValueError: for a request that the model cannot take, or when no complete weights are loaded.
        """
        ...

    def load_weights(self, stream: Iterator[tuple[str, Tensor]], *, policy_version: int) -> WeightsReceipt:
        """Replace all weights. Until the whole stream has arrived and fits, the engine refuses to generate.

        Args:
            stream: (HF name, full tensor) pairs of the whole model, in any order; a tied `lm_head.weight` may
                be left out.
            policy_version: stored with every completion drawn from these weights.

        Returns:
            what the engine holds now; the sender compares it with what was sent.

        Raises:
            ValueError: for a name that is unknown or missing, a wrong shape, or tensors that contradict.
        """
        ...

    def score(self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[Tensor]:
        """Log-probabilities of given tokens under the loaded weights, computed as `generate` would.

        Args:
            sequences: token ids; each sequence has at least one and fits into the context.
            temperature: divides the logits, above 0.

        Returns:
            For each sequence float32 [length] on the CPU: the log-probability of each token given those
            before it, 0 for the first, which has none.

        Raises:
            ValueError: when no complete weights are loaded, or for a sequence that `generate` would refuse.
        """
        ...

    def release(self) -> None:
        """Leave the device's memory to training, where the engine shares it; until the next `load_weights`."""
        ...

    def health(self) -> Health:
        """Whether `generate` can be called now; never raises."""
        ...

    def close(self) -> None:
        """Free the memory and stop whatever was started. Safe to call twice."""
        ...
