"""RMSNorm, SwiGLU and rotary embedding in few passes over memory. Plain torch, no Megatron.

As torch and Megatron write them, they are chains of elementwise operations on a CPU, each of which reads and writes all
activations. Here norm and SwiGLU take a few rows at a time through the whole chain, forward and backward, and keep
nothing but the input (of the norm also one number per row) in between; the rotation needs no concatenation. Left out
on purpose: device kernels; on CUDA TransformerEngine has its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# FP32 elements that go through the chain together. Three buffers of 2^17 are 1.5 MiB and fit in an L2 cache of 2 MiB;
# with 2^16 the calls themselves cost up to a quarter more. A CUDA device wants few, large kernels instead.
CPU_CHUNK_ELEMENTS = 2**17
CUDA_CHUNK_ELEMENTS = 2**30


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Slices of the same rows of all tensors; the first says how many rows fit."""
    elements = CPU_CHUNK_ELEMENTS if tensors[0].device.type == "cpu" else CUDA_CHUNK_ELEMENTS
    num_rows = max(elements // tensors[0].shape[1], 1)
    return zip(*(tensor.split(num_rows) for tensor in tensors), strict=True)


def _store(a: Tensor, b: Tensor, result: Tensor) -> None:
    """a * b into `result`; `a`, FP32, is overwritten. Rounding in the product itself is slower than in a copy."""
    if result.dtype is a.dtype:
        torch.mul(a, b, out=result)
    else:
        result.copy_(a.mul_(b))


class _RMSNorm(torch.autograd.Function):
    """y = x r w with r = 1 / sqrt(mean(x^2) + eps) of each row.

    With g the gradient of y: that of w is the sum over rows of g x r, and that of x is
    r (g w - x r^2 mean(g x w)).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        size = x.shape[-1]
        rows = x.reshape(-1, size)
        out = torch.empty_like(rows)
        scale = torch.empty(len(rows), 1, dtype=torch.float32, device=x.device)
        for values, result, r in _chunks(rows, out, scale):
            values = values.float()
            torch.linalg.vector_norm(values, dim=-1, keepdim=True, out=r)
            r.square_().div_(size).add_(eps).rsqrt_()
            _store(values * r, weight, result)
        ctx.save_for_backward(x, weight, scale)
        return out.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        size = x.shape[-1]
        rows, grad_rows = x.reshape(-1, size), grad.reshape(-1, size)
        grad_x, w = torch.empty_like(rows), weight.float()
        grad_weight = torch.zeros_like(w)
        for values, g, result, r in _chunks(rows, grad_rows, grad_x, scale):
            values, g = values.float(), g.float()
            product = g * values
            grad_weight.addmv_(product.t(), r[:, 0])
            minus_mean = torch.mv(product, w).div_(-size)[:, None]
            torch.mul(g, w, out=product)
            product.addcmul_(values, minus_mean.mul_(r.square()))
            _store(product, r, result)
        return grad_x.view_as(x), grad_weight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich, 2019), FP32 inside.

    Args:
        x: [..., h].
        weight: [h].
        eps: added to the mean square.

    Returns:
        [..., h] in the dtype of `x`.
    """
    return _RMSNorm.apply(x, weight, eps)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        size = x.shape[-1] // 2
        rows = x.reshape(-1, 2 * size)
        out = rows.new_empty(len(rows), size)
        for values, result in _chunks(rows, out):
            gate, up = values.chunk(2, -1)
            torch.ops.aten.silu.out(gate, out=result)
            result.mul_(up)
        return out.view(*x.shape[:-1], size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        rows, grad_rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        grad_x = torch.empty_like(rows)
        for values, result, g in _chunks(rows, grad_x, grad_rows):
            gate, up = values.chunk(2, -1)
            grad_gate, grad_up = result.chunk(2, -1)
            torch.ops.aten.silu.out(gate, out=grad_up)
            grad_up.mul_(g)
            torch.mul(g, up, out=grad_gate)
            torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_x.view_as(x)


def swiglu(x: Tensor) -> Tensor:
    """silu(a) b for the halves a, b of the last dimension (Shazeer, "GLU Variants Improve Transformer", 2020).

    Args:
        x: [..., 2 f].

    Returns:
        [..., f].
    """
    return _SwiGLU.apply(x)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    swapped = x.unflatten(-1, (2, -1)).roll(1, -2).flatten(-2)
    return torch.mul(x, cos).addcmul_(swapped, sin, value=direction)


class _Rotate(torch.autograd.Function):
    """The gradient is turned back by the same angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, -1), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: turn the pair (x_i, x_{i + d/2}) of every head by its token's i-th angle.

    Args:
        x: [t, heads, d].
        cos: [t, 1, d], both halves alike, of the dtype of `x`.
        sin: like `cos`, but the first half negated.

    Returns:
        [t, heads, d].
    """
    return _Rotate.apply(x, cos, sin)
