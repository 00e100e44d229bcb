"""How measurement files read in the documentation: pure functions from a file's content to Markdown.

What: a table for each of `docs/measured/*.json`, with the command, date, commit and machine above it and, where something was
asked for, a sentence below that says what was met. Every figure is computed from the file, and whether a goal is met by
`Result.met`; nothing is typed by hand. `tools/make_results.py` puts the texts into the pages. Here are the benchmarks; runs and
tests are in `tables_runs.py`.

Left out on purpose: what the figures mean, which the pages say.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.results import Result, read_results

Report = Mapping[str, Any]
"""The content of a file."""
MISSED = " (missed)"
"""After a figure that does not reach its goal."""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def percent(share: float | None, digits: int = 1) -> str:
    """A share in percent; empty where there is none."""
    return "" if share is None else f"{share:.{digits}%}"


def number(value: float) -> str:
    """Three significant digits: 0.0233, 1.50, 29.6, 1317."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:#.3g}".rstrip(".")


def amount(value: float, unit: str) -> str:
    """A ratio with its unit: `1.84x` of speed or counts, `0.630x the time`, `2.10% of its seconds`, `43.0 s`."""
    if unit.startswith("x "):
        return f"{number(value)}x" + ("" if unit in ("x speed", "x tokens") else f" the {unit.removeprefix('x ')}")
    if unit.startswith("of "):
        return f"{percent(value, 2)} {unit}"
    return f"{number(value)} {unit}"


def asked(result: Result) -> str:
    """A goal in words; empty without one."""
    if result.goal is None:
        return ""
    return f"at {'least' if result.better == 'higher' else 'most'} {amount(result.goal, result.unit)}"


def measured(result: Result) -> str:
    """The figure, and whether it misses its goal."""
    return amount(result.ratio, result.unit) + (MISSED if result.met is False else "")


def source(report: Report) -> str:
    """Which command made a file, when and where."""
    found = report["environment"]
    return (
        f"`{found['command']}`, {found['date']}, commit `{found['commit']}`, {found['processor']}, {found['num_cores']} cores, "
        f"load average {found['load_average']:.1f} at the end, torch {found['packages']['torch']}."
    )


def verdict(results: Sequence[Result]) -> str:
    """How many goals are met; the tables mark those that are not."""
    goals = [result.met for result in results if result.met is not None]
    if not goals:
        return "No goal was set for these."
    missed = goals.count(False)
    return f"Goals met: {len(goals) - missed} of {len(goals)}" + ("; the others are marked." if missed else ".")


def page(report: Report, *parts: str) -> str:
    """Source, tables and sentences, a blank line between them."""
    return "\n\n".join([source(report), *filter(None, parts)])


def comparisons(report: Report) -> str:
    """Every comparison of a file in a line of its own."""
    results = read_results(report)
    rows = [
        (
            result.what,
            result.peer,
            measured(result),
            "" if result.spread is None else " to ".join(map(number, result.spread)),
            asked(result),
        )
        for result in results
    ]
    return page(report, table(("what", "against", "median", "range", "asked"), rows), verdict(results))


def by_peer(report: Report) -> str:
    """Comparisons with several peers: a line for each case, a column for each peer."""
    results = read_results(report)
    peers = list(dict.fromkeys(result.peer for result in results))
    cases: dict[str, dict[str, Result]] = {result.what: {} for result in results}
    for result in results:
        cases[result.what][result.peer] = result
    goals = {
        case: next((asked(found[peer]) for peer in peers if found[peer].goal), "") for case, found in cases.items()
    }
    rows = [
        (case.removeprefix("step, "), *(measured(found[peer]) for peer in peers), goals[case])
        for case, found in cases.items()
    ]
    return page(report, table(("case", *peers, "asked, where a goal was set"), rows), verdict(results))


def logprobs(report: Report) -> str:
    """Time, memory and error of the log-probabilities."""
    rows = []
    for row in report["summary"]:
        memory = percent(row["memory_share"])
        if row["max_memory_share"] is not None:
            memory += f" (asked {row['max_memory_share']:.0%})"
        speed = f"{1 / row['time_share']:.2f}x (asked {1 / row['max_time_share']:.2f}x)"
        rows.append(
            (row["title"], row["dtype"], speed, memory, f"{row['error']:.1e}", "yes" if row["met"] else "missed")
        )
    sizes = f"{report['tokens']} x {report['vocab']:,} logits."
    header = ("what", "dtype", "speed-up", "memory", "largest error against float64", "met")
    return page(report, sizes, table(header, rows), verdict(read_results(report)))


def precision(report: Report) -> str:
    """Steps and shadow passes of every recipe in multiples of BF16's time."""
    found = {(row["recipe"], row["fp8_param"]): row for row in report["rows"]}
    rows = []
    for recipe in dict.fromkeys(recipe for recipe, _ in found):
        cells = [recipe]
        for part in ("step", "shadow"):
            for fp8_param in (False, True):
                row = found[recipe, fp8_param]
                goal = row[f"{part}_goal"]
                missed = goal is not None and row[part] > goal
                cells.append(f"{row[part]:.2f}x" + (MISSED if missed else ""))
            cells.append(f"at most {found[recipe, False][f'{part}_goal']:.2f}x")
        rows.append(cells)
    header = (
        "recipe",
        "step",
        "with FP8 parameters",
        "asked",
        "shadow pass",
        "with FP8 parameters",
        "asked of the first",
    )
    models = ", ".join(dict.fromkeys(row["model"] for row in report["rows"]))
    sizes = f"Model of {models} parameters, {report['tokens']:,} tokens a step, multiples of BF16's time."
    return page(report, sizes, table(header, rows), verdict(read_results(report)))


def calibration(report: Report) -> str:
    """Comparisons, and what a calibration sends."""
    sent = f"Over {report['tokens']:,} tokens; the one all-reduce carries {calibration_bytes(report)} bytes."
    return f"{comparisons(report)}\n\n{sent}"


def calibration_bytes(report: Report) -> str:
    """What the all-reduce of a calibration carries; a part of a sentence."""
    run = report["runs"][0]
    plain, bootstrap = (run[name]["num_bytes"] for name in ("ours, no bootstrap", "ours, bootstrap"))
    return f"{plain:,}, with bootstrap replicates {bootstrap:,}"


def exchange_bytes(report: Report) -> str:
    """Bytes of a response token when ranks exchange completions; a part of a sentence."""
    return f"{report['exchange']['bytes']:.1f}"


def exchange(report: Report) -> str:
    """The same and its time; a part of a sentence."""
    found = report["exchange"]
    return f"{found['bytes']:.1f} bytes, {found['pickle_ns']:.0f} ns to pickle and {found['unpickle_ns']:.0f} ns to unpickle"


def weights(report: Report) -> str:
    """GB/s of conversions and of the stream, beside a copy."""
    summary = report["summary"]
    rows = []
    for name in ("hf_to_megatron --tp 2 --pp 2", "megatron_to_hf", "stream TP2"):
        row = summary[name]
        peak = f"{row['peak_bytes'] / 1e9:.2f} GB" if "peak_bytes" in row else ""
        peak += MISSED if row.get("peak_bytes", 0) > summary["peak_limit"] else ""
        rows.append(
            (name, f"{row['gb_per_second']:.3f}", f"{row['copy_gb_per_second']:.3f}", f"{row['ratio']:.2f}", peak)
        )
    sizes = (
        f"A checkpoint of {summary['bytes'] / 1e9:.2f} GB, largest tensor {summary['largest_tensor'] / 1e9:.3f} GB, limit of "
        f"resident memory {summary['peak_limit'] / 1e9:.2f} GB. Seconds of the commands include imports and verification."
    )
    header = ("", "GB/s", "a copy in the same run", "ratio", "peak resident")
    return page(report, sizes, table(header, rows), verdict(read_results(report)))


def rewards(report: Report) -> str:
    """Answers per second and right verdicts, beside math-verify."""
    rows = []
    for result, (title, runs) in zip(read_results(report), report["runs"].items(), strict=True):
        ours, theirs = (statistics.median(run[f"{who}_per_second"] for run in runs) for who in ("ours", "peer"))
        right = statistics.median(run["ours_accuracy"] for run in runs)
        peers = [run["peer_accuracy"] for run in runs if run["peer_accuracy"] is not None]
        spread = "" if result.spread is None else f" ({result.spread[0]:.2f} to {result.spread[1]:.2f})"
        rows.append(
            (
                title,
                f"{ours:.0f}",
                f"{theirs:.1f}",
                measured(result) + spread,
                asked(result),
                percent(right, 2),
                percent(statistics.median(peers), 2) if peers else "never ended",
            )
        )
    sizes = f"{report['answers']:,} answers, {report['num_workers']} workers, time-out {report['timeout_seconds']} s for both."
    header = ("answers", "ours, per second", "math-verify, per second", "speed-up", "asked", "ours right", "peer right")
    return page(report, sizes, table(header, rows), verdict(read_results(report)))


def checkpoint(report: Report) -> str:
    """The comparison, and the seconds behind it."""
    found = report["medians"]
    seconds = (
        f"A checkpoint of {found['bytes'] / 1e9:.2f} GB, {len(report['rows'])} repetitions: saved at once {found['whole']:.2f} s, "
        f"training stands still for {found['stall']:.2f} s when it is saved in the background, and a step beside the "
        f"writing process takes {found['step_beside']:.1f} times its own time."
    )
    return f"{comparisons(report)}\n\n{seconds}"
