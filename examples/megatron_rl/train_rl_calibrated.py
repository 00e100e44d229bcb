"""Megatron-LM's own `train_rl.py` with calibrated clipping; run it in the root of a checkout.

    cd MEGATRON_LM && torchrun --nproc-per-node 8 .../train_rl_calibrated.py --calclip .../calclip.yaml [train_rl.py's options] \
        --perform-rl-step --rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef 2.0 \
        --fp8-format hybrid --fp8-recipe tensorwise --use-distributed-optimizer

The YAML file holds settings of the calibration; `calclip.yaml` beside this script is an example. Several updates per collection
are needed (`--grpo-iterations`, or a global batch smaller than the collection). Not yet run on a GPU.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import yaml

from megatron_calclip.errors import UserError
from megatron_calclip.integrations.megatron_rl import calibrate


def main() -> None:
    """Run the script as if it had been started itself."""
    try:
        at = sys.argv.index("--calclip")
        settings = yaml.safe_load(Path(sys.argv[at + 1]).read_text()) or {}
    except (ValueError, IndexError, OSError, yaml.YAMLError) as error:
        sys.exit(f"error: --calclip: name a YAML file with the settings of the calibration ({error})")
    del sys.argv[at : at + 2]
    sys.path.insert(0, os.getcwd())
    try:
        calibrate(settings)
    except (UserError, ImportError) as error:
        sys.exit(f"error: {error}")
    sys.argv[0] = "train_rl.py"
    runpy.run_path("train_rl.py", run_name="__main__")


if __name__ == "__main__":
    main()
