"""Slices of flattened tensors as rectangles, written by some ranks and read by others, against PyTorch's own reader."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_calclip.checkpoint_files import flushed_record
from megatron_calclip.errors import UserError
from megatron_calclip.learner.checkpoint_blocks import (
    Block,
    Part,
    read_part,
    rectangles,
    write_blocks,
)
from megatron_calclip.weights.dist_load import DistCheckpoint
from megatron_calclip.weights.dist_save import write_metadata

KEY = "exp_avg.layer.weight"


def test_part_of_a_row_whole_rows_part_of_a_row() -> None:
    # 0  1  2 [3  4
    # 5  6  7  8  9
    # 10 11 12 13 14
    # 15 16] 17 ..
    expected = [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2))]
    assert rectangles(3, 17, (4, 5)) == expected
    assert rectangles(1, 4, (4, 5)) == [((0, 1), (1, 3))]
    assert rectangles(5, 20, (4, 5)) == [((1, 0), (3, 5))]
    assert rectangles(0, 0, (4, 5)) == rectangles(7, 7, (4, 5)) == []
    assert rectangles(2, 3, (4,)) == [((2,), (1,))]
    assert rectangles(0, 1, ()) == [((), ())]


SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(st.data(), SHAPES)
def test_rectangles_are_the_slice_in_order(data: st.DataObject, shape: tuple[int, ...]) -> None:
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    found = rectangles(start, stop, shape)
    numbers = torch.arange(math.prod(shape)).view(shape)
    pieces = [numbers[tuple(slice(o, o + n) for o, n in zip(*rectangle, strict=True))].flatten() for rectangle in found]
    assert torch.equal(torch.cat([*pieces, torch.empty(0, dtype=torch.int64)]), torch.arange(start, stop))
    assert len(found) <= 2 * len(shape) - 1


def gate_and_up(rank: int, *, num_ranks: int, rows: int, columns: int) -> list[Part]:
    """A rank's fused linear as Megatron has it: its rows of the gate, then its rows of the up projection."""
    size, shape = (2 * num_ranks * rows, columns), (rows, columns)
    gate = Part(KEY, size, (rank * rows, 0), shape, 0, padded=False)
    return [gate, Part(KEY, size, ((num_ranks + rank) * rows, 0), shape, rows * columns, padded=False)]


def slices(numel: int, inner: list[int]) -> list[tuple[int, int]]:
    """A flattened tensor in consecutive slices, as data-parallel ranks own it."""
    return list(itertools.pairwise(sorted({0, *(cut % numel for cut in inner), numel})))


def write(folder: Path, holders: list[list[Part]], whole: Tensor, cuts: list[int]) -> None:
    """What all ranks write of a global tensor, each slice another one."""
    written = []
    for parts in holders:
        flat = torch.cat([local(whole, part).flatten() for part in parts])
        for number, (start, stop) in enumerate(slices(flat.numel(), cuts)):
            blocks = [
                Block(part.key, part.size, offsets, value)
                for part in parts
                for offsets, value in part.cut(flat[start:stop], start)
            ]
            path = folder / f"__{len(written)}_{number}.distcp"
            placed, record = write_blocks(path, blocks)
            assert record == flushed_record(path)
            written.append(placed)
    write_metadata(folder, [block for placed in written for block in placed])


def local(whole: Tensor, part: Part) -> Tensor:
    return whole[tuple(slice(o, o + n) for o, n in zip(part.offsets, part.shape, strict=True))]


LISTS_OF_CUTS = st.lists(st.integers(1, 10**6), max_size=4)


@settings(max_examples=30)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), LISTS_OF_CUTS, LISTS_OF_CUTS)
def test_any_ranks_read_what_others_wrote(
    tmp_path_factory: pytest.TempPathFactory, writers: int, readers: int, cuts: list[int], other_cuts: list[int]
) -> None:
    folder, whole = tmp_path_factory.mktemp("optimizer"), torch.randn(24, 3)
    layouts = {
        size: [gate_and_up(rank, num_ranks=size, rows=12 // size, columns=3) for rank in range(size)]
        for size in (writers, readers)
    }
    write(folder, layouts[writers], whole, cuts)

    peer = {KEY: torch.zeros_like(whole)}
    dcp.load(peer, checkpoint_id=folder, no_dist=True)
    assert torch.equal(peer[KEY], whole)

    checkpoint = DistCheckpoint(folder)
    assert torch.equal(checkpoint.read(KEY), whole)
    for parts in layouts[readers]:
        expected = torch.cat([local(whole, part).flatten() for part in parts])
        for start, stop in slices(expected.numel(), other_cuts):
            flat = torch.full((stop - start,), torch.nan)
            for part in parts:
                read_part(checkpoint, part, flat, start)
            assert torch.equal(flat, expected[start:stop])


@pytest.mark.parametrize(("rows", "padded_rows"), [(6, 8), (8, 6), (8, 8)])
def test_a_vocabulary_padded_to_another_size(tmp_path: Path, rows: int, padded_rows: int) -> None:
    whole = torch.randn(rows, 3)
    write(tmp_path, [[Part(KEY, (rows, 3), (0, 0), (rows, 3), 0, padded=True)]], whole, [7])
    part = Part(KEY, (padded_rows, 3), (padded_rows // 2, 0), (padded_rows // 2, 3), 0, padded=True)
    flat = torch.full((math.prod(part.shape),), 5.0)  # the lower half, as the second of two ranks holds it
    read_part(DistCheckpoint(tmp_path), part, flat, 0)
    expected = torch.full((padded_rows, 3), 5.0)
    expected[:rows] = whole[:padded_rows]
    assert torch.equal(flat.view(part.shape), expected[padded_rows // 2 :])


def test_another_model_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [[Part(KEY, (6, 3), (0, 0), (6, 3), 0, padded=False)]], torch.randn(6, 3), [])
    checkpoint = DistCheckpoint(tmp_path)
    for part in (
        Part(KEY, (8, 3), (0, 0), (8, 3), 0, padded=False),
        Part("exp_avg.other", (6, 3), (0, 0), (6, 3), 0, padded=False),
    ):
        with pytest.raises(UserError, match=rf"checkpoint.resume: .* has no {part.key} of shape \[{part.size[0]}, 3\]"):
            read_part(checkpoint, part, torch.zeros(18), 0)
        read_part(checkpoint, part, torch.zeros(0), 0)  # a rank that owns nothing of it asks for nothing


def test_what_is_not_written_once_as_a_whole_is_no_checkpoint(tmp_path: Path) -> None:
    top, bottom = (Part(KEY, (6, 3), (row, 0), (3, 3), 0, padded=False) for row in (0, 3))
    for parts in ([top], [top, top, bottom]):
        with pytest.raises(AssertionError, match="is not written once as a whole"):
            write(tmp_path, [[part] for part in parts], torch.randn(6, 3), [])


def test_objects_lie_beside_tensors(tmp_path: Path) -> None:
    tensors = [Block(KEY, (2,), (0,), torch.ones(2)), Block("scale", (), (), torch.tensor(3.0))]
    blocks = [Block("state/shard_0_1", (), (), b"pickled"), *tensors]
    written, _ = write_blocks(tmp_path / "__0_0.distcp", blocks)
    write_metadata(tmp_path, written)
    assert written[0].length == 7 and (tmp_path / "__0_0.distcp").read_bytes().startswith(b"pickled")
    checkpoint = DistCheckpoint(tmp_path)
    assert torch.equal(checkpoint.read(KEY), torch.ones(2)) and torch.equal(checkpoint.read("scale"), torch.tensor(3.0))
