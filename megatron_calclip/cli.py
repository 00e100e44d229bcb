"""`megatron-calclip COMMAND ...`: tools around a run.

What: one table of commands. A command is a module with `add_arguments(parser)` and `run(arguments)`; only the one
that is called is imported, so that help and usage errors take no time. A `UserError` becomes one line on stderr and
its exit code: 2 for wrong usage, 1 for a command that failed. Left out on purpose: training itself, which torchrun
starts (`launch`).
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_calclip.errors import UserError


@dataclass(frozen=True)
class Command:
    """An entry of the table."""

    module: str
    """Where `add_arguments` and `run` are."""
    summary: str
    """What it does, for the list of commands."""


COMMANDS = {
    "plan": Command("megatron_calclip.commands.plan", "say what a run needs in memory and time, and whether it fits"),
    "serve": Command("megatron_calclip.commands.serve", "become a vLLM server for a run, on a node of its own"),
    "replay": Command(
        "megatron_calclip.commands.replay", "calibrate again, with any settings, on what a run has dumped"
    ),
    "eval": Command(
        "megatron_calclip.commands.eval", "evaluate a model or a run's checkpoint: Avg@n, pass@k, maj@n with intervals"
    ),
    "samples": Command("megatron_calclip.commands.samples", "read a run's completions, token by token"),
    "report": Command(
        "megatron_calclip.commands.report", "write runs as one HTML page: curves, what the clip did, settings"
    ),
    "diagnose": Command(
        "megatron_calclip.commands.diagnose", "measure what each FP8 recipe does to a model's importance ratios"
    ),
}


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="megatron-calclip", description="Tools for calibrated FP8 runs.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.summary, description=command.summary)
        if argv[:1] == [name]:
            module = importlib.import_module(command.module)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command.

    Args:
        argv: arguments without the program's name; None: those of the process.

    Raises:
        SystemExit: with the status of a wrong usage or a failed command.
    """
    arguments = _parse(sys.argv[1:] if argv is None else list(argv))
    try:
        arguments.run(arguments)
    except UserError as error:
        line = " ".join(str(error).split())  # messages of libraries may have several
        print(f"error: {line}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
