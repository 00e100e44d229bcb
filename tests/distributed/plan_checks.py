"""One case of `check_plan.py`: a learner is built and stepped under counters, and compared with its plan."""

from __future__ import annotations

import functools
import gc
from typing import Any

import psutil
import torch
from check_plan import BYTES_TOLERANCE, FLOPS_TOLERANCE, LENGTHS, PROMPT, SIZES, Case
from checks import Checks, layout
from live_bytes import LiveBytes
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3Config

from megatron_calclip.batch import Completion, Prompt, ScoredTokens, Trajectories
from megatron_calclip.config import Config
from megatron_calclip.config_file import config_from_dict
from megatron_calclip.learner.learner import Learner, PreparedBatch
from megatron_calclip.learner.runtime import Runtime
from megatron_calclip.planning import flops, plan
from megatron_calclip.planning.devices import find_device
from megatron_calclip.planning.memory import MicroBatch, RankMemory, rank_memory
from megatron_calclip.planning.parameters import rank_parameters
from megatron_calclip.weights.load import HFSource
from megatron_calclip.weights.mapping import ModelShape

MODELS: dict[str, PretrainedConfig] = {
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "tied": Qwen2Config(**SIZES | {"tie_word_embeddings": True}),
    "large vocabulary": Qwen2Config(**SIZES | {"vocab_size": 8000}),
}


@functools.cache
def _weights(model: str) -> dict[str, Tensor]:
    return dict(AutoModelForCausalLM.from_config(MODELS[model], dtype=torch.bfloat16).state_dict())


def _trajectories(vocab_size: int) -> Trajectories:
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, vocab_size, (count,), generator=generator).tolist())

    prompts = [Prompt(index, draw(PROMPT), "", "") for index in range(len(LENGTHS))]
    answers = [[Completion(draw(n - PROMPT), (-1.0,) * (n - PROMPT), True, 0)] for n in LENGTHS]
    return Trajectories.from_completions(prompts, answers)


def _objective(scored: ScoredTokens) -> tuple[Tensor, None]:
    return scored.log_probs.sum() / sum(LENGTHS), None


def _attention_flops(query: Any, key: Any, *_: Any, **__: Any) -> int:
    batch, heads, num_queries, size = query
    return 4 * batch * heads * num_queries * key[2] * size


def _attention_backward_flops(_: Any, query: Any, key: Any, *__: Any, **___: Any) -> int:
    return int(flops.BACKWARD_OF_ATTENTION * _attention_flops(query, key))


# torch's counter knows the kernels of GPUs only.
_KERNELS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


def check_case(checks: Checks, case: Case, *, table: bool) -> None:
    """Build, step, compare.

    Args:
        checks: where verdicts go.
        case: the learner.
        table: print every rank's figures.
    """
    config = config_from_dict(
        {
            "model": {"shape": {}, "tokenizer": "characters", "max_sequence_length": 512},
            "precision": {"backend": "emulated"} | case.precision,
            "train": {"tokens_per_microbatch": 2048} | case.train,
            "parallel": case.parallel,
        }
    )
    hf_config = MODELS[case.model]
    source = HFSource.from_tensors(_weights(case.model))
    batch = _trajectories(hf_config.vocab_size)
    gc.collect()
    live = LiveBytes()
    with layout(config) as runtime, live:
        learner = Learner(
            config,
            hf_config,
            runtime,
            source=source,
            lr=1e-4,
            num_steps=9,
            warmup_steps=0,
            decay="constant",
            min_lr=0.0,
        )
        prepared = learner.prepare(batch, num_minibatches=1)
        learner.update(prepared, 0, _objective)  # the optimizer makes its moments
        measured = {}
        for phase, run in {
            "update": lambda: learner.update(prepared, 0, _objective),
            "log-probs": lambda: learner.log_probs(prepared),
            "shadow": lambda: learner.shadow_log_probs(prepared),
        }.items():
            live.reset_peak()
            run()
            measured[phase] = float(live.peak)
        measured["held"] = float(live.now)
        num_parameters = sum(p.numel() for chunk in learner.chunks for p in chunk.parameters())
        with FlopCounterMode(display=False, custom_mapping=_KERNELS) as counter:
            learner.update(prepared, 0, _objective)
        counted = float(runtime.sum_over_world(torch.tensor(float(counter.get_total_flops()))))
        planned = _plan(config, learner.shape, runtime, prepared)
    checks.true(f"{case.title}: parameters", num_parameters == planned.num_parameters)
    expected = planned.phases | {"held": planned.static + planned.fp8_weights}
    for phase, value in measured.items():
        ratio = expected[phase] / value
        detail = f"{expected[phase] / 1e6:.1f} MB planned, {value / 1e6:.1f} MB live, ratio {ratio:.3f}"
        checks.true(f"{case.title}: bytes, {phase}", abs(ratio - 1) <= BYTES_TOLERANCE, detail)
    ratio = _update_flops(config, learner.shape) / counted
    checks.true(f"{case.title}: FLOPs", abs(ratio - 1) <= FLOPS_TOLERANCE, f"ratio {ratio:.3f}")
    if table:
        resident = psutil.Process().memory_info().rss
        print(
            f"| {case.title} | {runtime.rank} | {num_parameters:,} | "
            + " | ".join(f"{expected[phase] / value:.3f}" for phase, value in measured.items())
            + f" | {ratio:.3f} | {measured['update'] / 2**20:.0f} MiB live, {resident / 2**20:.0f} MiB resident |\n",
            end="",  # one write for line and end, between which another rank's might come
            flush=True,
        )


def _plan(config: Config, shape: ModelShape, runtime: Runtime, prepared: PreparedBatch) -> RankMemory:
    """This rank's plan for the micro-batches that it really had."""
    micros = prepared.minibatches[0]
    largest = max(micros, key=lambda micro: micro.tokens.numel())
    in_flight = plan.micro_batches_in_flight(config, runtime.pp_rank, len(micros))
    return rank_memory(
        config,
        shape,
        find_device("cpu", ranks_per_node=runtime.world_size),
        rank_parameters(shape, config.parallel)[runtime.pp_rank],
        MicroBatch(largest.tokens.numel(), largest.rows.numel(), in_flight),
        dp=runtime.dp_size,
        sampler=(0.0, 0.0),
    )


def _update_flops(config: Config, shape: ModelShape) -> float:
    """Planned FLOPs of the update of the batch, on all ranks."""
    total = sum(LENGTHS)
    one = flops.pass_flops(
        shape,
        num_tokens=total,
        num_scored=total - PROMPT * len(LENGTHS),
        squares=sum(length**2 for length in LENGTHS),
    )
    return flops.update_flops(config, one)
