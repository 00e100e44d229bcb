"""Prompts: generated arithmetic, or rows of a JSON Lines file, in an order that seed and step alone decide.

A stream is addressed by position, so that resuming needs nothing but the step, and any number of ranks sees
the same order. Every prompt that a run will use is checked before it starts: one that is too long must not
end a run after hours.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import torch

from megatron_calclip.batch import Prompt
from megatron_calclip.config import Config
from megatron_calclip.errors import UserError
from megatron_calclip.tasks import Row, Source, generated_task

# Evaluation prompts get ids of their own, far from those of training, because randomness is keyed by them.
EVAL_ID_OFFSET = 1 << 40


class JsonLines:
    """Rows of a JSON Lines file, shuffled anew each epoch.

    Args:
        path: the file.
        where: the setting that names it, for errors.
        config: names of the fields, seed.
        shuffle: whether to shuffle (evaluation keeps the file's order).

    Raises:
        UserError: for a missing or empty file, or a row that is no JSON object with both fields; it names the
            file and the line.
    """

    def __init__(self, path: str, *, where: str, config: Config, shuffle: bool) -> None:
        self.seed, self.shuffle = config.train.seed, shuffle
        self.rows = list(_read_rows(path, where, config.data.prompt_field, config.data.answer_field))
        if not self.rows:
            raise UserError(where, f"{path} has no rows; give a file with at least one")
        self._epoch = -1
        self._order: list[int] = []

    def row(self, position: int) -> Row:
        """See `Source`."""
        epoch, index = divmod(position, len(self.rows))
        if self.shuffle:
            index = self._permutation(epoch)[index]
        return self.rows[index]

    def extremes(self, count: int) -> Iterator[Row]:
        """See `Source`: all that a run of `count` prompts uses."""
        return (self.row(position) for position in range(min(count, len(self.rows))))

    def _permutation(self, epoch: int) -> list[int]:
        if self._epoch != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._order = torch.randperm(len(self.rows), generator=generator).tolist()
            self._epoch = epoch
        return self._order


def _read_rows(path: str, where: str, prompt_field: str, answer_field: str) -> Iterator[Row]:
    if not os.path.isfile(path):  # pathlib's raises for a name that is too long
        raise UserError(where, f"no file {path!r}; give a JSON Lines file, or `arithmetic`")
    try:
        with open(path, "rb") as file:
            lines = file.readlines()
    except OSError as error:
        raise UserError(where, f"{path} cannot be read ({error}); give a readable file") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield _parse_row(line, prompt_field, answer_field)
            except ValueError as error:
                raise UserError(where, f"{path} line {number} {error}; correct it") from None


def _parse_row(line: bytes, prompt_field: str, answer_field: str) -> Row:
    """One row.

    Raises:
        ValueError: saying what is wrong with it.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"is a {type(row).__name__}, not an object with fields")
    for setting, name in (("data.prompt_field", prompt_field), ("data.answer_field", answer_field)):
        if name not in row:
            raise ValueError(f"has no field {name!r} (named by {setting})")
    prompt, answer = row[prompt_field], row[answer_field]
    if not isinstance(prompt, str):
        raise ValueError(f"field {prompt_field!r} is a {type(prompt).__name__}, not a text")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"field {answer_field!r} is a {type(answer).__name__}, not a text or a number")
    f"{prompt}{answer}".encode()  # raises for half of a surrogate pair, which is JSON but no text
    rest = {key: value for key, value in row.items() if key not in (prompt_field, answer_field)}
    return prompt, str(answer), rest


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

    def check(self, count: int) -> None:
        """Whether the first `count` prompts can be used.

        Raises:
            UserError: as `take`.
        """
        for text, _, _ in self.source.extremes(count):
            self._tokenize(text)

    def _prompt(self, position: int) -> Prompt:
        text, answer, metadata = self.source.row(position)
        return Prompt(
            id=position + self.id_offset,
            token_ids=self._tokenize(text),
            text=text,
            answer=answer,
            metadata=metadata,
        )

    def _tokenize(self, text: str) -> tuple[int, ...]:
        model, max_new_tokens = self.config.model, self.config.rollout.max_new_tokens
        if self.config.data.chat_template:
            message = [{"role": "user", "content": text}]
            ids = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        else:
            ids = self.tokenizer(text)["input_ids"]
        if not ids:
            raise UserError(self.where, "a prompt has no tokens; a prompt needs at least one")
        if model.tokenizer == "characters" and (unknown := set(text) - set(model.characters)):
            raise UserError(
                "model.characters",
                f"lacks {''.join(sorted(unknown))!r} of the prompt {text[:40]!r} ({self.where}); add them",
            )
        if len(ids) + max_new_tokens > model.max_sequence_length:
            raise UserError(
                "model.max_sequence_length",
                f"a prompt of {len(ids)} tokens ({text[:40]!r}..., {self.where}) plus rollout.max_new_tokens "
                f"= {max_new_tokens} exceeds {model.max_sequence_length}; raise it, or leave the prompt out",
            )
        return tuple(ids)


def _source(name: str, *, where: str, config: Config, held_out: bool) -> Source:
    task = generated_task(name, config, held_out=held_out)
    if task is not None:
        return task
    return JsonLines(name, where=where, config=config, shuffle=config.data.shuffle and not held_out)


def _stream(name: str, tokenizer: Any, config: Config, *, where: str, held_out: bool) -> PromptStream:
    if config.data.chat_template and not getattr(tokenizer, "chat_template", None):
        raise UserError("data.chat_template", "the tokenizer has no template; use false, or another tokenizer")
    source = _source(name, where=where, config=config, held_out=held_out)
    offset = EVAL_ID_OFFSET if held_out else 0
    return PromptStream(source, tokenizer, config, id_offset=offset, where=where)


def train_stream(config: Config, tokenizer: Any) -> PromptStream:
    """The endless stream of training prompts.

    Raises:
        UserError: when the source, or a prompt of it that the run will use, is unusable.
    """
    stream = _stream(config.data.train, tokenizer, config, where="data.train", held_out=False)
    dynamic = config.algorithm.dynamic_sampling
    rounds = dynamic.max_rounds if dynamic.enabled else 1
    stream.check(config.train.num_steps * config.train.prompts_per_step * rounds)
    return stream


def eval_prompts(config: Config, tokenizer: Any) -> list[Prompt]:
    """The first `eval.num_prompts` distinct held-out prompts, or all there are; none when evaluation is off.

    Distinct, because a problem that came twice would make the standard error look smaller than it is.

    Raises:
        UserError: when the source or a prompt of it is unusable.
    """
    if config.data.held_out is None:
        return []
    stream = _stream(config.data.held_out, tokenizer, config, where="data.eval", held_out=True)
    source, count = stream.source, config.eval.num_prompts
    # Generated problems repeat by chance, and small tasks have few.
    positions = len(source.rows) if isinstance(source, JsonLines) else 32 * count
    seen: dict[str, Prompt] = {}
    for position in range(positions):
        if len(seen) == count:
            break
        prompt = stream.take(position, 1)[0]
        seen.setdefault(prompt.text, prompt)
    return list(seen.values())
