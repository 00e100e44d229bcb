"""SIGTERM and SIGUSR1 (what schedulers send before they take the machine): finish what must be whole, save, exit 0.

A signal only sets a flag. The trainer asks between stages, all ranks together, because the signal reaches them at
different times; a step whose updates have not begun is given up, one whose updates have is completed.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron_calclip.learner.runtime import Runtime

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preemption:
    """Listens for the signals.

    Args:
        runtime: this rank.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.received: signal.Signals | None = None
        for signum in SIGNALS:
            signal.signal(signum, self._note)

    def _note(self, signum: int, _: FrameType | None) -> None:
        self.received = signal.Signals(signum)

    def requested(self) -> bool:
        """Whether any rank was told to stop; collective."""
        flag = torch.tensor(float(self.received is not None))
        return bool(self.runtime.max_over_world(flag) > 0)
