"""Per-token records of samples, from the updates of a step to the terminal and the page."""

from __future__ import annotations

import html.parser
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from megatron_calclip import cli
from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.importance import ImportanceWeights
from megatron_calclip.batch import Completion, Prompt, ScoredTokens, TrainingBatch, Trajectories
from megatron_calclip.commands.samples import coloured, read_samples
from megatron_calclip.config import AlgorithmConfig, ClipConfig
from megatron_calclip.experience import Experience
from megatron_calclip.hf import character_tokenizer
from megatron_calclip.objective import MicroBatchRecord, PolicyTokens, policy_objective
from megatron_calclip.sample_log import chosen_sequences, last_updates, sample_rows, token_texts
from megatron_calclip.sample_page import facts_of, level, page

TOKENIZER = character_tokenizer("0123456789")
BOUNDS = ClipBounds(0.8, 1.25)


def tokens_of(advantages: Tensor) -> PolicyTokens:
    n = advantages.numel()
    return PolicyTokens(
        advantages=advantages,
        old_log_probs=torch.zeros(n),
        sampler_log_probs=torch.zeros(n),
        importance=ImportanceWeights(torch.ones(n), torch.zeros(n, dtype=torch.bool)),
        loss_weights=torch.ones(n),
        reference_log_probs=None,
        sequence_ids=torch.zeros(n, dtype=torch.int64),
        num_sequences=1,
    )


def record_of(index: list[int], ratios: list[float], advantages: Tensor) -> MicroBatchRecord:
    """What the policy loss itself leaves of these ratios."""
    objective = policy_objective(tokens_of(advantages), BOUNDS, AlgorithmConfig(clip=ClipConfig(dual=3.0)))
    log_probs = torch.tensor(ratios).log()
    _, record = objective(ScoredTokens(torch.tensor(index), log_probs, torch.zeros(len(index))))
    return record


def test_the_loss_says_what_it_clipped() -> None:
    advantages = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, 1.0])
    record = record_of([0, 1, 2, 3, 4, 5], [0.8, 0.81, 1.25, 1.24, 3.0, 0.5], advantages)
    assert record.clipped.tolist() == [1, 0, 2, 0, 3, 0]


def test_the_last_update_of_a_token_counts() -> None:
    advantages = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    records = [record_of([0, 2], [0.7, 1.0], advantages), record_of([1], [1.5], advantages)]
    records += [record_of([2, 0], [0.75, 1.1], advantages)]  # the second pass, in another order

    def other_rank(values: Tensor) -> Tensor:  # has scored token 3
        return values + torch.tensor([[0.0, 0.0, 0.5], [0.0, 0.0, 0.0]])

    ratio, clipped = last_updates(records, torch.tensor([0, 2, 3]), num_tokens=4, gather_tokens=other_rank)
    assert ratio.tolist() == pytest.approx([1.1, 0.75, 0.5]) and clipped.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("num_sequences", "count", "chosen"),
    [(8, 4, [0, 2, 4, 6]), (3, 4, [0, 1, 2]), (5, 2, [0, 2]), (4, 0, []), (0, 4, [])],
)
def test_samples_are_spread_over_the_step(num_sequences: int, count: int, chosen: list[int]) -> None:
    assert chosen_sequences(num_sequences, count) == chosen


def byte_level() -> Tokenizer:
    """Tokens of one byte, as GPT-2 spells them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@given(text=st.text(max_size=12))
@settings(max_examples=50)
def test_token_texts_make_the_text(text: str) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text).ids
    texts = token_texts(tokenizer.decode, ids)
    assert len(texts) == len(ids) and "".join(texts) == text
    assert [piece for piece in texts if piece] == list(text)  # a character stands at its last byte


def test_token_texts_keep_spaces_that_a_decoder_drops_at_the_start() -> None:
    words = {0: "▁one", 1: "▁two", 2: "s"}

    def decode(ids: list[int]) -> str:  # as SentencePiece does
        return "".join(words[index] for index in ids).replace("▁", " ").removeprefix(" ")

    assert token_texts(decode, [0, 1, 2, 1]) == ["one", " two", "s", " two"]
    assert token_texts(decode, []) == []


def test_a_character_that_never_ends_is_shown_as_it_is() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("aé").ids[:2]
    assert token_texts(tokenizer.decode, ids) == ["a", "�"]


def rows_of_a_step() -> list[dict[str, Any]]:
    """Two prompts with two samples each; the second pass clips the first sample's second token."""
    prompts = [Prompt(0, (3, 4), "12", "3"), Prompt(1, (5,), "3", "4")]
    answers = [
        [Completion((4, 6, 1), (-0.1, -0.2, -0.3), True, 7), Completion((7,), (-0.5,), False, 7)],
        [Completion((8, 1), (-0.4, -0.6), True, 7), Completion((9, 1), (-1.0, -1.1), True, 7)],
    ]
    trajectories = Trajectories.from_completions(prompts, answers)
    texts = ["13", "4", "5", "6"]
    experience = Experience(prompts, trajectories, texts, torch.tensor([0.0, 1.0, 0.5, 0.5]))
    # Flat: 12 13. | 12 4 | 3 5. | 3 6. ; responses at 2 3 4, 7, 9 10, 12 13.
    advantages = torch.zeros(14)
    advantages[[2, 3, 4]], advantages[7] = -1.0, 1.0
    batch = TrainingBatch(trajectories, experience.rewards, advantages)
    batch = batch.with_log_probs(old_log_probs=torch.linspace(-1.3, 0.0, 14))
    records = [
        record_of([2, 3, 4, 9, 10], [1.0] * 5, advantages),
        record_of([3, 2, 4, 9, 10], [0.7, 1.0, 0.9, 1, 1], advantages),
    ]
    return sample_rows(
        experience,
        batch,
        records,
        count=2,
        bounds=BOUNDS,
        decode=TOKENIZER.decode,
        gather_tokens=lambda values: values,
    )


def test_rows_of_a_step() -> None:
    first, second = rows_of_a_step()
    assert first == {
        "sample_id": 0,
        "policy_version": 7,
        "prompt": "12",
        "completion": "13",
        "answer": "3",
        "reward": 0.0,
        "finished": True,
        "advantage": -1.0,
        "bounds": [0.8, 1.25],
        "tokens": ["2", "4", "<eos>"],
        "sampler_log_probs": [-0.1, -0.2, -0.3],
        "old_log_probs": [-1.1, -1.0, -0.9],
        "ratio": [1.0, 0.7, 0.9],
        "clipped": ".l.",
    }
    assert (second["sample_id"], second["prompt"], second["completion"]) == (2, "3", "5")
    assert second["advantage"] == 0.0 and second["clipped"] == ".."


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (1.0, 0),
        (0.0, 0),  # no update scored it
        (0.99, 0),
        (math.exp(0.2 * math.log(0.8)), -1),
        (math.exp(0.6 * math.log(0.8)), -2),
        (0.8, -3),
        (0.3, -3),
        (math.exp(0.2 * math.log(1.25)), 1),
        (math.exp(0.6 * math.log(1.25)), 2),
        (1.2500001, 3),
    ],
)
def test_levels_are_shares_of_the_way_to_the_bound(ratio: float, expected: int) -> None:
    assert level(ratio, [0.8, 1.25]) == expected


class Outline(html.parser.HTMLParser):
    """Tags with their attributes, and the text of tokens."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def sample_of(**changes: Any) -> dict[str, Any]:
    return {"step": 3, **rows_of_a_step()[0], **changes}


def test_page_marks_what_was_clipped_and_stands_alone() -> None:
    text = page(
        "run",
        [sample_of(), {"step": 1, "prompt": "p", "completion": "c", "answer": "a", "reward": 1, "finished": True}],
    )
    outline = Outline(text)
    assert outline.open == [] and text.startswith("<!doctype html>")
    marked = [attributes for tag, attributes in outline.tags if tag == "span" and "title" in attributes]
    assert [attributes["class"] for attributes in marked] == ["d3 l", "d1"]
    assert marked[0]["title"] == "r 0.7, log pi_old -1, clipped at the lower bound"
    assert '<span class="d3 l" title="r 0.7, log pi_old -1, clipped at the lower bound">4</span>' in text
    assert "1 at L, 0 at H" in text and "0.7 to 1" in text
    assert [tag for tag, _ in outline.tags].count("article") == 2
    # It loads nothing, follows the reader's colours and fits a phone.
    assert not any(name in ("src", "href") for _, attributes in outline.tags for name in attributes)
    assert "url(" not in text and "<script" not in text
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text


def test_page_escapes_what_the_policy_wrote() -> None:
    attack = '<script>alert("x")</script>'
    changes = {"prompt": attack, "answer": attack, "tokens": [attack, "4", attack], "ratio": [0.7, 1.0, 1.0]}
    text = page(attack, [sample_of(**changes), {**sample_of(prompt=attack)}])
    assert "<script" not in text and text.count("&lt;script&gt;") >= 5
    Outline(text)


def write(run: Path, *rows: Any) -> Path:
    run.mkdir(exist_ok=True)
    (run / "samples.jsonl").write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return run


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(
        tmp_path / "run", *(sample_of(step=step, completion=f"of {step}") for step in range(1, 31)), '{"step": 31'
    )
    cli.main(["samples", str(run), "--num", "2"])
    shown = capsys.readouterr().out
    assert shown.count("reward 0") == 2 and "step 29" in shown and "step 30" in shown and "24<eos>" in shown
    cli.main(["samples", str(run), "--step", "7", "--html", str(tmp_path / "page.html")])
    assert capsys.readouterr().out == "" and "<b>7</b>" in (tmp_path / "page.html").read_text()
    for arguments, code, message in (
        ([str(tmp_path / "absent")], 2, "cannot be read"),
        ([str(run), "--step", "99"], 2, "has none of step 99"),
        ([str(run), "--num", "0"], 2, "--num: 0 is no number of samples"),
        ([str(run), "--html", str(tmp_path / "no" / "page.html")], 1, "--html: "),
        ([str(write(tmp_path / "none"))], 2, "has no completions"),
    ):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["samples", *arguments])
        error = capsys.readouterr().err
        assert (
            stopped.value.code == code and error.startswith("error: ") and message in error and error.count("\n") == 1
        )


def test_terminal_colours() -> None:
    text = coloured(sample_of())
    assert text.plain == "24<eos>"
    assert [(span.start, span.end, str(span.style)) for span in text.spans] == [
        (1, 2, "bold underline on dodger_blue2"),
        (2, 7, "on navy_blue"),
    ]
    assert coloured({"completion": "[bold]"}).plain == "[bold]"


def test_rows_without_tokens_are_read(tmp_path: Path) -> None:
    row = {"step": 1, "prompt": "p", "completion": "c", "answer": "a", "reward": 1.0, "finished": False}
    run = write(tmp_path / "run", row, "{}", "3")
    assert list(read_samples(run / "samples.jsonl")) == [row]
    assert facts_of(row) == {"step": "1", "reward": "1", "reference": "a", "ended": "cut"}


def test_a_sample_of_a_step_that_went_wrong(tmp_path: Path) -> None:
    """Numbers that were not finite are null in the file; these rows are the ones to look at."""
    row = {
        **{"step": 2, "prompt": "1+1=", "completion": "23", "answer": "2", "reward": 0.0, "finished": True},
        **{"tokens": ["2", "3"], "ratio": [None, 1.1], "clipped": "-h", "old_log_probs": [-1.0, None]},
        **{"advantage": None, "bounds": [0.8, 1.2], "policy_version": 1},
    }
    (tmp_path / "samples.jsonl").write_text(json.dumps(row) + "\n")
    (found,) = read_samples(tmp_path / "samples.jsonl")
    assert facts_of(found)["advantage"] == "+nan" and math.isnan(found["ratio"][0])
    assert coloured(found).plain == "23" and "log pi_old nan" in page("t", [found])


def test_what_a_policy_writes_does_not_reach_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;OWNED\x07\x1b[2J\u202eab\n\tc"
    row = {"step": 1, "prompt": evil, "completion": evil, "answer": evil, "reward": 0.0, "finished": True}
    (tmp_path / "samples.jsonl").write_text(json.dumps(row) + "\n")
    cli.main(["samples", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "\x1b]" not in shown and "\x1b[2J" not in shown and "\u202e" not in shown and "\\x1b[2J" in shown
    assert "\u202e" not in page("t", [row])
