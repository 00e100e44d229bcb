"""Generated tasks: right answers, no problem on both sides, demonstrations as often wrong as asked."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_calclip.config import ArithmeticTask, ScratchpadTask
from megatron_calclip.config_file import config_from_dict
from megatron_calclip.tasks import Arithmetic, Scratchpad, generated_task, scratchpad_reward


@given(
    operators=st.sampled_from(["+", "-", "*", "+-*"]),
    max_operand=st.integers(1, 200),
    num_operands=st.integers(2, 5),
    seed=st.integers(0, 5),
    position=st.integers(0, 1 << 40),
    held_out=st.booleans(),
)
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
        value = str(eval(f"({value}){symbol}{operand}"))
    assert value == answer
    longest = max(len(row[0]) for row in source.extremes(1))
    assert len(problem) <= longest == num_operands * (len(str(max_operand)) + 1)


def test_training_and_evaluation_share_no_problem() -> None:
    # 31 x 31 pairs; those with (31 a + 17 b) mod 8 == 0 are held out.
    task = ArithmeticTask(operators="+", max_operand=30)
    sources = [Arithmetic(task, seed=0, held_out=held_out) for held_out in (False, True)]
    train, held_out = ({source.row(position)[0] for position in range(20_000)} for source in sources)
    assert not train & held_out
    assert len(train | held_out) == 31 * 31
    assert len(held_out) == sum((31 * a + 17 * b) % 8 == 0 for a in range(31) for b in range(31))


def test_seeds_give_other_problems() -> None:
    sources = [Arithmetic(ArithmeticTask(), seed=seed, held_out=False) for seed in (0, 1)]
    first, second = ([source.row(position) for position in range(20)] for source in sources)
    assert first != second


@pytest.mark.parametrize("noise", [0.0, 0.5, 1.0])
def test_arithmetic_demonstrations(noise: float) -> None:
    source = Arithmetic(ArithmeticTask(), seed=0, held_out=False)
    given_answers = [source.demonstrate("-", "-1234567", random.Random(i), noise=noise) for i in range(400)]
    assert all(len(answer) == 8 and answer[0] == "-" for answer in given_answers)
    # A garbled answer is right by chance once in 10^7; 400 draws of probability 1/2 have a deviation of 10.
    wrong = sum(answer != "-1234567" for answer in given_answers)
    assert abs(wrong - 400 * noise) <= 4 * 10 * (noise == 0.5)


# Running sums


def test_running_sums_by_hand() -> None:
    source = Scratchpad(ScratchpadTask(num_digits=3), seed=0, held_out=False)
    assert scratchpad_reward("375", "3a7c5f") == 1.0  # 3, 3 + 4, 3 + 4 + 8 modulo 10
    assert source.demonstrate("^3_4_8=", "375", random.Random(0), noise=0.0)[::2] == "375"


@pytest.mark.parametrize(
    "completion", ["", "3a7c", "3a7c5", "3a7c5f0", "3a7c5f0a", "3a7c6f", "3a7c51", "3a7c5z", "375", " 3a7c5f"]
)
def test_wrong_scratchpads(completion: str) -> None:
    assert scratchpad_reward("375", completion) == 0.0


@given(num_digits=st.integers(1, 20), seed=st.integers(0, 5), position=st.integers(0, 1 << 40))
def test_scratchpad_rows(num_digits: int, seed: int, position: int) -> None:
    source = Scratchpad(ScratchpadTask(num_digits=num_digits), seed=seed, held_out=False)
    problem, answer, _ = source.row(position)
    assert (problem, answer, {}) == source.row(position)
    digits = [int(digit) for digit in problem.removeprefix("^").removesuffix("=").split("_")]
    assert len(digits) == num_digits
    assert answer == "".join(str(sum(digits[: i + 1]) % 10) for i in range(num_digits))
    assert {len(row[0]) for row in source.extremes(1)} == {len(problem)} == {2 * num_digits + 1}
    held_out = Scratchpad(ScratchpadTask(num_digits=num_digits), seed=seed, held_out=True)
    assert num_digits < 8 or held_out.row(position)[0] != problem
    text = source.demonstrate(problem, answer, random.Random(position), noise=0.0)
    assert scratchpad_reward(answer, text) == 1.0
    noisy = source.demonstrate(problem, answer, random.Random(position), noise=0.3)
    assert 1 <= len(noisy) <= 2 * num_digits


def test_noise_spoils_demonstrations() -> None:
    source = Scratchpad(ScratchpadTask(num_digits=12), seed=0, held_out=False)
    right = 0.0
    for position in range(400):
        problem, answer, _ = source.row(position)
        text = source.demonstrate(problem, answer, random.Random(position), noise=0.05)
        right += scratchpad_reward(answer, text)
    # Each of 12 sums survives the burst (0.95) and the slip (0.95, or a lucky digit: 0.955): 0.907^12 = 0.31;
    # 400 draws have a deviation of 0.023.
    assert right / 400 == pytest.approx((0.95 * 0.955) ** 12, abs=4 * 0.023)


def test_tasks_by_name() -> None:
    config = config_from_dict({"data": {"scratchpad": {"num_digits": 3}, "arithmetic": {"max_operand": 1}}})
    arithmetic, scratchpad = (generated_task(name, config, held_out=True) for name in ("arithmetic", "scratchpad"))
    assert isinstance(arithmetic, Arithmetic) and arithmetic.task.max_operand == 1 and arithmetic.held_out
    assert isinstance(scratchpad, Scratchpad) and scratchpad.task.num_digits == 3 and scratchpad.held_out
    assert generated_task("rows.jsonl", config, held_out=False) is None
