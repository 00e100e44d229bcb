"""One process that adds in the order of two tensor-parallel ranks: a GEMM for each shard, then a sum of their results.

FP32 sums depend on their order, and a last bit decides on which side of a border between two codes a number lies. With
the order the same nothing is left that may differ: what the ranks multiply must be what this process multiplies, bit for bit.
Part of `check_precision.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from fp8_learners import Training
from torch import Tensor

from megatron_calclip.learner import logprobs
from megatron_calclip.precision.linear import Fp8Gemms, Operand, gemm
from megatron_calclip.weights.mapping import find_tensor


@contextlib.contextmanager
def vocabulary_in_shards(training: Training) -> Iterator[None]:
    """Logits, the gradient of hidden states and the reductions over the vocabulary are computed shard by shard."""
    learner, before = training.learner, logprobs.TILE_COLUMNS
    learner._output_gemms = lambda rows, weight: torch.cat([rows @ shard.t() for shard in weight.chunk(2)], -1)
    logprobs.TILE_COLUMNS = learner.shape.padded_vocab_size // 2
    try:
        yield
    finally:
        logprobs.TILE_COLUMNS = before


def linears_in_shards(training: Training) -> None:
    """The linears of the decoder multiply shard by shard."""
    for chunk in training.bare:
        for name, module in chunk.named_modules():
            if isinstance(gemms := getattr(module, "fp8", None), Fp8Gemms):
                weight = find_tensor(training.learner.shape, f"{name}.weight")
                gemms.forward = _Linear(gemms, [_kept(weight, gemms, rank) for rank in range(2)])


def _kept(weight: Any, gemms: Fp8Gemms, rank: int) -> Tensor:
    """Indices of the inputs (row-parallel) or outputs (column-parallel) that a rank holds."""
    rows, columns = weight.shard_shape()
    index = torch.arange(columns).expand(rows, columns) if gemms.input_sharded else torch.arange(rows)[:, None]
    shard: Tensor = weight.shard(index.expand(rows, columns), rank=rank, size=2)
    return shard[0] if gemms.input_sharded else shard[:, 0]


class _Linear:
    """In the place of `Fp8Gemms.forward`."""

    def __init__(self, gemms: Fp8Gemms, shards: list[Tensor]) -> None:
        self.gemms, self.shards = gemms, shards

    def __call__(self, x: Tensor, weight: Tensor, codes: None = None, *, first_tokens: Tensor | None = None) -> Tensor:
        y: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), weight, self)
        return y.view(*x.shape[:-1], -1)

    def multiply(self, a: Operand, b: Operand, *, summed: bool) -> Tensor:
        """a @ b.T, cut along the contracted dimension if its result is summed over ranks, else along the result's columns."""
        if summed:
            first, second = (_gemm(_cut(a, shard, dim=1), _cut(b, shard, dim=1)) for shard in self.shards)
            return first + second
        result = a.values.new_empty(len(a.values), len(b.values), dtype=torch.float32)
        for shard in self.shards:
            result[:, shard] = _gemm(a, _cut(b, shard, dim=0))
        return result


def _cut(operand: Operand, shard: Tensor, *, dim: int) -> Operand:
    """Some rows (dim 0) or columns (1) of an operand, laid out in memory as a rank has them: kernels differ by strides."""
    scale, transposed = operand.scale, not operand.values.is_contiguous()
    stored = operand.values.t() if transposed else operand.values
    stored = stored.index_select(1 - dim if transposed else dim, shard)
    if scale is not None and scale.numel() > 1 and dim == 0:
        scale = scale.index_select(0, shard)
    return Operand(stored.t() if transposed else stored, scale)


def _gemm(a: Operand, b: Operand) -> Tensor:
    return gemm(a, b, dtype=torch.float32, backend="emulated")


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, linear: _Linear) -> Tensor:
        codes = linear.gemms.quantize_weight(weight)
        along_inputs, along_tokens = linear.gemms.quantize_input(x)
        ctx.linear, ctx.operands = linear, (codes.backward, along_tokens)
        return linear.multiply(along_inputs, codes.forward, summed=linear.gemms.input_sharded)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        linear, (weight, tokens) = ctx.linear, ctx.operands
        along_outputs, along_tokens = linear.gemms.quantize_gradient(gradients[0].contiguous())
        dx = linear.multiply(along_outputs, weight, summed=linear.gemms.output_sharded)
        return dx, _gemm(along_tokens, tokens), None
