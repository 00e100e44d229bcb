"""An evaluation over sampled completions: scores by set, votes, estimates, metrics, report, and what each rank does."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from megatron_calclip.batch import Completion, Prompt, Trajectories
from megatron_calclip.config import Config
from megatron_calclip.config_file import config_from_dict
from megatron_calclip.data import EvalSet
from megatron_calclip.data_sets import DataSet
from megatron_calclip.evaluation import Evaluation, SetResult, eval_metrics, math_vote, overall, vote_of
from megatron_calclip.evaluation_report import ReportWriter, table
from megatron_calclip.hf import character_tokenizer
from megatron_calclip.metrics import is_known
from megatron_calclip.scoring import score_shares

ALPHABET = "0123456789"
TOKENIZER = character_tokenizer(ALPHABET)
# For each problem, the completions that a sampler returns; the first is right when it equals the answer.
ANSWERS = {"1": ["1", "1", "2", "1"], "22": ["3", "3", "22", "4"], "333": ["5", "6", "7", "8"]}


class StubSampler:
    """Returns `ANSWERS`; the last completion of each problem is cut."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def sample(self, prompts: Sequence[Prompt], **settings: Any) -> Trajectories:
        self.calls.append(settings)
        groups = []
        for prompt in prompts:
            texts = ANSWERS[prompt.answer][: settings["samples_per_prompt"]]
            rows = [TOKENIZER(text)["input_ids"] + ([] if i == 3 else [1]) for i, text in enumerate(texts)]
            groups.append([Completion(tuple(ids), (0.0,) * len(ids), i != 3, 5) for i, ids in enumerate(rows)])
        return Trajectories.from_completions(prompts, groups)


def one_rank() -> Any:
    return SimpleNamespace(rank=0, world_size=1, gather_objects=lambda value: [value])


def set_of(name: str, answers: Sequence[str], data: DataSet | None = None) -> EvalSet:
    prompts = [Prompt(index, (3,), f"Q{answer}", answer) for index, answer in enumerate(answers)]
    return EvalSet(name, prompts, "exact", data)


def config_of(**settings: Any) -> Config:
    return config_from_dict({"model": {}, "eval": {"samples_per_prompt": 4, "temperature": 0.6} | settings})


def results_of(*sets: EvalSet, config: Config | None = None) -> list[SetResult]:
    evaluation = Evaluation(
        config or config_of(),
        sets,
        tokenizer=TOKENIZER,
        sampler=StubSampler(),  # type: ignore[arg-type]
        runtime=one_rank(),
    )
    results = list(evaluation.run())
    evaluation.close()
    return results


def values_of(result: SetResult) -> dict[str, float]:
    return {name: round(estimate.value, 6) for name, estimate in result.estimates.items()}


def test_estimates_by_hand() -> None:
    (result,) = results_of(set_of("a", ["1", "22", "333"]))
    # Scores: 1 1 0 1, 0 0 1 0, 0 0 0 0.
    assert [[one.score.value for one in row] for row in result.graded] == [[1, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert values_of(result) == {
        "avg@4": round((0.75 + 0.25 + 0) / 3, 6),
        "pass@2": round((1 + 0.5 + 0) / 3, 6),  # 1 - C(1,2)/C(4,2), 1 - C(3,2)/C(4,2)
        "pass@4": round(2 / 3, 6),
        "maj@4": round(1 / 3, 6),  # 1; 3, which is wrong; a tie of four wrong ones
        "response_length": round((7 + (2 + 2 + 3 + 1) + 7) / 12, 6),
        "truncated": 0.25,
    }
    assert result.score == pytest.approx(1 / 3)
    # Standard deviation of 0.75, 0.25, 0 over the root of 3.
    assert result.standard_error == pytest.approx(((0.75 - 1 / 3) ** 2 + (0.25 - 1 / 3) ** 2 + 1 / 9) ** 0.5 / 6**0.5)


def test_one_sample_has_neither_majority_nor_pass_at_k() -> None:
    (result,) = results_of(set_of("a", ["1", "22"]), config=config_of(samples_per_prompt=1))
    assert list(result.estimates) == ["avg@1", "response_length", "truncated"]


def test_sampling_is_that_of_the_evaluation() -> None:
    sampler = StubSampler()
    evaluation = Evaluation(
        config_of(),
        [set_of("a", ["1"])],
        tokenizer=TOKENIZER,
        sampler=sampler,  # type: ignore[arg-type]
        runtime=one_rank(),
    )
    list(evaluation.run())
    assert sampler.calls == [{"samples_per_prompt": 4, "temperature": 0.6, "seed_step": 0}]


def test_bonuses_of_training_do_not_count() -> None:
    config = config_from_dict(
        {"model": {}, "eval": {"samples_per_prompt": 4}, "reward": {"format": {"pattern": ".", "weight": 0.5}}}
    )
    (result,) = results_of(set_of("a", ["1", "22", "333"]), config=config)
    assert result.score == pytest.approx(1 / 3)


def test_metrics_of_several_sets() -> None:
    results = results_of(set_of("a", ["1"]), set_of("b", ["22", "333"]))
    row = eval_metrics(results)
    assert row["eval/a/score"] == 0.75 and row["eval/b/score"] == 0.125
    assert row["eval/score"] == pytest.approx((0.75 + 0.125) / 2)  # sets weigh alike, whatever their size
    # b: values 0.25 and 0, a standard error of 0.125; a single problem has none.
    assert row["eval/stderr"] == pytest.approx(0.125 / 2)
    assert row["eval/truncated"] == 0.25 and all(is_known(name) for name in row)
    assert overall(results)["avg@4"].value == row["eval/score"]
    single = eval_metrics(results[1:])
    assert single["eval/score"] == 0.125 and "eval/b/score" not in single


@pytest.mark.parametrize(
    ("completion", "vote"),
    [
        (r"so \boxed{042}", "42"),
        (r"\boxed{42.0}", "42"),
        (r"\boxed{1{,}000}", "1000"),
        (r"\boxed{\dfrac{1}{2}}", "1/2"),
        (r"\boxed{ \frac 12 }", "1/2"),
        (r"\boxed{0.5}", "1/2"),
        (r"\boxed{20 \text{ cm}}", "20"),
        ("The answer is 20 miles.", "20"),
        (r"\boxed{ x + \dfrac13 }", r"x+\frac{1}{3}"),
        (r"\boxed{1} and \boxed{x+1}", "1,x+1"),
        ("Answer: 7", "7"),
        (r"\boxed{7^{9^{9}}}", "7^{9^{9}}"),
        (rf"\boxed{{{'7' * 500}}}", None),
        ("no idea, really.\nNone.", None),
    ],
)
def test_math_votes(completion: str, vote: str | None) -> None:
    assert math_vote(completion) == vote


@given(text=st.text(alphabet=r"\boxed{}^_$0123456789.,-+/()frac \n%e", max_size=60))
def test_any_text_has_a_vote_or_none(text: str) -> None:
    for completion in (text, rf"\boxed{{{text}}}", rf"\boxed{{10^{{{text}}}}}"):
        math_vote(completion)
        assert vote_of("math", completion) == math_vote(completion)


def test_votes_of_numbers_that_are_too_long_to_write() -> None:
    one, same, other = (math_vote(rf"\boxed{{{text}}}") for text in ("10^{2400}", "100^{1200}", "10^{2401}"))
    assert one is not None and one.startswith("0x") and one == same != other


def test_votes_that_cannot_be_read_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_calclip.evaluation.normalize", lambda text: 1 / 0)
    assert vote_of("math", r"\boxed{1}") is None


def test_votes_by_reward() -> None:
    assert vote_of("exact", " 7\n") == "7" and vote_of("exact", " ") is None
    assert vote_of("code", "print(1)") is None


def test_each_rank_scores_a_share() -> None:
    samples = [f"s{index}" for index in range(5)]
    gathered: list[list[str]] = []

    def rank(number: int) -> Any:
        def gather(value: list[str]) -> list[list[str]]:
            gathered.append(value)
            return [[f"score of {sample}" for sample in samples[start::2]] for start in range(2)]

        return SimpleNamespace(rank=number, world_size=2, gather_objects=gather)

    scorer = SimpleNamespace(score=lambda share: [f"score of {sample}" for sample in share])
    for number in (0, 1):
        found: Any = score_shares(scorer, samples, rank(number))  # type: ignore[arg-type]
        assert found == [f"score of {sample}" for sample in samples]
    assert gathered == [[f"score of s{i}" for i in (0, 2, 4)], [f"score of s{i}" for i in (1, 3)]]


def test_report(tmp_path: Path) -> None:
    data = DataSet(
        "a", "a.jsonl", "5af3", None, [("", "", {})] * 3, [""] * 3, 4, {"field 'answer' is empty": ["line 2"]}
    )
    results = results_of(set_of("a", ["1", "22", "333"], data), set_of("b", ["22", "333"]))
    writer = ReportWriter(tmp_path / "deep" / "out", config_of(), model={"path": "m"})
    writer.add(results[0])
    assert not (writer.folder / "report.json").exists()  # the evaluation has not ended
    assert len((writer.folder / "completions.jsonl").read_text().splitlines()) == 12
    writer.add(results[1])
    writer.finish()
    report = json.loads((writer.folder / "report.json").read_text())
    assert report["model"] == {"path": "m"} and report["seed"] == 0
    assert report["sampling"]["temperature"] == 0.6 and report["sampling"]["samples_per_prompt"] == 4
    one, other = report["sets"]
    assert (one["name"], one["num_problems"], one["num_completions"]) == ("a", 3, 12)
    assert one["data"] == {
        "source": "a.jsonl",
        "sha256": "5af3",
        "num_rows": 4,
        "num_usable": 3,
        "left_out": {"field 'answer' is empty": ["line 2"]},
    }
    assert other["data"] is None
    found = one["estimates"]["avg@4"]
    assert found["low"] < found["value"] < found["high"] and found["value"] == pytest.approx(1 / 3)
    assert report["mean"]["avg@4"]["value"] == pytest.approx((1 / 3 + 0.125) / 2)
    rows = [json.loads(line) for line in (writer.folder / "completions.jsonl").read_text().splitlines()]
    assert len(rows) == 20
    assert rows[6] == {
        "set": "a",
        "problem": 1,
        "sample": 2,
        "prompt": "Q22",
        "completion": "22",
        "answer": "22",
        "reference": "22",
        "score": 1.0,
        "timed_out": False,
        "num_tokens": 3,
        "finished": True,
    }


def test_table() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table(results_of(set_of("a", ["1", "22"]), set_of("b", ["22", "333"])), title="model"))
    text = console.export_text()
    for cell in ("avg@4", "pass@4", "maj@4", "50.0 [25.0, 75.0]", "31.2 [", "mean", "25%", "[low, high]"):
        assert cell in text, text
