"""Loops over single elements as machine code, for CPU tensors: one way to compile them, with numba.

Eager torch reads and writes memory for every operation of a chain; a compiled loop does so once for all of them. It is
worth having where a definition in plain torch operations exists, runs on every device, and is what tests compare the
loop with, bit for bit.

Left out on purpose: threads of its own (a rank has one, see `learner/runtime.py`), and devices, which have their
libraries' kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Loop = TypeVar("Loop", bound=Callable[..., Any])


def compiled(loop: Loop) -> Loop:
    """Compile `loop` at its first call; the machine code is kept on disk for the processes that follow.

    It takes NumPy arrays and scalars. Floating-point operations are those written down, in their order.
    """
    try:
        return cast(Loop, numba.njit(cache=True, nogil=True, error_model="numpy")(loop))
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return cast(Loop, numba.njit(nogil=True, error_model="numpy")(loop))
