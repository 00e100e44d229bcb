"""What differs between the versions of Megatron-Core that are supported, 0.16.1 to 0.19.2, with what ends each difference.

`tools/test_mcore_latest.sh` runs the default tests with the newest. Imports no Megatron.
"""

from __future__ import annotations

import functools
from typing import Any

# Since 0.19 imported on first use, which would be after `cpu.install` has patched what is loaded. Needed for as long
# as Megatron-Core has to be patched on a CPU.
IMPORTED_LATE = (
    "megatron.core.dist_checkpointing.strategies.async_utils",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
)


def mlp_submodules(spec: Any) -> Any:
    """Submodules of a layer spec's MLP: a `ModuleSpec` up to 0.16, a `functools.partial` from 0.17 on."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules
