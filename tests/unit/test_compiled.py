"""Compiled loops: where their machine code is kept, and what happens where nothing can be written."""

import numpy as np

from megatron_calclip.compiled import compiled


def test_a_function_without_a_file_is_compiled_without_a_cache() -> None:
    """Numba refuses to cache what has no folder of its own; an installation that nobody may write to looks the same."""
    namespace: dict[str, object] = {}
    exec("def add_one(values):\n    for i in range(len(values)):\n        values[i] += 1", namespace)
    values = np.zeros(3)
    compiled(namespace["add_one"])(values)  # type: ignore[type-var]
    assert values.tolist() == [1, 1, 1]
