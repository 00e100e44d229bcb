"""The loop over the tokens of `histograms` for tensors on a CPU, compiled.

It does what `SequenceHistograms._add_by_operations` does, in the same float32 operations; tests compare the two.
"""

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron_calclip.compiled import bits_of, compiled

Tokens: TypeAlias = tuple[NDArray[Any], ...]


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
        how many tokens were added before one needed a row that is not there; and how many sequences have a row now.
    """
    ratio8, ratio16, advantages, importance_weights, loss_weights, mask, sequence_ids = tokens
    last_cell = bins.first_thresholds.shape[1] - 1
    if not per_sequence:
        num_rows = 1
    for t in range(len(mask)):
        if not mask[t]:
            continue
        if per_sequence and (num_rows == 0 or sequence_ids[t] != row_ids[num_rows - 1]):
            if num_rows == len(rows):
                return t, num_rows
            row_ids[num_rows] = sequence_ids[t]
            num_rows += 1
        r8, r16, advantage = ratio8[t], ratio16[t], advantages[t]
        importance, loss_weight = importance_weights[t], loss_weights[t]
        # Finite numbers alone have a finite sum; a huge one may overflow, and be looked at again.
        if not np.isfinite(r8 + r16 + advantage + importance + loss_weight) and not (
            np.isfinite(r8)
            and np.isfinite(r16)
            and np.isfinite(advantage)
            and np.isfinite(importance)
            and np.isfinite(loss_weight)
        ):
            counts[0] += 1
            continue
        if advantage == 0:
            continue
        side = 0 if advantage < 0 else 1

        weight = abs(advantage) * importance
        if weights.use_loss_weights:
            weight = weight * loss_weight
        weight = weight * weights.scale
        weight = weights.largest if weight > weights.largest else weight
        counts[1] += weight > 0
        counts[2] += weight > 0 and r8 != 1
        for precision in range(2):
            ratio = r8 if precision == 0 else r16
            bits = np.int64(np.int32(bits_of(ratio)))
            cell = min(max((bits >> bins.shift) - bins.first_cell, 0), last_cell)
            found = bins.first_thresholds[side, cell]
            for _ in range(bins.depth):
                # 1 for a negative difference. A comparison would become a branch, which nobody can predict.
                found += (bins.thresholds[found] - bits) >> 63 & 1
            weighted = (weights.ratio_cap if ratio > weights.ratio_cap else ratio) * weight
            weighted = weights.largest if weighted > weights.largest else weighted
            rows[num_rows - 1, 0, precision, found] += 1
            rows[num_rows - 1, 1, precision, found] += np.int64(weighted)
            if rows.shape[1] > 2:
                rows[num_rows - 1, 2, precision, found] += np.int64(weight)
    return len(mask), num_rows
