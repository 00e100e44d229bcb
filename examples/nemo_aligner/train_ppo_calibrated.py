"""NeMo-Aligner 0.7.0's own PPO actor script with calibrated clipping, in its container.

    NEMO_ALIGNER_SRC=... torchrun --nproc-per-node 8 examples/nemo_aligner/train_ppo_calibrated.py [NeMo-Aligner's overrides] \
        ++model.fp8=true ++model.fp8_hybrid=true ++model.ppo.calclip.enabled=true ++model.ppo.calclip.interval=20

The checkout (tag v0.7.0) holds the script; the package may be the wheel. Not yet run on a GPU.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from megatron_calclip.integrations.nemo_aligner import calibrate


def main() -> None:
    """Run the script as if it had been started itself."""
    source = os.environ.get("NEMO_ALIGNER_SRC")
    if not source:
        sys.exit("error: NEMO_ALIGNER_SRC: not set; name a checkout of NeMo-Aligner v0.7.0, which holds its scripts")
    try:
        calibrate("ppo")
    except ImportError as error:
        sys.exit(f"error: {error}")
    script = Path(source) / "examples" / "nlp" / "gpt" / "train_gpt_ppo_actor.py"
    sys.argv[0] = str(script)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
