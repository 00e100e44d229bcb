"""Megatron's column- and row-parallel linears with FP8 GEMMs from `precision/linear.py`.

Only the GEMM is replaced, at the one hook that both of Megatron's linears have (`_forward_impl`); parameters,
sharding, checkpoints and the communication around the GEMM stay Megatron's. Whether a layer computes in FP8 is read
from its config at every forward pass (`fp8_active`), as Megatron reads `config.fp8` for TransformerEngine's layers:
the shadow pass switches both in the same place.

Over which group each amax is taken (`precision.amax_group`) is a table in `docs/precision.md`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn

from megatron_calclip.config import PrecisionConfig
from megatron_calclip.precision.linear import Backend, Fp8Gemms, WeightCodes
from megatron_calclip.precision.recipes import Recipe, resolve
from megatron_calclip.precision.scaling import update_delayed_scaling
from megatron_calclip.precision.shadow import MasterWeight


def max_over(group: dist.ProcessGroup | None) -> Any:
    """A max all-reduce over a group, or None for a group of one."""
    if group is None or dist.get_world_size(group) == 1:
        return None

    def reduce_amax(amax: Tensor) -> Tensor:
        amax = amax.contiguous()
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        return amax

    return reduce_amax


class _Fp8ParallelLinear(nn.Module):
    """What both linears share; mixed in before Megatron's class."""

    config: Any
    weight: Any
    fp8: Fp8Gemms | None
    """Its quantisers and GEMMs; None keeps the layer in BF16."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fp8 = None

    def make_fp8(self, recipe: Recipe, *, backend: Backend, group: dist.ProcessGroup) -> None:
        """Give the layer its quantisers; without this call it stays in BF16."""
        column = isinstance(self, ColumnParallelLinear)
        self.fp8 = Fp8Gemms(
            recipe,
            backend=backend,
            input_sharded=not column,
            output_sharded=column,
            reduce_amax=max_over(group),
        )

    @property
    def fp8_active(self) -> bool:
        """Whether the next forward pass computes in FP8."""
        return self.fp8 is not None and bool(self.config.fp8_active)

    def _fp8_product(self, x: Tensor, weight: Tensor) -> Tensor:
        assert self.fp8 is not None
        first_tokens = getattr(self.config, "first_tokens", None)
        y: Tensor = self.fp8(x, weight, getattr(weight, "fp8_codes", None), first_tokens=first_tokens)
        return y


def _with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    """A fresh product plus bias, in place: Megatron's own sum makes another copy of the activations."""
    return y if bias is None else y.add_(bias)


class Fp8ColumnParallelLinear(_Fp8ParallelLinear, ColumnParallelLinear):
    """Y = X W^T with W cut along the outputs."""

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None,
        sequence_parallel: bool,
        allreduce_dgrad: bool,
        tp_group: dist.ProcessGroup,
        **rest: Any,
    ) -> Tensor:
        if not self.fp8_active:
            y = super()._forward_impl(
                input,
                weight,
                bias=None,
                sequence_parallel=sequence_parallel,
                allreduce_dgrad=allreduce_dgrad,
                tp_group=tp_group,
                **rest,
            )
            return _with_bias(y, bias)
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        return _with_bias(self._fp8_product(input, weight), bias)


class Fp8RowParallelLinear(_Fp8ParallelLinear, RowParallelLinear):
    """Y = X W^T with W cut along the inputs; Megatron sums the partial products."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *, bias: Tensor | None, **rest: Any) -> Tensor:
        if not self.fp8_active:
            return _with_bias(super()._forward_impl(input, weight, bias=None, **rest), bias)
        return _with_bias(self._fp8_product(input, weight), bias)


def fp8_linears(chunks: Iterable[nn.Module]) -> list[_Fp8ParallelLinear]:
    """All linears that have been given FP8, in module order (the same on every data-parallel rank)."""
    return [
        module
        for chunk in chunks
        for module in chunk.modules()
        if isinstance(module, _Fp8ParallelLinear) and module.fp8 is not None
    ]


def make_fp8(chunks: Iterable[nn.Module], precision: PrecisionConfig, *, backend: Backend, num_layers: int) -> None:
    """Give every decoder linear of this rank its recipe, but for the first and last layers that stay in BF16."""
    recipe = resolve(precision)
    assert recipe is not None
    edge = precision.first_last_layers_bf16
    for chunk in chunks:
        for layer in chunk.decoder.layers:  # type: ignore[union-attr]
            if not edge < layer.layer_number <= num_layers - edge:
                continue
            for module in layer.modules():
                if isinstance(module, _Fp8ParallelLinear):
                    module.make_fp8(recipe, backend=backend, group=ps.get_tensor_model_parallel_group())
            _dial(layer, precision)


def _dial(layer: Any, precision: PrecisionConfig) -> None:
    """Dialled-in noise of one layer: an outlier channel before qkv and the MLP, the first token before its second linear."""
    dials = precision.emulation
    if dials.channel_outlier > 1:
        for place, linear in enumerate((layer.self_attention.linear_qkv, layer.mlp.linear_fc1)):
            size = linear.weight.shape[1]
            linear.fp8.dial_channel(37 * layer.layer_number + 11 * place, size, device=linear.weight.device)
    layer.mlp.linear_fc2.fp8.first_token_outlier = dials.first_token_outlier


class DelayedHistories:
    """Ends the passes of delayed scaling: forward after each micro-batch, backward when its gradients have left the chunk.

    TransformerEngine does the first when its outermost autocast exits with gradients enabled, the second after the
    backward of the first FP8 layer. Amaxes are reduced over TP, DP and CP (Megatron's default group), so histories
    do not depend on these ranks and need no sharding in checkpoints.

    Args:
        chunk: a bare GPTModel chunk; one whose layers all stay in BF16 has nothing to end.
    """

    def __init__(self, chunk: nn.Module) -> None:
        self.linears = fp8_linears([chunk])
        self._reduce = max_over(ps.get_tensor_and_data_parallel_group(with_context_parallel=True))
        first = next((layer for layer in chunk.decoder.layers if fp8_linears([layer])), None)  # type: ignore[union-attr]
        if first is not None:
            # By layer, not by linear: modules are not registered in the order in which they run.
            first.register_forward_pre_hook(self._watch_backward, with_kwargs=True)

    def _watch_backward(self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notice when the backward pass has left the layer: its input then has its whole gradient."""
        hidden: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        if torch.is_grad_enabled() and hidden.requires_grad:
            hidden.register_hook(lambda _: self._update("gradient_scaling"))

    def after_forward(self) -> None:
        """Set the next scales of inputs and weights, when the pass will be followed by a backward."""
        if torch.is_grad_enabled():
            self._update("input_scaling", "weight_scaling")

    def _update(self, *names: str) -> None:
        states = [getattr(linear.fp8, name) for linear in self.linears for name in names]
        update_delayed_scaling(states, reduce_amax=self._reduce)


@torch.no_grad()
def quantize_parameters(linears: Iterable[_Fp8ParallelLinear], master: MasterWeight) -> None:
    """Put the linears' weights into FP8: codes of their FP32 masters, and live values that hold no more than the codes.

    As TransformerEngine does with `fp8_param`, codes come from the masters, not from BF16 copies of them.

    Args:
        linears: layers of this rank, in the same order on all data-parallel ranks.
        master: whole FP32 masters; collective.
    """
    for linear in linears:
        assert linear.fp8 is not None
        _hold_codes(linear.weight, linear.fp8.quantize_weight(master(linear.weight)))


def _hold_codes(weight: Any, codes: WeightCodes) -> None:
    """Make codes the live value of a weight."""
    weight.fp8_codes = codes
    values, scale = codes.forward.values, codes.forward.scale
    weight.copy_(values if scale is None else values.float() * scale)


@contextlib.contextmanager
@torch.no_grad()
def codes_set_aside(linears: Iterable[_Fp8ParallelLinear], master: MasterWeight) -> Iterator[None]:
    """Inside the block the weights that live in FP8 are BF16 again, rounded from their masters, and quantised at every use.

    For other weights that take the live ones' place for a while: their values go into the parameters, and no codes
    of the policy's stand in their way. Afterwards the policy's codes are back.

    Args:
        linears: layers of this rank, in the same order on all data-parallel ranks.
        master: whole FP32 masters; collective.
    """
    weights = [linear.weight for linear in linears if hasattr(linear.weight, "fp8_codes")]
    codes = [weight.fp8_codes for weight in weights]
    for weight in weights:
        del weight.fp8_codes
        weight.copy_(master(weight))
    try:
        yield
    finally:
        for weight, own in zip(weights, codes, strict=True):
            _hold_codes(weight, own)
