"""What the distributed checks share: a record of verdicts, and layouts one after another within one launch.

One launch goes through many layouts, because its imports cost more than all of its checks. Each layout gets process groups of
its own, the default group included, and gives them back: groups that pile up cost hundreds of threads.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_calclip.config import Config
from megatron_calclip.config_file import launch_world_size
from megatron_calclip.learner import runtime
from megatron_calclip.learner.runtime import Runtime

Values = Mapping[str, Tensor | float]


class Checks:
    """This rank's verdicts. Rank 0 prints them all, the others their failures; each rank's exit code tells of its own."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.rank = int(os.environ.get("RANK", "0"))

    @property
    def compares(self) -> bool:
        """Whether this rank compares global values, which are the same on all ranks; the others save the reference."""
        return self.rank == 0

    def true(self, name: str, passed: bool, detail: str = "") -> None:
        """Record one check."""
        if not passed:
            self.failures.append(name)
        if self.rank == 0 or not passed:
            line = f"{'ok  ' if passed else 'FAIL'} {name}  {detail}".rstrip()
            print(f"{line}\n", end="", flush=True)  # one write: other ranks print, too

    def close(self, name: str, actual: Values, expected: Values, *, tolerance: float) -> None:
        """Compare named values: |actual - expected| <= tolerance * max(1, |expected|), no value missing, none NaN."""
        worst, label = 0.0, "all equal"
        passed = actual.keys() == expected.keys()
        for key in expected if passed else ():
            a, e = (torch.as_tensor(values[key], dtype=torch.float64) for values in (actual, expected))
            error = float(((a - e).abs() / e.abs().clamp(min=1)).max()) if a.shape == e.shape else float("nan")
            if not error <= worst:
                worst, label = error, key
        self.true(name, passed and worst <= tolerance, f"{worst:.1e} ({label})")


@functools.cache
def _store() -> dist.Store:
    """The launcher's key-value store, through which ranks find each other."""
    if launch_world_size() == 1:
        return dist.HashStore()
    store, _, _ = next(dist.rendezvous("env://"))
    return store


_layouts = itertools.count()


@contextlib.contextmanager
def layout(config: Config) -> Iterator[Runtime]:
    """Process groups for one configuration."""
    # A name of its own for each layout: ranks would else meet at the addresses of the groups before.
    store = dist.PrefixStore(f"layout_{next(_layouts)}", _store())
    rank, excepthook = int(os.environ.get("RANK", "0")), sys.excepthook
    dist.init_process_group("gloo", store=store, rank=rank, world_size=launch_world_size())
    sys.excepthook = excepthook  # it puts the rank before every line, once for each group that was ever made
    try:
        yield runtime.start(config)
        dist.barrier()
    finally:
        runtime.stop()
        gc.collect()


def launch_folder(exchange: Path) -> Path:
    """A folder of this launch, the same on all ranks."""
    return exchange / f"launch_{os.environ.get('TORCHELASTIC_RUN_ID', os.getpid())}"
