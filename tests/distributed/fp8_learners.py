"""Small models and batches for the FP8 checks, and everything of a learner that a pass may disturb. Fixtures only.

The batch makes results comparable over layouts: two sequences of one length fill each micro-batch, so that every layout and
every number of data-parallel ranks computes with the same micro-batches, and their amaxes mean the same.

Weights are small. A quantised model turns a difference in the last bit of FP32 into a whole FP8 step wherever a number lies
at the border of two codes; the smaller the logits, the less of that is seen in a loss.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny_learners import SIZES, TIED, make_config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3Config

from megatron_calclip.batch import Completion, Objective, Prompt, ScoredTokens, Trajectories
from megatron_calclip.config import Config
from megatron_calclip.learner import checkpoint, runtime
from megatron_calclip.learner.learner import Learner, PreparedBatch
from megatron_calclip.learner.runtime import Runtime
from megatron_calclip.precision.shadow import lives_in_fp8
from megatron_calclip.weights.load import HFSource

VOCAB_SIZE = SIZES["vocab_size"]
NUM_SEQUENCES, PROMPT_LENGTH, RESPONSE_LENGTH = 8, 4, 20
BLOCK_SIZE = 8  # divides every shard at tensor-parallel size 2, so that blocks do not depend on it
WEIGHT_SCALE = 0.03

RECIPES = ("tensorwise_delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP1": {},
    "TP2": {"tp": 2},
    "TP2 SP": {"tp": 2, "sequence_parallel": True},
    "PP2": {"pp": 2},
    "PP2 VPP2": {"pp": 2, "vpp": 2},
    "DP2": {},
    "DP2 overlap": {"overlap_grad_reduce": True, "overlap_param_gather": True},
}
MODELS: dict[str, PretrainedConfig] = {
    "two layers": Qwen3Config(**SIZES | {"num_hidden_layers": 2}, head_dim=16),
    "four layers": Qwen3Config(**SIZES, head_dim=16),
    "tied": Qwen2Config(**SIZES | TIED | {"num_hidden_layers": 2}),
}


def precision_config(recipe: str, layout: str, *, dtype: str = "bf16", **precision: Any) -> Config:
    """A recipe on a layout."""
    settings: dict[str, Any] = {"params_dtype": dtype, "recipe": recipe, "amax_group": "global"}
    if recipe in ("blockwise", "mxfp8"):
        settings["emulation"] = {"block_size": BLOCK_SIZE}
    return make_config(
        precision=settings | precision,
        parallel=LAYOUTS[layout],
        optimizer={"lr": 1e-3},
        train={"tokens_per_microbatch": 2 * (PROMPT_LENGTH + RESPONSE_LENGTH), "deterministic": True},
    )


@functools.cache
def weights(model: str, *, seed: int = 0) -> dict[str, Tensor]:
    """HF tensors, the same on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hf = AutoModelForCausalLM.from_config(MODELS[model], dtype=torch.float32)
        for parameter in hf.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=WEIGHT_SCALE)
            else:  # biases and norms: 0 and 1 hide mistakes
                parameter.data.add_(0.1 * torch.randn_like(parameter))
    return dict(hf.state_dict())


@functools.cache
def trajectories() -> Trajectories:
    """See the module's docstring."""
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, VOCAB_SIZE, (count,), generator=generator).tolist())

    prompts = [Prompt(index, draw(PROMPT_LENGTH), "", "") for index in range(NUM_SEQUENCES)]
    answers = [[Completion(draw(RESPONSE_LENGTH), (-1.0,) * RESPONSE_LENGTH, True, 0)] for _ in prompts]
    return Trajectories.from_completions(prompts, answers)


@contextlib.contextmanager
def started(config: Config) -> Iterator[Runtime]:
    """Megatron's groups for a layout on the ranks that there are."""
    from megatron.core import parallel_state

    world = dist.distributed_c10d._world
    before = set(world.pg_map)
    try:
        yield runtime.start(config)
    finally:
        parallel_state.destroy_model_parallel()
        # Megatron forgets its groups, but their threads would go on polling: thousands of them after some layouts.
        for group in set(world.pg_map) - before:
            dist.destroy_process_group(group)


@dataclass
class Training:
    """A learner with its batch and what was seen of it."""

    learner: Learner
    batch: PreparedBatch
    losses: list[float] = field(default_factory=list)
    """Global, one an update."""
    scored: list[ScoredTokens] = field(default_factory=list)
    """This rank's, from the last update."""

    @classmethod
    def begin(
        cls,
        config: Config,
        started: Runtime,
        model: str = "two layers",
        *,
        tensors: dict[str, Tensor] | None = None,
        warm_up: bool = True,
    ) -> Training:
        """A fresh start, warmed up as the trainer does it, from the weights of `weights(model)` or from other HF tensors."""
        source = HFSource.from_tensors(weights(model) if tensors is None else tensors)
        learner = Learner(
            config,
            MODELS[model],
            started,
            source=source,
            lr=config.optimizer.lr,
            num_steps=100,
            warmup_steps=0,
            decay="constant",
            min_lr=0.0,
        )
        training = cls(learner, learner.prepare(trajectories(), num_minibatches=1))
        if warm_up:
            learner.warm_up(training.batch)
        return training

    def objective(self) -> Objective:
        """Mean negative log-probability over all response tokens."""
        count = trajectories().num_response_tokens

        def loss(scored: ScoredTokens) -> tuple[Tensor, ScoredTokens]:
            kept = ScoredTokens(scored.index, scored.log_probs.detach().clone(), scored.entropy)
            return -scored.log_probs.sum() / count, kept

        return loss

    def update(self, num_steps: int = 1) -> None:
        """Optimizer steps on the whole batch."""
        started = self.learner.runtime
        for _ in range(num_steps):
            result = self.learner.update(self.batch, 0, self.objective())
            own = result.loss if started.reports_tokens else torch.zeros_like(result.loss)
            self.losses.append(float(started.sum_over_world(own)))
            self.scored = result.extras

    def log_probs(self) -> Tensor:
        """[T] over all ranks."""
        return self.learner.gather_tokens(self.learner.log_probs(self.batch).log_probs)

    def shadow_log_probs(self) -> Tensor:
        """[T] over all ranks."""
        return self.learner.gather_tokens(self.learner.shadow_log_probs(self.batch).log_probs)

    @property
    def bare(self) -> list[Any]:
        """Model chunks without their wrappers."""
        return [chunk.module for chunk in self.learner.chunks]

    @property
    def fp8_weights(self) -> list[nn.Parameter]:
        """Parameters that live in FP8."""
        return [p for chunk in self.bare for p in chunk.parameters() if lives_in_fp8(p)]


class NoTokenizer:
    """Stands in where a checkpoint saves one."""

    def save_pretrained(self, folder: Path) -> None:
        """Nothing."""


def save(training: Training, run_dir: Path) -> Path:
    """A checkpoint of the learner, the same folder on all ranks."""
    return checkpoint.save(
        run_dir, 1, training.learner, tokenizer=NoTokenizer(), state={"position": 0}, tensors={}, keep=1
    )


def whole_masters(training: Training) -> dict[int, Tensor]:
    """Masters by the identity of their parameter: the slices that Megatron hangs on it, one data-parallel rank after another."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    masters = {}
    for parameter in (p for chunk in training.bare for p in chunk.parameters()):
        slices: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(slices, parameter.main_param, group=group)
        masters[id(parameter)] = torch.cat([s for s in slices if s is not None]).view(parameter.shape)
    return masters


def snapshot(training: Training) -> dict[str, Any]:
    """All state of a learner that a pass without gradients could disturb, as copies, with the identity of its tensors."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    learner = training.learner
    state: dict[str, Any] = {
        "random": torch.get_rng_state(),
        "named random states": {name: value.clone() for name, value in get_cuda_rng_tracker().get_states().items()},
        "fp8": (learner.megatron.fp8, learner.megatron.fp8_active),
        "grad mode": torch.is_grad_enabled(),
    }
    for index, chunk in enumerate(training.bare):
        for name, parameter in chunk.named_parameters():
            gradient = None if parameter.grad is None else parameter.grad.clone()
            value = parameter.detach().clone()
            state[f"{index}.{name}"] = (id(parameter), value, gradient, parameter.main_grad.clone())
            if lives_in_fp8(parameter):
                codes = parameter.fp8_codes
                state[f"{index}.{name} codes"] = (
                    id(codes),
                    *(t.clone() for t in (codes.forward.values, codes.backward.values)),
                    *(None if t is None else t.clone() for t in (codes.forward.scale, codes.backward.scale)),
                )
        state[f"{index} buffers"] = {name: buffer.clone() for name, buffer in chunk.named_buffers()}
        for name, module in chunk.named_modules():
            hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
            fp8 = getattr(module, "fp8_active", None)
            state[f"{index}.{name} module"] = (module.training, hooks, fp8)
    return state


def same(left: Any, right: Any) -> bool:
    """Equal bit for bit: NaN equals itself, 0 does not equal -0."""
    if isinstance(left, Tensor):
        if not (isinstance(right, Tensor) and left.shape == right.shape and left.dtype == right.dtype):
            return False
        return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


failures: list[str] = []


def check(name: str, passed: bool, detail: object = "") -> None:
    """Record one check of this rank; all ranks must pass it."""
    verdicts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(verdicts, (bool(passed), str(detail)))
    good = all(verdict for verdict, _ in verdicts)
    if not good:
        failures.append(name)
    if dist.get_rank() == 0:
        print(f"{'ok  ' if good else 'FAIL'} {name} {'' if good else verdicts}", flush=True)
