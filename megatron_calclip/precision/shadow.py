"""The BF16 shadow pass: the learner's own forward, with FP8 off, on the optimizer's master weights.

It is the ruler that calibration measures with: what the importance ratios would be if the learner computed in BF16.

FP8 is switched off on the config of every module, which is read at forward time. An outer autocast that disables
FP8 would do nothing, because Megatron enters TransformerEngine's autocast itself, inside the transformer block; so
every layer asserts, when it runs, that FP8 really is off.

Weights that live in FP8 are replaced, for the duration, by BF16 ones rounded from the FP32 masters. The live ones
are set aside untouched, not overwritten and restored: nothing that happens inside can change them. All other
weights are BF16 and equal their rounded masters already.

Left out on purpose: gathering masters (`learner/masters.py`) and everything about Megatron but the names of its
attributes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

MasterWeight = Callable[[nn.Parameter], Tensor]
"""From a live parameter to its whole FP32 master, gathered over data parallelism; a collective."""


def lives_in_fp8(parameter: nn.Parameter) -> bool:
    """Whether a parameter's live value is FP8: codes of ours, or one of TransformerEngine's quantised tensors."""
    return hasattr(parameter, "fp8_codes") or hasattr(parameter, "_quantizer")


def _configs(chunks: Iterable[nn.Module]) -> list[Any]:
    found = {
        id(module.config): module.config for chunk in chunks for module in chunk.modules() if hasattr(module, "config")
    }
    return list(found.values())


@contextlib.contextmanager
def _fp8_off(chunks: list[nn.Module]) -> Iterator[None]:
    configs = _configs(chunks)
    before = [(config, getattr(config, "fp8", None), getattr(config, "fp8_active", False)) for config in configs]
    for config in configs:
        config.fp8, config.fp8_active = None, False
    try:
        yield
    finally:
        for config, fp8, active in before:
            config.fp8, config.fp8_active = fp8, active


def _assert_fp8_off(layer: nn.Module, *_: Any) -> None:
    assert not any(getattr(module, "fp8_active", False) for module in layer.modules()), "FP8 is on in a shadow pass"
    if torch.cuda.is_available():
        try:
            from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
        except ImportError:
            return
        assert not FP8GlobalStateManager.is_fp8_enabled(), "TransformerEngine computes in FP8 in a shadow pass"


class _Replacement:
    """BF16 weights in the place of FP8 ones, for one module tree."""

    def __init__(self, tree: nn.Module, master: MasterWeight) -> None:
        self.master = master
        self.live = [
            (module, name, parameter)
            for module in tree.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if lives_in_fp8(parameter)
        ]

    def enter(self, *_: Any) -> None:
        for module, name, parameter in self.live:
            shadow = self.master(parameter).to(torch.bfloat16)
            module._parameters[name] = nn.Parameter(shadow, requires_grad=False)

    def leave(self, *_: Any) -> None:
        for module, name, parameter in self.live:
            module._parameters[name] = parameter


@contextlib.contextmanager
def shadow_pass(chunks: list[nn.Module], *, master: MasterWeight, streamed: bool = False) -> Iterator[None]:
    """Inside the block, forward passes of the chunks are BF16 on the master weights; afterwards all is as before.

    Wraps forward passes without gradients. Histories, extra states, gradients, weights and training mode are not
    touched, and the random state is put back, also after an exception.

    Args:
        chunks: this rank's GPTModel chunks, bare.
        master: masters of parameters that live in FP8; called for each of them in the same order on all ranks.
        streamed: build one layer's weights at a time, when it runs, instead of all at the start: extra memory of
            one layer. Every micro-batch then gathers them again.
    """
    layers = [layer for chunk in chunks for layer in chunk.decoder.layers]  # type: ignore[union-attr]
    trees: list[nn.Module] = layers if streamed else list(chunks)
    replacements = [_Replacement(tree, master) for tree in trees]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=_cuda_devices()))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_fp8_off(list(chunks)))
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(_assert_fp8_off).remove)
        for tree, replacement in zip(trees, replacements, strict=True):
            stack.callback(replacement.leave)
            if streamed:
                stack.callback(tree.register_forward_pre_hook(replacement.enter).remove)
                stack.callback(tree.register_forward_hook(replacement.leave).remove)
            else:
                replacement.enter()
        yield


def _cuda_devices() -> list[int]:
    return [torch.cuda.current_device()] if torch.cuda.is_available() else []
