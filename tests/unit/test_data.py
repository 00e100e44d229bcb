"""Prompts: an order of seed and position alone, wording, what is too long, evaluation sets; JSON Lines with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_calclip.config import Config
from megatron_calclip.config_file import config_from_dict, config_to_dict
from megatron_calclip.data import EVAL_ID_OFFSET, PromptStream, eval_sets, train_stream
from megatron_calclip.data_presets import MATH_INSTRUCTION
from megatron_calclip.errors import UserError
from megatron_calclip.hf import character_tokenizer

ALPHABET = "0123456789+-*=ab"
TOKENIZER = character_tokenizer(ALPHABET)


def make_config(*, sets: Any = "auto", num_prompts: int | None = 5, **data: Any) -> Config:
    """Room for prompts of 12 tokens; 2 steps of 4 prompts; 5 evaluation prompts."""
    shape = {"shape": {}, "tokenizer": "characters", "characters": ALPHABET, "max_sequence_length": 16}
    return config_from_dict(
        {
            "model": shape,
            "data": data,
            "rollout": {"max_new_tokens": 4},
            "train": {"num_steps": 2, "prompts_per_step": 4},
            "eval": {"num_prompts": num_prompts, "sets": sets},
        }
    )


def write_rows(folder: Path, rows: list[Any], name: str = "rows.jsonl") -> str:
    path = folder / name
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


@pytest.mark.parametrize("split", ["data.train", "eval.sets"])
@pytest.mark.parametrize("content", [None, "", "\n \n"])
def test_missing_or_empty_file(tmp_path: Path, split: str, content: str | None) -> None:
    path = tmp_path / "a.jsonl"
    if content is not None:
        path.write_text(content)
    config = make_config(train=str(path)) if split == "data.train" else make_config(sets=[str(path)])
    with pytest.raises(UserError, match=rf"^{split}: .*(no file|has no rows)"):
        train_stream(config, TOKENIZER) if split == "data.train" else eval_sets(config, TOKENIZER)


@pytest.mark.parametrize("path", ["x" * 5000, "a\nb"])
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
    with pytest.raises(UserError, match=complaint.replace(r"data\.train", r"eval\.sets")):
        eval_sets(make_config(sets=[write_rows(tmp_path, [too_long])]), TOKENIZER)


def test_generated_problem_that_is_too_long_shows_before_the_run() -> None:
    # 999999+999999= has 14 characters, though hardly a problem of a short run is that long.
    with pytest.raises(UserError, match="a prompt of 14 tokens"):
        train_stream(make_config(arithmetic={"max_operand": 999_999}), TOKENIZER)


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ("", r"data\.train: .*line 1 field 'prompt' is empty"),
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
    (found,) = eval_sets(make_config(), TOKENIZER)
    assert found.name == "arithmetic" and found.reward == "exact" and found.data is None
    assert len({prompt.text for prompt in found.prompts}) == len(found.prompts) == 5
    assert all(prompt.id >= EVAL_ID_OFFSET for prompt in found.prompts)
    assert [found] == eval_sets(make_config(), TOKENIZER)


def test_evaluation_takes_all_there_are(tmp_path: Path) -> None:
    # Operands 0 and 1: 0+0 (hash 0) and 1+1 (hash 48) are held out.
    (tiny,) = eval_sets(make_config(arithmetic={"max_operand": 1}), TOKENIZER)
    assert {prompt.text for prompt in tiny.prompts} == {"0+0=", "1+1="}
    path = write_rows(tmp_path, [*rows_of(3), *rows_of(3)])
    (found,) = eval_sets(make_config(sets=[path]), TOKENIZER)
    assert [prompt.text for prompt in found.prompts] == ["0+1=", "1+1=", "2+1="]
    assert found.report == [
        f"{path}: 3 of 6 rows; 3 left out: same problem as an earlier row, exactly (line 4, line 5, line 6)"
    ]
    assert found.data is not None and found.data.num_read == 6


def test_the_first_problems_of_each_set(tmp_path: Path) -> None:
    one, other = write_rows(tmp_path, rows_of(8), "one.jsonl"), write_rows(tmp_path, rows_of(3), "other.jsonl")
    both = eval_sets(make_config(sets=[one, other]), TOKENIZER)
    assert [(found.name, len(found.prompts)) for found in both] == [("one", 5), ("other", 3)]
    everything = eval_sets(make_config(sets=[other, one], num_prompts=None), TOKENIZER)
    assert [(found.name, len(found.prompts)) for found in everything] == [("other", 3), ("one", 8)]
    # The ids, and with them the random numbers, are those of the set, whatever is around it; sets share none.
    assert both[0].prompts == everything[1].prompts[:5]
    assert not {prompt.id for prompt in both[0].prompts} & {prompt.id for prompt in both[1].prompts}
    with pytest.raises(UserError, match=r"^eval\.sets: two sets are called 'one'"):
        eval_sets(make_config(sets=[one, "arithmetic", one]), TOKENIZER)


def test_no_evaluation(tmp_path: Path) -> None:
    assert eval_sets(make_config(sets=[]), TOKENIZER) == []
    assert eval_sets(make_config(train=write_rows(tmp_path, rows_of(3))), TOKENIZER) == []


# What is left out


def test_too_long_prompts_are_left_out_and_reported(tmp_path: Path) -> None:
    fitting = [{"prompt": f"{number}" * 12, "answer": 1} for number in (1, 2)]
    rows = [fitting[0], {"prompt": "1" * 13, "answer": 1}, fitting[1], {"prompt": "2" * 14, "answer": 1}]
    path = write_rows(tmp_path, rows)
    stream = train_stream(make_config(train=path, too_long="skip", shuffle=False), TOKENIZER)
    assert [prompt.text[0] for prompt in stream.take(0, 4)] == ["1", "2", "1", "2"]
    assert stream.report == [
        f"{path}: 2 of 4 rows; 2 left out: prompt longer than 12 tokens (line 2, line 4)",
        f"{path}: no duplicates",
        f"{path}: no overlap",
    ]
    (found,) = eval_sets(make_config(sets=[path], too_long="skip"), TOKENIZER)
    assert len(found.prompts) == 2
    with pytest.raises(UserError, match="has no prompt of at most 12 tokens"):
        train_stream(make_config(train=write_rows(tmp_path, rows[1::2]), too_long="skip"), TOKENIZER)


def test_evaluation_has_a_length_of_its_own(tmp_path: Path) -> None:
    path = write_rows(tmp_path, [{"prompt": "1" * 12, "answer": 1}])
    config = make_config(sets=[path])
    assert len(eval_sets(config, TOKENIZER)[0].prompts[0].token_ids) == 12
    longer = config_from_dict({**config_to_dict(config), "eval": {"sets": [path], "max_new_tokens": 5}})
    with pytest.raises(UserError, match=r"= 5 exceeds 16"):
        eval_sets(longer, TOKENIZER)


def test_duplicates_and_overlap_are_reported_or_dropped(tmp_path: Path) -> None:
    held_out = write_rows(tmp_path, [{"prompt": "9+1=", "answer": 10}, {"prompt": "8 + 1=", "answer": 9}], "test.jsonl")
    problems = ["1+1=", "2+1=", "1+1=", "1 +1=", "9+1=", "8+1="]
    path = write_rows(tmp_path, [{"prompt": problem, "answer": 1} for problem in problems])
    settings: dict[str, Any] = {"train": path, "sets": [held_out], "shuffle": False}
    alphabet = {"shape": {}, "tokenizer": "characters", "characters": ALPHABET + " ", "max_sequence_length": 16}

    def stream_of(**data: Any) -> PromptStream:
        config = config_from_dict({**config_to_dict(make_config(**settings, **data)), "model": alphabet})
        tokenizer = character_tokenizer(ALPHABET + " ")
        return train_stream(config, tokenizer, eval_sets(config, tokenizer))

    kept = stream_of()
    assert [prompt.text for prompt in kept.take(0, 6)] == problems
    assert kept.report == [
        f"{path}: 6 of 6 rows",
        f"{path}: 1 kept: same problem as an earlier row, exactly",
        f"{path}: 1 kept: same problem as an earlier row, up to spelling",
        f"{path}: 1 kept: problem of the evaluation set test, exactly",
        f"{path}: 1 kept: problem of the evaluation set test, up to spelling",
    ]
    dropped = stream_of(duplicates="drop", overlap="drop")
    assert [prompt.text for prompt in dropped.take(0, 3)] == ["1+1=", "2+1=", "1+1="]
    assert dropped.report == [
        f"{path}: 2 of 6 rows; 1 left out: same problem as an earlier row, exactly (line 3)"
        "; 1 left out: same problem as an earlier row, up to spelling (line 4)"
        "; 1 left out: problem of the evaluation set test, exactly (line 5)"
        "; 1 left out: problem of the evaluation set test, up to spelling (line 6)"
    ]
    assert [prompt.text for prompt in stream_of(overlap="drop").take(0, 5)] == [*problems[:4], "1+1="]


# Wording


def test_instruction_and_templates(tmp_path: Path) -> None:
    path = write_rows(tmp_path, [{"prompt": "1+1=", "answer": 2}])
    template = (
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}=b{% endif %}"
    )
    file = tmp_path / "template.jinja"
    file.write_text(template)
    alphabet = ALPHABET + "\nusrme"

    def asked(**data: Any) -> str:
        model = {"shape": {}, "tokenizer": "characters", "characters": alphabet, "max_sequence_length": 64}
        config = config_from_dict({**config_to_dict(make_config(train=path, **data)), "model": model})
        (prompt,) = train_stream(config, character_tokenizer(alphabet)).take(0, 1)
        return str(character_tokenizer(alphabet).decode(prompt.token_ids))

    assert asked() == "1+1="
    assert asked(instruction="sum") == "1+1=\nsum"
    assert asked(chat_template=template) == asked(chat_template=str(file)) == "u1+1==b"
    assert asked(chat_template=template, system_prompt="me", instruction="ab") == "smeu1+1=\nab=b"
    with pytest.raises(UserError, match=r"^data\.chat_template: cannot be applied to '1\+1=' \(.*\); correct it"):
        asked(chat_template="{{ 1 / 0 }}")
    with pytest.raises(UserError, match=r"^data\.chat_template: 'no\.jinja' is no readable file"):
        asked(chat_template="no.jinja")


def test_a_layout_brings_its_instruction_and_its_system_message(tmp_path: Path) -> None:
    tokenizer = StubTokenizer()
    gsm8k = write_rows(tmp_path, [{"question": "1 and 1?", "answer": "1+1=2 #### 2"}], "gsm8k.jsonl")
    config = config_from_dict({"model": {}, "data": {"train": f"gsm8k={gsm8k}"}})
    (prompt,) = train_stream(config, tokenizer).take(0, 1)
    assert (prompt.text, prompt.answer) == (f"1 and 1?\n{MATH_INSTRUCTION}", "2")
    own = config_from_dict({"model": {}, "data": {"train": f"gsm8k={gsm8k}", "instruction": ""}})
    assert train_stream(own, tokenizer).take(0, 1)[0].text == "1 and 1?"
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    dapo = write_rows(tmp_path, [{"prompt": chat, "reward_model": {"ground_truth": "3"}}], "dapo.jsonl")
    data = {"train": f"dapo={dapo}", "chat_template": "{{ messages }}"}
    for system_prompt, expected in ((None, "S"), ("other", "other")):
        config = config_from_dict({"model": {}, "data": data | {"system_prompt": system_prompt}})
        train_stream(config, tokenizer).take(0, 1)
        assert tokenizer.messages == [{"role": "system", "content": expected}, {"role": "user", "content": "U"}]


class StubTokenizer:
    """A token for each character; remembers the last conversation."""

    messages: list[dict[str, str]]

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(range(len(text)))}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        self.messages = messages
        return [1, 2]
