"""NeMo-Aligner's own GRPO script with calibrated clipping, in its container.

    NEMO_ALIGNER_SRC=... PYTHONPATH=$NEMO_ALIGNER_SRC torchrun --nproc-per-node 8 \
        examples/nemo_aligner/train_grpo_calibrated.py [NeMo-Aligner's overrides] \
        trainer.grpo.importance_sample_correct=true \
        ++model.fp8=true ++model.fp8_hybrid=true \
        ++model.grpo.calclip.enabled=true ++model.grpo.calclip.algorithm=dapo ++model.grpo.calclip.interval=20

The checkout is one of the branch `llama-nemotron-dev`. Several updates per rollout are needed: `model.global_batch_size` smaller
than `trainer.grpo.num_prompts_per_grpo_step` times `samples_per_prompt`, as by default. Not yet run on a GPU.
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
        sys.exit("error: NEMO_ALIGNER_SRC: not set; name a checkout of NeMo-Aligner's branch llama-nemotron-dev")
    try:
        calibrate("grpo")
    except ImportError as error:
        sys.exit(f"error: {error}")
    script = Path(source) / "examples" / "nlp" / "gpt" / "train_gpt_grpo.py"
    sys.argv[0] = str(script)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
