"""Prompts: JSON Lines, an order of seed and position alone, what is too long, errors with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_calclip.config import Config
from megatron_calclip.config_file import config_from_dict
from megatron_calclip.data import EVAL_ID_OFFSET, eval_prompts, train_stream
from megatron_calclip.errors import UserError
from megatron_calclip.hf import character_tokenizer

ALPHABET = "0123456789+-*=ab"
TOKENIZER = character_tokenizer(ALPHABET)


def make_config(**data: Any) -> Config:
    """Room for prompts of 12 tokens; 2 steps of 4 prompts; 5 evaluation prompts."""
    shape = {"shape": {}, "tokenizer": "characters", "characters": ALPHABET, "max_sequence_length": 16}
    return config_from_dict(
        {
            "model": shape,
            "data": data,
            "rollout": {"max_new_tokens": 4},
            "train": {"num_steps": 2, "prompts_per_step": 4},
            "eval": {"num_prompts": 5},
        }
    )


def write_rows(folder: Path, rows: list[Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def rows_of(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{i}+1=", "answer": i + 1, "source": "made"} for i in range(count)]


def texts_of(config: Config, start: int, count: int) -> list[str]:
    return [prompt.text for prompt in train_stream(config, TOKENIZER).take(start, count)]


# JSON Lines


def test_rows_in_the_order_of_the_file(tmp_path: Path) -> None:
    config = make_config(train=write_rows(tmp_path, rows_of(3)), shuffle=False)
    prompts = train_stream(config, TOKENIZER).take(1, 4)
    assert [prompt.text for prompt in prompts] == ["1+1=", "2+1=", "0+1=", "1+1="]
    assert [prompt.id for prompt in prompts] == [1, 2, 3, 4]  # no id comes twice, so no random number does
    first = prompts[0]
    assert (first.answer, first.metadata) == ("2", {"source": "made"})
    assert first.token_ids == (3, 12, 3, 15)  # two special tokens, then the alphabet: 1 + 1 =


def test_shuffling_is_a_permutation_of_each_epoch(tmp_path: Path) -> None:
    path = write_rows(tmp_path, rows_of(8))
    config = make_config(train=path)
    order = texts_of(config, 0, 24)
    epochs = [order[start : start + 8] for start in (0, 8, 16)]
    assert all(sorted(epoch) == [f"{i}+1=" for i in range(8)] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert order == texts_of(config, 0, 24)
    assert order[5:13] == texts_of(config, 5, 8)  # by position, wherever a resumed run starts
    other_seed = config_from_dict({"model": {}, "data": {"train": path}, "train": {"seed": 1}})
    stream = train_stream(other_seed, TOKENIZER)
    assert [prompt.text for prompt in stream.take(0, 24)] != order


def test_blank_lines_byte_order_mark_and_other_fields(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"q": "1+1=", "a": 2.5}\n\n  \n{"q": "2+2=", "a": "4"}')
    config = make_config(train=str(path), prompt_field="q", answer_field="a", shuffle=False)
    assert [(p.text, p.answer) for p in train_stream(config, TOKENIZER).take(0, 2)] == [
        ("1+1=", "2.5"),
        ("2+2=", "4"),
    ]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("3", "is a int, not an object"),
        ('["prompt", "answer"]', "is a list, not an object"),
        ('{"answer": 1}', r"has no field 'prompt' \(named by data\.prompt_field\)"),
        ('{"prompt": "1"}', r"has no field 'answer' \(named by data\.answer_field\)"),
        ('{"prompt": null, "answer": 1}', "field 'prompt' is a NoneType, not a text"),
        ('{"prompt": ["1"], "answer": 1}', "field 'prompt' is a list, not a text"),
        ('{"prompt": "1", "answer": null}', "field 'answer' is a NoneType, not a text or a number"),
        ('{"prompt": "1", "answer": true}', "field 'answer' is a bool, not a text or a number"),
        ('{"prompt": "\\ud800", "answer": 1}', "surrogates not allowed"),
        ('{"prompt": "1", "answer": "\\udc00"}', "surrogates not allowed"),
    ],
)
def test_bad_row_names_file_and_line(tmp_path: Path, line: str, complaint: str) -> None:
    path = write_rows(tmp_path, [*rows_of(2), line])
    with pytest.raises(UserError, match=rf"^data\.train: {path} line 3 .*{complaint}") as caught:
        train_stream(make_config(train=path), TOKENIZER)
    assert "\n" not in str(caught.value)


def test_row_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "1", "answer": 1}\n{"prompt": "\xff", "answer": 1}\n')
    with pytest.raises(UserError, match=r"a\.jsonl line 2 is not JSON"):
        train_stream(make_config(train=str(path)), TOKENIZER)


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("content", [None, "", "\n \n"])
def test_missing_or_empty_file(tmp_path: Path, split: str, content: str | None) -> None:
    path = tmp_path / "a.jsonl"
    if content is not None:
        path.write_text(content)
    config = make_config(**{split: str(path)})
    with pytest.raises(UserError, match=rf"^data\.{split}: .*(no file|has no rows)"):
        train_stream(config, TOKENIZER) if split == "train" else eval_prompts(config, TOKENIZER)


@pytest.mark.parametrize("path", ["x" * 5000, "/", "a\nb"])
def test_impossible_path(path: str) -> None:
    with pytest.raises(UserError, match=r"^data\.train: no file"):
        train_stream(make_config(train=path), TOKENIZER)


# Prompts that do not fit


def test_prompt_that_is_too_long_shows_before_the_run(tmp_path: Path) -> None:
    # Room for 16 - 4 = 12 tokens. The last of 8 rows, all of which the run uses, is one too long.
    fitting, too_long = {"prompt": "1" * 12, "answer": 1}, {"prompt": "1" * 13, "answer": 1}
    train_stream(make_config(train=write_rows(tmp_path, [fitting])), TOKENIZER)
    path = write_rows(tmp_path, [*rows_of(7), too_long])
    complaint = r"^model\.max_sequence_length: a prompt of 13 tokens .*data\.train.* = 4 exceeds 16"
    with pytest.raises(UserError, match=complaint):
        train_stream(make_config(train=path), TOKENIZER)
    with pytest.raises(UserError, match=complaint.replace("train", "eval")):
        eval_prompts(make_config(eval=write_rows(tmp_path, [too_long])), TOKENIZER)


def test_generated_problem_that_is_too_long_shows_before_the_run() -> None:
    # 999999+999999= has 14 characters, though hardly a problem of a short run is that long.
    with pytest.raises(UserError, match="a prompt of 14 tokens"):
        train_stream(make_config(arithmetic={"max_operand": 999_999}), TOKENIZER)


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ("", r"data\.train: a prompt has no tokens"),
        ("1+x=", r"model\.characters: lacks 'x' of the prompt '1\+x='"),
    ],
)
def test_prompt_that_cannot_be_written(tmp_path: Path, prompt: str, complaint: str) -> None:
    path = write_rows(tmp_path, [{"prompt": prompt, "answer": 1}])
    with pytest.raises(UserError, match=f"^{complaint}"):
        train_stream(make_config(train=path), TOKENIZER)


def test_chat_template_is_applied() -> None:
    tokenizer = character_tokenizer(ALPHABET)
    config = make_config(chat_template=True)
    with pytest.raises(UserError, match=r"^data\.chat_template: the tokenizer has no template"):
        train_stream(config, tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}a{{ m.content }}{% endfor %}{% if add_generation_prompt %}b{% endif %}"
    )
    (prompt,) = train_stream(config, tokenizer).take(0, 1)
    assert tokenizer.decode(prompt.token_ids) == f"a{prompt.text}b"


# Evaluation


def test_evaluation_prompts_are_distinct_and_have_ids_of_their_own() -> None:
    config = make_config()
    prompts = eval_prompts(config, TOKENIZER)
    assert len({prompt.text for prompt in prompts}) == len(prompts) == 5
    assert all(prompt.id >= EVAL_ID_OFFSET for prompt in prompts)
    assert prompts == eval_prompts(config, TOKENIZER)


def test_evaluation_takes_all_there_are(tmp_path: Path) -> None:
    # Operands 0 and 1: 0+0 (hash 0) and 1+1 (hash 48) are held out.
    tiny = make_config(arithmetic={"max_operand": 1})
    assert {prompt.text for prompt in eval_prompts(tiny, TOKENIZER)} == {"0+0=", "1+1="}
    path = write_rows(tmp_path, [*rows_of(3), *rows_of(3)])
    in_order = eval_prompts(make_config(eval=path), TOKENIZER)
    assert [prompt.text for prompt in in_order] == ["0+1=", "1+1=", "2+1="]


def test_no_evaluation() -> None:
    assert eval_prompts(make_config(eval=None), TOKENIZER) == []
