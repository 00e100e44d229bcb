"""Fixed-point histograms of importance ratios, one per sequence: the inner loop of `statistics`.

What: for each token the bin of its ratio in two precisions, and what it adds there, as integers. Why this
way: calibration runs over every token of a step on hardware that has better things to do, so the loop works
on chunks that stay in the cache, finds bins by table look-up instead of binary search, and allocates nothing.

Left out on purpose: sums over sequences and bootstrap replicates (`statistics`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

FRACTION_BITS = 28
"""Weighted sums are held in units of 2^-28; a token's value is truncated to it."""
MAX_TOKEN_VALUE = 2.0**14
"""What one token adds to a weighted sum saturates here. FP8 ratios of 843 have been seen; TIS weights end at
2 and normalised advantages at about 8."""

CHUNK_TOKENS = 2**16
"""Most tokens of a chunk: its temporaries fit the cache."""
MAX_TOKENS = 2**20
"""Most tokens of the histograms: 2^20 of value 2^14, in units of 2^-28, stay below 2^63."""
MAX_SEQUENCES = 2**8
"""Most sequences of the histograms."""

_LANES = 2
"""Histograms of a sequence that neighbouring tokens take turns in. Most tokens fall into the same bin, and an
addition to it would have to wait for the one before."""
_MAX_CELLS = 2**20
"""Largest table for finding bins, 4 MB per sign of A. A grid of 0.001 from 0.1 to 10 takes 2^16 cells."""


class Quantity(IntEnum):
    """What a bin adds up."""

    COUNT = 0
    """Tokens."""
    WEIGHTED_RATIO = 1
    """w * |A| * loss weight * min(r, cap), in units of 2^-28."""
    WEIGHT = 2
    """w * |A| * loss weight, in units of 2^-28."""


class Precision(IntEnum):
    """Which forward a ratio comes from."""

    FP8 = 0
    """The learner's own, in its training precision."""
    BF16 = 1
    """The shadow on the master weights."""


class TokenRatios(NamedTuple):
    """Tokens in both precisions, each field [T]; see `RatioStatistics.update`."""

    ratio8: Tensor
    ratio16: Tensor
    advantages: Tensor
    importance_weights: Tensor
    loss_weights: Tensor
    response_mask: Tensor
    sequence_ids: Tensor

    def cut(self, start: int, stop: int) -> "TokenRatios":
        """The tokens start <= t < stop."""
        return TokenRatios(*(tensor[start:stop] for tensor in self))

    def map_values(self, function: Callable[[Tensor], Tensor]) -> "TokenRatios":
        """The function applied to the five floating-point fields."""
        return self._replace(**{name: function(getattr(self, name)) for name in self._fields[:5]})

    def without_nonfinite(self) -> tuple["TokenRatios", Tensor]:
        """Finite values everywhere, by taking tokens out of the mask; and how many were in it, int64 []."""
        finite = torch.stack([tensor.isfinite() for tensor in self[:5]]).all(dim=0)
        mask = self.response_mask & finite
        cleaned = self.map_values(lambda values: torch.where(mask, values, 1.0))
        return cleaned._replace(response_mask=mask), (self.response_mask & ~finite).sum()


class ChunkCounts(NamedTuple):
    """Numbers of tokens of a chunk, each int64 []."""

    nonfinite: Tensor
    """Inside the mask with a NaN or inf; they are in no histogram."""
    weighted: Tensor
    """Inside the mask with w * |A| * loss weight above 0."""
    off_one: Tensor
    """Those of them with an FP8 ratio that is not exactly 1."""


@dataclass(frozen=True)
class _Buffers:
    """Temporaries of a chunk, allocated once: the page faults of fresh ones cost more than the sums."""

    ones: Tensor
    advantages: Tensor
    weight: Tensor
    weighted_ratio8: Tensor
    weighted_ratio16: Tensor
    first_cell: Tensor
    bits: Tensor
    cell: Tensor
    index: Tensor
    fixed_weight: Tensor
    fixed_ratio: Tensor

    @classmethod
    def allocate(cls, num_tokens: int, device: torch.device | str) -> "_Buffers":
        """Buffers for chunks of up to num_tokens."""
        dtypes = [torch.float32] * 4 + [torch.int32] * 4 + [torch.int64] * 2
        ones = torch.ones(num_tokens, dtype=torch.int64, device=device)
        return cls(ones, *(torch.empty(num_tokens, dtype=dtype, device=device) for dtype in dtypes))

    def cut(self, num_tokens: int) -> "_Buffers":
        """Views of the first num_tokens."""
        if num_tokens == self.ones.numel():
            return self
        return _Buffers(*(getattr(self, field.name)[:num_tokens] for field in fields(self)))


class SequenceHistograms:
    """Histograms of up to `MAX_SEQUENCES` sequences and `MAX_TOKENS` tokens.

    A row holds, quantity by quantity and in it precision by precision, the bins of A < 0 and then of A > 0. A
    sequence that occurs in several chunks gets several rows, which no sum over sequences notices.

    Args:
        lower_edges: ascending ratios; bins of A < 0 hold edge < r <= next edge.
        upper_edges: ascending ratios; bins of A > 0 hold edge <= r < next edge.
        ratio_cap: see `Quantity.WEIGHTED_RATIO`.
        use_loss_weights: False gives each token a loss weight of 1.
        with_weights: False leaves `Quantity.WEIGHT` out.
        weight_scale: factor of all weights.
        device: where everything lies.
    """

    def __init__(
        self,
        lower_edges: Sequence[float],
        upper_edges: Sequence[float],
        *,
        ratio_cap: float | None,
        use_loss_weights: bool,
        with_weights: bool,
        weight_scale: float,
        device: torch.device | str,
    ) -> None:
        self._buckets = _BucketTable(lower_edges, upper_edges, device=device)
        self._ratio_cap = math.inf if ratio_cap is None else ratio_cap
        self._use_loss_weights = use_loss_weights
        self.num_quantities = len(Quantity) if with_weights else len(Quantity) - 1
        self._scale = weight_scale * 2.0**FRACTION_BITS
        # One bin more than anyone reads: there go the tokens that count nowhere.
        self._num_bins = self._buckets.num_bins + 1
        self._row_size = self.num_quantities * len(Precision) * self._num_bins
        self._device = device
        self._num_tokens = 0
        self.num_sequences = 0

    # Statistics that are only loaded and read never need these.
    @cached_property
    def _buffers(self) -> _Buffers:
        return _Buffers.allocate(CHUNK_TOKENS, self._device)

    @cached_property
    def _rows(self) -> Tensor:
        return torch.zeros(MAX_SEQUENCES * _LANES * self._row_size, dtype=torch.int64, device=self._device)

    @cached_property
    def _lane_offset(self) -> Tensor:
        lanes = torch.arange(CHUNK_TOKENS, dtype=torch.int32, device=self._device) % _LANES
        return lanes * self._row_size

    @cached_property
    def _sequence_ids(self) -> Tensor:
        return torch.zeros(MAX_SEQUENCES, dtype=torch.int64, device=self._device)

    @property
    def num_bins(self) -> int:
        """Bins of one quantity and precision, both sides together."""
        return self._buckets.num_bins

    def has_room(self, *, num_tokens: int, num_sequences: int) -> bool:
        """Whether a chunk of this size can be added before `take`."""
        fits = self.num_sequences + num_sequences <= MAX_SEQUENCES
        return fits and self._num_tokens + num_tokens <= MAX_TOKENS

    def add(self, tokens: TokenRatios, sequence_ids: Tensor, lengths: Tensor) -> ChunkCounts:
        """Add a chunk for which there is room.

        Args:
            tokens: up to `CHUNK_TOKENS` tokens.
            sequence_ids: int64 [S], the ids of its runs of equal ids, in order.
            lengths: int64 [S], tokens of each run.
        """
        buffers = self._buffers.cut(tokens.sequence_ids.numel())
        num_nonfinite = lengths.new_zeros(())
        # Float32 is what the loss compares ratios with bounds in.
        tokens = tokens.map_values(lambda values: values.float().contiguous())
        if not self._weigh(tokens, buffers):
            tokens, num_nonfinite = tokens.without_nonfinite()
            self._weigh(tokens, buffers)
        fixed_weight = buffers.fixed_weight
        if self.num_quantities == len(Quantity):
            fixed_weight.copy_(buffers.weight)

        first_row = self.num_sequences
        self._sequence_ids[first_row : first_row + sequence_ids.numel()] = sequence_ids
        row_starts = torch.arange(first_row, first_row + lengths.numel(), device=lengths.device)
        row_starts = (row_starts * _LANES * self._row_size).int()
        offset = torch.repeat_interleave(row_starts, lengths, output_size=buffers.ones.numel())
        offset.add_(self._lane_offset[: offset.numel()])
        self._buckets.prepare(buffers)
        for precision, ratio, weighted_ratio in (
            (Precision.FP8, tokens.ratio8, buffers.weighted_ratio8),
            (Precision.BF16, tokens.ratio16, buffers.weighted_ratio16),
        ):
            index = self._buckets.bins(ratio, buffers).add_(offset)
            fixed_ratio = buffers.fixed_ratio.copy_(weighted_ratio)
            values = (buffers.ones, fixed_ratio, fixed_weight)
            for quantity, value in enumerate(values[: self.num_quantities]):
                # A view that starts at the channel shifts every index by it, without another tensor.
                channel = (quantity * len(Precision) + precision) * self._num_bins
                self._rows[channel:].index_add_(0, index, value)
        self.num_sequences += sequence_ids.numel()
        self._num_tokens += tokens.sequence_ids.numel()

        # In float32, weight * r differs from weight whenever r differs from 1. The bits of a difference are 0
        # exactly when it is, and integers are counted faster than floats.
        off_one = buffers.weighted_ratio8.sub_(buffers.weight).view(torch.int32)
        return ChunkCounts(
            num_nonfinite, torch.count_nonzero(buffers.weight.view(torch.int32)), torch.count_nonzero(off_one)
        )

    def _weigh(self, tokens: TokenRatios, buffers: _Buffers) -> bool:
        """Fill in advantages (0 outside the mask) and weights; False if some input is not finite."""
        largest = MAX_TOKEN_VALUE * 2.0**FRACTION_BITS
        advantages = buffers.advantages.copy_(tokens.response_mask.view(torch.uint8)).mul_(tokens.advantages)
        weight = torch.abs(advantages, out=buffers.weight).mul_(tokens.importance_weights)
        if self._use_loss_weights:
            weight.mul_(tokens.loss_weights)
        # A sum is finite only if its terms are, and these three cover all inputs. Huge but finite terms may
        # fail the test as well, which costs time and changes nothing.
        total = tokens.ratio8.sum() + tokens.ratio16.sum() + weight.sum()
        weight.mul_(self._scale).clamp_(max=largest)
        for ratio, weighted_ratio in (
            (tokens.ratio8, buffers.weighted_ratio8),
            (tokens.ratio16, buffers.weighted_ratio16),
        ):
            torch.clamp(ratio, max=self._ratio_cap, out=weighted_ratio).mul_(weight).clamp_(max=largest)
        return math.isfinite(float(total))

    def take(self) -> tuple[Tensor, Tensor]:
        """Ids int64 [S] and histograms int64 [S, row]; nothing is held any more afterwards."""
        used = self._rows[: self.num_sequences * _LANES * self._row_size]
        rows = used.view(self.num_sequences, _LANES, -1, self._num_bins).sum(dim=1)
        histograms = rows[:, :, :-1].flatten(1)
        sequence_ids = self._sequence_ids[: self.num_sequences].clone()
        used.zero_()
        self.num_sequences = self._num_tokens = 0
        return sequence_ids, histograms


class _BucketTable:
    """The exact bin of a float32 ratio by one table look-up, about ten times faster than a binary search.

    The bits of positive floats are ordered like the floats. Their upper bits name a cell, and cells are so
    narrow that none holds two edges. A cell's entry packs the number of edges before it (upper bits) with the
    distance from its own edge to its end (lower bits). Adding the ratio's position in the cell carries into
    the upper bits exactly when the ratio lies beyond that edge.
    """

    def __init__(
        self, lower_edges: Sequence[float], upper_edges: Sequence[float], *, device: torch.device | str
    ) -> None:
        # Beyond an edge means bits(r) > threshold; for r >= edge the threshold is the float before the edge.
        lower = _edge_bits(lower_edges, "lower")
        upper = [bits - 1 for bits in _edge_bits(upper_edges, "upper")]
        gaps = [b - a for thresholds in (lower, upper) for a, b in pairwise(thresholds)]
        # A cell no wider than the smallest gap holds at most one edge.
        self._shift = min(gaps, default=2**20).bit_length() - 1
        self._first_cell = min(lower[0], upper[0]) >> self._shift
        last_cell = (max(lower[-1], upper[-1]) >> self._shift) + 1
        self._num_cells = last_cell - self._first_cell + 1
        if self._num_cells > _MAX_CELLS:
            raise ValueError("edges lie too close to each other for the range they span; widen the grid's steps")
        # Ratios before the first cell or behind the last one are moved to its start or end.
        self._range = (self._first_cell << self._shift, ((last_cell + 1) << self._shift) - 1)
        self.num_bins = len(lower) + 1 + len(upper) + 1
        assert (self.num_bins + 2) << self._shift < 2**31, "an entry must fit int32"
        parts = [
            self._entries(lower, first_bin=0),
            self._entries([], first_bin=self.num_bins),
            self._entries(upper, first_bin=len(lower) + 1),
        ]
        self._table = torch.cat(parts).to(device=device, dtype=torch.int32)

    def _entries(self, thresholds: list[int], *, first_bin: int) -> Tensor:
        """int64 [cells]: entries minus the bits at the start of their cell, which `bins` adds back."""
        edges = torch.tensor(thresholds, dtype=torch.int64)
        cell_starts = torch.arange(self._first_cell, self._first_cell + self._num_cells) << self._shift
        entries = (torch.searchsorted(edges, cell_starts) + first_bin) << self._shift
        last = 2**self._shift - 1
        entries[(edges >> self._shift) - self._first_cell] += last - (edges & last)
        return entries - cell_starts

    def prepare(self, buffers: _Buffers) -> None:
        """Choose the part of the table by the sign of the buffered advantages: A < 0, A = 0, A > 0."""
        sign = buffers.advantages.sign_()
        buffers.first_cell.copy_(sign).mul_(self._num_cells).add_(self._num_cells - self._first_cell)

    def bins(self, ratio: Tensor, buffers: _Buffers) -> Tensor:
        """int32 [T]: bins of float32 [T] ratios, in `buffers.index`; the bin of A = 0 is `num_bins`."""
        bits = torch.clamp(ratio.view(torch.int32), *self._range, out=buffers.bits)
        cell = torch.bitwise_right_shift(bits, self._shift, out=buffers.cell).add_(buffers.first_cell)
        torch.index_select(self._table, 0, cell, out=buffers.index)
        return buffers.index.add_(bits).bitwise_right_shift_(self._shift)


def _edge_bits(edges: Sequence[float], name: str) -> list[int]:
    values = torch.tensor(edges, dtype=torch.float32)
    bits: list[int] = values.view(torch.int32).tolist()
    valid = bool(bits) and bits[0] > 0 and bool(values.isfinite().all())
    if not valid or any(b <= a for a, b in pairwise(bits)):
        raise ValueError(
            f"{name} edges {tuple(edges)} must be positive, finite and strictly ascending in float32; "
            "choose a grid with wider steps"
        )
    return bits
