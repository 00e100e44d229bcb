"""What commands share: checks of pictures before any work, errors of the file system, and who speaks first of several ranks."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_calclip.errors import EXIT_FAILED, UserError
from megatron_calclip.launch import WAIT_SECONDS

_PLOT_FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Refuse before any work what cannot be plotted at the end.

    Raises:
        UserError: for a name that is no picture's, or without matplotlib.
    """
    if path.suffix not in _PLOT_FORMATS:
        raise UserError("--plot", f"{str(path)!r} names no picture; end it in one of {', '.join(_PLOT_FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot", "needs matplotlib: pip install 'megatron-calclip[plot]', or leave --plot out")


@contextlib.contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """Around the writing of a file that an option names.

    Raises:
        UserError: when the file system refuses.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            option, f"{path} cannot be written ({error.strerror or error}); name a writable file", exit_code=EXIT_FAILED
        ) from None


@contextlib.contextmanager
def rank_zero_speaks_first() -> Iterator[None]:
    """Around a command that all ranks of a launch run.

    What is wrong for all of them, every rank finds; rank 0 says so, and torchrun then ends the others.
    """
    try:
        yield
    except UserError:
        if int(os.environ.get("RANK", "0")):
            time.sleep(WAIT_SECONDS)
        raise
