"""Generated tasks with a verifiable answer, and demonstrations of them for a supervised start.

`arithmetic` is what the headline demo learns. `scratchpad` keeps its entropy while it is learned: each running sum
of the prompt's digits is followed by a letter of the policy's choice, so that there are tokens to be certain and
tokens to be free about, and its answers are long enough for rare tokens to matter. It is the task on which noise in
the importance ratio is studied.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from megatron_calclip.config import ArithmeticTask, Config, ScratchpadTask

# Generated problems whose first two operands hash to 0 modulo this are held out for evaluation.
_HELD_OUT = 8

_OPERATORS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}

Row = tuple[str, str, dict[str, Any]]
"""(problem, answer, other columns)."""


class Source(Protocol):
    """Problems by position."""

    def row(self, position: int) -> Row:
        """The problem at a position of the endless stream."""
        ...

    def extremes(self, count: int) -> Iterator[Row]:
        """Problems among which the longest of the first `count` are."""
        ...


class GeneratedTask(Source, Protocol):
    """A source that can also show how its problems are solved, rightly or wrongly."""

    def demonstrate(self, problem: str, answer: str, rng: random.Random, *, noise: float) -> str:
        """A completion for a supervised start.

        Args:
            problem: from a row.
            answer: its reference answer.
            rng: of this demonstration.
            noise: how often it is wrong; what that means is the task's.
        """
        ...


class Arithmetic:
    """Problems such as `37+48=`, evaluated from left to right; evaluation and training share none.

    Args:
        task: operators and sizes.
        seed: of the stream.
        held_out: whether to draw from the problems kept for evaluation.
    """

    def __init__(self, task: ArithmeticTask, *, seed: int, held_out: bool) -> None:
        self.task, self.seed, self.held_out = task, seed, held_out

    def row(self, position: int) -> Row:
        """See `Source`."""
        rng = random.Random(f"{self.seed}:{self.held_out}:{position}")
        while True:
            operands = [rng.randint(0, self.task.max_operand) for _ in range(self.task.num_operands)]
            if ((operands[0] * 31 + operands[1] * 17) % _HELD_OUT == 0) == self.held_out:
                break
        text, value = str(operands[0]), operands[0]
        for operand in operands[1:]:
            symbol = rng.choice(self.task.operators)
            text, value = f"{text}{symbol}{operand}", _OPERATORS[symbol](value, operand)
        return f"{text}=", str(value), {}

    def demonstrate(self, problem: str, answer: str, rng: random.Random, *, noise: float) -> str:
        """The answer, or with probability `noise` digits of the same length."""
        if rng.random() >= noise:
            return answer
        return "".join(rng.choice("0123456789") if c.isdigit() else c for c in answer)

    def extremes(self, count: int) -> Iterator[Row]:
        """See `Source`: the largest operands with each operator."""
        largest = str(self.task.max_operand)
        for symbol in self.task.operators:
            yield symbol.join([largest] * self.task.num_operands) + "=", "", {}


_LETTERS = "abcdefgh"
_GARBLE = "0123456789abcdefgh"


class Scratchpad:
    """Running sums modulo 10: `^3_4_8=` is answered `3a7c5f`, a digit for each sum and any letter after it.

    Args:
        task: its size.
        seed: of the stream.
        held_out: another stream; with 10^12 problems the two share none but by chance.
    """

    def __init__(self, task: ScratchpadTask, *, seed: int, held_out: bool) -> None:
        self.task, self.seed, self.held_out = task, seed, held_out

    def row(self, position: int) -> Row:
        """See `Source`; the answer is the sums alone."""
        rng = random.Random(f"scratchpad:{self.seed}:{self.held_out}:{position}")
        digits = [rng.randrange(10) for _ in range(self.task.num_digits)]
        sums = [sum(digits[: i + 1]) % 10 for i in range(len(digits))]
        return f"^{'_'.join(map(str, digits))}=", "".join(map(str, sums)), {}

    def extremes(self, count: int) -> Iterator[Row]:
        """See `Source`: all problems are equally long."""
        yield self.row(0)

    def demonstrate(self, problem: str, answer: str, rng: random.Random, *, noise: float) -> str:
        """Sums and letters; each addition goes wrong, and each sum starts a garbled burst, with probability `noise`.

        A wrong addition carries on into the later sums. A burst is random text to the end, of random length.
        """
        digits = [int(c) for c in problem if c.isdigit()]
        text, total = "", 0
        for digit in digits:
            if rng.random() < noise:
                return text + "".join(rng.choices(_GARBLE, k=rng.randint(1, 2 * len(digits) - len(text))))
            total = (total + (rng.randrange(10) if rng.random() < noise else digit)) % 10
            text += f"{total}{rng.choice(_LETTERS)}"
        return text


def scratchpad_reward(answer: str, completion: str) -> float:
    """1 when every sum is right and every one is followed by a letter; else 0.

    Args:
        answer: the sums.
        completion: what the policy wrote, without its end-of-sequence token.
    """
    sums, letters = completion[::2], completion[1::2]
    return float(sums == answer and len(letters) == len(answer) and all(c in _LETTERS for c in letters))


def generated_task(name: str, config: Config, *, held_out: bool) -> GeneratedTask | None:
    """The generated task of this name; None when the name is something else (a file)."""
    if name == "arithmetic":
        return Arithmetic(config.data.arithmetic, seed=config.train.seed, held_out=held_out)
    if name == "scratchpad":
        return Scratchpad(config.data.scratchpad, seed=config.train.seed, held_out=held_out)
    return None
