"""Fixed-point histograms of importance ratios, one per sequence: the inner part of `statistics`.

What: for each token the bin of its ratio in two precisions, and what it adds there, as integers. Tensors on a CPU go
through one compiled loop (`histogram_loop`), which finds bins by table look-up; tensors on a device through torch
operations, which also define the result: both give the same integers.

Left out on purpose: sums over sequences and bootstrap replicates (`statistics`).
"""

import math
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_calclip.algorithms.histogram_loop import BinRule, WeightRule, add_tokens
from megatron_calclip.compiled import memory_of

FRACTION_BITS = 28
"""Weighted sums are held in units of 2^-28; a token's value is truncated to it."""
MAX_TOKEN_VALUE = 2.0**14
"""What one token adds to a weighted sum saturates here. FP8 ratios of 843 have been seen; TIS weights end at
2 and normalised advantages at about 8."""

MAX_TOKENS = 2**20
"""Most tokens of the histograms: 2^20 of value 2^14, in units of 2^-28, stay below 2^63."""
MAX_SEQUENCES = 2**8
"""Most sequences of the histograms."""
MAX_CELL_BITS = 12
"""Logarithm of the largest table for finding bins: 16 KiB per sign of A."""


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

    def map(self, function: Callable[[Tensor], Tensor]) -> "TokenRatios":
        """The function applied to all fields."""
        return TokenRatios._make(map(function, self))

    def cut(self, start: int, stop: int) -> "TokenRatios":
        """The tokens start <= t < stop."""
        return self.map(lambda values: values[start:stop])


class TokenCount(IntEnum):
    """Tokens that `SequenceHistograms` counts along the way."""

    NONFINITE = 0
    """Inside the mask with a NaN or inf; they are in no histogram."""
    WEIGHTED = 1
    """Inside the mask with w * |A| * loss weight above 0."""
    OFF_ONE = 2
    """Those of them with an FP8 ratio that is not exactly 1."""


class SequenceHistograms:
    """Histograms of up to `MAX_SEQUENCES` sequences and `MAX_TOKENS` tokens.

    A sequence whose tokens do not follow one another gets several rows, which no sum over sequences notices.

    Args:
        lower_edges: ascending ratios; bins of A < 0 hold edge < r <= next edge.
        upper_edges: ascending ratios; bins of A > 0 hold edge <= r < next edge.
        ratio_cap: see `Quantity.WEIGHTED_RATIO`.
        use_loss_weights: False gives each token a loss weight of 1.
        with_weights: False leaves `Quantity.WEIGHT` out.
        weight_scale: factor of all weights.
        per_sequence: False puts all tokens into one row.
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
        per_sequence: bool,
        device: torch.device | str,
    ) -> None:
        # Beyond an edge means r > threshold; for r >= edge the threshold is the float before the edge.
        lower = _checked_edges(lower_edges, "lower")
        upper = torch.nextafter(_checked_edges(upper_edges, "upper"), torch.zeros(()))
        self._thresholds = lower.to(device), upper.to(device)
        self.num_bins = len(lower) + 1 + len(upper) + 1
        self.num_quantities = len(Quantity) if with_weights else len(Quantity) - 1
        self._weight_rule = WeightRule(
            ratio_cap=np.float32(math.inf if ratio_cap is None else ratio_cap),
            use_loss_weights=use_loss_weights,
            scale=np.float32(weight_scale * 2.0**FRACTION_BITS),
            largest=np.float32(MAX_TOKEN_VALUE * 2.0**FRACTION_BITS),
        )
        self._per_sequence = per_sequence
        self._device = torch.device(device)
        self.num_tokens = 0
        self.num_sequences = 0

    # Statistics that are only loaded and read never need these.
    @cached_property
    def _rows(self) -> Tensor:
        num_rows = MAX_SEQUENCES if self._per_sequence else 1
        shape = (num_rows, self.num_quantities, len(Precision), self.num_bins)
        return torch.zeros(shape, dtype=torch.int64, device=self._device)

    @cached_property
    def _sequence_ids(self) -> Tensor:
        return torch.zeros(len(self._rows), dtype=torch.int64, device=self._device)

    @cached_property
    def _bin_rule(self) -> BinRule:
        return bin_rule(*self._thresholds)

    def add(self, tokens: TokenRatios) -> tuple[int, Tensor]:
        """Add as many of the tokens as there is room for before `take`, from the first one on.

        Returns:
            how many were added: 0 only when there is no room at all; and int64 counts of them by `TokenCount`.
        """
        tokens = tokens.cut(0, MAX_TOKENS - self.num_tokens)
        # Float32 is what the loss compares ratios with bounds in.
        tokens = TokenRatios._make([*(values.float() for values in tokens[:5]), *tokens[5:]])
        tokens = tokens.map(torch.Tensor.contiguous)
        add = self._add_in_loop if self._device.type == "cpu" else self._add_by_operations
        num_added, counts = add(tokens)
        self.num_tokens += num_added
        return num_added, counts

    def _add_in_loop(self, tokens: TokenRatios) -> tuple[int, Tensor]:
        counts = torch.zeros(len(TokenCount), dtype=torch.int64)
        num_added, self.num_sequences = add_tokens(
            tuple(map(memory_of, tokens)),
            self._bin_rule,
            self._weight_rule,
            self._per_sequence,
            memory_of(self._rows),
            memory_of(self._sequence_ids),
            self.num_sequences,
            memory_of(counts),
        )
        return num_added, counts

    def _add_by_operations(self, tokens: TokenRatios) -> tuple[int, Tensor]:
        tokens, rows = self._new_rows(tokens)
        num_added = len(rows)

        finite = torch.stack([tensor.isfinite() for tensor in tokens[:5]]).all(dim=0)
        num_nonfinite = (tokens.response_mask & ~finite).sum()
        inside = (tokens.response_mask & finite & (tokens.advantages != 0)).nonzero().squeeze(1)
        tokens, rows = tokens.map(lambda values: values[inside]), rows[inside]

        rule = self._weight_rule
        weight = tokens.advantages.abs() * tokens.importance_weights
        if rule.use_loss_weights:
            weight = weight * tokens.loss_weights
        weight = (weight * float(rule.scale)).clamp_(max=float(rule.largest))
        for precision, ratio in ((Precision.FP8, tokens.ratio8), (Precision.BF16, tokens.ratio16)):
            weighted_ratio = (ratio.clamp(max=float(rule.ratio_cap)) * weight).clamp_(max=float(rule.largest))
            # Bins of A < 0, then those of A > 0.
            lower, upper = (torch.bucketize(ratio, thresholds) for thresholds in self._thresholds)
            bins = torch.where(tokens.advantages < 0, lower, len(self._thresholds[0]) + 1 + upper)
            values = (torch.ones_like(bins), weighted_ratio.long(), weight.long())
            for quantity, value in enumerate(values[: self.num_quantities]):
                index = ((rows * self.num_quantities + quantity) * len(Precision) + precision) * self.num_bins + bins
                self._rows.view(-1).index_add_(0, index, value)

        is_weighted = weight > 0
        return num_added, torch.stack([num_nonfinite, is_weighted.sum(), (is_weighted & (tokens.ratio8 != 1)).sum()])

    def _new_rows(self, tokens: TokenRatios) -> tuple[TokenRatios, Tensor]:
        """The first tokens, as many as have rows, and the row of each, int64 [tokens]; their rows are taken."""
        if not self._per_sequence:
            self.num_sequences = 1
            return tokens, torch.zeros_like(tokens.sequence_ids)
        first_row, room = self.num_sequences, len(self._rows) - self.num_sequences
        sequence_ids, lengths = torch.unique_consecutive(tokens.sequence_ids, return_counts=True)
        sequence_ids, lengths = sequence_ids[:room], lengths[:room]
        self.num_sequences += len(sequence_ids)
        self._sequence_ids[first_row : self.num_sequences] = sequence_ids
        rows = torch.arange(first_row, self.num_sequences, device=self._device).repeat_interleave(lengths)
        return tokens.cut(0, len(rows)), rows

    def take(self) -> tuple[Tensor, Tensor]:
        """Ids int64 [S] and histograms int64 [S, quantities * precisions * bins]; nothing is held afterwards."""
        used = self._rows[: self.num_sequences]
        histograms, sequence_ids = used.flatten(1).clone(), self._sequence_ids[: self.num_sequences].clone()
        used.zero_()
        self.num_sequences = self.num_tokens = 0
        return sequence_ids, histograms


def bin_rule(lower: Tensor, upper: Tensor) -> BinRule:
    """How the loop finds bins.

    The bits of positive floats are ordered like the floats, and their upper bits name a cell. A table holds the number
    of thresholds before each cell; in the cell at most `depth` are left to be compared with.

    Args:
        lower: float32 [E_L], ascending thresholds of A < 0.
        upper: float32 [E_H], those of A > 0.
    """
    bits = [thresholds.numpy().view(np.int32).astype(np.int64) for thresholds in (lower, upper)]
    first, last = min(side[0] for side in bits), max(side[-1] for side in bits)
    smallest_gap = min((np.diff(side).min() for side in bits if len(side) > 1), default=last)
    # As narrow as the smallest gap, unless the table would leave the first-level cache.
    shift = max(int(smallest_gap).bit_length() - 1, int(last - first).bit_length() - MAX_CELL_BITS, 0)
    cells = np.arange(first >> shift, (last >> shift) + 2)
    tables = np.stack([np.searchsorted(side, cells << shift) for side in bits])
    depth = max(int(np.bincount((side >> shift) - cells[0]).max()) for side in bits)
    infinity = np.array([math.inf], np.float32).view(np.int32)
    return BinRule(
        thresholds=np.concatenate([bits[0], infinity, bits[1], infinity]),
        first_thresholds=tables + np.array([[0], [len(lower) + 1]]),  # bins of A > 0 come after those of A < 0
        shift=shift,
        first_cell=int(cells[0]),
        depth=depth,
    )


def _checked_edges(edges: Sequence[float], name: str) -> Tensor:
    values = torch.tensor(edges, dtype=torch.float32)
    valid = len(edges) > 0 and bool((values > 0).all() & values.isfinite().all() & (values.diff() > 0).all())
    if not valid:
        raise ValueError(
            f"{name} edges {tuple(edges)} must be positive, finite and strictly ascending in float32; "
            "choose a grid with wider steps"
        )
    return values
