"""The planner against real steps: parameters exactly, bytes within 10%, FLOPs within 5%, on several layouts.

    torchrun --nproc-per-node 2 tests/distributed/check_plan.py [--table]

Bytes are the peak of live tensors of the update, the log-probabilities and the shadow pass (`live_bytes`), on every rank;
resident memory is printed beside them. FLOPs are those of torch's FlopCounterMode, summed over all ranks. Sequences have
different lengths, so that attention pads; the planner is given the largest micro-batch as it was packed.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """One learner."""

    title: str
    parallel: dict[str, Any] = field(default_factory=dict)
    precision: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    model: str = "qwen2"


FP8 = {"recipe": "tensorwise"}
SP = {"sequence_parallel": True}
CASES = {
    1: [
        Case("BF16"),
        Case("BF16, QK norms", model="qwen3"),
        Case("BF16, tied embeddings", model="tied"),
        Case("FP32", precision={"params_dtype": "fp32"}),
        Case("BF16, large vocabulary", model="large vocabulary"),
        Case("BF16, large vocabulary, fused head", train={"fused_head": True}, model="large vocabulary"),
        Case("BF16, several micro-batches", train={"tokens_per_microbatch": 700}),
        Case("BF16, selective recomputation", {"recompute": "selective"}),
        Case("BF16, selective recomputation, QK norms", {"recompute": "selective"}, model="qwen3"),
        Case("BF16, full recomputation", {"recompute": "full"}),
        Case("tensorwise", precision=FP8),
        Case("tensorwise, FP8 parameters", precision=FP8 | {"fp8_param": True}),
        Case("tensorwise, streamed shadow", precision=FP8 | {"fp8_param": True, "shadow_streamed": True}),
        Case("tensorwise, full recomputation", {"recompute": "full"}, FP8),
        Case("tensorwise_delayed", precision={"recipe": "tensorwise_delayed"}),
        Case("rowwise, FP8 parameters", precision={"recipe": "rowwise", "fp8_param": True}),
        Case("blockwise", precision={"recipe": "blockwise"}),
        Case("blockwise, FP32 scales", precision={"recipe": "blockwise", "power_of_two_scales": False}),
        Case("mxfp8, edge layers in BF16", precision={"recipe": "mxfp8", "first_last_layers_bf16": 1}),
    ],
    2: [
        Case("TP2", {"tp": 2}),
        Case("TP2+SP", {"tp": 2} | SP),
        Case("TP2+SP, tensorwise, FP8 parameters", {"tp": 2} | SP, FP8 | {"fp8_param": True}, model="qwen3"),
        Case("TP2, large vocabulary", {"tp": 2}, model="large vocabulary"),
        Case("PP2", {"pp": 2}, train={"tokens_per_microbatch": 700}),
        Case("PP2, tied embeddings, tensorwise", {"pp": 2}, FP8, {"tokens_per_microbatch": 700}, "tied"),
        Case("PP2xVPP2", {"pp": 2, "vpp": 2}, train={"tokens_per_microbatch": 700}),
        Case("DP2", train={"tokens_per_microbatch": 700}),
        Case("CP2", {"cp": 2}),
    ],
}
BYTES_TOLERANCE, FLOPS_TOLERANCE = 0.10, 0.05
LENGTHS = (100, 210, 300, 260, 150, 180, 240, 200)
PROMPT = 4
SIZES = dict(
    vocab_size=1000,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=False,
)


def main(*, table: bool) -> int:
    """Check every case for this number of processes; the number of failures.

    Args:
        table: print a table of all figures.
    """
    warnings.filterwarnings("ignore")
    # Imported here, because Megatron must not be imported before its view of torch is installed.
    from megatron_calclip.learner import cpu

    cpu.install()
    from checks import Checks
    from plan_checks import check_case

    from megatron_calclip.config_file import launch_world_size

    checks = Checks()
    for case in CASES[launch_world_size()]:
        check_case(checks, case, table=table)
    return len(checks.failures)


if __name__ == "__main__":
    sys.exit(min(main(table="--table" in sys.argv), 1))
