"""RMSNorm, SwiGLU and rotary embedding, forward and backward. No Megatron.

As torch and Megatron write them, they are chains of elementwise operations, each of which reads and writes all
activations and keeps some of them. Here norm and SwiGLU keep nothing but the input (of the norm also one number per
row), and on a CPU each is one compiled loop (`pointwise_loops`); the rotation needs no concatenation. Left out on
purpose: device kernels; on CUDA TransformerEngine has its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_calclip.compiled import memory_of
from megatron_calclip.learner import pointwise_loops


def _in_loop(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


class _RMSNorm(torch.autograd.Function):
    """y = x r w with r = 1 / sqrt(mean(x^2) + eps) of each row.

    With g the gradient of y: that of w is the sum over rows of g x r, and that of x is
    r (g w - x r^2 mean(g x w)).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, w = _matrix(x), weight.float()
        if _in_loop(x):
            out, scale = torch.empty_like(rows), torch.empty(len(rows))
            pointwise_loops.rms_norm(memory_of(rows), memory_of(w), np.float32(eps), memory_of(out), memory_of(scale))
        else:
            values = rows.float()
            scale = values.square().mean(-1).add_(eps).rsqrt_()
            out = (values * scale[:, None] * w).to(x.dtype)
        ctx.save_for_backward(x, weight, scale)
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        rows, grad_rows, w = _matrix(x), _matrix(grad), weight.float()
        if _in_loop(x):
            grad_x, grad_weight = torch.empty_like(rows), torch.zeros_like(w)
            operands = rows, w, scale, grad_rows, grad_x, grad_weight
            pointwise_loops.rms_norm_backward(*map(memory_of, operands))
        else:
            values, g, r = rows.float(), grad_rows.float(), scale[:, None]
            grad_weight = (g * values * r).sum(0)
            mean = (g * values * w).mean(-1, keepdim=True)
            grad_x = (r * (g * w - values * r.square() * mean)).to(x.dtype)
        return grad_x.view(x.shape), grad_weight.to(weight.dtype), None


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
        rows = _matrix(x)
        if _in_loop(x):
            out = rows.new_empty(len(rows), x.shape[-1] // 2)
            pointwise_loops.swiglu(memory_of(rows), memory_of(out))
        else:
            gate, up = rows.chunk(2, -1)
            out = F.silu(gate) * up
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        rows, grad_rows = _matrix(x), _matrix(grad)
        if _in_loop(x):
            grad_x = torch.empty_like(rows)
            pointwise_loops.swiglu_backward(memory_of(rows), memory_of(grad_rows), memory_of(grad_x))
        else:
            gate, up = rows.chunk(2, -1)
            grad_x = torch.cat((torch.ops.aten.silu_backward(grad_rows * up, gate), grad_rows * F.silu(gate)), -1)
        return grad_x.view(x.shape)


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
