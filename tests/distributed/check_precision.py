"""FP8 training and the BF16 shadow pass on two ranks.

    torchrun --nproc-per-node 2 tests/distributed/check_precision.py [--all] [layouts] [histories] [shadow] [weights]

Each check prints a line; the exit code is not 0 when one fails. One launch does them all, because starting processes costs
more than the checks. By default each recipe meets some layouts, with `--all` every one.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import precision_histories
import precision_layouts
import precision_shadow
import torch.distributed as dist
from fp8_learners import failures

from megatron_calclip.learner import cpu


def check_histories(root: Path, *, every: bool) -> None:
    """Delayed scaling."""
    precision_histories.check_histories("TP2", amax_group="te")
    precision_histories.check_histories("DP2", fp8_param=True)
    precision_histories.check_histories("PP2")
    precision_histories.check_checkpoint("TP2", "TP2", root)
    precision_histories.check_checkpoint("PP2 VPP2", "TP2", root, first_last_layers_bf16=1)
    if every:
        precision_histories.check_checkpoint("TP2", "PP2", root)


def check_weights(root: Path) -> None:
    """Which weights live in FP8, and where their values come from."""
    precision_shadow.check_reference(root, "tensorwise", "DP2 overlap")
    precision_shadow.check_reference(root, "rowwise", "TP2")
    precision_shadow.check_checkpoint(root, saved="TP2", loaded="TP2")
    precision_shadow.check_checkpoint(root, saved="TP2", loaded="DP2")
    precision_shadow.check_edge_layers()
    precision_shadow.check_output_layer()


def main(*, every: bool, parts: list[str]) -> int:
    """Run checks; the number of failures.

    Args:
        every: all recipes on all layouts.
        parts: which checks; all of them if empty.
    """
    begin = time.perf_counter()
    cpu.install()
    cases = list(precision_layouts.layout_cases(every)) if "layouts" in parts or not parts else []
    expected = precision_layouts.references(cases)  # trains alone, then joins the ranks
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)  # all ranks use that of rank 0
        root = Path(shared[0])
        steps: dict[str, Callable[[], None]] = {
            "layouts": lambda: precision_layouts.check_layouts(cases, expected),
            "histories": lambda: check_histories(root, every=every),
            "shadow": lambda: precision_shadow.check_shadows(every),
            "weights": lambda: check_weights(root),
        }
        for part in parts or steps:
            steps[part]()
            if dist.get_rank() == 0:
                print(f"---- {part}: done after {time.perf_counter() - begin:.0f} s", flush=True)
        dist.barrier()
    dist.destroy_process_group()
    return len(failures)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    parts = [argument for argument in arguments if argument != "--all"]
    sys.exit(min(main(every="--all" in arguments, parts=parts), 1))
