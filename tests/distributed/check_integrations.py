"""What adapters of other frameworks share, on two ranks.

    torchrun --nproc-per-node 2 tests/distributed/check_integrations.py

The shadow pass through a framework's wrapped model and optimizer is the learner's own, bit for bit, also where weights live in
FP8 and masters are sharded; and a measurement whose tokens are spread over ranks gives all of them the bounds of one rank that
has all tokens.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from fp8_learners import Training, check, failures, precision_config, same, snapshot, started
from torch import Tensor

from megatron_calclip.errors import UserError
from megatron_calclip.integrations.controller import ClipController, Measurement, PairedLogProbs
from megatron_calclip.integrations.shadow import framework_shadow_pass
from megatron_calclip.learner import cpu

CASES = (("tensorwise", True, "DP2"), ("blockwise", True, "TP2"), ("rowwise", False, "PP2"))
SETTINGS = {"interval": 1, "start_step": 1, "num_replicates": 20, "min_tail_tokens": 2}


def check_shadow(recipe: str, fp8_param: bool, layout: str) -> None:
    """After two updates, so that masters are no longer what BF16 or FP8 can hold."""
    name = f"{recipe} fp8_param={fp8_param} {layout}"
    with started(config := precision_config(recipe, layout, fp8_param=fp8_param)) as runtime:
        training = Training.begin(config, runtime)
        learner = training.learner
        training.update(2)
        expected, fp8, before = training.shadow_log_probs(), training.log_probs(), snapshot(training)
        with framework_shadow_pass(learner.chunks, learner.optimizer):
            shadow = training.log_probs()
        check(f"{name}: a framework's shadow pass is the learner's", same(shadow, expected))
        check(f"{name}: it is not the FP8 pass", not torch.equal(shadow, fp8))
        check(f"{name}: it leaves nothing behind", same(snapshot(training), before))
        refused = False
        try:
            with framework_shadow_pass(learner.chunks, None):
                pass
        except UserError:
            refused = True
        check(f"{name}: masters out of reach are refused where they are needed", refused == bool(training.fp8_weights))


def microbatch(rows: range) -> PairedLogProbs:
    """The given sequences of a batch that is the same on every rank."""
    g = torch.Generator().manual_seed(0)

    def draw(scale: float, count: int = 40) -> Tensor:
        return scale * torch.randn(64, count, generator=g)

    log_probs, shadow = draw(1.0) - 3.0, draw(1.0) - 3.0
    tokens = PairedLogProbs(
        log_probs=log_probs,
        old_log_probs=log_probs + draw(0.3),
        shadow_log_probs=shadow,
        shadow_old_log_probs=shadow + draw(0.15),
        advantages=draw(1.0, 1),
        importance_weights=torch.rand(64, 40, generator=g),
        loss_weights=torch.ones(64, 40),
        response_mask=torch.rand(64, 40, generator=g) < 0.8,
        sequence_ids=torch.arange(64),
    )
    return PairedLogProbs(**{name: value[rows.start : rows.stop] for name, value in vars(tokens).items()})


def check_controller() -> None:
    """Half of the sequences on each rank, against all of them in one calibrator without any reduction."""
    rank, world = dist.get_rank(), dist.get_world_size()
    controller = ClipController.from_settings(SETTINGS)
    assert controller is not None
    measurement = controller.begin(1, num_updates=2)
    assert measurement is not None
    size = 64 // world
    measurement.add(microbatch(range(rank * size, (rank + 1) * size)), weights_unmoved=False)
    report = controller.finish(measurement)

    alone = ClipController.from_settings(SETTINGS)
    assert alone is not None
    whole = Measurement(1, alone.calibrator.new_statistics())
    whole.add(microbatch(range(64)), weights_unmoved=False)
    expected = alone.calibrator.calibrate(whole.statistics, 1)
    check("ranks that share the tokens choose one calibrator's bounds", report == expected, (report, expected))
    check("the bounds move", report.before != report.after)


if __name__ == "__main__":
    cpu.install()
    dist.init_process_group("gloo")  # outlives the layouts
    for case in CASES:
        check_shadow(*case)
    check_controller()
    dist.destroy_process_group()
    sys.exit(min(len(failures), 1))
