"""Floating-point operations of an RL step, pass by pass: the one place where passes are counted.

A step takes every token (prompts included, once for each sample) through: the rollout, the old log-probs, where asked for a
reference policy and BAPO's search, the updates (forward and backward, `num_epochs` times), and on calibration steps the
BF16 shadow passes. The run's ledger counts in forward passes of a token, the planner in FLOPs; both from `passes`.

FLOPs are counted as `torch.utils.flop_counter` does: 2 for a multiply-add of a matrix product, attention over the full
square of a sequence (a kernel that skips the masked half does less), nothing for norms, rotation and softmax. The
backward pass of a linear is twice its forward, that of attention 2.5 times (it computes the scores again).

Imports no torch. Left out on purpose: prompts that samplers prefill once for all samples of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_calclip.config import Config
from megatron_calclip.config_calibration import calibration_settings

if TYPE_CHECKING:  # the ledger needs no shapes
    from megatron_calclip.weights.mapping import ModelShape

BACKWARD_OF_ATTENTION = 2.5


@dataclass(frozen=True)
class Passes:
    """How often a step takes each token through the model: forward and backward."""

    forward: float
    backward: float = 0.0

    @property
    def forwards(self) -> float:
        """In forward passes: a backward pass is two."""
        return self.forward + 2 * self.backward


def passes(config: Config) -> dict[str, Passes]:
    """The passes of one step by stage, without shadow passes."""
    algorithm = config.algorithm
    recomputed = 2 if config.parallel.recompute == "full" else 1
    stages = {"rollout": Passes(1), "old log-probs": Passes(1)}
    if algorithm.kl.coefficient:
        stages["reference"] = Passes(1)
    if algorithm.loss == "bapo":
        stages["bounds"] = Passes(algorithm.num_epochs)
    stages["updates"] = Passes(recomputed * algorithm.num_epochs, algorithm.num_epochs)
    return stages


def run_forwards(config: Config) -> float:
    """A step's work on a token in forward passes, shadow passes left out; 5 in the plain case."""
    return sum(stage.forwards for stage in passes(config).values())


def shadow_forwards(config: Config) -> float:
    """Shadow passes of a token in a step that calibrates; 0 if none does.

    The first pass (pi_old) covers each measured mini-batch once, the second (pi_theta) once an epoch; the first update's
    weights have not moved, so it needs no second pass.
    """
    every_step = config.calibration.measure == "every_step" or config.algorithm.loss == "oracle"
    if not (config.calibration.enabled or every_step):
        return 0.0
    settings = calibration_settings(config)
    count, epochs = config.algorithm.num_minibatches, config.algorithm.num_epochs
    measured = count if settings.minibatches == "all" else 1
    unmoved = 1 if measured == count else 0
    fraction = 1.0 if every_step else settings.token_fraction
    return fraction * (measured + epochs * measured - unmoved) / count


def shadow_share_of_steps(config: Config) -> float:
    """Share of steps that run shadow passes. A drift schedule is taken at its shortest interval, the configured one."""
    if config.calibration.measure == "every_step" or config.algorithm.loss == "oracle":
        return 1.0
    return 1.0 / calibration_settings(config).interval if config.calibration.enabled else 0.0


@dataclass(frozen=True)
class Workload:
    """The tokens of one step, as the planner assumes them."""

    num_sequences: int
    prompt_tokens: float
    """Mean length of a prompt."""
    response_tokens: float
    """Mean length of a response."""

    @property
    def num_tokens(self) -> float:
        """All tokens of a step."""
        return self.num_sequences * (self.prompt_tokens + self.response_tokens)

    @property
    def num_scored(self) -> float:
        """Response tokens: those that need logits."""
        return self.num_sequences * self.response_tokens


def linear_parameters(shape: ModelShape) -> int:
    """Weights of the linears of one decoder layer."""
    return shape.hidden_size * (2 * shape.q_size + 2 * shape.kv_size + 3 * shape.ffn_size)


@dataclass(frozen=True)
class PassFlops:
    """FLOPs of one forward pass, by what multiplies."""

    linears: float
    attention: float
    head: float
    """The output layer, on scored tokens."""

    @property
    def forward(self) -> float:
        """Forward pass."""
        return self.linears + self.attention + self.head

    @property
    def backward(self) -> float:
        """Backward pass."""
        return 2 * self.linears + BACKWARD_OF_ATTENTION * self.attention + 2 * self.head


def pass_flops(shape: ModelShape, *, num_tokens: float, num_scored: float, squares: float) -> PassFlops:
    """FLOPs of a forward pass over packed sequences.

    Args:
        shape: the model.
        num_tokens: T.
        num_scored: tokens that get logits.
        squares: the sum of the squared lengths of all sequences.
    """
    return PassFlops(
        linears=2.0 * linear_parameters(shape) * shape.num_layers * num_tokens,
        attention=4.0 * shape.q_size * shape.num_layers * squares,
        head=2.0 * shape.padded_vocab_size * shape.hidden_size * num_scored,
    )


def update_flops(config: Config, one: PassFlops) -> float:
    """FLOPs of one epoch of updates: forward, backward, and what is computed again in between.

    Full recomputation computes the layers once more, selective recomputation attention, the fused head the logits.

    Args:
        config: the run.
        one: a forward pass over the batch.
    """
    again = {"none": 0.0, "selective": one.attention, "full": one.linears + one.attention}[config.parallel.recompute]
    return one.forward + one.backward + again + (one.head if config.train.fused_head else 0.0)


def step_flops(config: Config, shape: ModelShape, workload: Workload) -> dict[str, float]:
    """FLOPs of one step by stage; `shadow` is that of a calibration step, spread over the interval."""
    length = workload.prompt_tokens + workload.response_tokens
    one = pass_flops(
        shape,
        num_tokens=workload.num_tokens,
        num_scored=workload.num_scored,
        squares=workload.num_sequences * length**2,
    )
    flops = {name: stage.forward * one.forward for name, stage in passes(config).items() if not stage.backward}
    flops["updates"] = config.algorithm.num_epochs * update_flops(config, one)
    if shadow := shadow_forwards(config):
        flops["shadow"] = shadow * shadow_share_of_steps(config) * one.forward
    return flops
