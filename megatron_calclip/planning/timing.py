"""Seconds of an RL step on a named device: FLOPs and bytes over assumed shares of peak speed.

An estimate to choose between layouts by, not a promise: every assumption is a constant below and is printed with the
result. None of them has been measured here; no GPU has run this project yet.

Decoding is bound by memory: every step reads the server's weights once and each sequence's cache, so it takes as many
steps as the longest answer has tokens. Prefill and training are bound by arithmetic.

Left out on purpose: rewards, evaluation, checkpoints and start-up.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_calclip.config import Config
from megatron_calclip.planning.devices import Device
from megatron_calclip.planning.flops import Workload

# Of peak BF16: Megatron-LM reports 41 to 48% for pretraining on H100; packed micro-batches of RL are less regular.
COMPUTE_SHARE = 0.35
# Of the memory's bandwidth, while decoding.
BANDWIDTH_SHARE = 0.6
# Whole-step speed of an FP8 learner over BF16. tensorwise and blockwise: the method's paper (arXiv 2609.22870), up to 1.5
# and 1.1 to 1.2; the others are taken as blockwise, for want of a figure.
FP8_SPEEDUP = {
    "bf16": 1.0,
    "tensorwise_delayed": 1.5,
    "tensorwise": 1.5,
    "rowwise": 1.15,
    "blockwise": 1.15,
    "mxfp8": 1.15,
}
# Bytes/s of the shared file system that weights travel through to vLLM servers, written once and read once.
FILE_BANDWIDTH = 2e9
# Bytes/s of a broadcast from rank 0's host memory over one 400 Gb/s link at half its speed.
NETWORK_BANDWIDTH = 25e9


@dataclass(frozen=True)
class Servers:
    """The samplers of a run: vLLM servers, or the engine inside every rank."""

    count: int
    gpus_each: int
    weight_bytes: float
    """On each of a server's GPUs."""
    cache_bytes_per_token: float
    """On each of a server's GPUs."""
    cache_bytes: float
    """Room for the cache on each of a server's GPUs."""
    max_batch_size: int
    """Sequences at once, by setting."""

    def batch_size(self, length: float) -> int:
        """Sequences of this length that a server decodes at once; 0 when not one fits."""
        return min(int(self.cache_bytes // (self.cache_bytes_per_token * length)), self.max_batch_size)


def learner_seconds(
    config: Config, device: Device, flops: dict[str, float], *, num_ranks: int, num_microbatches: int
) -> dict[str, float]:
    """Seconds of the learner's stages.

    Args:
        config: recipe and pipeline.
        device: with its speeds.
        flops: per stage; `rollout` is not the learner's.
        num_ranks: all of them.
        num_microbatches: of a mini-batch on one rank, which the pipeline's fill and drain are divided over.
    """
    assert device.bf16_flops is not None
    p = config.parallel
    bubble = 1 + (p.pp - 1) / ((p.vpp or 1) * num_microbatches)
    speed = num_ranks * device.bf16_flops * COMPUTE_SHARE
    faster = FP8_SPEEDUP[config.precision.recipe]
    return {
        name: bubble * value / (speed * (1.0 if name == "shadow" else faster))
        for name, value in flops.items()
        if name != "rollout"
    }


def rollout_seconds(config: Config, device: Device, flops: float, servers: Servers, workload: Workload) -> float:
    """Seconds of sampling: the slower of arithmetic and memory, in as many rounds as the cache demands.

    Args:
        config: the longest answer, and the sampler's precision.
        device: with its speeds.
        flops: of the rollout.
        servers: see there.
        workload: the step's tokens.
    """
    assert device.bf16_flops is not None and device.fp8_flops is not None and device.bandwidth is not None
    gpus = servers.count * servers.gpus_each
    peak = device.bf16_flops if config.rollout.precision == "bf16" else device.fp8_flops
    arithmetic = flops / (gpus * peak * COMPUTE_SHARE)
    mean_length = workload.prompt_tokens + workload.response_tokens
    at_once = servers.count * max(servers.batch_size(mean_length), 1)
    rounds = max(1.0, workload.num_sequences / at_once)
    weights = rounds * config.rollout.max_new_tokens * servers.weight_bytes
    mean_context = workload.prompt_tokens + workload.response_tokens / 2
    cache = workload.num_scored * mean_context * servers.cache_bytes_per_token / servers.count
    return max(arithmetic, (weights + cache) / (device.bandwidth * BANDWIDTH_SHARE))


def sync_seconds(config: Config, *, num_parameters: int) -> float:
    """Seconds of a weight sync to vLLM: BF16 through a file or over the network; 0 for the embedded engine.

    Args:
        config: engine and way of transfer.
        num_parameters: of the whole model.
    """
    if config.rollout.engine == "local":
        return 0.0
    num_bytes = 2.0 * num_parameters
    by_file = config.rollout.vllm.transfer == "file"
    return 2 * num_bytes / FILE_BANDWIDTH if by_file else num_bytes / NETWORK_BANDWIDTH


def assumptions(config: Config, device: Device, workload: Workload) -> list[str]:
    """What an estimate rests on, in words."""
    lines = [
        f"prompts of {workload.prompt_tokens:,.0f} and answers of {workload.response_tokens:,.0f} tokens on average; "
        "memory is planned for full micro-batches",
        "FLOPs are those of torch's FlopCounter: attention over the full square",
    ]
    if device.bf16_flops is None:
        return [*lines, "no time estimate: speeds of CPUs differ too much"]
    return [
        *lines,
        f"learner at {COMPUTE_SHARE:.0%} of {device.bf16_flops / 1e12:,.0f} BF16 TFLOP/s, "
        f"times {FP8_SPEEDUP[config.precision.recipe]:g} for {config.precision.recipe}; shadow passes in BF16",
        f"decoding at {BANDWIDTH_SHARE:.0%} of {(device.bandwidth or 0) / 1e12:g} TB/s, {config.rollout.max_new_tokens:,} "
        "steps a round",
        f"weights to vLLM through a file system of {FILE_BANDWIDTH / 1e9:g} GB/s, or by broadcast at "
        f"{NETWORK_BANDWIDTH / 1e9:g} GB/s",
        "rewards, evaluation, checkpoints and start-up are not in it; nothing here was measured on a GPU",
    ]
