"""Calibrated clipping inside other people's trainers: NeMo-Aligner, NeMo-RL, Megatron-LM's `megatron/rl`, verl.

What: one thin adapter per framework. Each sets the framework's own clip bounds before a step, runs the two BF16 shadow
passes on calibration steps, reads the ratios that the framework's own loss clips, and keeps the calibrator's state beside
the framework's checkpoints. Everything they share is in `controller` (the calibrator and its measurement) and `shadow`
(the shadow pass on a Megatron model and optimizer).

Every rank holds a calibrator of its own. One all-reduce of a few kilobytes gives all of them the same sums, so all derive
the same bounds and nothing travels through a driver process.

Importing this package imports none of the frameworks; importing an adapter of one does, where it needs it, and says in one
sentence what is missing. Left out on purpose: the frameworks' losses, written again; each keeps its own.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any


def require(module: str, *, framework: str, how: str) -> Any:
    """Import a module of another framework.

    Args:
        module: full name of the module.
        framework: name and versions, for the message.
        how: how to get it, for the message.

    Raises:
        ImportError: one sentence, when it is missing or of a version that lacks the module.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{framework} is needed for this adapter, but {module} cannot be imported ({error}); {how}"
        ) from (error)


def require_version(distribution: str, versions: tuple[str, ...]) -> None:
    """Refuse a version whose internals the adapter was not tested with.

    Args:
        distribution: name on the package index.
        versions: tested versions.

    Raises:
        ImportError: one sentence, naming the version found.
    """
    try:
        found = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"{distribution} is not installed; install {distribution}=={versions[-1]}") from None
    if found not in versions:
        raise ImportError(
            f"{distribution} {found} is installed, but the adapter was tested with {', '.join(versions)} alone; "
            f"install {distribution}=={versions[-1]}"
        )
