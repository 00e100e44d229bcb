"""The learner against plain training, on 1, 2 or 4 ranks: every layout, awkward batches, checkpoints, the trainer.

    torchrun --nproc-per-node 2 tests/distributed/check_learner.py FOLDER [models layouts bf16 edges checkpoints trainer]

FOLDER passes checkpoints between launches of different sizes: that of two ranks writes one, the others load it. Each check
prints a line with its largest error; the exit code is not 0 when one fails.
"""

from __future__ import annotations

import gc
import sys
import time
import warnings
from pathlib import Path


def main() -> int:
    """Run the groups of checks that are named, or all; 0 when every rank passed them."""
    warnings.filterwarnings("ignore")
    # Imported here, because Megatron must not be imported before its view of torch is installed.
    from megatron_calclip.learner import cpu

    cpu.install()
    import checkpoint_checks
    import edge_checks
    import invariance_checks
    import trainer_checks
    from checks import Checks, launch_folder

    groups = {
        "models": invariance_checks.check_models,
        "layouts": invariance_checks.check_layouts,
        "bf16": invariance_checks.check_bf16,
        "edges": edge_checks.check_edges,
        "checkpoints": checkpoint_checks.check_checkpoints,
        "trainer": trainer_checks.check_trainer,
    }
    gc.freeze()  # what is imported stays; collections between the layouts need not look through it
    exchange, checks = Path(sys.argv[1]), Checks()
    for name in sys.argv[2:] or groups:
        began = time.perf_counter()
        groups[name](checks, launch_folder(exchange) / name, exchange)
        if checks.rank == 0:
            print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
    return len(checks.failures)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
