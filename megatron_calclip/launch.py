"""Command line of the main job: arguments, errors in one line, process groups, the trainer."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

from megatron_calclip.config import config_to_yaml, launch_world_size, load_config
from megatron_calclip.errors import EXIT_USAGE, UserError


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="grpo_fp8.py", description="Reinforcement learning of a language model on Megatron-Core."
    )
    parser.add_argument("config", metavar="CONFIG", help="path of a YAML file, or the name of a shipped configuration")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's")
    parser.add_argument("--dry-run", action="store_true", help="check and print the configuration, then stop")
    # Overrides may stand before or after the flag.
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the job and exit with its status."""
    arguments = _parse(argv)
    try:
        world_size = None if arguments.dry_run else launch_world_size()
        config = load_config(arguments.config, arguments.overrides, world_size=world_size)
    except UserError as error:
        # Every rank found the same; one says so.
        _exit(error, speak=os.environ.get("RANK", "0") == "0")
    if arguments.dry_run:
        if os.environ.get("RANK", "0") == "0":
            print(config_to_yaml(config), end="")
        return
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    # Heavy imports only now: a wrong configuration is reported at once.
    from megatron_calclip.learner import runtime
    from megatron_calclip.trainer import Trainer

    try:
        Trainer(config, runtime.start(config)).run()
        runtime.stop()
    except UserError as error:
        _exit(error, speak=True)


def _exit(error: UserError, *, speak: bool) -> None:
    if speak:
        rank = os.environ.get("RANK", "0")
        print(f"error: {error}" if rank == "0" else f"error: [rank {rank}] {error}", file=sys.stderr, flush=True)
    # Not sys.exit: other ranks may be waiting in a collective, and interpreter shutdown would wait for them.
    sys.stdout.flush()
    os._exit(error.exit_code if error.exit_code else EXIT_USAGE)
