"""Command line of the main job: arguments, errors in one line, process groups, the trainer."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megatron_calclip.config import Config
from megatron_calclip.config_file import config_to_yaml, launch_world_size, load_config
from megatron_calclip.data_presets import check_training_reward
from megatron_calclip.errors import EXIT_FAILED, UserError

# How long a rank keeps to itself what may be another rank's to report. When one has failed, torchrun ends the
# others: it looks ten times a second.
WAIT_SECONDS = 3.0


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
        check_training_reward(config)
        if arguments.dry_run:
            if _rank() == 0:
                _dry_run(config)
            return
    except UserError as error:
        _exit(error)
    if (problem := wrong_apex()) is not None:
        _exit(problem)
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    # Heavy imports only now: a wrong configuration is reported at once.
    from megatron_calclip.learner import cpu, runtime

    cpu.install()  # before anything else imports Megatron
    from megatron_calclip.trainer import Trainer

    try:
        Trainer(config, runtime.start(config)).run()
        runtime.stop()
    except UserError as error:
        _exit(error)
    except Exception:
        # A rank that has died shows on others as a failing collective; its own message is the one to read.
        if launch_world_size() > 1:
            _give_way()
        raise


def _dry_run(config: Config) -> None:
    """Print the configuration resolved and, for a pretrained model, as comments below it, its layout and whether it fits."""
    remarks = []
    if config.model.hf is not None:
        from megatron_calclip.planning.report import dry_run_lines

        remarks = dry_run_lines(config)
    print(config_to_yaml(config), end="")
    for line in remarks:
        print(f"# {line}")


def wrong_apex() -> UserError | None:
    """PyPI's `apex`, which is not NVIDIA's and which Megatron would stumble over: found without importing it."""
    spec = importlib.util.find_spec("apex")
    if spec is None or any(
        Path(place, "multi_tensor_apply").is_dir() for place in spec.submodule_search_locations or ()
    ):
        return None
    return UserError(
        "apex",
        "the package of this name that is installed is not NVIDIA's; pip uninstall apex (NVIDIA's is optional and not "
        "on PyPI)",
    )


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _give_way() -> None:
    """Wait for torchrun to end this rank. Its SIGTERM, for a run a request to save (`guards.preemption`), is that again."""
    from megatron_calclip.guards.preemption import stand_down

    if stand_down():
        os._exit(EXIT_FAILED)  # it has come already
    time.sleep(WAIT_SECONDS)


def _exit(error: UserError) -> NoReturn:
    """Report in one line and end this process.

    What is wrong for all ranks, every rank finds; rank 0 says so first, and torchrun then ends the others.
    """
    line = " ".join(str(error).split())  # messages of libraries and of the user's own code may have several
    if rank := _rank():
        _give_way()
        line += f" (rank {rank})"
    print(f"error: {line}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    # Not sys.exit: other ranks may be waiting in a collective, and interpreter shutdown would wait for them.
    os._exit(error.exit_code)
