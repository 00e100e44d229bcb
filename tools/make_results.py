"""Writes the figures of the documentation from the files of `docs/measured`.

    python tools/make_results.py            # write them
    python tools/make_results.py --check    # exit with status 1 when a page or picture is not up to date

A page has pairs of comments, `<!-- measured: NAME -->` and `<!-- end -->`; what stands between them is made from a file by one of
the functions of `BLOCKS`. So a table cannot say anything else than what its command measured, and a test fails when one of the two
was changed. Where there is no file yet, the place says so and names the command that makes it.

A file of `docs/measured` is what its command wrote, unchanged, and holds command, date, commit and machine; one of a `--quick`
run, or without these, is refused. Left out on purpose: running the commands, which takes hours and a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import picture, tables, tables_runs
from benchmarks.__main__ import BENCHMARKS
from benchmarks.results import MEASURED
from benchmarks.tables import Report
from megatron_calclip.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
MARKER = re.compile(r"(?P<begin><!-- measured: (?P<name>[^>]+?) -->)(?P<text>.*?)(?P<end><!-- end -->)", re.DOTALL)
COMMANDS = {name: f"python -m {' '.join(found.command)}" for name, found in BENCHMARKS.items()} | {
    "study_short": "python -m examples.study --variant short",
    "study": "python -m examples.study",
    "study_full": "python -m examples.study --variant full --jobs 2",
    "study_search": "python -m examples.study --part search",
    "study_smollm2": "python -m examples.study --part smollm2",
    "faults": "pytest -m faults tests/faults",
    "plan": "pytest tests/distributed/test_plan_reality.py",
    "vllm": "pytest -m vllm tests/vllm",
}
"""File -> how it is made; benchmarks take `--output FILE`, tests `--record FILE`, and the study writes `results.json`."""
ENVIRONMENT = ("command", "date", "commit", "processor", "num_cores", "load_average", "packages")
PICTURES = {"docs/assets/ratios.svg": ("regime", picture.ratios)}
"""Whole files that are drawn from one of `docs/measured`."""
GPU = "gpu_check.md"
"""The table of `tools/gpu_check.sh`, taken as it is."""


class Block(NamedTuple):
    """What stands between two markers."""

    file: str
    render: Callable[[Report], str]


BLOCKS = {
    "learner": Block("learner", tables.by_peer),
    "logprobs": Block("logprobs", tables.logprobs),
    "precision": Block("precision", tables.precision),
    "precision_60m": Block("precision_60m", tables.precision),
    "calibration": Block("calibration", tables.calibration),
    "calibration bytes": Block("calibration", tables.calibration_bytes),
    "calibration_run": Block("calibration_run", tables.comparisons),
    "weights": Block("weights", tables.weights),
    "rollout": Block("rollout", tables.comparisons),
    "exchange": Block("rollout", tables.exchange),
    "exchange bytes": Block("rollout", tables.exchange_bytes),
    "rewards": Block("rewards", tables.rewards),
    "checkpoint": Block("checkpoint", tables.checkpoint),
    "regime": Block("regime", tables_runs.regime),
    "study": Block("study", tables_runs.study),
    "study tables": Block("study", tables_runs.study_tables),
    "study_short tables": Block("study_short", tables_runs.study_tables),
    "study_full tables": Block("study_full", tables_runs.study_tables),
    "study_search": Block("study_search", tables_runs.search_table),
    "study_smollm2": Block("study_smollm2", tables_runs.smollm2_tables),
    "tiny_run": Block("tiny_run", tables_runs.tiny_run),
    "diagnose recipes": Block("diagnose", tables_runs.diagnose_recipes),
    "diagnose updates": Block("diagnose", tables_runs.diagnose_updates),
    "diagnose layouts": Block("diagnose", tables_runs.diagnose_layouts),
    "diagnose floor": Block("diagnose", tables_runs.diagnose_floor),
    "faults": Block("faults", tables_runs.faults),
    "plan": Block("plan", tables_runs.plan),
    "vllm": Block("vllm", tables_runs.recorded),
} | {
    f"dlogp {recipe}": Block("diagnose", tables_runs.dlogp_of(recipe))
    for recipe in ("tensorwise", "rowwise", "blockwise", "mxfp8")
}
"""Name in a marker -> file and function. `headlines` and `gpu` are of their own kind: several files, and no JSON."""


def read_reports(folder: Path) -> dict[str, Report]:
    """All files by name.

    Raises:
        UserError: for a file that nobody could check: not whole, not known, without its origin, or of a quick run.
    """
    reports: dict[str, Report] = {}
    for path in sorted(folder.glob("*.json")):
        name = path.stem
        if name not in COMMANDS:
            raise UserError(str(path), f"no page shows such a file; known are {', '.join(sorted(COMMANDS))}")
        try:
            report: dict[str, Any] = json.loads(path.read_text())
        except ValueError as error:
            raise UserError(str(path), f"not JSON ({error}); make it again: {COMMANDS[name]}") from None
        found = report.get("environment", {})
        if missing := [field for field in ENVIRONMENT if field not in found]:
            raise UserError(str(path), f"does not say its {', '.join(missing)}; make it again: {COMMANDS[name]}")
        words = shlex.split(found["command"])
        if "--quick" in words:
            raise UserError(str(path), f"is of a quick run, whose figures mean nothing; run {COMMANDS[name]}")
        if any(word.startswith("/") for word in words):
            raise UserError(
                str(path), f"its command names a path of one machine: {found['command']}; use relative ones"
            )
        reports[name] = report
    return reports


def block_text(name: str, reports: Mapping[str, Report], folder: Path, *, inline: bool) -> str:
    """What stands between the markers of a name.

    Args:
        name: of the block.
        reports: all files.
        folder: where they are.
        inline: within a sentence or a cell.

    Raises:
        UserError: for an unknown name.
    """
    if name == "headlines":
        return tables_runs.headlines(reports)
    if name == "gpu":
        path = folder / GPU
        missing = f"Not yet run on a GPU: `tools/gpu_check.sh WHEELS --output {MEASURED}/{GPU}` measures it."
        return path.read_text().strip() if path.is_file() else missing
    if name not in BLOCKS:
        raise UserError(f"measured: {name}", f"no such block; there are {', '.join([*BLOCKS, 'headlines', 'gpu'])}")
    file, render = BLOCKS[name]
    if file in reports:
        return render(reports[file])
    return "not measured yet" if inline else f"Not measured in this form yet: `{COMMANDS[file]}`."


def render(text: str, reports: Mapping[str, Report], folder: Path) -> str:
    """A page with everything between its markers made anew."""

    def replace(match: re.Match[str]) -> str:
        inline = "\n" not in match["text"]  # a cell of a table or a part of a sentence stays in its line
        made = block_text(match["name"], reports, folder, inline=inline)
        if inline and "\n" in made:
            raise UserError(f"measured: {match['name']}", "is a table; put its two markers on lines of their own")
        return f"{match['begin']}{made}{match['end']}" if inline else f"{match['begin']}\n\n{made}\n\n{match['end']}"

    return MARKER.sub(replace, text)


def pages(root: Path) -> Iterator[Path]:
    """Pages that may have markers."""
    yield root / "README.md"
    yield from sorted((root / "docs").rglob("*.md"))


def make(root: Path) -> dict[Path, str]:
    """All pages and pictures as the files of `docs/measured` want them.

    Args:
        root: of the checkout.

    Raises:
        UserError: see `read_reports` and `block_text`.
    """
    reports = read_reports(root / MEASURED)
    made = {path: render(path.read_text(), reports, root / MEASURED) for path in pages(root)}
    return made | {root / path: draw(reports[file]) for path, (file, draw) in PICTURES.items() if file in reports}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 when a page is not up to date")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    try:
        made = make(arguments.root)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    stale = [path for path, text in made.items() if not path.is_file() or path.read_text() != text]
    for path in stale:
        print(f"{path.relative_to(arguments.root)} {'is not up to date' if arguments.check else 'written'}")
        if not arguments.check:
            path.write_text(made[path])
    return int(arguments.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
