"""SIGTERM and SIGUSR1 (what schedulers send before they take the machine): finish what must be whole, save, exit 0.

A signal only sets a flag. The trainer asks between stages, all ranks together, because the signal reaches them at
different times; a step whose updates have not begun is given up, one whose updates have is completed.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_calclip.learner.runtime import Runtime

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def stand_down() -> bool:
    """A run that fails no longer saves: signals end it as they end any process.

    Returns:
        whether one had come before.
    """
    listening = [getattr(signal.getsignal(signum), "__self__", None) for signum in SIGNALS]
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_DFL)
    return any(isinstance(one, Preemption) and one.received is not None for one in listening)


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
        return self.runtime.any_rank(self.received is not None)
