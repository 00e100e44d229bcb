"""Megatron-LM's `megatron/rl`: bounds into its arguments at every iteration, shadow passes between its iterations.

Megatron's training loop asks `rl_utils.get_grpo_data_iterator` for data before each optimizer step, and its forward step
calls `rl_utils.calculate_grpo_loss` for each micro-batch with `--grpo-clamp-eps-lower` and `-upper` as they are then. Both
names are looked up at run time, so both can be wrapped: before the first the weights rest, and the second returns the
very ratios that are clipped. `calibrate(rl_utils, settings)` wraps them; `train_rl.py` itself stays as it is.

A *collection* (rollouts, and all optimizer steps on them) is what the calibrator counts as a step. Its calibration is
finished when the next collection begins, and its state saved then, in `SAVE/calclip`.

In BF16 runs Megatron's RL computes log-probabilities and ratios in BF16, shadow passes included: r16 carries that rounding
too. Left out on purpose: sequence packing (`--rl-use-sequence-packing`), which is refused in one sentence.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_calclip.errors import UserError
from megatron_calclip.integrations import require
from megatron_calclip.integrations.controller import ClipController, Measurement, PairedLogProbs, StateFolder, epsilons
from megatron_calclip.integrations.shadow import framework_shadow_pass

MicroBatch = Sequence[Tensor]
"""Of Megatron's unpacked data: tokens, advantages, old log-probs, loss mask, position ids, reference and sampler log-probs."""
_TOKENS, _ADVANTAGES, _OLD, _LOSS_MASK, _POSITIONS = range(5)


class RlCalibration:
    """The two wrapped functions and what they share.

    Args:
        rl_utils: the module `megatron.rl.rl_utils`.
        controller: of the run.
    """

    def __init__(self, rl_utils: Any, controller: ClipController) -> None:
        self.rl_utils, self.controller = rl_utils, controller
        self._get_data, self._loss = rl_utils.get_grpo_data_iterator, rl_utils.calculate_grpo_loss
        self._loss_arguments = inspect.signature(self._loss)
        self._measurement: Measurement | None = None
        self._cycle: list[MicroBatch] = []
        self._shadow_old: list[Tensor] = []
        self._shadow_new: dict[int, Tensor] = {}
        self._position = 0
        self._expected: list[int] = []
        self._unmoved = False

    def get_grpo_data_iterator(
        self,
        model: Any,
        inference_model: Any,
        optimizer: Any,
        iteration: int,
        ref_state_dict: Any,
        *,
        buffered_rollouts: Any = None,
        **settings: Any,
    ) -> Any:
        """Megatron's function, with calibration around it. Called on all ranks before each optimizer step."""
        args = self.rl_utils.get_args()
        if settings["sequence_packing"]:
            raise UserError(
                "--rl-use-sequence-packing", "calibration does not support it; leave it out, or run without calclip"
            )
        iterator = self._get_data(
            model,
            inference_model,
            optimizer,
            iteration,
            ref_state_dict,
            buffered_rollouts=buffered_rollouts,
            **settings,
        )
        if iterator is not buffered_rollouts:
            self._finish(args)
            iterator = self._begin(model, optimizer, iterator, iteration, settings)
        args.grpo_clamp_eps_lower, args.grpo_clamp_eps_upper = epsilons(self.controller.bounds)
        if self._measurement is not None:
            self._before_update(model, optimizer)
        return iterator

    def calculate_grpo_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's function; on measured steps its ratios are recorded."""
        result = self._loss(*args, **kwargs)
        if self._measurement is not None and self._expected:
            self._add(self._expected.pop(0), self._loss_arguments.bind(*args, **kwargs).arguments, ratios=result[2])
        return result

    def _finish(self, args: Any) -> None:
        """The last collection's updates are done."""
        if self._measurement is None:
            return
        self.controller.finish(self._measurement)
        if args.save:
            StateFolder(Path(args.save) / "calclip").save(self.controller)
        self._measurement, self._cycle, self._shadow_old, self._shadow_new = None, [], [], {}

    def _resume(self, args: Any, num_collections: int) -> None:
        """A run that goes on after so many collections."""
        if args.save:
            StateFolder(Path(args.save) / "calclip").load(self.controller, num_collections)

    def _begin(self, model: Any, optimizer: Any, iterator: Any, iteration: int, settings: Mapping[str, Any]) -> Any:
        """Begin a collection; returns an iterator over the same micro-batches."""
        args = self.rl_utils.get_args()
        rollouts = settings["grpo_prompts_per_step"] * settings["grpo_group_size"]
        num_updates = settings["grpo_iterations"] * (rollouts // settings["global_batch_size"])
        if self.controller.last_step == 0 and iteration > 0:
            self._resume(args, iteration // num_updates)
        self._measurement = self.controller.begin(self.controller.last_step + 1, num_updates=num_updates)
        if self._measurement is None:
            return iterator
        # The iterator cycles over stored micro-batches: a cycle ends where the first object comes again.
        self._cycle = [next(iterator)]
        while (micro := next(iterator)) is not self._cycle[0]:
            self._cycle.append(micro)
        self._position, self._unmoved = 0, True
        self._shadow_old = self._shadow(model, optimizer, self._cycle)
        return self.rl_utils.RerunDataIterator(itertools.cycle(self._cycle))

    def _before_update(self, model: Any, optimizer: Any) -> None:
        """The second shadow pass over the micro-batches of the update that follows."""
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        assert self._measurement is not None
        self._unmoved = self._position == 0
        count = get_num_microbatches()
        self._expected = [(self._position + offset) % len(self._cycle) for offset in range(count)]
        self._position += count
        if self._unmoved:
            self._shadow_new = dict(
                zip(self._expected, (self._shadow_old[index] for index in self._expected), strict=True)
            )
        else:
            log_probs = self._shadow(model, optimizer, [self._cycle[index] for index in self._expected])
            self._shadow_new = dict(zip(self._expected, log_probs, strict=True))

    @torch.no_grad()
    def _shadow(self, model: Any, optimizer: Any, micros: Sequence[MicroBatch]) -> list[Tensor]:
        """BF16 log-probabilities [b, S-1] of each micro-batch on the master weights, on the CPU; collective."""
        args, rl_utils = self.rl_utils.get_args(), self.rl_utils
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
        if rl_utils.is_batch_invariant_mode_enabled():
            dtype = torch.float32
        sizes = [len(micro[_TOKENS]) for micro in micros]
        with framework_shadow_pass(model, optimizer):
            log_probs = rl_utils.compute_logprobs_batch(
                model=model[0],
                data_loader=[(micro[_TOKENS], micro[_POSITIONS]) for micro in micros],
                forward_backward_func=rl_utils.get_forward_backward_func(),
                packing_context=None,
                trajs_batch_size=sum(sizes),
                seq_length=args.seq_length,
                logprobs_batch_size=args.micro_batch_size,
                decoder_seq_length=args.decoder_seq_length,
                dtype=dtype,
                pp_group=rl_utils.get_attr_wrapped_model(model[0], "pg_collection").pp,
                is_correction=args.rl_inference_logprobs_is_correction,
            )
        return list(log_probs.split(sizes))

    @torch.no_grad()
    def _add(self, index: int, loss: Mapping[str, Any], *, ratios: Tensor) -> None:
        from megatron.core import parallel_state

        # These ranks all hold the whole log-probabilities; one of them counts.
        if parallel_state.get_tensor_model_parallel_rank() or parallel_state.get_context_parallel_rank():
            return
        micro, old = self._cycle[index], loss["old_logprobs"].float()
        weights = torch.ones(())
        if (sampler := loss.get("inference_logprobs")) is not None:
            cap = loss.get("is_truncation_coef")
            weights = (old - sampler.float()).exp().clamp(max=math.inf if cap is None else cap)
        mask = micro[_LOSS_MASK][:, 1:]
        per_token = self.rl_utils.get_args().calculate_per_token_loss
        first_row = sum(len(earlier[_TOKENS]) for earlier in self._cycle[:index])
        num_rows = sum(len(each[_TOKENS]) for each in self._cycle)
        first_row += parallel_state.get_data_parallel_rank() * num_rows
        assert self._measurement is not None
        self._measurement.add(
            PairedLogProbs(
                # the ratio that was clipped, in whatever precision Megatron computed it
                log_probs=old + ratios.float().log(),
                old_log_probs=old,
                shadow_log_probs=self._shadow_new[index].float(),
                shadow_old_log_probs=self._shadow_old[index].float(),
                advantages=loss["advantages"].view(-1, 1),
                importance_weights=weights,
                loss_weights=torch.ones(()) if per_token else 1.0 / mask.sum().clamp(min=1),
                response_mask=mask,
                sequence_ids=torch.arange(first_row, first_row + len(micro[_TOKENS])),
            ),
            weights_unmoved=self._unmoved,
        )


def calibrate(settings: Mapping[str, Any], rl_utils: Any = None) -> RlCalibration | None:
    """Wrap the two functions of `megatron.rl.rl_utils`; call it before `train_rl.py` runs.

    Args:
        settings: keys of `controller.SETTINGS`.
        rl_utils: the module, by default the one that Python finds.

    Returns:
        None, with nothing wrapped, when the settings switch calibration off.

    Raises:
        ImportError: when `megatron.rl` is missing.
        UserError: see `controller.settings_from`.
    """
    if rl_utils is None:
        how = "run inside a checkout of Megatron-LM, since no wheel has megatron.rl"
        rl_utils = require("megatron.rl.rl_utils", framework="Megatron-LM", how=how)
    controller = ClipController.from_settings(settings)
    if controller is None:
        return None
    calibration = RlCalibration(rl_utils, controller)
    rl_utils.get_grpo_data_iterator = calibration.get_grpo_data_iterator
    rl_utils.calculate_grpo_loss = calibration.calculate_grpo_loss
    return calibration
