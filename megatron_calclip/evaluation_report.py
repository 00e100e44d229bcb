"""What an evaluation leaves behind: a table, a JSON file with everything that is needed to repeat it, and every completion.

    FOLDER/report.json        settings, files with their SHA-256, what was left out of them, estimates with intervals
    FOLDER/completions.jsonl  a line for each completion: problem, answer, reference, score

Completions are written set by set, so that those of an evaluation that was stopped are there; the report comes last, and its
absence says that the evaluation did not end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

import megatron_calclip
from megatron_calclip.config import Config
from megatron_calclip.data import EvalSet
from megatron_calclip.evaluation import SetResult, overall
from megatron_calclip.evaluation_stats import COVERAGE, NUM_REPLICATES, Estimate

REPORT_FILE = "report.json"
COMPLETIONS_FILE = "completions.jsonl"


class ReportWriter:
    """Writes one evaluation into a folder.

    Args:
        folder: is created; files of an evaluation that was there are replaced.
        config: of the evaluation.
        model: what was evaluated, as JSON.
    """

    def __init__(self, folder: Path, config: Config, *, model: dict[str, Any]) -> None:
        self.folder, self.config, self.model = folder, config, model
        self.results: list[SetResult] = []
        folder.mkdir(parents=True, exist_ok=True)
        (folder / REPORT_FILE).unlink(missing_ok=True)
        (folder / COMPLETIONS_FILE).write_text("", encoding="utf-8")

    def add(self, result: SetResult) -> None:
        """Append a set's completions."""
        with (self.folder / COMPLETIONS_FILE).open("a", encoding="utf-8") as file:
            for row in completion_rows(result):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self.results.append(result)

    def write(self, results: Sequence[SetResult]) -> None:
        """Write all of an evaluation."""
        for result in results:
            self.add(result)
        self.finish()

    def finish(self) -> None:
        """Write the report."""
        report = {"model": self.model, **as_json(self.results, self.config)}
        aside = self.folder / (REPORT_FILE + ".partial")
        aside.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        aside.rename(self.folder / REPORT_FILE)


def completion_rows(result: SetResult) -> Iterator[dict[str, Any]]:
    """Every completion of a set, to be read."""
    for index, (prompt, row) in enumerate(zip(result.eval_set.prompts, result.graded, strict=True)):
        for sample, graded in enumerate(row):
            yield {
                "set": result.eval_set.name,
                "problem": index,
                "sample": sample,
                "prompt": prompt.text,
                "completion": graded.text,
                "answer": graded.vote,
                "reference": prompt.answer,
                "score": graded.score.value,
                "timed_out": graded.score.timed_out,
                "num_tokens": graded.num_tokens,
                "finished": graded.finished,
            }


def as_json(results: Sequence[SetResult], config: Config) -> dict[str, Any]:
    """Settings, sets and estimates."""
    sampling = config.for_evaluation.rollout
    return {
        "version": megatron_calclip.__version__,
        "seed": config.train.seed,
        "sampling": {
            "samples_per_prompt": config.eval.samples_per_prompt,
            "temperature": config.eval.temperature,
            "top_p": sampling.top_p,
            "max_new_tokens": sampling.max_new_tokens,
            "engine": sampling.engine,
            "dtype": sampling.dtype,
            "precision": sampling.precision,
            "chat_template": config.data.chat_template,
            "system_prompt": config.data.system_prompt,
        },
        "intervals": {"coverage": COVERAGE, "replicates": NUM_REPLICATES, "over": "problems"},
        "sets": [_set_json(result) for result in results],
        "mean": {name: asdict(value) for name, value in overall(results).items()},
    }


def _set_json(result: SetResult) -> dict[str, Any]:
    one = result.eval_set
    times = [graded.score.timed_out for row in result.graded for graded in row]
    return {
        "name": one.name,
        "reward": one.reward,
        "num_problems": len(one.prompts),
        "num_completions": len(times),
        "num_timed_out": sum(times),
        "data": _data_json(one),
        "estimates": {name: asdict(value) for name, value in result.estimates.items()},
    }


def _data_json(one: EvalSet) -> dict[str, Any] | None:
    if one.data is None:
        return None
    return {
        "source": one.data.source,
        "sha256": one.data.sha256,
        "num_rows": one.data.num_read,
        "num_usable": len(one.data.rows),
        "left_out": one.data.left_out,
    }


def table(results: Sequence[SetResult], *, title: str) -> Table:
    """A row for each set, and one for their mean."""
    n = len(results[0].graded[0])
    means = overall(results)
    names = [f"avg@{n}", *([f"pass@{n}"] if n > 1 else []), *([f"maj@{n}"] if n > 1 else [])]
    titled = Table(
        title=escape(title),
        caption=f"\\[low, high]: {COVERAGE:.0%} interval over problems; the mean weighs sets alike",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    titled.add_column("set", no_wrap=True)
    titled.add_column("num", justify="right")
    for name in names:
        titled.add_column(name, justify="right", no_wrap=True)
    titled.add_column("tokens", justify="right", no_wrap=True)
    titled.add_column("cut", justify="right", no_wrap=True)
    for result in results:
        found = result.estimates
        titled.add_row(escape(result.eval_set.name), str(len(result.graded)), *_cells(found, names))
    if len(results) > 1:
        titled.add_row("mean", "", *_cells(means, names), style="bold")
    return titled


def _cells(found: dict[str, Estimate], names: Sequence[str]) -> list[str]:
    return [
        *(_percent(found.get(name)) for name in names),
        f"{found['response_length'].value:.0f}",
        f"{found['truncated'].value:.0%}",
    ]


def _percent(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    if estimate.low is None or estimate.high is None:
        return f"{100 * estimate.value:.1f}"
    return f"{100 * estimate.value:.1f} \\[{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"
