"""Names of metrics: every number that a step yields has its entry; the stopwatch adds up."""

from __future__ import annotations

import time

import pytest
import torch

from megatron_calclip.algorithms.diagnostics import SUM_NAMES, PolicyMetricSums
from megatron_calclip.metrics import METRICS, Stopwatch


def test_every_metric_says_what_it_is_and_how_it_is_reduced() -> None:
    for name, metric in METRICS.items():
        assert metric.meaning and metric.reduction, name
        assert name == name.strip().lower()


def test_instruments_of_the_loss_have_their_entries() -> None:
    # All sums 1, so that no quotient is undefined and each instrument reports.
    sums = PolicyMetricSums(torch.ones(len(SUM_NAMES)), torch.ones(1), torch.ones(2))
    names = set(sums.finalize())
    # Of whole sequences and percentiles, which sums cannot hold; see algorithms/mismatch.py.
    names |= {"mismatch/p95_abs_dlogp", "mismatch/sequence_max", "mismatch/outliers"}
    assert names <= set(METRICS), names - set(METRICS)
    prefixes = (
        "clip/low_",
        "clip/high_",
        "clip/dual_",
        "ratio/",
        "kl/",
        "mismatch/",
        "importance/",
        "entropy",
    )
    assert {name for name in METRICS if name.startswith(prefixes)} == names  # and no entry describes nothing


def test_stopwatch(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 3.0, 3.5, 4.0, 8.0, 10.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    watch = Stopwatch()  # 0
    with watch.stage("rollout"):  # 1 to 3
        pass
    with watch.stage("rollout"):  # 3 to 3.5
        pass
    with pytest.raises(KeyError), watch.stage("update"):  # 4 to 8: booked though it failed
        raise KeyError
    assert watch.finish() == {"timing/rollout": 2.5, "timing/update": 4.0, "timing/step": 10.0}
    assert set(watch.seconds) <= set(METRICS)
