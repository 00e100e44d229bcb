"""The passes behind `megatron-calclip diagnose`: the project's own learner, in BF16 and in each recipe.

One update is made, in BF16, and its masters are kept. Each recipe's learner, built as a run would build it, then computes
the same tokens at the masters before and after that update, on any layout. So recipes differ in nothing but their forward
pass, and all of them are compared with the same two BF16 passes.

The update is a policy-gradient step of the run's own optimizer, with advantages of +1 and -1 in turn over the sequences:
what matters here is how far weights move, not where to. AdamW's step is proportional to the learning rate, so one gradient
serves several: masters = old + lr / lr_0 * (new - old).

Left out on purpose: TransformerEngine's layers in the passes over single layers, whose precision Megatron decides for the
whole block.

Legend: T tokens of the batch, n response tokens.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.batch import Objective, ScoredTokens, Trajectories
from megatron_calclip.config import Config
from megatron_calclip.convert.checkpoints import open_checkpoint
from megatron_calclip.diagnosis import (
    ClipShares,
    LayerNoise,
    LogProbPair,
    RecipeReport,
    Report,
    between_boundaries,
    clip_shares,
    probability_noise,
    ratio_noise,
)
from megatron_calclip.errors import EXIT_FAILED, UserError
from megatron_calclip.learner.learner import Learner, PreparedBatch
from megatron_calclip.learner.packing import plan_step
from megatron_calclip.learner.parallel_linear import fp8_linears
from megatron_calclip.learner.runtime import Runtime
from megatron_calclip.weights.load import HFSource
from megatron_calclip.weights.mapping import find_tensor
from megatron_calclip.weights.stream import global_parameters, group_rank, group_size

Masters = dict[str, Tensor]
"""This rank's FP32 masters by their names over the whole model, whole over data parallelism, on the CPU."""


@dataclass(frozen=True)
class Model:
    """The policy that is diagnosed."""

    hf_config: Any
    source: HFSource
    """Weights in FP32."""
    has_masters: bool
    """Whether these are a training run's FP32 masters; others are spread between BF16's boundaries first."""

    @classmethod
    def open(cls, folder: Path, hf_config: Any) -> Model:
        """A HF folder, or a checkpoint of ours.

        Raises:
            UserError: when it cannot be read.
        """
        checkpoint = open_checkpoint(folder, dtype=torch.float32)
        return cls(hf_config, checkpoint.source, has_masters=checkpoint.has_masters)


def with_spread_masters(source: HFSource, *, seed: int) -> HFSource:
    """Weights as FP32 masters in the middle of training; see `diagnosis.between_boundaries`.

    Args:
        source: BF16 weights, or what rounds to them.
        seed: of the offsets. They depend on the tensor's name, not on who reads it.
    """

    def read(name: str) -> Tensor:
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        return between_boundaries(source.read(name), generator)

    specs = {name: spec.to(torch.float32) for name, spec in source.specs.items()}
    return HFSource(source.where, specs=specs, read=read)


def build_learner(config: Config, model: Model, runtime: Runtime) -> Learner:
    """A learner with the model's weights; its masters are BF16's until `set_masters`."""
    gc.collect()  # the one before lies in reference cycles
    return Learner(
        config,
        model.hf_config,
        runtime,
        source=model.source,
        lr=config.optimizer.lr,
        num_steps=1,
        warmup_steps=0,
        decay="constant",
        min_lr=0.0,
    )


def read_masters(learner: Learner, source: HFSource) -> Masters:
    """This rank's part of FP32 weights."""
    masters = {}
    for name in global_parameters(learner.chunks, learner.shape, learner.groups):
        tensor = find_tensor(learner.shape, name)
        group = learner.groups.tp_group(tensor)
        whole = tensor.join([source.read(hf.name) for hf in tensor.hf])
        masters[name] = tensor.shard(whole, rank=group_rank(group), size=group_size(group)).float()
    return masters


def set_masters(learner: Learner, masters: Mapping[str, Tensor]) -> None:
    """Give a learner masters, and the live weights that follow from them."""
    for name, parameter in global_parameters(learner.chunks, learner.shape, learner.groups).items():
        learner.masters.assign(parameter, masters[name])
    learner.refresh_fp8_params()


def get_masters(learner: Learner) -> Masters:
    """A copy of a learner's masters; collective over data parallelism."""
    parameters = global_parameters(learner.chunks, learner.shape, learner.groups)
    return {name: learner.masters.full(parameter).to("cpu", copy=True) for name, parameter in parameters.items()}


@contextlib.contextmanager
def fp8_layers_only(learner: Learner, layers: Collection[int]) -> Iterator[None]:
    """Inside the block only these layers (from 1) compute in FP8, the other decoder layers in BF16."""
    layers_by_number = [
        (layer.layer_number, fp8_linears([layer])) for chunk in learner.chunks for layer in chunk.module.decoder.layers
    ]
    silenced = [
        (linear, linear.fp8) for number, linears in layers_by_number if number not in layers for linear in linears
    ]
    with learner.fp8_params_set_aside():
        for linear, _ in silenced:
            linear.fp8 = None
        try:
            yield
        finally:
            for linear, fp8 in silenced:
                linear.fp8 = fp8


class Diagnosis:
    """One model, one batch; recipes come one after another.

    Args:
        config: of the BF16 learner: layout, optimizer, token budget, seed.
        model: the policy.
        runtime: this rank.
        trajectories: the same on all ranks.
        bounds: the clip range.
        lrs: learning rates of the update.
        num_layer_sequences: sequences on which single layers are looked at; 0: none.
        say: reports progress.
    """

    def __init__(
        self,
        config: Config,
        model: Model,
        runtime: Runtime,
        trajectories: Trajectories,
        *,
        bounds: ClipBounds,
        lrs: Sequence[float],
        num_layer_sequences: int,
        say: Callable[[str], None],
    ) -> None:
        self.runtime, self.trajectories, self.bounds, self.lrs = runtime, trajectories, bounds, lrs
        self.num_layer_sequences, self.say = num_layer_sequences, say
        self.mask = trajectories.response_mask
        signs = torch.where(torch.arange(trajectories.num_sequences) % 2 == 0, 1.0, -1.0)
        self.advantages = signs[trajectories.sequence_ids] * self.mask
        self.is_positive = self.advantages[self.mask] > 0
        self.model = (
            model
            if model.has_masters
            else replace(model, source=with_spread_masters(model.source, seed=config.train.seed))
        )
        self._measure_bf16(config)

    def _measure_bf16(self, config: Config) -> None:
        """The two sides of the update, and BF16's log-probabilities at both."""
        learner = build_learner(config, self.model, self.runtime)
        self.old = read_masters(learner, self.model.source)
        set_masters(learner, self.old)
        batch = learner.prepare(self.trajectories, num_minibatches=1)
        self.old16, self.seconds16 = self.timed_log_probs(learner, batch)
        self.floor16 = self.shares(self.log_probs(learner, self.other_microbatches(learner)), self.old16)
        self.step = self._update(learner, batch)
        self.new16 = []
        for lr in self.lrs:
            set_masters(learner, self.masters_after(lr))
            self.new16.append(self.log_probs(learner, batch))
        self.say(f"bf16: {self.seconds16:.1f} s a forward pass")

    def _update(self, learner: Learner, batch: PreparedBatch) -> Masters:
        """What an update at learning rate 1 would add to the masters."""
        lr = max(self.lrs)
        for group in learner.optimizer.param_groups:
            group["lr"] = lr
        result = learner.update(batch, 0, self.objective())
        if not result.applied:
            raise UserError(
                "MODEL", "its gradient on these tokens is not finite; give a working model", exit_code=EXIT_FAILED
            )
        return {name: (new - self.old[name]) / lr for name, new in get_masters(learner).items()}

    def objective(self) -> Objective:
        """Policy gradient at ratio 1, averaged over response tokens: its value there does not matter, its gradient does."""
        count = self.trajectories.num_response_tokens

        def loss(scored: ScoredTokens) -> tuple[Tensor, None]:
            advantages = self.advantages[scored.index].to(scored.log_probs.device)
            return -(advantages * scored.log_probs).sum() / count, None

        return loss

    def masters_after(self, lr: float) -> Masters:
        """Masters after the update with a learning rate."""
        return {name: old + lr * self.step[name] for name, old in self.old.items()}

    def log_probs(self, learner: Learner, batch: PreparedBatch) -> Tensor:
        """float32 [n], complete on every rank."""
        return learner.gather_tokens(learner.log_probs(batch).log_probs)[self.mask]

    def timed_log_probs(self, learner: Learner, batch: PreparedBatch) -> tuple[Tensor, float]:
        """`log_probs` and its seconds."""
        self.runtime.barrier()
        begin = time.perf_counter()
        log_probs = self.log_probs(learner, batch)
        return log_probs, time.perf_counter() - begin

    def other_microbatches(self, learner: Learner) -> PreparedBatch:
        """The same batch in micro-batches of half the size."""
        parallel, train = learner.config.parallel, learner.config.train
        plan = plan_step(
            self.trajectories.lengths.tolist(),
            num_minibatches=1,
            dp_size=self.runtime.dp_size,
            tokens_per_microbatch=max(train.tokens_per_microbatch // 2, 1),
            microbatch_multiple=parallel.pp if parallel.vpp else 1,
        )
        return learner.pack_plan(self.trajectories, plan)

    def shares(self, new: Tensor, old: Tensor) -> ClipShares:
        """Clip shares of p(new) / p(old)."""
        return clip_shares(LogProbPair(old, new).ratio, self.is_positive, self.bounds)

    def measure(self, name: str, config: Config) -> RecipeReport:
        """One recipe.

        Args:
            name: what to call it.
            config: of its learner.
        """
        begin = time.perf_counter()
        learner = build_learner(config, self.model, self.runtime)
        set_masters(learner, self.old)
        batch = learner.prepare(self.trajectories, num_minibatches=1)
        learner.warm_up(batch)
        old8, seconds = self.timed_log_probs(learner, batch)
        updates = []
        for lr, new16 in zip(self.lrs, self.new16, strict=True):
            set_masters(learner, self.masters_after(lr))
            pair8, pair16 = LogProbPair(old8, self.log_probs(learner, batch)), LogProbPair(self.old16, new16)
            updates.append(ratio_noise(pair8, pair16, self.is_positive, bounds=self.bounds, lr=lr))
        set_masters(learner, self.old)
        report = RecipeReport(
            recipe=name,
            unmoved=probability_noise(old8, self.old16),
            repeated=self.shares(self.log_probs(learner, batch), old8),
            floor=self.shares(self.log_probs(learner, self.other_microbatches(learner)), old8),
            updates=updates,
            seconds=seconds,
            layers=self._layers(learner) if self.num_layer_sequences and learner.megatron.fp8_active else None,
        )
        self.say(f"{name}: {seconds:.1f} s a forward pass, measured in {time.perf_counter() - begin:.0f} s")
        return report

    def _layers(self, learner: Learner) -> LayerNoise:
        """Single layers in FP8, on the first sequences."""
        count = min(self.num_layer_sequences, self.trajectories.num_sequences)
        groups = list(dict.fromkeys(self.trajectories.groups[:count].tolist()))
        some = self.trajectories.select(torch.arange(count), groups=groups)
        batch = learner.prepare(some, num_minibatches=1)

        def log_probs(layers: Collection[int]) -> Tensor:
            with fp8_layers_only(learner, layers):
                return learner.gather_tokens(learner.log_probs(batch).log_probs)[some.response_mask]

        every = range(1, learner.shape.num_layers + 1)
        bf16 = log_probs(())

        def noise(layers: Collection[int]) -> float:
            return probability_noise(log_probs(layers), bf16).mean_abs_dlogp

        return LayerNoise(
            mean_abs_dlogp=noise(every), one_layer=[noise((layer,)) for layer in every], edges_bf16=noise(every[1:-1])
        )

    def report(self, recipes: list[RecipeReport]) -> Report:
        """Everything together."""
        return Report(
            num_sequences=self.trajectories.num_sequences,
            num_tokens=self.trajectories.num_response_tokens,
            bounds=(self.bounds.lower, self.bounds.upper),
            bf16_nll=-float(self.old16.double().mean()),
            bf16_floor=self.floor16,
            bf16_seconds=self.seconds16,
            recipes=recipes,
        )
