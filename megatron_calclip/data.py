"""Prompts: generated problems, or rows of a data set, in an order that seed and position alone decide.

A stream is addressed by position, so that resuming needs nothing but the position, and any number of ranks sees the same order.
Every prompt that a run will use is checked before it starts: one that is too long must not end a run after hours.

    sets = eval_sets(config, tokenizer)
    stream = train_stream(config, tokenizer, sets)
    prompts = stream.take(position, count)

Reading and checking of rows is in `data_sets`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_calclip.batch import Prompt
from megatron_calclip.config import Config
from megatron_calclip.data_presets import fits, fitting_rewards
from megatron_calclip.data_sets import DataSet, counted, duplicate_reasons, load_data_set, overlap_reasons
from megatron_calclip.errors import UserError
from megatron_calclip.tasks import Row, Source, generated_task

# Evaluation prompts get ids of their own, far from those of training, because randomness is keyed by them. Those of a file
# depend on its name and not on the sets around it; 2^40 * 2^12 ids leave room for samples in 64 bits.
EVAL_ID_OFFSET = 1 << 40
_NUM_ID_BLOCKS = 1 << 12

_NUM_GENERATED = 256
"""Problems of a generated evaluation set whose size nobody gives."""
_POSITIONS_PER_PROBLEM = 32
"""Positions of a generated task that are looked at for each distinct problem: they repeat by chance, and small tasks have few."""


class Rows:
    """Rows in memory, shuffled anew each epoch.

    Args:
        rows: at least one.
        seed: of the shuffling.
        shuffle: whether to shuffle; else the file's order.
    """

    def __init__(self, rows: Sequence[Row], *, seed: int, shuffle: bool) -> None:
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
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


class PromptFormat:
    """How a problem becomes the tokens of a prompt.

    Args:
        tokenizer: HF tokenizer.
        config: instruction, system prompt, chat template and length limits.
        instruction: the layout's, where the configuration has none.
        where: the setting that names the problems' source, for errors.

    Raises:
        UserError: when there is no chat template to use.
    """

    def __init__(self, tokenizer: Any, config: Config, *, instruction: str, where: str) -> None:
        self.tokenizer, self.config, self.where = tokenizer, config, where
        own = config.data.instruction
        self.instruction = instruction if own is None else own
        self.template = _chat_template(config.data.chat_template, tokenizer)

    def text(self, problem: str) -> str:
        """What is asked: the problem, and the instruction."""
        return f"{problem}\n{self.instruction}" if self.instruction else problem

    def tokens(self, row: Row) -> tuple[int, ...]:
        """Tokens of a row's prompt.

        Raises:
            UserError: when it is empty, or cannot be written with the tokenizer or the template.
        """
        problem, _, metadata = row
        text, model = self.text(problem), self.config.model
        if self.template is None:
            ids = self.tokenizer(text)["input_ids"]
        else:
            ids = self._in_template(text, self.config.data.system_prompt or metadata.get("system"))
        if not ids:
            raise UserError(self.where, "a prompt has no tokens; a prompt needs at least one")
        if model.tokenizer == "characters" and (unknown := set(text) - set(model.characters)):
            raise UserError(
                "model.characters",
                f"lacks {''.join(sorted(unknown))!r} of the prompt {text[:40]!r} ({self.where}); add them",
            )
        return tuple(ids)

    def _in_template(self, text: str, system: Any) -> list[int]:
        messages = [{"role": "system", "content": system}] if isinstance(system, str) else []
        messages.append({"role": "user", "content": text})
        try:
            ids: list[int] = self.tokenizer.apply_chat_template(
                messages, chat_template=self.template, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:  # whatever the template's author raises, and Jinja
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                "data.chat_template", f"cannot be applied to {text[:40]!r} ({reason}); correct it"
            ) from None
        return ids

    def fits(self, ids: Sequence[int]) -> bool:
        """Whether a prompt leaves room for an answer."""
        return len(ids) + self.config.rollout.max_new_tokens <= self.config.model.max_sequence_length

    def check_fits(self, ids: Sequence[int], row: Row) -> None:
        """Refuse a prompt that does not.

        Raises:
            UserError: with its length.
        """
        if not self.fits(ids):
            longest = self.config.model.max_sequence_length
            raise UserError(
                "model.max_sequence_length",
                f"a prompt of {len(ids)} tokens ({row[0][:40]!r}..., {self.where}) plus rollout.max_new_tokens "
                f"= {self.config.rollout.max_new_tokens} exceeds {longest}; raise it, or set data.too_long=skip",
            )


def _chat_template(setting: bool | str, tokenizer: Any) -> str | None:
    """The Jinja template that `data.chat_template` asks for; None for none."""
    if setting is False:
        return None
    if setting is True:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError("data.chat_template", "the tokenizer has no template; use false, or give one")
        return str(tokenizer.get_chat_template())
    return template_text(setting)


def template_text(setting: str) -> str:
    """A Jinja template that is given itself, or by its path.

    Raises:
        UserError: for a file that cannot be read.
    """
    if "{" in setting:
        return setting
    try:
        return Path(setting).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            "data.chat_template",
            f"{setting[:80]!r} is no readable file ({error}); give a Jinja template's path or text",
        ) from None


class PromptStream:
    """Tokenised prompts of one source.

    Args:
        source: problems by position.
        form: how they become prompts.
        id_offset: added to the position to give the prompt's id.
        report: lines that say what was read.
    """

    def __init__(self, source: Source, form: PromptFormat, *, id_offset: int, report: Sequence[str] = ()) -> None:
        self.source, self.form, self.id_offset, self.report = source, form, id_offset, list(report)

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
        for row in self.source.extremes(count):
            self._tokens(row)

    def _prompt(self, position: int) -> Prompt:
        row = self.source.row(position)
        problem, answer, metadata = row
        return Prompt(
            id=position + self.id_offset,
            token_ids=self._tokens(row),
            text=self.form.text(problem),
            answer=answer,
            metadata=metadata,
        )

    def _tokens(self, row: Row) -> tuple[int, ...]:
        ids = self.form.tokens(row)
        self.form.check_fits(ids, row)
        return ids


@dataclass(frozen=True)
class EvalSet:
    """Problems of one evaluation set, all distinct."""

    name: str
    prompts: list[Prompt]
    reward: str
    """`reward.name` that scores it."""
    data: DataSet | None = None
    """Where they come from; None for a generated task."""
    report: list[str] = field(default_factory=list)
    """Lines that say what was read."""


def _form(data_set: DataSet | None, tokenizer: Any, config: Config, where: str) -> PromptFormat:
    instruction = data_set.preset.instruction if data_set is not None and data_set.preset is not None else ""
    return PromptFormat(tokenizer, config, instruction=instruction, where=where)


def _without_too_long(data_set: DataSet, form: PromptFormat) -> DataSet:
    """A copy without prompts that leave no room for an answer, where those do not end the run."""
    if form.config.data.too_long == "error":
        return data_set
    distinct = {row[0]: row for row in data_set.rows}  # some sets repeat each problem a hundred times
    too_long = {problem for problem, row in distinct.items() if not form.fits(form.tokens(row))}
    room = form.config.model.max_sequence_length - form.config.rollout.max_new_tokens
    reason = f"prompt longer than {room} tokens"
    result = data_set.without([reason if row[0] in too_long else None for row in data_set.rows])
    if not result.rows:
        raise UserError(form.where, f"{data_set.source} has no prompt of at most {room} tokens; give shorter ones")
    return result


def train_stream(config: Config, tokenizer: Any, held_out: Sequence[EvalSet] = ()) -> PromptStream:
    """The endless stream of training prompts.

    Args:
        config: of the run.
        tokenizer: of the policy.
        held_out: evaluation sets, for the report of what training has in common with them.

    Raises:
        UserError: when the source, or a prompt of it that the run will use, is unusable.
    """
    name, where = config.data.train, "data.train"
    source: Source | None = generated_task(name, config, held_out=False)
    data_set, report = None, []
    if source is None:
        data_set = load_data_set(name, where=where, data=config.data, reward=config.reward.name)
        duplicates = duplicate_reasons(data_set)
        overlap = overlap_reasons(data_set, [other.data for other in held_out if other.data is not None])
        drops = (config.data.duplicates == "drop", config.data.overlap == "drop")
        gone = [
            (drops[0] and one) or (drops[1] and other) or None for one, other in zip(duplicates, overlap, strict=True)
        ]
        if all(gone):
            raise UserError("data.overlap", f"leaves none of the rows of {data_set.source}; use keep")
        data_set = data_set.without(gone)
    form = _form(data_set, tokenizer, config, where)
    if data_set is not None:
        data_set = _without_too_long(data_set, form)
        report = [data_set.summary()]
        for what, reasons, dropped in (("duplicates", duplicates, drops[0]), ("overlap", overlap, drops[1])):
            if not any(reasons):
                report.append(f"{data_set.source}: no {what}")
            elif not dropped:
                report += [f"{data_set.source}: {count} kept: {why}" for why, count in counted(reasons).items()]
        source = Rows(data_set.rows, seed=config.train.seed, shuffle=config.data.shuffle)
    assert source is not None
    stream = PromptStream(source, form, id_offset=0, report=report)
    dynamic = config.algorithm.dynamic_sampling
    rounds = dynamic.max_rounds if dynamic.enabled else 1
    # After a rollback steps are done again, on other prompts.
    attempts = 1 + config.alarms.max_rollbacks if config.alarms.action == "rollback" else 1
    stream.check(config.train.num_steps * config.train.prompts_per_step * rounds * attempts)
    return stream


def eval_sets(config: Config, tokenizer: Any) -> list[EvalSet]:
    """For each of `eval.sets` its first `eval.num_prompts` distinct problems, or all there are.

    Distinct, because a problem that came twice would make intervals look smaller than they are.

    Raises:
        UserError: when a source or a prompt of it is unusable, or two sets have one name.
    """
    config = config.for_evaluation
    found: list[EvalSet] = []
    for name in config.eval_sets:
        task = generated_task(name, config, held_out=True)
        new = _eval_set(name, tokenizer, config) if task is None else _generated_set(name, task, tokenizer, config)
        if any(other.name == new.name for other in found):
            raise UserError("eval.sets", f"two sets are called {new.name!r}; rename a file, or leave one out")
        found.append(new)
    return found


def _eval_set(name: str, tokenizer: Any, config: Config) -> EvalSet:
    where = "eval.sets"
    data_set = load_data_set(name, where=where, data=config.data, reward=config.reward.name)
    form = _form(data_set, tokenizer, config, where)
    data_set = _without_too_long(data_set.without(duplicate_reasons(data_set)), form)
    offset = EVAL_ID_OFFSET * (1 + zlib.crc32(data_set.name.encode()) % _NUM_ID_BLOCKS)
    stream = PromptStream(Rows(data_set.rows, seed=0, shuffle=False), form, id_offset=offset)
    prompts = stream.take(0, min(config.eval.num_prompts or len(data_set.rows), len(data_set.rows)))
    reward = data_set.reward or config.reward.name
    return EvalSet(data_set.name, prompts, reward, data_set, [data_set.summary()])


def _generated_set(name: str, task: Source, tokenizer: Any, config: Config) -> EvalSet:
    stream = PromptStream(task, _form(None, tokenizer, config, "eval.sets"), id_offset=EVAL_ID_OFFSET)
    count = config.eval.num_prompts or _NUM_GENERATED
    seen: dict[str, Prompt] = {}
    for position in range(_POSITIONS_PER_PROBLEM * count):
        if len(seen) == count:
            break
        prompt = stream.take(position, 1)[0]
        seen.setdefault(prompt.text, prompt)
    reward = config.reward.name if fits(config.reward.name, name) else fitting_rewards(name)[0]
    return EvalSet(name, list(seen.values()), reward)
