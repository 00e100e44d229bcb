"""Ratio statistics: all that calibration needs to know of a step's tokens, in one small integer buffer.

What: for each side (A < 0, A > 0) and each precision (FP8, BF16) a histogram of the importance ratio, with
the candidate bounds as edges, that holds counts and two weighted sums; the same once more for every Poisson
bootstrap replicate over sequences. Why: the share of tokens beyond a bound and the balance of what survives a
pair of bounds are sums over whole bins, so some kilobytes and ONE all-reduce replace a gather of ratios, and
integer sums are the same in any order, micro-batching, padding and data-parallel split.

Every token counts, also those of the first mini-batch, whose ratios are 1 in both precisions: a share is
taken of all tokens that the step's clips act on.

Left out on purpose: the all-reduce itself, `torch.distributed.all_reduce(statistics.state())`, and what the
numbers mean for a bound (`bound_search`).
"""

import math
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from megatron_calclip.algorithms.bootstrap import poisson_weights
from megatron_calclip.algorithms.histograms import (
    Precision,
    Quantity,
    SequenceHistograms,
    TokenCount,
    TokenRatios,
)

__all__ = ["Precision", "Quantity", "RatioStatistics", "Side"]

MAX_SUM = 2**53
"""A bin of one rank saturates here (33.5 million tokens of value 1): 1,023 ranks cannot wrap int64."""

_SPLIT_BITS = 26
"""Histograms are multiplied by bootstrap weights in two parts, both exact in float64: the low 26 bits stay
under 2^26 * 2^8 sequences * 8, the high ones, all sequences together, under 2^(62 - 26) * 8."""


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


class RatioStatistics:
    """Histograms of the ratios of one calibration step; see the module's docstring.

    Bins follow the clip rule of the loss, in float32: a token with A < 0 is clipped at r <= L, one with A > 0
    at r >= H. Tokens with A = 0 get no gradient whatever the bounds, and are left out.

    Args:
        lower_edges: E_L ascending ratios for A < 0: all lower bounds that will be asked for.
        upper_edges: E_H ascending ratios for A > 0.
        ratio_cap: ratios are capped here in `Quantity.WEIGHTED_RATIO`, in both precisions; None for no cap.
        use_loss_weights: False gives each token a loss weight of 1.
        with_weights: False leaves `Quantity.WEIGHT` out, which nothing but the surrogate balance asks for.
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
        with_weights: bool = True,
        weight_scale: float = 1.0,
        num_replicates: int = 100,
        device: torch.device | str = "cpu",
    ) -> None:
        self.lower_edges = tuple(lower_edges)
        self.upper_edges = tuple(upper_edges)
        self.num_replicates = num_replicates
        self._histograms = SequenceHistograms(
            lower_edges,
            upper_edges,
            ratio_cap=ratio_cap,
            use_loss_weights=use_loss_weights,
            with_weights=with_weights,
            weight_scale=weight_scale,
            per_sequence=num_replicates > 0,  # without a bootstrap nothing depends on the sequences
            device=device,
        )
        num_quantities, num_bins = self._histograms.num_quantities, self._histograms.num_bins
        shape = (1 + num_replicates, num_quantities, len(Precision), num_bins)
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
            sequence_ids: int64 [T], GLOBAL ids: a sequence's bootstrap weights are a hash of its id. It may
                be spread over updates; it is fastest when its tokens follow one another.
            weights_unmoved: True for the first mini-batch of a step, in which a ratio other than 1 is noise
                of the forward itself (per-tensor scales over another batch, say). They are counted for the
                report.

        Raises:
            ValueError: when the tensors are not 1-D of one length, or the mask is not bool.
        """
        tokens = TokenRatios(ratio8, ratio16, advantages, importance_weights, loss_weights, response_mask, sequence_ids)
        if any(tensor.shape != ratio8.shape or tensor.dim() != 1 for tensor in tokens):
            shapes = {name: tuple(tensor.shape) for name, tensor in tokens._asdict().items()}
            raise ValueError(f"expected 1-D tensors of one length, got {shapes}; flatten them to [T]")
        if response_mask.dtype != torch.bool:
            raise ValueError(f"response_mask is {response_mask.dtype}; pass a bool mask")
        start = 0
        while start < ratio8.numel():
            num_added, counts = self._histograms.add(tokens.cut(start, ratio8.numel()))
            start += num_added
            if start < ratio8.numel():
                self._flush()
            self._counters[_Counter.NONFINITE] += counts[TokenCount.NONFINITE]
            self._counters[_Counter.MOVED] += counts[TokenCount.OFF_ONE]
            if weights_unmoved:
                self._counters[_Counter.UNMOVED_WEIGHTS] += counts[TokenCount.WEIGHTED]
                self._counters[_Counter.UNMOVED_WEIGHTS_OFF_ONE] += counts[TokenCount.OFF_ONE]

    def _flush(self) -> None:
        """Bring the sums up to date with the tokens of the present block."""
        if self._histograms.num_tokens == 0:
            return
        sequence_ids, histograms = self._histograms.take()
        plain = torch.ones_like(sequence_ids).unsqueeze(1)
        weights = torch.cat([plain, poisson_weights(sequence_ids, num_replicates=self.num_replicates)], dim=1)
        weights = weights.double().T
        # Two float64 products that are exact (see _SPLIT_BITS): far faster than one of int64, which a GPU
        # does not even have.
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
        assert quantity < self._sums.shape[1], f"{quantity!r} was left out of these statistics"
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
        """Tokens with a weight w * |A| * loss weight above 0 whose FP8 ratio is not exactly 1."""
        return self._counter(_Counter.MOVED)

    @property
    def num_unmoved_weights(self) -> int:
        """Tokens with a weight above 0 of the updates with `weights_unmoved`."""
        return self._counter(_Counter.UNMOVED_WEIGHTS)

    @property
    def num_unmoved_weights_off_one(self) -> int:
        """Those of them whose FP8 ratio is not exactly 1."""
        return self._counter(_Counter.UNMOVED_WEIGHTS_OFF_ONE)

    def _counter(self, counter: _Counter) -> int:
        self._flush()
        return int(self._counters[counter])
