"""What the scripts in `tools/convert` share: options, the progress bar, errors in one line, exit codes.

Exit codes: 0 done, 1 failed (or, for `verify.py`, not the same), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megatron_calclip.convert.conversion import Progress as Report
from megatron_calclip.errors import UserError
from megatron_calclip.weights.load import HFSource

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def add_shared_options(parser: argparse.ArgumentParser, *, dtype_help: str) -> None:
    """Options of both converters."""
    parser.add_argument("--torch-dtype", choices=sorted(_DTYPES), help=dtype_help)
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint of the same kind")
    parser.add_argument(
        "--backend",
        choices=("native", "bridge"),
        default="native",
        help="native: this project's tables (Llama, Qwen2, Qwen2.5, Qwen3, Qwen3-MoE); bridge: Megatron-Bridge",
    )
    parser.add_argument(
        "--verify",
        choices=("quick", "full", "none"),
        default="quick",
        help="read the result back and compare bits: of a sample (first and last layer, embeddings), of all, of none",
    )


def torch_dtype(name: str | None) -> torch.dtype | None:
    """The type behind `--torch-dtype`."""
    return None if name is None else _DTYPES[name]


def folder(name: str) -> Path:
    """A path from the command line, without a trailing slash or `..`."""
    return Path(name).resolve()


def run(main: Callable[[], int | None]) -> None:
    """Run a script's main function and exit with its status; a `UserError` is one line on stderr."""
    try:
        status = main()
    except UserError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("error: interrupted; nothing was kept", file=sys.stderr)
        sys.exit(1)
    sys.exit(status or 0)


@contextlib.contextmanager
def progress_bar() -> Iterator[Report]:
    """A bar in bytes on stderr, where that is a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def report(source: HFSource, description: str) -> HFSource:
            task = progress.add_task(description, total=sum(spec.nbytes for spec in source.specs.values()))

            def read(name: str) -> torch.Tensor:
                value = source.read(name)
                progress.advance(task, source.specs[name].nbytes)
                return value

            return HFSource(source.where, specs=source.specs, read=read)

        yield report
