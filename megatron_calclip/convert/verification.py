"""Are two checkpoints the same, bit for bit? The first tensor that differs, with how much and where.

Values are compared as bits: two NaN of one pattern are equal, 0 and -0 are not. Left out on purpose: tolerances. What a
difference in bits means for a model is a question to its logits (`learner/logits.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from megatron_calclip.weights.load import HFSource
from megatron_calclip.weights.mapping import ModelShape, mapped_tensors

_SAME_SIZE_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def quick_sample(shape: ModelShape) -> set[str]:
    """The tensors that a cheap comparison reads: all outside of the layers, and the first and the last layer.

    Between them they hold every rule of a table, the vocabulary's padding and both ends of the pipeline; an error that
    spares them all would be one of the disk.
    """
    layers = {None, 0, shape.num_layers - 1}
    return {hf.name for tensor in mapped_tensors(shape) if tensor.layer in layers for hf in tensor.hf}


def first_difference(
    expected: Iterable[tuple[str, Tensor]], expected_specs: Mapping[str, Tensor], actual: HFSource
) -> str | None:
    """Compare names, shapes and types of all tensors, then the bits of those that `expected` yields.

    Args:
        expected: (name, tensor), all of a checkpoint or a sample.
        expected_specs: meta tensors of all of it.
        actual: the other checkpoint.

    Returns:
        a line that says what differs first, or None.
    """
    missing = [name for name in expected_specs if name not in actual.specs]
    extra = [name for name in actual.specs if name not in expected_specs]
    if missing or extra:
        return f"{len(missing)} tensors are missing and {len(extra)} too many, the first {(missing + extra)[0]}"
    for name, spec in expected_specs.items():
        found = actual.specs[name]
        if (spec.shape, spec.dtype) != (found.shape, found.dtype):
            return f"{name} is {_describe(found)} instead of {_describe(spec)}"
    for name, value in expected:
        other = actual.read(name)
        if not torch.equal(_bits(value), _bits(other)):
            return f"{name} {_describe(value)} differs: {_statistics(value, other)}"
    return None


def sample(source: HFSource, names: Collection[str]) -> Iterable[tuple[str, Tensor]]:
    """The named tensors of a checkpoint, in its order."""
    return ((name, source.read(name)) for name in source.specs if name in names)


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_SAME_SIZE_INTEGERS[tensor.dtype.itemsize])


def _statistics(expected: Tensor, actual: Tensor) -> str:
    different = (_bits(expected) != _bits(actual)).nonzero()
    first = tuple(different[0].tolist())
    distance = (expected.double() - actual.double()).abs()
    finite = distance[distance.isfinite()]
    largest = f"{float(finite.max()):.3g}" if finite.numel() else "not finite"
    return (
        f"{len(different)} of {expected.numel()} values, first at {list(first)}: {float(actual[first]):.8g} instead of "
        f"{float(expected[first]):.8g}; largest |difference| {largest}, mean |expected| "
        f"{float(expected.double().abs().mean()):.3g}"
    )
