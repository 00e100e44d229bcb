"""Tiny models, a batch with every awkward sequence, and the plain training that every layout must reproduce.

`PlainLearner` is transformers, autograd and torch's AdamW on one process: no Megatron, no packing, no process groups. It
shares with the learner only the objective, so it checks everything between weights and objective, and between gradient and
weights. Fixtures only; the checks are in `check_learner.py` and its neighbours.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.diagnostics import PolicyMetricSums
from megatron_calclip.batch import Completion, Objective, Prompt, ScoredTokens, TrainingBatch, Trajectories
from megatron_calclip.config import Config
from megatron_calclip.config_file import config_from_dict
from megatron_calclip.learner.learner import Learner
from megatron_calclip.learner.reference import ReferencePolicy
from megatron_calclip.learner.runtime import Runtime
from megatron_calclip.objective import policy_objective, policy_tokens
from megatron_calclip.weights.load import HFSource

VOCAB_SIZE = 150  # padded to 256: of two vocabulary shards the second is mostly padding
ORIGINAL_CONTEXT = 16  # of the models with scaled RoPE; sequences of the batch go far beyond
# Tokens of each sequence: prompt, response. Five sequences a mini-batch, which two ranks cannot share evenly.
PROMPT_LENGTHS = (3, 3, 7, 7, 2, 2, 20, 20, 5, 5)
RESPONSE_LENGTHS = (9, 1, 30, 17, 26, 12, 40, 1, 8, 33)
SEQUENCE_WITH_HOLES, SEQUENCE_MASKED_OUT = 3, 5

SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
)
TIED = {"tie_word_embeddings": True}


def rope(kind: str, **values: Any) -> dict[str, Any]:
    """Configuration of one kind of RoPE scaling."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **values}}


_CONTEXT = {"original_max_position_embeddings": ORIGINAL_CONTEXT}
_YARN = rope("yarn", factor=4.0, beta_fast=4.0, beta_slow=1.0, **_CONTEXT)
_LLAMA3 = rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, **_CONTEXT)

MODELS: dict[str, PretrainedConfig] = {
    "qwen2 tied": Qwen2Config(**SIZES | TIED),
    "qwen2 yarn": Qwen2Config(**SIZES | _YARN),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "qwen3 tied yarn": Qwen3Config(**SIZES | TIED | _YARN, head_dim=16),
    "llama": LlamaConfig(**SIZES | {"num_key_value_heads": 4}),
    "llama tied llama3": LlamaConfig(**SIZES | TIED | _LLAMA3),
    "llama linear": LlamaConfig(**SIZES | rope("linear", factor=3.0)),
}


def make_config(**sections: dict[str, Any]) -> Config:
    """fp32, every term of the loss switched on, and a learning rate at which ratios leave the clip range.

    Args:
        sections: settings that replace the defaults below, one mapping for each section.
    """
    defaults: dict[str, dict[str, Any]] = {
        "model": {"shape": {}, "tokenizer": "characters", "max_sequence_length": 64},
        "rollout": {"temperature": 0.9, "max_new_tokens": max(RESPONSE_LENGTHS)},
        "algorithm": {
            "num_minibatches": 2,
            "num_epochs": 2,
            "clip": {"dual": 3.0},
            "kl": {"coefficient": 0.05},
            "entropy_bonus": 0.02,
        },
        "precision": {"params_dtype": "fp32"},
        # A large epsilon: with a small one Adam makes a whole step of a gradient that is nothing but rounding.
        "optimizer": {"lr": 5e-3, "epsilon": 1e-4, "weight_decay": 0.1, "clip_grad": 0.5},
        "train": {"tokens_per_microbatch": 96, "deterministic": True},
    }
    names = [*defaults, *(name for name in sections if name not in defaults)]
    return config_from_dict({name: defaults.get(name, {}) | sections.get(name, {}) for name in names})


@functools.cache
def random_model(name: str) -> Any:
    """A transformers model, the same on every rank. Biases and norms are random too: 0 and 1 hide mistakes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(MODELS[name], dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def make_learner(config: Config, runtime: Runtime, model: str) -> Learner:
    """A learner with the weights of `random_model`."""
    return Learner(
        config,
        MODELS[model],
        runtime,
        source=HFSource.from_tensors(random_model(model).state_dict()),
        lr=config.optimizer.lr,
        num_steps=config.train.num_steps,
        warmup_steps=config.schedule.warmup_steps,
        decay=config.schedule.decay,
        min_lr=config.schedule.min_lr,
    )


@functools.cache
def make_batch(model: str) -> TrainingBatch:
    """Ten sequences: lengths from 4 to 60, one-token responses, a mask with holes, a sequence masked out altogether.

    Sampler log-probabilities scatter around the model's own, so that some importance weights reach their cap.
    """
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, VOCAB_SIZE, (count,), generator=generator).tolist())

    prompts = [Prompt(index, draw(length), "", "") for index, length in enumerate(PROMPT_LENGTHS[::2])]
    answers = [Completion(draw(n), (-1.0,) * n, finished=True, policy_version=0) for n in RESPONSE_LENGTHS]
    trajectories = Trajectories.from_completions(prompts, list(zip(answers[::2], answers[1::2], strict=True)))
    mask, ids = trajectories.response_mask.clone(), trajectories.sequence_ids
    mask[ids == SEQUENCE_MASKED_OUT] = False
    hole = (ids == SEQUENCE_WITH_HOLES).nonzero()[PROMPT_LENGTHS[SEQUENCE_WITH_HOLES] + 4 :: 3, 0]
    mask[hole] = False
    trajectories = replace(trajectories, response_mask=mask)
    own, _ = plain_log_probs(random_model(model), trajectories, range(trajectories.num_sequences), temperature=0.9)
    sampler = torch.where(mask, own.detach() + 0.4 * torch.randn(own.shape, generator=generator), 0.0)
    rewards = torch.randn(trajectories.num_sequences, generator=generator)
    return TrainingBatch(
        trajectories=replace(trajectories, sampler_log_probs=sampler),
        rewards=rewards,
        advantages=rewards[ids] * mask,
    )


def plain_log_probs(
    model: Any, trajectories: Trajectories, sequences: Sequence[int], *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [T] of the response tokens of some sequences, 0 elsewhere; differentiable."""
    log_probs, entropies = [], []
    sizes = trajectories.lengths.tolist()
    masks = trajectories.response_mask.split(sizes)
    for index, tokens in enumerate(trajectories.tokens.split(sizes)):
        if index not in sequences:
            log_probs.append(torch.zeros(len(tokens)))
            entropies.append(torch.zeros(len(tokens)))
            continue
        logits = model(tokens[None]).logits[0, :-1].float() / temperature
        every = logits.log_softmax(-1)
        first = torch.zeros(1)  # nothing predicts the first token
        own = every.gather(1, tokens[1:, None])[:, 0]
        log_probs.append(torch.cat([first, own]) * masks[index])
        entropies.append(torch.cat([first, -(every.exp() * every).sum(-1)]) * masks[index])
    return torch.cat(log_probs), torch.cat(entropies)


@dataclass(frozen=True)
class Update:
    """One optimizer step, with global values."""

    loss: float
    grad_norm: float
    applied: bool
    sums: PolicyMetricSums


@dataclass
class History:
    """Everything observable of a training."""

    updates: list[Update] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)
    """[T] before each RL step."""
    entropies: list[Tensor] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    """HF tensors at the end."""

    @property
    def metrics(self) -> dict[str, float]:
        """Of all updates together."""
        return functools.reduce(PolicyMetricSums.merge, (update.sums for update in self.updates)).finalize()


class Policy(Protocol):
    """What `train` needs of the plain and of the Megatron learner."""

    def score(self) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [T]."""
        ...

    def score_reference(self) -> Tensor:
        """Log-probabilities [T] under the first weights."""
        ...

    def update(self, minibatch: int, objective: Objective) -> Update:
        """One optimizer step."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """HF tensors."""
        ...


def minibatches(batch: TrainingBatch, config: Config) -> list[list[int]]:
    """Sequences of each mini-batch: consecutive ones."""
    numbers = torch.arange(batch.trajectories.num_sequences)
    return numbers.view(config.algorithm.num_minibatches, -1).tolist()


def train(policy: Policy, batch: TrainingBatch, config: Config, *, num_steps: int) -> History:
    """RL steps over the same trajectories: old log-probabilities, then epochs of mini-batches, the first in order."""
    history = History()
    algorithm = config.algorithm
    bounds = ClipBounds(algorithm.clip.lower, algorithm.clip.upper)
    for _ in range(num_steps):
        log_probs, entropies = policy.score()
        history.log_probs.append(log_probs)
        history.entropies.append(entropies)
        complete = batch.with_log_probs(old_log_probs=log_probs, reference_log_probs=policy.score_reference())
        members = minibatches(batch, config)
        tokens = policy_tokens(complete, members, algorithm, config.rollout.max_new_tokens)
        objective = policy_objective(tokens, bounds, algorithm)
        for epoch in range(algorithm.num_epochs):
            for index in range(len(members))[:: -1 if epoch else 1]:
                history.updates.append(policy.update(index, objective))
    history.weights = policy.weights()
    return history


class PlainLearner:
    """The reference; see the module's docstring.

    Args:
        config: optimizer and temperature are read.
        model: one of `MODELS`.
        batch: what it trains on.
        dtype: its weights are rounded to this first (they are FP32 afterwards, like a master).
    """

    def __init__(self, config: Config, model: str, batch: TrainingBatch, *, dtype: torch.dtype = torch.float32) -> None:
        self.config, self.trajectories = config, batch.trajectories
        self.minibatches = minibatches(batch, config)
        self.model = AutoModelForCausalLM.from_config(MODELS[model], dtype=torch.float32).eval()
        self.model.load_state_dict({k: v.to(dtype) for k, v in random_model(model).state_dict().items()})
        parameters = list(self.model.parameters())
        o = config.optimizer
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.dim() > 1], "weight_decay": o.weight_decay},
                {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},  # norms and biases
            ],
            lr=o.lr,
            betas=(o.beta1, o.beta2),
            eps=o.epsilon,
        )
        self.reference, _ = self.score()

    def score(self) -> tuple[Tensor, Tensor]:
        """See `Policy`."""
        with torch.no_grad():
            return self._score(range(self.trajectories.num_sequences))

    def score_reference(self) -> Tensor:
        """See `Policy`."""
        return self.reference

    def update(self, minibatch: int, objective: Objective) -> Update:
        """See `Policy`."""
        sequences = self.minibatches[minibatch]
        member = torch.isin(self.trajectories.sequence_ids, torch.tensor(sequences))
        index = (self.trajectories.response_mask & member).nonzero()[:, 0]
        log_probs, entropies = self._score(sequences)
        loss, record = objective(ScoredTokens(index, log_probs[index], entropies[index]))
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip_grad)
        self.optimizer.step()
        return Update(float(loss.detach()), float(norm), True, record.metrics)

    def weights(self) -> dict[str, Tensor]:
        """See `Policy`."""
        tied = self.model.config.tie_word_embeddings
        state = self.model.state_dict().items()
        return {name: tensor.clone() for name, tensor in state if not (tied and name == "lm_head.weight")}

    def _score(self, sequences: Sequence[int]) -> tuple[Tensor, Tensor]:
        temperature = self.config.rollout.temperature
        return plain_log_probs(self.model, self.trajectories, sequences, temperature=temperature)


class MegatronLearner:
    """The learner under test, with global values as `Policy` wants them; every method is collective.

    Args:
        learner: as the trainer has it.
        batch: what it trains on.
        run_dir: folder of the reference policy.
    """

    def __init__(self, learner: Learner, batch: TrainingBatch, run_dir: Path) -> None:
        self.learner = learner
        algorithm = learner.config.algorithm
        self.prepared = learner.prepare(batch.trajectories, num_minibatches=algorithm.num_minibatches)
        self.reference = ReferencePolicy(learner, run_dir, resumes=True)

    def score(self) -> tuple[Tensor, Tensor]:
        """See `Policy`."""
        scores = self.learner.log_probs(self.prepared)
        return self.learner.gather_tokens(scores.log_probs), self.learner.gather_tokens(scores.entropy)

    def score_reference(self) -> Tensor:
        """See `Policy`."""
        return self.learner.gather_tokens(self.reference.log_probs(self.prepared))

    def update(self, minibatch: int, objective: Objective) -> Update:
        """See `Policy`."""
        runtime = self.learner.runtime
        result = self.learner.update(self.prepared, minibatch, objective, entropy_grad=True)
        own = PolicyMetricSums.empty()
        for record in result.extras:
            own = own.merge(record.metrics)
        sums, minima, maxima = (own if runtime.reports_tokens else PolicyMetricSums.empty()).pack()
        reduced = PolicyMetricSums(
            runtime.sum_over_world(sums), -runtime.max_over_world(-minima), runtime.max_over_world(maxima)
        )
        loss = result.loss if runtime.reports_tokens else torch.zeros_like(result.loss)
        return Update(float(runtime.sum_over_world(loss)), result.grad_norm, result.applied, reduced)

    def weights(self) -> dict[str, Tensor]:
        """See `Policy`."""
        return {name: tensor.clone() for name, tensor in self.learner.stream_hf()}


def snapshot(learner: Learner) -> dict[str, Tensor]:
    """Every bit of this rank's state: live weights, masters, Adam's moments and step counts (copies)."""
    values: dict[str, Tensor] = {}
    for index, chunk in enumerate(learner.chunks):
        values |= {f"{index}.{name}": parameter for name, parameter in chunk.named_parameters()}
    for part in learner.optimizer.chained_optimizers:
        masters = [master for group in part.optimizer.param_groups for master in group["params"]]
        for index, master in enumerate(masters):
            values[f"master.{index}"] = master
            state = part.optimizer.state.get(master, {})
            values |= {f"{name}.{index}": value for name, value in state.items()}
    return {name: value.detach().clone() for name, value in values.items()}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two snapshots are equal to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
