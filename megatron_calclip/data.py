"""Prompts: generated arithmetic, or rows of a JSON Lines file, in an order that depends on the seed and the step alone.

A stream is addressed by position, so that resuming needs nothing but the step, and any number of ranks sees the same order.
"""

from __future__ import annotations

import json
import operator
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_calclip.batch import Prompt
from megatron_calclip.config import ArithmeticTask, Config
from megatron_calclip.errors import UserError

# Generated problems whose first two operands hash to 0 modulo this are held out for evaluation.
_HELD_OUT = 8
# Evaluation prompts get ids of their own, far from those of training, because randomness is keyed by them.
EVAL_ID_OFFSET = 1 << 40

_OPERATORS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Source(Protocol):
    """Problems by position."""

    def row(self, position: int) -> tuple[str, str, dict[str, Any]]:
        """(problem, answer, other columns) at a position of the endless stream."""
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

    def row(self, position: int) -> tuple[str, str, dict[str, Any]]:
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


class JsonLines:
    """Rows of a JSON Lines file, shuffled anew each epoch.

    Args:
        path: the file.
        where: the setting that names it, for errors.
        config: names of the fields, seed, shuffling.
        shuffle: whether to shuffle (evaluation keeps the file's order).

    Raises:
        UserError: for a missing or empty file, or a row that is no JSON object with both fields; it names file and line.
    """

    def __init__(self, path: str, *, where: str, config: Config, shuffle: bool) -> None:
        self.seed, self.shuffle = config.train.seed, shuffle
        self.rows = list(_read_rows(path, where, config.data.prompt_field, config.data.answer_field))
        if not self.rows:
            raise UserError(where, f"{path} has no rows; give a file with at least one")

    def row(self, position: int) -> tuple[str, str, dict[str, Any]]:
        """See `Source`."""
        epoch, index = divmod(position, len(self.rows))
        if self.shuffle:
            index = self._permutation(epoch)[index]
        return self.rows[index]

    def _permutation(self, epoch: int) -> list[int]:
        if getattr(self, "_epoch", None) != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._order: list[int] = torch.randperm(len(self.rows), generator=generator).tolist()
            self._epoch = epoch
        return self._order


def _read_rows(
    path: str, where: str, prompt_field: str, answer_field: str
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    if not Path(path).is_file():
        raise UserError(where, f"no file {path!r}; give a JSON Lines file, or `arithmetic`")
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(where, f"{path} line {number} is not JSON ({error}); correct it") from None
            missing = [f for f in (prompt_field, answer_field) if not isinstance(row, dict) or f not in row]
            if missing:
                raise UserError(
                    where, f"{path} line {number} has no field {missing[0]!r}; set data.prompt_field, data.answer_field"
                )
            rest = {key: value for key, value in row.items() if key not in (prompt_field, answer_field)}
            yield str(row[prompt_field]), str(row[answer_field]), rest


class PromptStream:
    """Tokenised prompts of one split.

    Args:
        source: problems by position.
        tokenizer: HF tokenizer.
        config: template and length limits.
        id_offset: added to the position to give the prompt's id.
        where: the setting that names the source, for errors.
    """

    def __init__(self, source: Source, tokenizer: Any, config: Config, *, id_offset: int, where: str) -> None:
        self.source, self.tokenizer, self.config = source, tokenizer, config
        self.id_offset, self.where = id_offset, where

    def take(self, start: int, count: int) -> list[Prompt]:
        """Prompts at positions start .. start + count - 1.

        Raises:
            UserError: when a prompt is empty, or leaves no room for an answer within the context.
        """
        return [self._prompt(position) for position in range(start, start + count)]

    def _prompt(self, position: int) -> Prompt:
        text, answer, metadata = self.source.row(position)
        if self.config.data.chat_template:
            message = [{"role": "user", "content": text}]
            ids = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        else:
            ids = self.tokenizer(text)["input_ids"]
        room = self.config.model.max_sequence_length - self.config.rollout.max_new_tokens
        if not ids:
            raise UserError(self.where, f"the prompt {text[:40]!r} has no tokens; a prompt needs at least one")
        if len(ids) > room:
            raise UserError(
                "model.max_sequence_length",
                f"a prompt of {len(ids)} tokens ({text[:40]!r}...) plus rollout.max_new_tokens = "
                f"{self.config.rollout.max_new_tokens} exceeds {self.config.model.max_sequence_length}; raise it",
            )
        return Prompt(id=position + self.id_offset, token_ids=tuple(ids), text=text, answer=answer, metadata=metadata)


def _source(name: str, *, where: str, config: Config, held_out: bool) -> Source:
    if name == "arithmetic":
        return Arithmetic(config.data.arithmetic, seed=config.train.seed, held_out=held_out)
    return JsonLines(name, where=where, config=config, shuffle=config.data.shuffle and not held_out)


def train_stream(config: Config, tokenizer: Any) -> PromptStream:
    """The endless stream of training prompts."""
    source = _source(config.data.train, where="data.train", config=config, held_out=False)
    return PromptStream(source, tokenizer, config, id_offset=0, where="data.train")


def eval_prompts(config: Config, tokenizer: Any) -> list[Prompt]:
    """The held-out prompts, `eval.num_prompts` of them (fewer if the file has fewer); empty when evaluation is off."""
    if config.data.eval is None:
        return []
    source = _source(config.data.eval, where="data.eval", config=config, held_out=True)
    count = config.eval.num_prompts
    if isinstance(source, JsonLines):
        count = min(count, len(source.rows))
    return PromptStream(source, tokenizer, config, id_offset=EVAL_ID_OFFSET, where="data.eval").take(0, count)
