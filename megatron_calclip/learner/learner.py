"""The learner: log-probabilities of a batch, and optimizer steps on mini-batches of it, on any layout.

A batch is prepared once a step (`prepare`): planned, packed and moved to the device. The old log-probabilities and
the updates then run over the very same micro-batches. What is optimised is a function from scored tokens to a
scalar that the caller passes in; the learner knows nothing of clipping or advantages. Losses must be sums that are
already divided by GLOBAL counts: the learner only adds them up, over micro-batches, data-parallel and
context-parallel ranks.

Per-token results are flat tensors [T] that are filled where this rank scored tokens (last pipeline stage, own
share) and zero elsewhere; that is all a later loss on the same rank needs. `Learner.gather_tokens` completes one
over all ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_calclip.batch import Objective, ScoredTokens, Trajectories
from megatron_calclip.config import Config
from megatron_calclip.learner import cpu, model
from megatron_calclip.learner.attention import PackedTokens
from megatron_calclip.learner.logprobs import linear_token_log_probs, token_log_probs
from megatron_calclip.learner.masters import MasterWeights
from megatron_calclip.learner.packing import PackedLayout, StepPlan, pack, plan_step
from megatron_calclip.learner.parallel_linear import (
    DelayedHistories,
    codes_set_aside,
    fp8_linears,
    max_over,
    quantize_parameters,
)
from megatron_calclip.learner.runtime import Runtime
from megatron_calclip.precision import backend
from megatron_calclip.precision.linear import Fp8Gemms
from megatron_calclip.precision.recipes import resolve
from megatron_calclip.precision.shadow import lives_in_fp8, shadow_pass
from megatron_calclip.weights.load import HFSource, load_hf
from megatron_calclip.weights.mapping import ModelShape
from megatron_calclip.weights.stream import stream_hf


@dataclass(frozen=True)
class MicroBatch:
    """One packed micro-batch on the device."""

    tokens: Tensor
    """int64 [1, t]."""
    positions: Tensor
    """int64 [1, t]."""
    packed: PackedTokens
    rows: Tensor
    """int64 [n]: local tokens whose successor is a response token."""
    targets: Tensor
    """int64 [n]: that successor."""
    index: Tensor
    """int64 [n]: its index in the flat layout, on the CPU."""
    first_tokens: Tensor
    """int64: local tokens that begin a sequence."""


@dataclass(frozen=True)
class PreparedBatch:
    """A batch, planned and packed for this rank."""

    num_tokens: int
    """T."""
    plan: StepPlan
    minibatches: tuple[tuple[MicroBatch, ...], ...]


@dataclass(frozen=True)
class LogProbs:
    """Flat per-token results; see the module's docstring for which tokens are filled."""

    log_probs: Tensor
    """float32 [T]."""
    entropy: Tensor
    """float32 [T] nats."""


@dataclass(frozen=True)
class UpdateResult:
    """One optimizer step."""

    applied: bool
    """False when the gradient was not finite: the weights did not move."""
    grad_norm: float
    """Global L2 norm before clipping."""
    loss: Tensor
    """float64 []: this rank's share of the loss; the sum over `reports_tokens` ranks is the loss."""
    extras: list[Any]
    """What the objective handed back, one item per micro-batch (empty but on the last stage)."""


class Learner:
    """Megatron model chunks with their optimizer.

    Args:
        config: the run's configuration.
        hf_config: shape of the policy.
        runtime: this rank.
        source: HF weights to start from.
        lr: peak learning rate.
        num_steps: steps that the learning-rate schedule is laid out for.
        warmup_steps: steps in which the rate rises from 0.
        decay: shape of its fall; see `config.ScheduleConfig`.
        min_lr: rate at the end of it.
    """

    def __init__(
        self,
        config: Config,
        hf_config: Any,
        runtime: Runtime,
        *,
        source: HFSource,
        lr: float,
        num_steps: int,
        warmup_steps: int,
        decay: str,
        min_lr: float,
    ) -> None:
        self.config, self.hf_config, self.runtime = config, hf_config, runtime
        self.shape = ModelShape.from_hf_config(hf_config)
        backend.check(config, self.shape)
        self.megatron = model.transformer_config(config, hf_config)
        chunks = model.build_chunks(config, hf_config, self.shape, self.megatron, runtime)
        self.groups = runtime.groups
        load_hf(chunks, self.shape, self.groups, source)
        self.chunks = model.wrap_chunks(config, self.megatron, chunks)
        # Built after loading, because its FP32 masters are copies of the parameters.
        self.optimizer = model.build_optimizer(config, self.chunks, lr=lr, min_lr=min_lr)
        self.scheduler = model.build_scheduler(
            self.optimizer,
            lr=lr,
            min_lr=min_lr,
            weight_decay=config.optimizer.weight_decay,
            decay=decay,
            warmup_steps=warmup_steps,
            num_steps=num_steps,
        )
        self.masters = MasterWeights(self.optimizer)
        bare = [_unwrap(chunk) for chunk in self.chunks]
        self._fp8_linears = fp8_linears(bare)
        delayed = self.megatron.fp8_active and config.precision.recipe == "tensorwise_delayed"
        self._histories = [DelayedHistories(chunk) for chunk in bare] if delayed else []
        self._output_gemms = None
        if config.precision.output_layer:
            recipe = resolve(config.precision)
            assert recipe is not None
            self._output_gemms = Fp8Gemms(
                recipe, backend="emulated", output_sharded=True, reduce_amax=max_over(self.groups.tp)
            )
        self.refresh_fp8_params()
        self._thd = model.uses_transformer_engine(config.precision)

    @property
    def lr(self) -> float:
        """Present learning rate."""
        return float(self.optimizer.param_groups[0]["lr"])

    def begin_step(self) -> None:
        """Move the learning-rate schedule on by one RL step."""
        self.scheduler.step(1)

    def prepare(self, trajectories: Trajectories, *, num_minibatches: int) -> PreparedBatch:
        """Plan and pack a batch; every rank calls it with the same trajectories."""
        lengths = trajectories.lengths.tolist()
        p = self.config.parallel
        plan = plan_step(
            lengths,
            num_minibatches=num_minibatches,
            dp_size=self.runtime.dp_size,
            tokens_per_microbatch=self.config.train.tokens_per_microbatch,
            microbatch_multiple=p.pp if p.vpp else 1,
        )
        return self.pack_plan(trajectories, plan)

    def pack_plan(self, trajectories: Trajectories, plan: StepPlan) -> PreparedBatch:
        """Pack this rank's share of a plan (for a part of a prepared batch, see `StepPlan.only`)."""
        minibatches = [self._pack(minibatch[self.runtime.dp_rank], trajectories) for minibatch in plan.minibatches]
        return PreparedBatch(trajectories.tokens.numel(), plan, tuple(minibatches))

    def _pack(self, micros: tuple[tuple[int, ...], ...], trajectories: Trajectories) -> tuple[MicroBatch, ...]:
        """This rank's micro-batches of one mini-batch."""
        r, p = self.runtime, self.config.parallel
        lengths = trajectories.lengths.tolist()
        offsets = (trajectories.lengths.cumsum(0) - trajectories.lengths).tolist()
        layout = functools.partial(
            pack,
            lengths=lengths,
            offsets=offsets,
            cp_size=r.cp_size,
            cp_rank=r.cp_rank,
            align=backend.token_multiple(self.config.precision) * (r.tp_size if p.sequence_parallel else 1),
        )
        layouts = [layout(sequences) for sequences in micros]
        if p.vpp:  # the interleaved schedule exchanges activations of one shape
            longest = max(item.source.numel() for item in layouts)
            layouts = [layout(sequences, min_tokens=longest) for sequences in micros]
        return tuple(self._to_device(item, trajectories) for item in layouts)

    def _to_device(self, layout: PackedLayout, trajectories: Trajectories) -> MicroBatch:
        source = layout.source
        tokens = trajectories.tokens[source.clamp(min=0)].masked_fill(source < 0, 0)
        # A local token predicts its successor: it scores one if that is a response token of the same sequence.
        ids, mask = trajectories.sequence_ids, trajectories.response_mask
        scores = torch.zeros_like(mask)
        scores[:-1] = mask[1:] & (ids[1:] == ids[:-1])
        rows = (scores[source.clamp(min=0)] & (source >= 0)).nonzero()[:, 0]
        index = source[rows] + 1
        device = self.runtime.device
        return MicroBatch(
            tokens=tokens[None].to(device),
            positions=layout.positions[None].to(device),
            packed=PackedTokens.of(layout, thd=self._thd, device=device),
            rows=rows.to(device),
            targets=trajectories.tokens[index].to(device),
            index=index,
            first_tokens=((layout.positions == 0) & (source >= 0)).nonzero()[:, 0].to(device),
        )

    def _score(self, chunk: Any, hidden: Tensor, micro: MicroBatch, *, entropy_grad: bool) -> ScoredTokens:
        """Log-probabilities of a micro-batch's response tokens from the last hidden states [1, t, h]."""
        gpt = _unwrap(chunk)
        weight = (
            gpt.shared_embedding_or_output_weight()
            if gpt.share_embeddings_and_output_weights
            else gpt.output_layer.weight
        )
        rows = hidden[0].index_select(0, micro.rows)
        common: dict[str, Any] = dict(
            temperature=self.config.rollout.temperature,
            vocab_size=self.hf_config.vocab_size,
            group=self.groups.tp,
            with_entropy=True,
            entropy_grad=entropy_grad,
        )
        if self.config.train.fused_head:
            log_probs, entropy = linear_token_log_probs(rows, weight, micro.targets, **common)
        else:
            if self._output_gemms is not None and self.megatron.fp8_active:
                logits = self._output_gemms(rows, weight)
            else:
                logits = rows @ weight.t()
            log_probs, entropy = token_log_probs(logits, micro.targets, inplace_backward=True, **common)
        assert entropy is not None
        return ScoredTokens(index=micro.index, log_probs=log_probs, entropy=entropy)

    def _run(
        self,
        micros: tuple[MicroBatch, ...],
        finish: Callable[[ScoredTokens], tuple[Tensor, Any]],
        *,
        forward_only: bool,
        entropy_grad: bool = False,
    ) -> list[Any]:
        """Megatron's pipeline schedule over micro-batches; returns what `finish` handed back, in order."""

        def forward_step(data: Iterator[MicroBatch], chunk: Any, *_: Any) -> tuple[Tensor, Any]:
            micro = next(data)
            self.megatron.first_tokens = micro.first_tokens
            output = chunk(micro.tokens, micro.positions, None, packed_seq_params=micro.packed)
            if self._histories and self.megatron.fp8_active:
                self._histories[self.chunks.index(chunk)].after_forward()

            def loss_function(hidden: Tensor, **_: Any) -> tuple[Tensor, Tensor, Any]:
                loss, extra = finish(self._score(chunk, hidden, micro, entropy_grad=entropy_grad))
                # Megatron counts tokens to divide by; see `transformer_config` for why nothing is divided here.
                return loss, torch.zeros((), dtype=torch.int32, device=hidden.device), extra

            return output, loss_function

        data = [iter(micros) for _ in self.chunks]
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data if len(data) > 1 else data[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(micros),
            # Read by the interleaved schedule alone; elsewhere packed micro-batches tell their shape.
            seq_length=micros[0].tokens.numel() * self.runtime.cp_size,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return results or []

    def log_probs(self, batch: PreparedBatch, *, minibatch: int | None = None) -> LogProbs:
        """Forward-only log-probabilities and entropies of response tokens, in the training precision.

        Args:
            batch: the prepared batch.
            minibatch: one of its mini-batches; None is all of them.
        """
        log_probs, entropy = torch.zeros(batch.num_tokens), torch.zeros(batch.num_tokens)

        def collect(scored: ScoredTokens) -> tuple[Tensor, None]:
            log_probs[scored.index] = scored.log_probs.cpu()
            entropy[scored.index] = scored.entropy.cpu()
            return scored.log_probs.sum(), None

        with torch.no_grad():
            for micros in batch.minibatches if minibatch is None else [batch.minibatches[minibatch]]:
                self._run(micros, collect, forward_only=True)
        return LogProbs(log_probs, entropy)

    def update(
        self, batch: PreparedBatch, minibatch: int, objective: Objective, *, entropy_grad: bool = False
    ) -> UpdateResult:
        """Forward, backward and one optimizer step on one mini-batch.

        Args:
            batch: the prepared batch.
            minibatch: which of its mini-batches.
            objective: see `Objective`.
            entropy_grad: whether the objective uses the entropy's gradient (an entropy bonus).
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses: list[Tensor] = []

        def finish(scored: ScoredTokens) -> tuple[Tensor, Any]:
            loss, extra = objective(scored)
            losses.append(loss.detach().double())
            # Where a bound cuts the gradient of a NaN off, only the loss tells; a NaN gradient stops every rank's step.
            poison = torch.where(loss.detach().isfinite(), 0.0, torch.nan)
            return loss + poison * scored.log_probs.sum(), extra

        extras = self._run(batch.minibatches[minibatch], finish, forward_only=False, entropy_grad=entropy_grad)
        with cpu.cuda_type_names():
            applied, grad_norm = self._step()
        loss = torch.stack(losses).sum() if losses else torch.zeros((), dtype=torch.float64)
        return UpdateResult(applied=applied, grad_norm=grad_norm, loss=loss.cpu(), extras=extras)

    def _step(self) -> tuple[bool, float]:
        """Optimizer step unless the gradient is not finite."""
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        if not torch.isfinite(torch.tensor(grad_norm)):
            return False, grad_norm
        applied, _, _ = self.optimizer.step()
        self.refresh_fp8_params()
        return bool(applied), grad_norm

    def refresh_fp8_params(self) -> None:
        """With `precision.fp8_param`, derive the FP8 weights from the FP32 masters: after a step or a load; collective."""
        if self.config.precision.fp8_param and self.megatron.fp8_active:
            quantize_parameters(self._fp8_linears, self.masters.full)

    def set_fp8(self, active: bool) -> None:
        """Switch an FP8 learner to BF16 and back (a supervised start may begin in BF16)."""
        if self.config.precision.recipe != "bf16" and self.megatron.fp8_active != active:
            self.megatron.fp8_active = active
            self.refresh_fp8_params()

    def fp8_params_set_aside(self) -> contextlib.AbstractContextManager[None]:
        """Inside the block live weights are BF16, also with `precision.fp8_param`; for the weights of another policy."""
        return codes_set_aside(self._fp8_linears, self.masters.full)

    def warm_up(self, batch: PreparedBatch) -> bool:
        """With delayed scaling, a pass forward and backward that fills the histories of a fresh start, so that no scale is 1.

        With a scale of 1 the gradients of a mean over thousands of tokens would all round to zero. Those of the mean
        log-probability have about the size of a policy loss's; the next update drops them.

        Returns:
            whether there was anything to fill.
        """
        if not self._histories:
            return False
        micros = batch.minibatches[0]

        def finish(scored: ScoredTokens) -> tuple[Tensor, None]:
            return scored.log_probs.sum() / (max(scored.log_probs.numel(), 1) * len(micros)), None

        self._run(micros, finish, forward_only=False)
        self.refresh_fp8_params()
        return True

    def shadow_log_probs(self, batch: PreparedBatch, *, minibatch: int | None = None) -> LogProbs:
        """Log-probabilities and entropies in BF16 on the master weights; see `precision.shadow`.

        Args:
            batch: the prepared batch.
            minibatch: one of its mini-batches; None is all of them.
        """
        bare = [_unwrap(chunk) for chunk in self.chunks]
        streamed = self.config.precision.shadow_streamed
        with shadow_pass(bare, master=self.masters.full, streamed=streamed):
            return self.log_probs(batch, minibatch=minibatch)

    def gather_tokens(self, values: Tensor) -> Tensor:
        """Complete a per-token result [T] over all ranks (one all-reduce)."""
        own = values if self.runtime.reports_tokens else torch.zeros_like(values)
        return self.runtime.sum_over_world(own).cpu()

    def gather_parameters(self) -> None:
        """Complete the live weights after an update where `parallel.overlap_param_gather` leaves that to the next forward."""
        if self.config.parallel.overlap_param_gather:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def stream_hf(self, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """The live weights as HF-named full tensors, the same on every rank; see `weights.stream`."""
        self.gather_parameters()
        bare = [_unwrap(chunk) for chunk in self.chunks]
        yield from stream_hf(bare, self.shape, self.groups, dtype=dtype, source=self._exported)

    def _exported(self, _name: str, parameter: torch.nn.Parameter) -> Tensor:
        """What leaves the learner for a parameter: where the live value is FP8, its master, rounded to BF16."""
        if lives_in_fp8(parameter):
            return self.masters.full(parameter).to(torch.bfloat16)
        return parameter.detach()


def _unwrap(module: Any) -> Any:
    while hasattr(module, "module"):
        module = module.module
    return module
