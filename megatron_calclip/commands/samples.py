"""`megatron-calclip samples`: read a run's completions, token by token.

    megatron-calclip samples runs/tiny_cpu --step 40
    megatron-calclip samples runs/tiny_cpu --num 50 --html samples.html

What: the rows of `RUN/samples.jsonl` with reward, advantage and policy version; tokens are coloured by their importance ratio at
the last update of the step, and underlined where the clip took their gradient. In the terminal, or as one HTML page that needs
nothing else. Left out on purpose: completions of evaluations, which are in their folder's `completions.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from megatron_calclip.commands.output import writing
from megatron_calclip.errors import UserError
from megatron_calclip.html_page import readable
from megatron_calclip.sample_page import CLIP_NAMES, facts_of, level, page

SAMPLES_FILE = "samples.jsonl"
_STYLES = {
    -3: "on dodger_blue2",
    -2: "on blue",
    -1: "on navy_blue",
    0: "",
    1: "on orange4",
    2: "on dark_orange3",
    3: "on orange_red1",
}
_CLIPPED_STYLE = "bold underline"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--step", type=int, metavar="N", help="only completions of this step")
    parser.add_argument(
        "--num", type=int, default=20, metavar="N", help="the newest ones, at most so many (default 20)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page instead of showing them here")


def run(arguments: argparse.Namespace) -> None:
    """Show the samples, or write the page.

    Raises:
        UserError: when the run has none, or the page cannot be written.
    """
    if arguments.num < 1:
        raise UserError("--num", f"{arguments.num} is no number of samples; give at least 1")
    path = arguments.run_dir / SAMPLES_FILE
    found = [row for row in read_samples(path) if arguments.step in (None, row["step"])][-arguments.num :]
    if not found:
        problem = "has no completions" if arguments.step is None else f"has none of step {arguments.step}"
        raise UserError(str(path), f"{problem}; see tracking.samples_per_step, or choose another step")
    if arguments.html is not None:
        with writing(arguments.html, "--html"):
            arguments.html.write_text(page(f"Samples of {arguments.run_dir}", found), encoding="utf-8")
        return
    console = Console(highlight=False)
    for sample in found:
        console.print(Rule(style="dim"))
        console.print(
            Text("  ".join(f"{name} {readable(value)}" for name, value in facts_of(sample).items()), style="bold")
        )
        console.print(Text(readable(sample["prompt"]), style="dim"))
        console.print(coloured(sample))


def read_samples(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a `samples.jsonl`; what a killed run left half written is passed over.

    Raises:
        UserError: when it is not there.
    """
    try:
        content = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(str(path), f"cannot be read ({error.strerror}); give the folder of a run") from None
    for line in content.split("\n"):
        try:
            row = with_nan(json.loads(line))
            facts_of(row)
        except (ValueError, KeyError, TypeError):
            continue
        yield row


def with_nan(sample: dict[str, Any]) -> dict[str, Any]:
    """The row with NaN for the numbers that were not finite, which the file has as null: steps that go wrong are looked at first."""

    def number(value: Any) -> Any:
        return math.nan if value is None else value

    own = {key: number(sample[key]) for key in ("reward", "advantage") if key in sample}
    lists = {key: [*map(number, sample[key])] for key in ("ratio", "old_log_probs") if key in sample}
    return sample | own | lists


def coloured(sample: dict[str, Any]) -> Text:
    """The completion as terminal text, coloured where its tokens were recorded."""
    if "tokens" not in sample:
        return Text(readable(sample["completion"]))
    text = Text()
    for piece, ratio, letter in zip(sample["tokens"], sample["ratio"], sample["clipped"], strict=True):
        mark = _CLIPPED_STYLE if letter in CLIP_NAMES else ""
        text.append(readable(piece), style=f"{mark} {_STYLES[level(ratio, sample['bounds'])]}".strip())
    return text
