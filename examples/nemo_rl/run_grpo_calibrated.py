"""NeMo-RL's own `examples/run_grpo.py` with calibrated clipping where the configuration has `loss_fn.calclip`.

    NEMO_RL_SRC=... python examples/nemo_rl/run_grpo_calibrated.py --config conf/nemo_rl/grpo_8b_fp8_blockwise.yaml [overrides]

Or on any of NeMo-RL's recipes, by overrides alone:

    ... --config $NEMO_RL_SRC/examples/configs/grpo_math_8B_megatron_fp8.yaml \
        loss_fn.truncated_importance_sampling_type=tis loss_fn.truncated_importance_sampling_ratio=2 \
        ++loss_fn.calclip.enabled=true ++loss_fn.calclip.interval=20

This package has to be installed in NeMo-RL's driver and Megatron environments. Not yet run on a GPU.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from megatron_calclip.errors import UserError


def main() -> None:
    """Run NeMo-RL's script with the hooks in place."""
    source = os.environ.get("NEMO_RL_SRC")
    if not source:
        sys.exit("error: NEMO_RL_SRC: not set; name a checkout of NeMo-RL")
    sys.path[:0] = [source, str(Path(source) / "examples")]
    try:
        from megatron_calclip.integrations.nemo_rl import calibrate

        script = calibrate(importlib.import_module("run_grpo"))
    except ImportError as error:
        sys.exit(f"error: {error}")
    try:
        script.main()
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
