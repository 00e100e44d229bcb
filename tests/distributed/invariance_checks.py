"""Log-probabilities equal transformers', and training equals plain training, whatever the layout."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from checks import Checks, Values, layout
from tiny_learners import (
    MODELS,
    History,
    MegatronLearner,
    PlainLearner,
    make_batch,
    make_config,
    make_learner,
    train,
)
from torch import Tensor

from megatron_calclip.config import AlgorithmConfig, Config
from megatron_calclip.config_file import launch_world_size
from megatron_calclip.learner.learner import Learner
from megatron_calclip.weights.stream import stream_hf

FP32 = 1e-5
NUM_STEPS = 2  # RL steps, of four updates each

ONE_SEQUENCE, ALL_SEQUENCES = {"tokens_per_microbatch": 1}, {"tokens_per_microbatch": 10_000}
FUSED = {"fused_head": True}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
SP = {"sequence_parallel": True}
# Mini-batches of one sequence: ranks and micro-batches stay empty, and one mini-batch is masked out altogether.
SINGLE = {"num_minibatches": 10, "num_epochs": 1, "aggregation": "token_mean"}
WHOLE_SEQUENCES = {"importance": {"level": "sequence_product"}}


@dataclass(frozen=True)
class Case:
    """One training."""

    title: str
    parallel: dict[str, Any]
    model: str = "qwen2 tied"
    train: dict[str, Any] = field(default_factory=dict)
    algorithm: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        """The defaults of `make_config` but for what the case names."""
        return make_config(parallel=self.parallel, train=self.train, algorithm=self.algorithm)


CASES: dict[int, list[Case]] = {
    1: [
        Case("TP1", {}),
        Case("TP1, fused head, full recomputation", {"recompute": "full"}, train=FUSED),
        Case("TP1, one sequence a micro-batch", {}, train=ONE_SEQUENCE),
    ],
    2: [
        Case("DP2, one sequence a micro-batch", {}, train=ONE_SEQUENCE),
        Case("DP2, overlapped, fused head", OVERLAP, "qwen3", ONE_SEQUENCE | FUSED),
        Case("DP2, overlapped, fused head, one sequence a mini-batch", OVERLAP, "qwen3", FUSED, SINGLE),
        Case("TP2, everything in one micro-batch", {"tp": 2}, train=ALL_SEQUENCES),
        Case("TP2, fused head, selective recomputation", {"tp": 2, "recompute": "selective"}, "qwen3", FUSED),
        Case("TP2+SP", {"tp": 2} | SP, "llama"),
        Case("TP2+SP, fused head, full recomputation", {"tp": 2, "recompute": "full"} | SP, "qwen3", FUSED),
        Case("PP2", {"pp": 2}),
        Case("PP2, overlapped, full recomputation", {"pp": 2, "recompute": "full"} | OVERLAP, "qwen3", ONE_SEQUENCE),
        Case("PP2xVPP2", {"pp": 2, "vpp": 2}),
        Case("PP2xVPP2, overlapped, fused head", {"pp": 2, "vpp": 2} | OVERLAP, "qwen3", ONE_SEQUENCE | FUSED),
        Case("PP2xVPP2, one sequence a mini-batch", {"pp": 2, "vpp": 2}, "qwen3", algorithm=SINGLE),
        Case("CP2", {"cp": 2}, "qwen3 tied yarn"),
        Case("CP2, fused head, sequence-level importance", {"cp": 2}, train=FUSED, algorithm=WHOLE_SEQUENCES),
    ],
    4: [
        Case("TP2xPP2", {"tp": 2, "pp": 2}),
        Case("TP2xPP2+SP, overlapped, fused head", {"tp": 2, "pp": 2} | SP | OVERLAP, "qwen3", FUSED),
        Case("TP2xPP2xVPP2+SP", {"tp": 2, "pp": 2, "vpp": 2} | SP, train=ONE_SEQUENCE),
        Case("PP2xVPP2xDP2, overlapped", {"pp": 2, "vpp": 2} | OVERLAP),
        Case("TP2xCP2+SP", {"tp": 2, "cp": 2} | SP, "qwen3"),
    ],
}

BF16_LAYOUTS: dict[int, list[dict[str, Any]]] = {1: [{}], 2: [{"tp": 2} | SP, {"pp": 2}, OVERLAP]}


@functools.cache
def _plain_history(model: str, algorithm: AlgorithmConfig) -> History:
    config, batch = replace(make_config(), algorithm=algorithm), make_batch(model)
    history = train(PlainLearner(config, model, batch), batch, config, num_steps=NUM_STEPS)
    # Both sides of the clip and the cap of the importance weights are at work, or the comparison would say little.
    for name in ("clip/low_negative", "clip/high_positive", "importance/truncated"):
        assert history.metrics[name] > 0, name
    return history


def expected_history(case: Case) -> History:
    """Plain training with what of a case matters to it."""
    return _plain_history(case.model, case.config.algorithm)


def observables(history: History) -> dict[str, Values]:
    """Everything that is compared, by kind."""
    losses = torch.tensor([update.loss for update in history.updates])
    norms = torch.tensor([update.grad_norm for update in history.updates])
    scores = {f"log-probs of step {step}": values for step, values in enumerate(history.log_probs)}
    scores |= {f"entropies of step {step}": values for step, values in enumerate(history.entropies)}
    return {
        "losses and gradient norms": {"loss": losses, "gradient norm": norms},
        "log-probs and entropies": scores,
        "metrics": history.metrics,
        "weights": history.weights,
    }


def first_ratios_are_one(history: History) -> bool:
    """Whether the first mini-batch of each RL step has importance ratios of 1, to the bit."""
    firsts = history.updates[:: len(history.updates) // len(history.log_probs)]
    return all(first.sums.minima[0] == 1.0 == first.sums.maxima[0] for first in firsts)


def check_layouts(checks: Checks, root: Path, _: Path) -> None:
    """Train every case for two RL steps."""
    for case in CASES[launch_world_size()]:
        title, batch = f"{case.title} ({case.model})", make_batch(case.model)
        with layout(case.config) as runtime:
            learner = make_learner(case.config, runtime, case.model)
            # One folder for each model: the first layout saves the reference policy, all others load it.
            policy = MegatronLearner(learner, batch, root / case.model)
            history = train(policy, batch, case.config, num_steps=NUM_STEPS)
        checks.true(
            f"{title}: ratio 1 on the first mini-batch, all updates applied",
            first_ratios_are_one(history) and all(update.applied for update in history.updates),
        )
        if checks.compares:
            expected = observables(expected_history(case))
            for kind, values in observables(history).items():
                checks.close(f"{title}: {kind}", values, expected[kind], tolerance=FP32)


def check_bf16(checks: Checks, root: Path, _: Path) -> None:
    """BF16 weights with FP32 masters follow FP32 training from the same rounded weights, within BF16's rounding.

    The clip is set wide open: a token that rounding moves across a bound changes the gradient by all of its own.
    """
    if launch_world_size() not in BF16_LAYOUTS:
        return
    model, batch = "qwen3", make_batch("qwen3")
    sections: dict[str, dict[str, Any]] = {
        "algorithm": {"clip": {"lower": 0.01, "upper": 100.0}},
        "optimizer": {"lr": 5e-4},  # steps below a unit in the last place of most weights
    }
    plain = PlainLearner(make_config(**sections), model, batch, dtype=torch.bfloat16)
    first = plain.weights()
    expected = train(plain, batch, plain.config, num_steps=NUM_STEPS) if checks.compares else None
    for parallel in BF16_LAYOUTS[launch_world_size()]:
        config = make_config(**sections, parallel=parallel, precision={"params_dtype": "bf16"})
        with layout(config) as runtime:
            learner = make_learner(config, runtime, model)
            history = train(MegatronLearner(learner, batch, root / model), batch, config, num_steps=NUM_STEPS)
            masters = _master_weights(learner)
        title = f"BF16 {parallel}"
        rounded = all(torch.equal(masters[name].bfloat16(), weight) for name, weight in history.weights.items())
        checks.true(f"{title}: weights are rounded masters", rounded)
        checks.true(f"{title}: ratio 1 on the first mini-batch", first_ratios_are_one(history))
        if expected is not None:
            _compare_bf16(checks, title, history, expected, masters, first)


def _master_weights(learner: Learner) -> dict[str, Tensor]:
    """The FP32 masters as HF tensors."""
    stream = stream_hf(
        learner.chunks,
        learner.shape,
        learner.groups,
        dtype=torch.float32,
        source=lambda _, parameter: learner.masters.full(parameter),
    )
    return {name: tensor.clone() for name, tensor in stream}


def _compare_bf16(
    checks: Checks,
    title: str,
    history: History,
    expected: History,
    masters: dict[str, Tensor],
    first: dict[str, Tensor],
) -> None:
    actual, wanted = observables(history), observables(expected)
    kind = "losses and gradient norms"
    checks.close(f"{title}: {kind}", actual[kind], wanted[kind], tolerance=0.05)
    kind = "log-probs and entropies"
    mean_errors = {
        name: (torch.as_tensor(actual[kind][name]) - value).abs().mean() for name, value in wanted[kind].items()
    }
    checks.close(f"{title}: mean error", mean_errors, dict.fromkeys(mean_errors, 0.0), tolerance=0.01)
    missed = {
        name: (masters[name] - last).norm() / (last - first[name]).norm() for name, last in expected.weights.items()
    }
    checks.close(f"{title}: masters, of their way", missed, dict.fromkeys(missed, 0.0), tolerance=0.15)


def check_models(checks: Checks, root: Path, _: Path) -> None:
    """Score the batch with every architecture and kind of RoPE, and compare with transformers; in one process."""
    if launch_world_size() > 1:
        return
    config = make_config()
    with layout(config) as runtime:
        for model in MODELS:
            batch = make_batch(model)
            policy = MegatronLearner(make_learner(config, runtime, model), batch, root / model)
            names = ("log-probs", "entropies")
            actual = dict(zip(names, policy.score(), strict=True))
            expected = dict(zip(names, PlainLearner(config, model, batch).score(), strict=True))
            checks.close(f"{model}: scores", actual, expected, tolerance=FP32)
