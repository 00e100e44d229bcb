"""The dataclasses that cross stage boundaries: prompts -> rollout -> rewards -> advantages -> mini-batches.

One layout everywhere, *flat and packed*: the tokens of all sequences one after another in 1-D tensors of length T, and
`lengths` of the N sequences. Nothing is padded until a device needs it (`learner/packing.py`), and a response mask is a
mask over tokens, not a length, so that tokens which the policy did not write (tool output, say) can be left out.

A token tensor holds at index t what belongs to token t itself: its log-probability is that of token t given the tokens
before it in the same sequence (0 for the first token of a sequence, which has none).

Legend: T tokens of all sequences, N sequences (samples), G samples per prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from megatron_calclip.prompt import Prompt


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn."""

    max_new_tokens: int
    """Most tokens of a completion, the stop token included; at least 1."""
    temperature: float = 1.0
    """Logits are divided by it; 0 means greedy."""
    top_p: float = 1.0
    """Nucleus mass in (0, 1]; 1 switches it off."""
    stop_token_ids: tuple[int, ...] = ()
    """A completion ends with the first of these (which is part of it)."""


@dataclass(frozen=True)
class Completion:
    """What a rollout engine returns for one request."""

    token_ids: tuple[int, ...]
    """Generated tokens, the stop token included."""
    log_probs: tuple[float, ...]
    """Natural log-probability of each token under the distribution that was sampled from."""
    finished: bool
    """True when a stop token ended it, False when the length limit did (truncated)."""
    policy_version: int
    """Version of the weights that wrote it."""


@dataclass(frozen=True)
class Trajectories:
    """Prompts with completions, flat: the input of everything after the rollout."""

    tokens: Tensor
    """int64 [T]: prompt and response tokens."""
    lengths: Tensor
    """int64 [N]: tokens of each sequence; they sum to T."""
    response_mask: Tensor
    """bool [T]: True for tokens that the policy wrote."""
    sampler_log_probs: Tensor
    """float32 [T]: log mu, 0 outside the response mask."""
    groups: Tensor
    """int64 [N]: index of the prompt (within this batch) that each sequence answers."""
    sample_ids: Tensor
    """int64 [N]: unique within a run, the same whatever the number of ranks."""
    policy_versions: Tensor
    """int64 [N]: version of the weights that wrote each sequence."""
    finished: Tensor
    """bool [N]: False where the length limit cut the response."""

    def __post_init__(self) -> None:
        """Raises ValueError where a sequence's first token counts as a response: nothing predicts it."""
        starts = (self.lengths.cumsum(0) - self.lengths)[self.lengths > 0]
        if bool(self.response_mask[starts].any()):
            raise ValueError("response_mask holds a sequence's first token, which nothing predicts; mask it out")

    @property
    def num_sequences(self) -> int:
        """N."""
        return self.lengths.numel()

    @property
    def sequence_ids(self) -> Tensor:
        """int64 [T]: for each token the index (0..N-1) of its sequence."""
        return torch.repeat_interleave(torch.arange(self.num_sequences), self.lengths)

    @property
    def response_lengths(self) -> Tensor:
        """int64 [N]: tokens of each sequence inside the response mask."""
        counts = torch.zeros(self.num_sequences, dtype=torch.int64)
        return counts.scatter_add_(0, self.sequence_ids, self.response_mask.to(torch.int64))

    @property
    def num_response_tokens(self) -> int:
        """Tokens inside the response mask, over all sequences."""
        return int(self.response_mask.sum())

    @classmethod
    def from_completions(cls, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]) -> Trajectories:
        """Lay prompts and their completions out flat.

        Args:
            prompts: P prompts.
            completions: for each prompt its G completions.

        Raises:
            ValueError: when a completion is empty or its log-probs do not match its tokens (a broken engine).
        """
        assert len(prompts) == len(completions)
        tokens: list[int] = []
        mask: list[bool] = []
        log_probs: list[float] = []
        lengths, groups, sample_ids, versions, finished = [], [], [], [], []
        for group, (prompt, answers) in enumerate(zip(prompts, completions, strict=True)):
            for index, answer in enumerate(answers):
                if not answer.token_ids or len(answer.token_ids) != len(answer.log_probs):
                    raise ValueError(
                        f"completion {index} of prompt {prompt.id} has {len(answer.token_ids)} tokens and "
                        f"{len(answer.log_probs)} log-probs; an engine must return one log-prob per token, and at "
                        "least one token"
                    )
                tokens += [*prompt.token_ids, *answer.token_ids]
                mask += [False] * len(prompt.token_ids) + [True] * len(answer.token_ids)
                log_probs += [0.0] * len(prompt.token_ids) + list(answer.log_probs)
                lengths.append(len(prompt.token_ids) + len(answer.token_ids))
                groups.append(group)
                sample_ids.append(prompt.id * len(answers) + index)
                versions.append(answer.policy_version)
                finished.append(answer.finished)
        return cls(
            tokens=torch.tensor(tokens, dtype=torch.int64),
            lengths=torch.tensor(lengths, dtype=torch.int64),
            response_mask=torch.tensor(mask, dtype=torch.bool),
            sampler_log_probs=torch.tensor(log_probs, dtype=torch.float32),
            groups=torch.tensor(groups, dtype=torch.int64),
            sample_ids=torch.tensor(sample_ids, dtype=torch.int64),
            policy_versions=torch.tensor(versions, dtype=torch.int64),
            finished=torch.tensor(finished, dtype=torch.bool),
        )

    def select(self, sequences: Tensor, *, groups: Sequence[int]) -> Trajectories:
        """Some of the sequences.

        Args:
            sequences: int64 [n], in the order that they take.
            groups: the groups that they belong to, which become 0, 1, ...
        """
        sizes, order = self.lengths.tolist(), sequences.tolist()
        number = torch.zeros(int(self.groups.max()) + 1, dtype=torch.int64)
        number[list(groups)] = torch.arange(len(groups))

        def per_token(values: Tensor) -> Tensor:
            parts = values.split(sizes)
            return torch.cat([parts[index] for index in order])

        return Trajectories(
            tokens=per_token(self.tokens),
            lengths=self.lengths[sequences],
            response_mask=per_token(self.response_mask),
            sampler_log_probs=per_token(self.sampler_log_probs),
            groups=number[self.groups[sequences]],
            sample_ids=self.sample_ids[sequences],
            policy_versions=self.policy_versions[sequences],
            finished=self.finished[sequences],
        )

    @classmethod
    def join(cls, parts: Sequence[Trajectories], *, num_groups: Sequence[int]) -> Trajectories:
        """Several batches as one.

        Args:
            parts: the batches.
            num_groups: of each; its groups are numbered on from those before.
        """
        joined = {f.name: torch.cat([getattr(part, f.name) for part in parts]) for f in fields(cls)}
        sizes = torch.tensor([part.num_sequences for part in parts])
        counts = torch.tensor(num_groups)
        joined["groups"] = joined["groups"] + torch.repeat_interleave(counts.cumsum(0) - counts, sizes)
        return cls(**joined)

    def responses(self) -> list[Tensor]:
        """For each sequence, int64 [length]: its tokens inside the response mask."""
        sizes = self.lengths.tolist()
        return [
            tokens[mask] for tokens, mask in zip(self.tokens.split(sizes), self.response_mask.split(sizes), strict=True)
        ]


@dataclass(frozen=True)
class TrainingBatch:
    """Everything that the updates of one step need, flat, the same on every rank."""

    trajectories: Trajectories
    rewards: Tensor
    """float32 [N]."""
    advantages: Tensor
    """float32 [T]: each sequence's advantage at each of its tokens, 0 outside the response mask."""
    old_log_probs: Tensor | None = None
    """float32 [T]: log pi_old, the learner at the start of the step, in its training precision."""
    reference_log_probs: Tensor | None = None
    """float32 [T]: log pi_ref; None without a KL term."""

    def with_log_probs(self, **log_probs: Tensor) -> TrainingBatch:
        """A copy with log-probability fields filled in.

        Raises:
            ValueError: for a name that is no log-prob field, or a tensor that is not [T].
        """
        names = {f.name for f in fields(self) if f.name.endswith("_log_probs")}
        for name, value in log_probs.items():
            if name not in names or value.shape != self.trajectories.tokens.shape:
                raise ValueError(f"{name} {tuple(value.shape)}: expected one of {sorted(names)} of shape [T]")
        return replace(self, **log_probs)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ScoredTokens:
    """Response tokens of one micro-batch with what the model says of them (n tokens)."""

    index: Tensor
    """int64 [n]: index of each token in the batch's flat layout [T], on the CPU."""
    log_probs: Tensor
    """float32 [n]: log pi_theta; carries the gradient in training."""
    entropy: Tensor
    """float32 [n] nats: entropy of the distribution that each token was drawn from."""


Objective = Callable[[ScoredTokens], tuple[Tensor, Any]]
"""From scored tokens to (this micro-batch's share of the loss, anything to hand back to the caller)."""
