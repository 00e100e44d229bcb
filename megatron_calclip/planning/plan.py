"""One plan of a run: bytes of every pipeline rank, FLOPs and seconds of a step, and whether it fits.

`make_plan` is the whole of it. `megatron-calclip plan` and `--dry-run` print what it returns, `advice.py` tries others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_calclip.config import Config
from megatron_calclip.planning import flops, timing
from megatron_calclip.planning.devices import GIB, Device, find_device
from megatron_calclip.planning.flops import Workload
from megatron_calclip.planning.memory import MicroBatch, RankMemory, rank_memory
from megatron_calclip.planning.parameters import rank_parameters
from megatron_calclip.planning.timing import Servers
from megatron_calclip.rollout.vllm_arguments import number_of, tensor_parallel
from megatron_calclip.weights.mapping import ModelShape, hf_shapes

# Kept free on a GPU: the CUDA context with its libraries and NCCL's buffers, and what an allocator cannot hand out.
CONTEXT_BYTES = 3 * GIB
FRAGMENTATION_SHARE = 0.05
# vLLM's defaults of --gpu-memory-utilization and --max-num-seqs (on a large GPU), and what a server needs besides weights
# and cache.
VLLM_MEMORY_SHARE = 0.9
VLLM_BATCH_SIZE = 1024
VLLM_WORKSPACE_BYTES = 4 * GIB


@dataclass(frozen=True)
class Plan:
    """What a run needs."""

    device: Device
    num_ranks: int
    """Ranks of the learner."""
    dp: int
    """Data-parallel size."""
    num_parameters: int
    """Of the model."""
    ranks: tuple[RankMemory, ...]
    """One tensor-parallel rank of each pipeline stage."""
    host_bytes: float
    """Memory of rank 0's machine for copies of weights, beyond the processes themselves."""
    micro_tokens: int
    """Tokens of the largest micro-batch on a rank."""
    num_microbatches: int
    """Of a mini-batch on one rank, at the assumed lengths."""
    max_sequence_length: int
    workload: Workload
    servers: Servers
    overlaps: bool
    """Whether rollouts overlap with training (`rollout.max_staleness`)."""
    flops: dict[str, float]
    """Per stage of a step."""
    seconds: dict[str, float] | None
    """Per stage of a step; None without known speeds."""
    assumptions: tuple[str, ...]

    @property
    def usable(self) -> float:
        """Bytes of a device that tensors may fill."""
        if not self.device.is_gpu:
            return self.device.memory
        return (self.device.memory - CONTEXT_BYTES) * (1 - FRAGMENTATION_SHARE)

    @property
    def fattest(self) -> RankMemory:
        """The rank with the largest peak."""
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def concurrent_sequences(self) -> int:
        """Sequences of full length that a sampler decodes at once."""
        return self.servers.batch_size(self.max_sequence_length)

    @property
    def fits(self) -> bool:
        """Whether every rank fits, and every sampler has room for one sequence."""
        return self.fattest.peak <= self.usable and self.concurrent_sequences >= 1

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step; None without known speeds. Rollouts of the next step may run beside the rest."""
        if self.seconds is None:
            return None
        rollout = self.seconds["rollout"]
        learner = sum(self.seconds.values()) - rollout
        return max(rollout, learner) if self.overlaps else rollout + learner

    @property
    def calibration_share(self) -> float | None:
        """Share of a step's seconds in shadow passes; None without known speeds."""
        if self.seconds is None or self.step_seconds is None:
            return None
        return self.seconds.get("shadow", 0.0) / self.step_seconds


def _servers(config: Config, shape: ModelShape, device: Device, *, num_ranks: int) -> Servers:
    """The samplers: vLLM servers, or the embedded engine in every rank."""
    rollout, cluster = config.rollout, config.cluster
    embedded = rollout.engine == "local"
    tp = 1 if embedded else tensor_parallel(rollout.vllm.arguments)
    linears = flops.linear_parameters(shape) * shape.num_layers
    others = sum(math.prod(size) for size in hf_shapes(shape).values()) - linears
    wide = 4 if rollout.dtype == "fp32" else 2
    # vLLM keeps FP8 codes in bytes; the embedded engine emulates them in the width of its other numbers.
    narrow = 1 if rollout.precision != "bf16" and not embedded else wide
    weights = (linears * narrow + others * wide) / tp
    cached = 1 if rollout.kv_cache != "auto" and not embedded else wide
    per_token = 2.0 * cached * shape.num_layers * shape.kv_size / tp
    if embedded:
        own = math.ceil(config.train.prompts_per_step / num_ranks) * config.train.samples_per_prompt
        largest = min(rollout.max_batch_size, own)
        room = largest * per_token * config.model.max_sequence_length
        return Servers(num_ranks, 1, weights, per_token, room, largest)
    if rollout.vllm.launch:
        count = rollout.vllm.num_servers
    else:
        count = cluster.num_rollout_nodes * cluster.gpus_per_node // tp or len(rollout.vllm.urls)
    room = max(_memory_share(config) * device.memory - weights - VLLM_WORKSPACE_BYTES, 0.0)
    batch_size = int(number_of(rollout.vllm.arguments, "--max-num-seqs", VLLM_BATCH_SIZE))
    return Servers(count, tp, weights, per_token, room, batch_size)


def _memory_share(config: Config) -> float:
    """Share of a device's memory that a vLLM server takes."""
    return number_of(config.rollout.vllm.arguments, "--gpu-memory-utilization", VLLM_MEMORY_SHARE)


def _sampler_bytes(config: Config, device: Device, servers: Servers) -> tuple[float, float]:
    """What samplers take of a learner's device: always, and while they sample."""
    if config.rollout.engine == "local":
        if config.rollout.max_staleness:  # it samples while the learner trains
            return servers.weight_bytes + servers.cache_bytes, 0.0
        return servers.weight_bytes, servers.cache_bytes
    if not config.rollout.vllm.launch:  # on machines of their own
        return 0.0, 0.0
    taken = _memory_share(config) * device.memory
    return (0.0, taken) if config.rollout.vllm.colocated else (taken, 0.0)


def micro_batches_in_flight(config: Config, stage: int, num_microbatches: int) -> float:
    """Micro-batches whose activations a rank holds at once under 1F1B; interleaved, single chunks count as fractions.

    Args:
        config: the pipeline.
        stage: the rank's place in it.
        num_microbatches: of a mini-batch on one rank.
    """
    p = config.parallel
    if p.vpp is None:
        return min(p.pp - stage, num_microbatches)
    warm_up = 2 * (p.pp - stage - 1) + (p.vpp - 1) * p.pp
    return min(warm_up + 1, num_microbatches * p.vpp) / p.vpp


def _micro_batches(config: Config, workload: Workload, *, dp: int) -> tuple[int, int]:
    """Tokens of the largest micro-batch on one rank, and micro-batches of a mini-batch at the assumed lengths."""
    t, p = config.train, config.parallel
    sequences = math.ceil(config.sequences_per_step / config.algorithm.num_minibatches / dp)
    largest = max(t.tokens_per_microbatch, config.model.max_sequence_length)
    tokens = min(largest, sequences * config.model.max_sequence_length)
    count = math.ceil(sequences * (workload.prompt_tokens + workload.response_tokens) / t.tokens_per_microbatch)
    if p.vpp:
        count = math.ceil(count / p.pp) * p.pp
    return math.ceil(tokens / p.cp), max(count, 1)


def _host_bytes(config: Config, ranks: tuple[RankMemory, ...], *, num_parameters: int) -> float:
    """Copies of weights in the memory of rank 0's machine: of a reference policy, and of the file for vLLM."""
    wide = 4 if config.precision.params_dtype == "fp32" else 2
    reference = 0.0
    if config.algorithm.kl.coefficient:  # the live weights are set aside beside it
        reference = 2.0 * wide * ranks[0].num_parameters * config.cluster.gpus_per_node
    return reference + (2.0 * num_parameters if config.rollout.engine == "vllm" else 0.0)


def default_workload(
    config: Config, *, prompt_tokens: float | None = None, response_tokens: float | None = None
) -> Workload:
    """The tokens of a step: by default, prompts and answers of half the length that the configuration leaves them."""
    longest = config.rollout.max_new_tokens
    prompts = (config.model.max_sequence_length - longest) / 2 if prompt_tokens is None else prompt_tokens
    return Workload(config.sequences_per_step, prompts, longest / 2 if response_tokens is None else response_tokens)


def make_plan(config: Config, shape: ModelShape, workload: Workload | None = None) -> Plan:
    """Plan a run for its `cluster`.

    Args:
        config: checked against the cluster's number of ranks.
        shape: the model, checked against the layout.
        workload: assumed lengths; None takes `default_workload`.
    """
    p, cluster = config.parallel, config.cluster
    workload = workload or default_workload(config)
    num_ranks = cluster.num_nodes * cluster.gpus_per_node
    device = find_device(cluster.device, ranks_per_node=cluster.gpus_per_node)
    dp = num_ranks // (p.tp * p.pp * p.cp)
    micro_tokens, num_microbatches = _micro_batches(config, workload, dp=dp)
    servers = _servers(config, shape, device, num_ranks=num_ranks)
    ranks = tuple(
        rank_memory(
            config,
            shape,
            device,
            parameters,
            MicroBatch(micro_tokens, micro_tokens, micro_batches_in_flight(config, parameters.stage, num_microbatches)),
            dp=dp,
            sampler=_sampler_bytes(config, device, servers),
        )
        for parameters in rank_parameters(shape, p)
    )
    num_parameters = sum(math.prod(size) for size in hf_shapes(shape).values())
    per_stage = flops.step_flops(config, shape, workload)
    seconds = None
    if device.bf16_flops is not None:
        rollout = timing.rollout_seconds(config, device, per_stage["rollout"], servers, workload)
        learner = timing.learner_seconds(
            config, device, per_stage, num_ranks=num_ranks, num_microbatches=num_microbatches
        )
        sync = timing.sync_seconds(config, num_parameters=num_parameters)
        seconds = {"rollout": rollout, **learner, "weight sync": sync}
    return Plan(
        device=device,
        num_ranks=num_ranks,
        dp=dp,
        num_parameters=num_parameters,
        ranks=ranks,
        host_bytes=_host_bytes(config, ranks, num_parameters=num_parameters),
        micro_tokens=micro_tokens,
        num_microbatches=num_microbatches,
        max_sequence_length=config.model.max_sequence_length,
        workload=workload,
        servers=servers,
        # The embedded engine samples on the learner's own devices: beside it, but not besides.
        overlaps=config.rollout.max_staleness > 0 and config.rollout.engine == "vllm",
        flops=per_stage,
        seconds=seconds,
        assumptions=tuple(timing.assumptions(config, device, workload)),
    )
