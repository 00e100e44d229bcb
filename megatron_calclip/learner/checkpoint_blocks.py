"""Blocks: the rectangles of global tensors that a rank holds, and files of them in PyTorch's distributed checkpoint format.

A data-parallel rank of Megatron's distributed optimizer owns a run of a flattened parameter. Cut at rows, such a run is a few
rectangles of the parameter, and those are what the format (`torch.distributed.checkpoint`) consists of: any rank can thus
write what it owns without asking another, and any layout can read it. A rank's blocks go into one file as `torch.save`
records; `.metadata` says of each global tensor which block lies where, and is all that ranks have to put together.

No Megatron in here: `checkpoint_state.py` makes blocks of a learner.

Left out on purpose: PyTorch's own planners and `FileSystemWriter`. They agree on a plan before anything is written; here no rank
writes what another one holds, so there is nothing to agree on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch
from torch import Tensor

from megatron_calclip.checkpoint_files import FileRecord, HashedFile
from megatron_calclip.errors import UserError
from megatron_calclip.weights.dist_load import DistCheckpoint
from megatron_calclip.weights.dist_save import WrittenBlock

Shape = tuple[int, ...]


def rectangles(start: int, stop: int, shape: Sequence[int]) -> list[tuple[Shape, Shape]]:
    """The elements [start, stop) of a flattened tensor as rectangles of it.

    Args:
        start: first element.
        stop: behind the last one.
        shape: of the tensor.

    Returns:
        offsets and sizes, in the order of their elements: part of a row, whole rows, part of a row, and the parts of rows
        in the same way; at most 2 n - 1 for n dimensions.
    """
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if start % row == 0 and stop % row == 0:
        return [((first, *(0 for _ in shape[1:])), (last + 1 - first, *shape[1:]))]
    if first == last:
        within = rectangles(start - first * row, stop - first * row, shape[1:])
        return [((first, *offsets), (1, *sizes)) for offsets, sizes in within]
    whole_from, whole_to = -(-start // row) * row, stop - stop % row
    cuts = ((start, whole_from), (whole_from, whole_to), (whole_to, stop))
    return [rectangle for cut in cuts for rectangle in rectangles(*cut, shape)]


@dataclass(frozen=True)
class Part:
    """A run of a rank's flattened tensor that is one rectangle of a global tensor."""

    key: str
    """Name of the global tensor."""
    size: Shape
    """Of the global tensor."""
    offsets: Shape
    """Of the rectangle in the global tensor."""
    shape: Shape
    """Of the rectangle, with as many dimensions as the global tensor."""
    start: int
    """First element of the run in the flattened tensor."""
    padded: bool
    """Whether the global tensor may have another size in a checkpoint, as a padded vocabulary may."""

    @property
    def stop(self) -> int:
        """Behind the run's last element."""
        return self.start + math.prod(self.shape)

    def cut(self, flat: Tensor, start: int) -> Iterator[tuple[Shape, Tensor]]:
        """What of a slice of the flattened tensor lies in this part.

        Args:
            flat: [n], the elements from `start` on; it may lie partly or altogether elsewhere.
            start: of the slice.

        Yields:
            offsets in the global tensor, and a view of `flat` in the shape of the block there.
        """
        position = max(start, self.start)
        stop = min(start + flat.numel(), self.stop)
        for offsets, sizes in rectangles(position - self.start, stop - self.start, self.shape):
            numel = math.prod(sizes)
            view = flat[position - start : position - start + numel].view(sizes)
            yield tuple(map(sum, zip(self.offsets, offsets, strict=True))), view
            position += numel


@dataclass(frozen=True)
class Block:
    """What a rank writes."""

    key: str
    size: Shape
    """Of the global tensor."""
    offsets: Shape
    """In the global tensor."""
    value: Tensor | bytes
    """Block of the tensor, on the CPU; or an object, pickled."""


def write_blocks(path: Path, blocks: Sequence[Block]) -> tuple[list[WrittenBlock], FileRecord]:
    """Write a file of blocks, and flush it to disk."""
    written: list[WrittenBlock] = []
    with HashedFile(path) as file:
        for block in blocks:
            start, value = file.size, block.value
            if isinstance(value, Tensor):
                torch.save(value.clone(), cast(IO[bytes], file))  # a view would be saved with all of its storage
                shape, dtype = tuple(value.shape), value.dtype
            else:
                file.write(value)
                shape, dtype = (), None
            place = (path.name, start, file.size - start)
            written.append(WrittenBlock(block.key, block.size, block.offsets, shape, dtype, *place))
    return written, file.record


def read_part(checkpoint: DistCheckpoint, part: Part, flat: Tensor, start: int) -> None:
    """Fill a slice of a flattened tensor with what a checkpoint has of a part of it.

    Args:
        checkpoint: written by any number of ranks, cut in any way.
        part: of the flattened tensor.
        flat: [n], the elements from `start` on. Where a padded tensor is larger than in the checkpoint they stay as they are.
        start: of the slice.

    Raises:
        UserError: when the checkpoint has no such tensor, or one of another shape.
    """
    targets = list(part.cut(flat, start))
    if not targets:
        return
    entry = checkpoint.tensors.get(part.key)
    if entry is not None and (tuple(entry.size) == part.size or part.padded):
        num_filled = checkpoint.fill(part.key, targets)
        if part.padded or num_filled == sum(target.numel() for _, target in targets):
            return
    raise UserError(
        "checkpoint.resume",
        f"{checkpoint.folder} has no {part.key} of shape {list(part.size)}; resume with the model that it is of",
    )
