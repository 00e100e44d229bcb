"""Token and sequence mismatch, by hand."""

from __future__ import annotations

import pytest
import torch

from megatron_calclip.algorithms.mismatch import mismatch


def test_by_hand() -> None:
    """Three sequences of 3, 2 and 4 tokens; the first of each is the prompt."""
    lengths = torch.tensor([3, 2, 4])
    mask = torch.tensor([0, 1, 1, 0, 1, 0, 1, 1, 1], dtype=torch.bool)
    sampler = torch.zeros(9)
    old = torch.tensor([9.0, 0.01, -0.03, 9.0, 0.02, 9.0, 0.5, -1.0, 0.0])
    result = mismatch(old, sampler, mask, lengths)
    assert result.sequence_mean.tolist() == pytest.approx([0.02, 0.02, 0.5])
    assert result.sequence_max.tolist() == pytest.approx([0.03, 0.02, 1.0])
    assert result.outliers.tolist() == [2]
    assert result.p95 == 1.0  # six tokens: the smallest value that 95% do not exceed is the largest


def test_percentile_and_order() -> None:
    lengths = torch.full((100,), 2)
    mask = torch.tensor([False, True]).repeat(100)
    old = torch.zeros(200)
    old[mask] = torch.arange(1, 101) / 1000.0
    old[[1, 3]] = torch.tensor([2.0, -3.0])  # sequences 0 and 1
    result = mismatch(old, torch.zeros(200), mask, lengths)
    assert result.outliers.tolist() == [1, 0]
    assert result.p95 == pytest.approx(0.097)  # the 95th of 0.003 ... 0.1, 2, 3


def test_small_noise_is_no_outlier_and_empty_sequences_count_not() -> None:
    lengths, mask = torch.tensor([2, 2, 1]), torch.tensor([0, 1, 0, 1, 0], dtype=torch.bool)
    result = mismatch(torch.tensor([0.0, 0.001, 0.0, 0.09, 0.0]), torch.zeros(5), mask, lengths)
    assert result.outliers.tolist() == [] and result.sequence_mean[2] == 0.0
    with pytest.raises(ValueError, match="at least one response token"):
        mismatch(torch.zeros(5), torch.zeros(5), torch.zeros(5, dtype=torch.bool), lengths)
