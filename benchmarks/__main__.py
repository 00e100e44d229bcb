"""All benchmarks in one table: `python -m benchmarks [--quick] [NAME ...]`.

    python -m benchmarks                     # everything: hours on one core, most of them in `regime`
    python -m benchmarks --quick             # small sizes, one or few repetitions: a quarter of an hour
    python -m benchmarks learner rewards     # some

Each benchmark runs as a process of its own, one after another, and prints its own detailed table; its results go to
FOLDER/NAME.json. The table at the end has a line for each comparison: what, with which peer, the ratio, how far
repetitions spread, what was asked and whether it is met. It is printed and written to FOLDER/table.md and
FOLDER/table.json, with commit, machine and load. `--reuse` takes files that are there instead of measuring again, so
an interrupted run can go on. A file that is to stand behind the documentation goes to `docs/measured` (CONTRIBUTING.md).

What only a GPU can tell is measured by `tools/gpu_check.sh`; the table that it wrote (FOLDER/gpu_check.md) comes last,
and where there is none the place says "not yet run".

Exits with status 1 when a benchmark fails or a goal is missed. Left out on purpose: comparing with earlier runs, since
ratios are the only figures that two machines share.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import FOLDER, ROOT, Result, environment, read_results


@dataclass(frozen=True)
class Benchmark:
    """How to run one benchmark."""

    command: tuple[str, ...]
    """Module and its options."""
    quick: bool = True
    """Whether `--quick` includes it."""


BENCHMARKS = {
    "learner": Benchmark(("benchmarks.learner",)),
    "logprobs": Benchmark(("benchmarks.logprobs",)),
    "precision": Benchmark(("benchmarks.precision", "--models", "4M", "--repetitions", "7")),
    "precision_60m": Benchmark(("benchmarks.precision", "--models", "60M", "--repetitions", "7"), quick=False),
    "calibration": Benchmark(("benchmarks.calibration",)),
    "calibration_run": Benchmark(("benchmarks.calibration", "--run"), quick=False),
    "weights": Benchmark(("benchmarks.weights",)),
    "rollout": Benchmark(("benchmarks.rollout",)),
    "rewards": Benchmark(("benchmarks.rewards", "--timeout", "2", "--patience", "150")),
    "checkpoint": Benchmark(("benchmarks.checkpoint",)),
    "tiny_run": Benchmark(("benchmarks.tiny_run",)),
    "diagnose": Benchmark(("benchmarks.diagnose",), quick=False),
    "regime": Benchmark(("benchmarks.regime",), quick=False),
}
GPU_TABLE = "gpu_check.md"
COLUMNS = ("benchmark", "what", "peer", "ratio", "spread", "goal", "met")


@dataclass(frozen=True)
class Outcome:
    """What became of one benchmark."""

    results: tuple[Result, ...] = ()
    environment: Mapping[str, Any] | None = None
    """Of the measurement, which may be older than this run."""
    error: str | None = None
    """Why there are no results."""


def measure(name: str, benchmark: Benchmark, *, output: Path, quick: bool) -> Outcome:
    """Run one benchmark; its file is the only thing believed, since some exit with status 1 for a missed goal."""
    output.unlink(missing_ok=True)
    command = [sys.executable, "-m", *benchmark.command, "--output", str(output), *(["--quick"] if quick else [])]
    print(f"\n== {name}: {' '.join(command[1:])}", flush=True)
    status = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode
    return read(output) if output.is_file() else Outcome(error=f"failed with exit status {status}")


def read(output: Path) -> Outcome:
    """The results of a file."""
    report = json.loads(output.read_text())
    return Outcome(tuple(read_results(report)), report["environment"])


def table_rows(outcomes: Mapping[str, Outcome]) -> list[tuple[str, ...]]:
    """Cells of the table, a row for each comparison and for each benchmark without one."""
    rows: list[tuple[str, ...]] = []
    for name, outcome in outcomes.items():
        if outcome.error is not None:
            rows.append((name, outcome.error, "", "", "", "", "no"))
        for result in outcome.results:
            sign = "at least" if result.better == "higher" else "at most"
            rows.append(
                (
                    name,
                    result.what,
                    result.peer,
                    f"{result.ratio:.3g} {result.unit}",
                    "" if result.spread is None else f"{result.spread[0]:.3g} to {result.spread[1]:.3g}",
                    "" if result.goal is None else f"{sign} {result.goal:.3g}",
                    {True: "yes", False: "no", None: ""}[result.met],
                )
            )
    return rows


def markdown(outcomes: Mapping[str, Outcome], *, gpu_table: Path, quick: bool) -> str:
    """The whole page: where it was measured, the table, the GPU's table or its place."""

    def line(cells: Sequence[str], widths: Sequence[int]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    rows = [COLUMNS, *table_rows(outcomes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    table = [line(rows[0], widths), line(["-" * width for width in widths], widths)]
    table += [line(row, widths) for row in rows[1:]]
    measured = [
        f"- {name}: {found['date']}, commit {found['commit']}, {found['processor']} ({found['num_cores']} cores), "
        f"load average {found['load_average']:.1f}, Python {found['python']}, torch {found['packages']['torch']}"
        for name, found in ((name, outcome.environment) for name, outcome in outcomes.items())
        if found is not None
    ]
    missing = f"not yet run: `tools/gpu_check.sh WHEELS --output FOLDER/{GPU_TABLE}` measures it\n"
    gpu = gpu_table.read_text() if gpu_table.is_file() else missing
    remark = ["", "Quick: goals are set for the full sizes."] if quick else []
    return "\n".join([*table, *remark, "", "Measured:", "", *measured, "", "On a GPU:", "", gpu])


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print and write the table; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="small sizes, few repetitions, without the long ones")
    parser.add_argument("--reuse", action="store_true", help="take results that are there")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=f"default: {FOLDER}, and {FOLDER}/quick")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.names) - set(BENCHMARKS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(BENCHMARKS)}")
    names = arguments.names or [name for name, found in BENCHMARKS.items() if found.quick or not arguments.quick]
    folder = (arguments.output or (ROOT / FOLDER / "quick" if arguments.quick else ROOT / FOLDER)).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = {}
    for name in names:
        file = folder / f"{name}.json"
        there = arguments.reuse and file.is_file()
        outcomes[name] = read(file) if there else measure(name, BENCHMARKS[name], output=file, quick=arguments.quick)
    page = markdown(outcomes, gpu_table=folder / GPU_TABLE, quick=arguments.quick)
    print(f"\n{page}", end="")
    (folder / "table.md").write_text(page)
    table = {"environment": environment(), "benchmarks": {name: asdict(outcome) for name, outcome in outcomes.items()}}
    (folder / "table.json").write_text(json.dumps(table, indent=1) + "\n")
    failed = any(outcome.error is not None for outcome in outcomes.values())
    missed = any(result.met is False for outcome in outcomes.values() for result in outcome.results)
    return int(failed or missed)


if __name__ == "__main__":
    sys.exit(main())
