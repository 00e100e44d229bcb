"""Prompts: generated problems, JSON Lines, an order of seed and position alone, and errors that name file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_calclip.config import ArithmeticTask, Config, config_from_dict
from megatron_calclip.data import EVAL_ID_OFFSET, Arithmetic, eval_prompts, train_stream
from megatron_calclip.errors import UserError
from megatron_calclip.hf import character_tokenizer

ALPHABET = "0123456789+-*=ab"
TOKENIZER = character_tokenizer(ALPHABET)


def config(*, model: dict[str, Any] | None = None, train: dict[str, Any] | None = None, **data: Any) -> Config:
    return config_from_dict(
        {
            "model": {"shape": {}, "tokenizer": "characters", "characters": ALPHABET, "max_sequence_length": 16}
            | (model or {}),
            "data": data,
            "rollout": {"max_new_tokens": 4},
            "train": {"num_steps": 2, "prompts_per_step": 4} | (train or {}),
            "eval": {"num_prompts": 5},
        }
    )


def write_rows(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def rows_of(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{i}+1=", "answer": i + 1, "source": "made"} for i in range(count)]


# Generated problems


@given(
    operators=st.sampled_from(["+", "-", "*", "+-*"]),
    max_operand=st.integers(1, 200),
    num_operands=st.integers(2, 5),
    seed=st.integers(0, 5),
    position=st.integers(0, 1 << 40),
    held_out=st.booleans(),
)
@settings(deadline=None)
def test_answers_are_right_from_left_to_right(
    operators: str, max_operand: int, num_operands: int, seed: int, position: int, held_out: bool
) -> None:
    task = ArithmeticTask(operators=operators, max_operand=max_operand, num_operands=num_operands)
    source = Arithmetic(task, seed=seed, held_out=held_out)
    problem, answer, _ = source.row(position)
    assert (problem, answer, {}) == source.row(position)
    text = problem.removesuffix("=")
    for symbol in "+-*":
        text = text.replace(symbol, f" {symbol} ")
    value, *rest = text.split()
    assert len(rest) == 2 * (num_operands - 1)
    for symbol, operand in zip(rest[::2], rest[1::2], strict=True):
        assert symbol in operators and 0 <= int(operand) <= max_operand
        value = str(eval(f"{value}{symbol}{operand}" if not value.startswith("-") else f"({value}){symbol}{operand}"))
    assert value == answer
    longest = max(len(row[0]) for row in source.extremes(1))
    assert len(problem) <= longest == num_operands * (len(str(max_operand)) + 1)


def test_training_and_evaluation_share_no_problem() -> None:
    # 31 x 31 pairs; (31 a + 17 b) mod 8 == 0 holds out an eighth of them.
    task = ArithmeticTask(operators="+", max_operand=30)
    train, held_out = (
        {Arithmetic(task, seed=0, held_out=flag).row(position)[0] for position in range(20_000)} for flag in (False, True)
    )
    assert not train & held_out
    assert len(train | held_out) == 31 * 31
    assert len(held_out) == sum((31 * a + 17 * b) % 8 == 0 for a in range(31) for b in range(31))


def test_seeds_give_other_problems() -> None:
    first, second = ([Arithmetic(ArithmeticTask(), seed=s, held_out=False).row(i) for i in range(20)] for s in (0, 1))
    assert first != second


# JSON Lines


def test_rows_in_order(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", rows_of(3))
    stream = train_stream(config(train_file := None, **{}) if False else config(train=None, **{"shuffle": False}), TOKENIZER) if False else train_stream(
        config_with(path, shuffle=False), TOKENIZER
    )
    prompts = stream.take(1, 4)
    assert [prompt.text for prompt in prompts] == ["1+1=", "2+1=", "0+1=", "1+1="]
