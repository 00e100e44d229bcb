"""Ratio statistics: all that calibration needs to know of a step's tokens, in one small integer buffer.

What: for each side (A < 0, A > 0) and each precision (FP8, BF16) a histogram of the importance ratio, with the
candidate bounds as edges, that holds counts and two weighted sums; the same once more for every Poisson
bootstrap replicate over sequences. Why: the share of tokens beyond a bound and the balance of what survives
a pair of bounds are sums over whole bins, so some kilobytes and ONE all-reduce replace a gather of ratios, and
integer sums are the same in any order, micro-batching, padding and data-parallel split.

Every token counts, also those of the first mini-batch, whose ratios are 1 in both precisions: a share is
taken of all tokens that the step's clips act on.

Left out on purpose: the all-reduce itself, `torch.distributed.all_reduce(statistics.state())`, and what the
numbers mean for a bound (`calibration`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_calclip.algorithms.bootstrap import poisson_weights

FRACTION_BITS = 28
"""Weighted sums are held in units of 2^-28; a token's value is truncated to it."""
MAX_TOKEN_VALUE = 2.0**14
"""What one token adds to a weighted sum saturates here. Ratios of 843 have been seen, TIS weights end at 2 and
normalised advantages at about 8."""
MAX_SUM = 2**53
"""A bin of one rank saturates here (33.5 million tokens of value 1), so that 1,023 ranks cannot wrap int64."""

_CHUNK_TOKENS = 2**16
"""Tokens handled at a time: temporaries are allocated once, and fit the cache."""
_BLOCK_TOKENS = 2**20
"""Most tokens between two `flush` calls: 2^20 of value 2^14 in units of 2^-28 stay below 2^63."""
_BLOCK_SEQUENCES = 2**8
"""Most per-sequence histograms held between two `flush` calls."""
_SPLIT_BITS = 26
"""Histograms are multiplied by bootstrap weights in two parts of fewer bits, both exact in float64: the low one
stays under 2^26 * 2^8 sequences * 13, the high one, all sequences together, under 2^(62 - 26) * 13."""


class Quantity(IntEnum):
    """What a bin adds up."""

    COUNT = 0
    """Tokens."""
    WEIGHT = 1
    """w * |A| * loss weight, in units of 2^-28."""
    WEIGHTED_RATIO = 2
    """w * |A| * loss weight * min(r, cap), in units of 2^-28."""


class Precision(IntEnum):
    """Which forward a ratio comes from."""

    FP8 = 0
    """The learner's own, in its training precision."""
    BF16 = 1
    """The shadow on the master weights."""


class Side(IntEnum):
    """Sign of the advantage: the lower bound clips the negative side, the upper bound the positive one."""

    NEGATIVE = 0
    POSITIVE = 1


class _Counter(IntEnum):
    """Plain counters at the head of the buffer."""

    NONFINITE = 0
    SATURATED = 1
    MOVED = 2
    UNMOVED_WEIGHTS = 3
    UNMOVED_WEIGHTS_OFF_ONE = 4


class _Tokens(NamedTuple):
    """The inputs of `RatioStatistics.update`, each [T]."""

    ratio8: Tensor
    ratio16: Tensor
    advantages: Tensor
    importance_weights: Tensor
    loss_weights: Tensor
    response_mask: Tensor
    sequence_ids: Tensor

    def cut(self, start: int, stop: int) -> "_Tokens":
        """The tokens start <= t < stop."""
        return _Tokens(*(tensor[start:stop] for tensor in self))


class RatioStatistics:
    """Histograms of the ratios of one calibration step; see the module's docstring.

    Bins follow the clip rule of the loss, in float32: a token with A < 0 is clipped at r <= L, one with A > 0
    at r >= H. Tokens with A = 0 get no gradient whatever the bounds, and are left out.

    Args:
        lower_edges: E_L ascending ratios for A < 0: all lower bounds that will be asked for.
        upper_edges: E_H ascending ratios for A > 0.
        ratio_cap: ratios are capped here in `Quantity.WEIGHTED_RATIO`, in both precisions; None for no cap.
        use_loss_weights: False gives each token a loss weight of 1.
        weight_scale: a factor that brings the mean of the loss weights near 1, where fixed point is precise;
            the same on all ranks and in all updates. For weights that sum to 1 over a mini-batch it is the
            number of the mini-batch's response tokens. It cancels in a balance of two sums.
        num_replicates: R, bootstrap replicates; 0 for none.
        device: where tokens and sums lie.

    Raises:
        ValueError: when edges are not positive, finite and strictly ascending in float32.
    """

    def __init__(
        self,
        lower_edges: Sequence[float],
        upper_edges: Sequence[float],
        *,
        ratio_cap: float | None = None,
        use_loss_weights: bool = True,
        weight_scale: float = 1.0,
        num_replicates: int = 100,
        device: torch.device | str = "cpu",
    ) -> None:
        self.lower_edges = tuple(lower_edges)
        self.upper_edges = tuple(upper_edges)
        self.num_replicates = num_replicates
        buckets = _BucketTable(lower_edges, upper_edges, device=device)
        self._block = _Block(
            buckets,
            ratio_cap=ratio_cap,
            use_loss_weights=use_loss_weights,
            weight_scale=weight_scale,
            device=device,
        )
        shape = (1 + num_replicates, len(Quantity), len(Precision), buckets.num_bins)
        self._buffer = torch.zeros(len(_Counter) + math.prod(shape), dtype=torch.int64, device=device)
        self._counters = self._buffer[: len(_Counter)]
        self._sums = self._buffer[len(_Counter) :].view(shape)

    def state(self) -> Tensor:
        """int64 [K], K constant in the number of tokens: the live buffer itself.

        One all-reduce (sum) of it, in place, makes the statistics global.
        """
        self._flush()
        return self._buffer

    def load(self, state: Tensor) -> None:
        """Replace the contents by those of a buffer that `state` returned for the same edges.

        Raises:
            ValueError: when its size or type does not fit.
        """
        if state.shape != self._buffer.shape or state.dtype != torch.int64:
            raise ValueError(
                f"state is {state.dtype} {tuple(state.shape)}, these statistics hold int64 "
                f"{tuple(self._buffer.shape)}; make them with the same edges and number of replicates"
            )
        self._flush()
        self._buffer.copy_(state)

    def add(self, state: Tensor) -> None:
        """Pool: add a buffer that `state` returned for the same edges; saturates instead of wrapping."""
        assert state.shape == self._buffer.shape
        self._flush()
        limit = torch.iinfo(torch.int64).max
        self._buffer += torch.minimum(state.to(self._buffer.device), limit - self._buffer)

    @property
    def num_bytes(self) -> int:
        """Bytes that one all-reduce of `state()` carries."""
        return self._buffer.numel() * self._buffer.element_size()

    @torch.no_grad()
    def update(
        self,
        ratio8: Tensor,
        ratio16: Tensor,
        *,
        advantages: Tensor,
        importance_weights: Tensor,
        loss_weights: Tensor,
        response_mask: Tensor,
        sequence_ids: Tensor,
        weights_unmoved: bool = False,
    ) -> None:
        """Add the tokens of a mini-batch, or of any part of one.

        Args:
            ratio8: [T], pi / pi_old in the learner's training precision: what the loss clips.
            ratio16: [T], the same by the BF16 shadow, paired with `ratio8` token by token.
            advantages: [T].
            importance_weights: [T], w >= 0.
            loss_weights: [T] >= 0, the weight of each token in the loss, up to a common factor.
            response_mask: bool [T]. Nothing outside it matters, NaN and inf included.
            sequence_ids: int64 [T], GLOBAL ids: a sequence's bootstrap weights are a hash of its id. It may be
                spread over updates; it is fastest when its tokens follow one another.
            weights_unmoved: True for the first mini-batch of a step, in which a ratio other than 1 is noise of
                the forward itself (per-tensor scales over another batch, say). They are counted for the report.

        Raises:
            ValueError: when the tensors are not 1-D of one length.
        """
        tokens = _Tokens(
            ratio8, ratio16, advantages, importance_weights, loss_weights, response_mask, sequence_ids
        )
        if any(tensor.shape != ratio8.shape or tensor.dim() != 1 for tensor in tokens):
            shapes = {name: tuple(tensor.shape) for name, tensor in tokens._asdict().items()}
            raise ValueError(f"expected 1-D tensors of one length, got {shapes}; flatten them to [T]")
        for start in range(0, ratio8.numel(), _CHUNK_TOKENS):
            self._add_chunk(tokens.cut(start, start + _CHUNK_TOKENS), weights_unmoved)

    def _add_chunk(self, tokens: _Tokens, weights_unmoved: bool) -> None:
        num_tokens = tokens.sequence_ids.numel()
        buffers = self._block.buffers.cut(num_tokens)
        starts = _run_starts(tokens.sequence_ids, buffers)
        if starts.numel() > _BLOCK_SEQUENCES:
            self._add_chunk(tokens.cut(0, num_tokens // 2), weights_unmoved)
            self._add_chunk(tokens.cut(num_tokens // 2, num_tokens), weights_unmoved)
            return
        if not self._block.has_room(num_tokens=num_tokens, num_sequences=starts.numel()):
            self._flush()
        tokens = self._sanitized(tokens, buffers)
        self._block.add(tokens, starts, buffers)

        off_one = torch.sub(tokens.ratio8, 1, out=buffers.scratch).mul_(tokens.advantages)
        num_off_one = torch.count_nonzero(off_one)
        self._counters[_Counter.MOVED] += num_off_one
        if weights_unmoved:
            self._counters[_Counter.UNMOVED_WEIGHTS] += torch.count_nonzero(tokens.advantages)
            self._counters[_Counter.UNMOVED_WEIGHTS_OFF_ONE] += num_off_one

    def _sanitized(self, tokens: _Tokens, buffers: "_Buffers") -> _Tokens:
        """Float32 and finite everywhere, with an advantage of 0 outside the mask."""
        values = [tensor.float().contiguous() for tensor in tokens[:5]]
        mask = tokens.response_mask
        # One look at the sums instead of five passes: a sum is finite if all its terms are (and if it is not
        # although they are, the careful way below is merely slower).
        if not bool(torch.isfinite(torch.stack([value.sum() for value in values]).sum())):
            finite = torch.stack([torch.isfinite(value) for value in values]).all(dim=0)
            self._counters[_Counter.NONFINITE] += (mask & ~finite).sum()
            mask = mask & finite
            values = [torch.where(mask, value, 1.0) for value in values]
        ratio8, ratio16, advantages, importance_weights, loss_weights = values
        advantages = buffers.advantages.copy_(mask.view(torch.uint8)).mul_(advantages)
        return _Tokens(
            ratio8, ratio16, advantages, importance_weights, loss_weights, mask, tokens.sequence_ids
        )

    def _flush(self) -> None:
        """Bring the sums up to date with the tokens of the present block."""
        if self._block.num_sequences == 0:
            return
        sequence_ids, histograms = self._block.take()
        plain = torch.ones_like(sequence_ids).unsqueeze(1)
        weights = torch.cat([plain, poisson_weights(sequence_ids, num_replicates=self.num_replicates)], dim=1)
        weights = weights.double().T
        # Two float64 products that are exact (see _SPLIT_BITS): far faster than one of int64, which a GPU does
        # not even have.
        high = (weights @ (histograms >> _SPLIT_BITS).double()).clamp_(max=MAX_SUM >> _SPLIT_BITS)
        low = weights @ (histograms & (2**_SPLIT_BITS - 1)).double()
        increment = high.long().bitwise_left_shift_(_SPLIT_BITS).add_(low.long())
        self._sums.add_(increment.view(self._sums.shape)).clamp_(max=MAX_SUM)
        self._counters[_Counter.SATURATED] = torch.count_nonzero(self._sums == MAX_SUM)

    def below(self, quantity: Quantity, *, precision: Precision, side: Side) -> Tensor:
        """Sums over the tokens on the low side of each edge.

        For `Side.NEGATIVE` these are the tokens with r <= edge, which a lower bound there clips; for
        `Side.POSITIVE` those with r < edge, which an upper bound there keeps.

        Returns:
            int64 [1 + R, E_L or E_H] on the CPU: row 0 from the tokens as they are, then the replicates.
        """
        return self._bins(quantity, precision, side).cumsum(dim=1)[:, :-1]

    def total(self, quantity: Quantity, *, precision: Precision, side: Side) -> Tensor:
        """int64 [1 + R] on the CPU: sums over all tokens of a side; the rows are those of `below`."""
        return self._bins(quantity, precision, side).sum(dim=1)

    def _bins(self, quantity: Quantity, precision: Precision, side: Side) -> Tensor:
        self._flush()
        num_lower_bins = len(self.lower_edges) + 1
        bins = slice(num_lower_bins) if side is Side.NEGATIVE else slice(num_lower_bins, None)
        return self._sums[:, quantity, precision, bins].cpu()

    @property
    def num_nonfinite(self) -> int:
        """Tokens inside the mask with a NaN or inf; they are in no sum."""
        return self._counter(_Counter.NONFINITE)

    @property
    def is_saturated(self) -> bool:
        """True when a bin reached `MAX_SUM` on some rank: its sum is too small then."""
        return self._counter(_Counter.SATURATED) > 0

    @property
    def num_moved(self) -> int:
        """Tokens with A != 0 whose FP8 ratio is not exactly 1."""
        return self._counter(_Counter.MOVED)

    @property
    def num_unmoved_weights(self) -> int:
        """Tokens with A != 0 of the updates with `weights_unmoved`."""
        return self._counter(_Counter.UNMOVED_WEIGHTS)

    @property
    def num_unmoved_weights_off_one(self) -> int:
        """Those of them whose FP8 ratio is not exactly 1."""
        return self._counter(_Counter.UNMOVED_WEIGHTS_OFF_ONE)

    def _counter(self, counter: _Counter) -> int:
        self._flush()
        return int(self._counters[counter])


@dataclass(frozen=True)
class _Buffers:
    """Temporaries of one chunk, allocated once: fresh ones would cost more in page faults than the arithmetic."""

    advantages: Tensor
    weight: Tensor
    scratch: Tensor
    first_cell: Tensor
    bits: Tensor
    cell: Tensor
    index: Tensor
    row_offset: Tensor
    fixed_weight: Tensor
    weighted_ratio: Tensor
    ones: Tensor
    changed: Tensor

    @classmethod
    def allocate(cls, num_tokens: int, device: torch.device | str) -> "_Buffers":
        """Buffers for chunks of up to num_tokens."""
        dtypes = [torch.float32] * 3 + [torch.int32] * 5 + [torch.int64] * 3 + [torch.bool]
        return cls(*(torch.ones(num_tokens, dtype=dtype, device=device) for dtype in dtypes))

    def cut(self, num_tokens: int) -> "_Buffers":
        """Views of the first num_tokens."""
        return _Buffers(*(getattr(self, field.name)[:num_tokens] for field in fields(self)))


def _run_starts(sequence_ids: Tensor, buffers: _Buffers) -> Tensor:
    """int64 [S]: where runs of equal ids start."""
    changed = buffers.changed
    changed[:1] = True
    torch.ne(sequence_ids[1:], sequence_ids[:-1], out=changed[1:])
    return changed.nonzero().squeeze(1)


class _Block:
    """Histograms per sequence, before bootstrap weights turn them into sums over sequences.

    A sequence that occurs in several chunks gets several rows, which changes no sum.
    """

    def __init__(
        self,
        buckets: "_BucketTable",
        *,
        ratio_cap: float | None,
        use_loss_weights: bool,
        weight_scale: float,
        device: torch.device | str,
    ) -> None:
        self.buffers = _Buffers.allocate(_CHUNK_TOKENS, device)
        self.num_sequences = 0
        self._num_tokens = 0
        self._buckets = buckets
        self._ratio_cap = math.inf if ratio_cap is None else ratio_cap
        self._use_loss_weights = use_loss_weights
        self._scale = weight_scale * 2.0**FRACTION_BITS
        # One bin more than the sums have: there go the tokens that count nowhere.
        self._num_bins = buckets.num_bins + 1
        self._row_size = len(Quantity) * len(Precision) * self._num_bins
        size = _BLOCK_SEQUENCES * self._row_size
        self._histograms = torch.zeros(size, dtype=torch.int64, device=device)
        self._sequence_ids = torch.zeros(_BLOCK_SEQUENCES, dtype=torch.int64, device=device)

    def has_room(self, *, num_tokens: int, num_sequences: int) -> bool:
        """Whether a chunk of this size can be added."""
        fits = self.num_sequences + num_sequences <= _BLOCK_SEQUENCES
        return fits and self._num_tokens + num_tokens <= _BLOCK_TOKENS

    def add(self, tokens: _Tokens, starts: Tensor, buffers: _Buffers) -> None:
        """Add a chunk whose runs of equal sequence ids begin at `starts`."""
        rows = slice(self.num_sequences, self.num_sequences + starts.numel())
        self._sequence_ids[rows] = tokens.sequence_ids[starts]
        row_offset = buffers.row_offset.zero_()
        row_offset[starts] = self._row_size
        row_offset[0] = self.num_sequences * self._row_size
        row_offset.cumsum_(0)

        largest = MAX_TOKEN_VALUE * 2.0**FRACTION_BITS
        weight = torch.abs(tokens.advantages, out=buffers.weight).mul_(tokens.importance_weights)
        if self._use_loss_weights:
            weight.mul_(tokens.loss_weights)
        weight.mul_(self._scale).clamp_(max=largest)
        fixed_weight = buffers.fixed_weight.copy_(weight)
        self._buckets.prepare(tokens.advantages, buffers)
        for precision, ratio in ((Precision.FP8, tokens.ratio8), (Precision.BF16, tokens.ratio16)):
            index = self._buckets.bins(ratio, buffers).add_(row_offset)
            capped = torch.clamp(ratio, max=self._ratio_cap, out=buffers.scratch)
            weighted_ratio = buffers.weighted_ratio.copy_(capped.mul_(weight).clamp_(max=largest))
            for quantity, value in zip(Quantity, (buffers.ones, fixed_weight, weighted_ratio), strict=True):
                # A view that starts at the channel shifts every index by it, without another tensor.
                channel = (quantity * len(Precision) + precision) * self._num_bins
                self._histograms[channel:].index_add_(0, index, value)
        self.num_sequences += starts.numel()
        self._num_tokens += tokens.sequence_ids.numel()

    def take(self) -> tuple[Tensor, Tensor]:
        """The sequences int64 [S] and their histograms int64 [S, row], after which the block is empty."""
        used = self._histograms[: self.num_sequences * self._row_size]
        histograms = used.view(self.num_sequences, -1, self._num_bins)[:, :, :-1].flatten(1).clone()
        sequence_ids = self._sequence_ids[: self.num_sequences].clone()
        used.zero_()
        self.num_sequences = self._num_tokens = 0
        return sequence_ids, histograms


class _BucketTable:
    """Exact bin of a float32 ratio by one table look-up, about ten times faster than a binary search.

    The bits of positive floats are ordered like the floats. Their upper bits name a cell, and cells are so
    narrow that none holds two edges. A cell's entry packs the number of edges before it (upper bits) with what
    the lower bits of a ratio in this cell must exceed to lie beyond the cell's own edge, subtracted from its
    largest value (lower bits). Adding the ratio's lower bits carries into the upper bits exactly then.
    """

    def __init__(
        self, lower_edges: Sequence[float], upper_edges: Sequence[float], *, device: torch.device | str
    ) -> None:
        # r > edge on the lower side is bits(r) > bits(edge); r >= edge on the upper side bits(r) > bits(edge) - 1.
        lower = _edge_bits(lower_edges, "lower")
        upper = [bits - 1 for bits in _edge_bits(upper_edges, "upper")]
        gaps = [b - a for side in (lower, upper) for a, b in pairwise(side)]
        # A cell no wider than the smallest gap holds at most one edge.
        self._shift = min(gaps, default=2**20).bit_length() - 1
        self._first_cell = min(lower[0], upper[0]) >> self._shift
        last_cell = (max(lower[-1], upper[-1]) >> self._shift) + 1
        self._num_cells = last_cell - self._first_cell + 1
        # Ratios before the first cell or after the last one are moved to its start or end.
        self._bits_range = (self._first_cell << self._shift, ((last_cell + 1) << self._shift) - 1)
        self._low_bits = 2**self._shift - 1
        self.num_bins = len(lower) + 1 + len(upper) + 1
        nowhere = torch.full((self._num_cells,), self.num_bins << self._shift, dtype=torch.int64)
        parts = [self._entries(lower, first_bin=0), nowhere, self._entries(upper, first_bin=len(lower) + 1)]
        self._table = torch.cat(parts).to(device=device, dtype=torch.int32)

    def _entries(self, thresholds: list[int], *, first_bin: int) -> Tensor:
        edges = torch.tensor(thresholds, dtype=torch.int64)
        cell_starts = torch.arange(self._first_cell, self._first_cell + self._num_cells) << self._shift
        entries = (torch.searchsorted(edges, cell_starts) + first_bin) << self._shift
        entries[(edges >> self._shift) - self._first_cell] += self._low_bits - (edges & self._low_bits)
        return entries

    def prepare(self, advantages: Tensor, buffers: _Buffers) -> None:
        """Choose the part of the table by the sign of the advantages [T]: A < 0, A = 0, A > 0."""
        sign = torch.sign(advantages, out=buffers.scratch)
        buffers.first_cell.copy_(sign).add_(1).mul_(self._num_cells).sub_(self._first_cell)

    def bins(self, ratio: Tensor, buffers: _Buffers) -> Tensor:
        """int32 [T]: bins of float32 [T]; those of A < 0, then those of A > 0, then `num_bins` for A = 0."""
        bits = torch.clamp(ratio.view(torch.int32), *self._bits_range, out=buffers.bits)
        cell = torch.bitwise_right_shift(bits, self._shift, out=buffers.cell).add_(buffers.first_cell)
        torch.index_select(self._table, 0, cell, out=buffers.index)
        return buffers.index.add_(bits.bitwise_and_(self._low_bits)).bitwise_right_shift_(self._shift)


def _edge_bits(edges: Sequence[float], name: str) -> list[int]:
    values = torch.tensor(edges, dtype=torch.float32)
    bits: list[int] = values.view(torch.int32).tolist()
    if not bits or bits[0] <= 0 or not bool(values.isfinite().all()) or any(b <= a for a, b in pairwise(bits)):
        raise ValueError(
            f"{name} edges {tuple(edges)} must be positive, finite and strictly ascending in float32; "
            "choose a grid with wider steps"
        )
    return bits
