"""The loop over the tokens of `histograms` for tensors on a CPU, compiled.

It does what `SequenceHistograms._add_by_operations` does, in the same float32 operations; tests compare the two. A block
of tokens is weighed first, in vector instructions and without branches; only finding bins and adding to them, which no
vector instruction can do, goes token by token.
"""

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron_calclip.compiled import bits_of, compiled, unsigned

Tokens: TypeAlias = tuple[NDArray[Any], ...]

BLOCK = 1024
"""Tokens that are weighed at once; what is noted of them stays in the first-level cache."""
_MAGNITUDE, _INFINITY = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)


class BinRule(NamedTuple):
    """See `histograms.bin_rule`."""

    thresholds: NDArray[np.int64]
    """[bins] bits of those of A < 0 and infinity, those of A > 0 and infinity: a token's bin is the index of the first
    threshold of its side that its ratio does not exceed."""
    first_thresholds: NDArray[np.int64]
    """[2, cells] for A < 0 and for A > 0, index of the first threshold that is not below the cell."""
    shift: int
    """A float's bits shifted right by it are its cell."""
    first_cell: int
    """That of column 0; smaller ratios belong there too, and larger ones than those of the last cell in that one."""
    depth: int
    """Most thresholds of a cell."""


class WeightRule(NamedTuple):
    """How tokens are weighted, in units of the fixed point."""

    ratio_cap: np.float32
    use_loss_weights: bool
    scale: np.float32
    largest: np.float32


class Block(NamedTuple):
    """What is noted of up to `BLOCK` tokens; zeros for those that are outside the mask, not finite, or have A = 0."""

    bits: NDArray[np.int32]
    """[2, BLOCK] of the ratios in FP8 and BF16."""
    sides: NDArray[np.int32]
    """[BLOCK] 0 for A < 0, 1 for A > 0."""
    ones: NDArray[np.int32]
    """[BLOCK] 1 for tokens that are in the histograms."""
    weighted_ratios: NDArray[np.float32]
    """[2, BLOCK] in units of the fixed point, of the ratios in FP8 and BF16."""
    weights: NDArray[np.float32]
    """[BLOCK] in the same units."""


@compiled
def add_tokens(
    tokens: Tokens,
    bins: BinRule,
    weights: WeightRule,
    per_sequence: bool,
    rows: NDArray[np.int64],
    row_ids: NDArray[np.int64],
    num_rows: int,
    counts: NDArray[np.int64],
) -> tuple[int, int]:
    """Add tokens to the rows of their sequences.

    Args:
        tokens: the fields of `TokenRatios`: float32 but for the last two, bool and int64.
        bins: how bins are found.
        weights: how tokens are weighted.
        per_sequence: False puts all tokens into the first row.
        rows: [S, quantities, precisions, bins] sums.
        row_ids: [S] ids of the sequences that have a row.
        num_rows: how many have.
        counts: [`TokenCount`] is added to.

    Returns:
        how many tokens were added before a sequence needed a row that is not there; and how many sequences have a row now.
    """
    sequence_ids = tokens[6]
    block = Block(
        np.empty((2, BLOCK), np.int32),
        np.empty(BLOCK, np.int32),
        np.empty(BLOCK, np.int32),
        np.empty((2, BLOCK), np.float32),
        np.empty(BLOCK, np.float32),
    )
    if not per_sequence:
        num_rows = 1
    start = 0
    while start < len(sequence_ids):
        stop = min(start + BLOCK, len(sequence_ids))
        if per_sequence:
            stop = _end_of_sequence(sequence_ids, start, stop)
            if num_rows == 0 or sequence_ids[start] != row_ids[num_rows - 1]:
                if num_rows == len(rows):
                    break
                row_ids[num_rows] = sequence_ids[start]
                num_rows += 1
        _weigh(tokens, start, stop, weights, block, counts)
        _add_to_bins(block, stop - start, bins, rows[num_rows - 1])
        start = stop
    return start, num_rows


@compiled
def _end_of_sequence(sequence_ids: NDArray[np.int64], start: int, stop: int) -> int:
    """The first token from `start` on, at most `stop`, that belongs to another sequence."""
    end = start + 1
    while end < stop and sequence_ids[end] == sequence_ids[start]:
        end += 1
    return end


@compiled
def _magnitude(value: np.float32) -> np.uint32:
    """Bits without the sign: ordered as the magnitudes are, with infinity and then NaN behind all numbers."""
    return np.uint32(bits_of(value) & _MAGNITUDE)


@compiled
def _weigh(tokens: Tokens, start: int, stop: int, weights: WeightRule, block: Block, counts: NDArray[np.int64]) -> None:
    """Note the tokens start <= t < stop, and add to the counts."""
    ratio8, ratio16, advantages, importance_weights, loss_weights, mask, _ = tokens
    bits, sides, ones, weighted_ratios, block_weights = block
    cap, use_loss_weights, scale, largest = weights
    zero = np.float32(0)
    num_nonfinite = num_weighted = num_off_one = 0
    for i in range(unsigned(stop - start)):
        t = unsigned(start) + i
        r8, r16, advantage = ratio8[t], ratio16[t], advantages[t]
        importance, loss_weight = importance_weights[t], loss_weights[t]
        ratios = max(_magnitude(r8), _magnitude(r16))
        factors = max(_magnitude(advantage), _magnitude(importance))
        finite = max(max(ratios, factors), _magnitude(loss_weight)) < _INFINITY
        kept = mask[t] & finite & (advantage != 0)
        weight = abs(advantage) * importance
        if use_loss_weights:
            weight = weight * loss_weight
        weight = weight * scale
        weight = largest if weight > largest else weight
        weight = weight if kept else zero
        weighted8 = (cap if r8 > cap else r8) * weight
        weighted16 = (cap if r16 > cap else r16) * weight
        weighted8 = largest if weighted8 > largest else weighted8
        weighted16 = largest if weighted16 > largest else weighted16
        bits[0, i] = np.int32(bits_of(r8)) if kept else np.int32(0)
        bits[1, i] = np.int32(bits_of(r16)) if kept else np.int32(0)
        sides[i] = np.int32(0) if advantage < 0 else np.int32(1)
        ones[i] = np.int32(1) if kept else np.int32(0)
        weighted_ratios[0, i] = weighted8 if kept else zero
        weighted_ratios[1, i] = weighted16 if kept else zero
        block_weights[i] = weight
        num_nonfinite += int(mask[t] & (not finite))
        num_weighted += int(weight > 0)
        num_off_one += int((weight > 0) & (r8 != 1))
    counts[0] += num_nonfinite
    counts[1] += num_weighted
    counts[2] += num_off_one


@compiled
def _add_to_bins(block: Block, num_tokens: int, bins: BinRule, row: NDArray[np.int64]) -> None:
    """Add the noted tokens to a row [quantities, precisions, bins]."""
    thresholds, first_thresholds, shift, first_cell, depth = bins
    last_cell = first_thresholds.shape[1] - 1
    for i in range(unsigned(num_tokens)):
        first_of_side = first_thresholds[unsigned(block.sides[i])]
        for precision in range(2):
            bits = np.int64(block.bits[precision, i])
            cell = min(max((bits >> shift) - first_cell, 0), last_cell)
            found = first_of_side[unsigned(cell)]
            for _ in range(depth):
                # 1 for a negative difference. A comparison would become a branch, which nobody can predict.
                found += (thresholds[unsigned(found)] - bits) >> 63 & 1
            place = unsigned(found)
            row[0, precision, place] += block.ones[i]
            row[1, precision, place] += np.int64(block.weighted_ratios[precision, i])
            if row.shape[0] > 2:
                row[2, precision, place] += np.int64(block.weights[i])
