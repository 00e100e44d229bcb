"""A few completions of a step with everything that training did to their tokens, for `samples.jsonl`.

Each row says what was asked and answered, its reward and advantage, and for each token of the answer the text, the
log-probabilities of sampler and old policy, the importance ratio at its last update of the step, and whether the clip took its
gradient there. `megatron-calclip samples` shows them.

Left out on purpose: all completions. A row is some hundred bytes a token; `tracking.samples_per_step` says how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.batch import TrainingBatch
from megatron_calclip.experience import Experience
from megatron_calclip.objective import MicroBatchRecord

CLIP_LETTERS = ".lhd"
"""By `MicroBatchRecord.clipped`: kept; clipped at the lower bound, at the upper one, at the dual clip."""
_DIGITS = 5
"""Decimals of numbers per token."""
_HALF_CHARACTER = "�"
"""How a tokenizer decodes bytes that do not make a character yet."""


def chosen_sequences(num_sequences: int, count: int) -> list[int]:
    """`count` sequences at most, spread over the step's prompts."""
    count = min(count, num_sequences)
    return [index * num_sequences // count for index in range(count)]


def last_updates(
    records: Sequence[MicroBatchRecord], tokens: Tensor, *, num_tokens: int, gather_tokens: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Ratio and clip state of some tokens at their last update of the step, on every rank; collective.

    Args:
        records: of this rank, in the order of the updates.
        tokens: int64 [n], indices into the flat layout.
        num_tokens: T of the flat layout.
        gather_tokens: `Learner.gather_tokens`.

    Returns:
        float32 [n] ratios, 0 for a token that no update scored, and int64 [n], see `MicroBatchRecord.clipped`.
    """
    state = torch.zeros(2, num_tokens, dtype=torch.float64)
    for record in records:
        state[0, record.index] = record.ratio.double().cpu()
        state[1, record.index] = record.clipped.double().cpu()
    ratio, clipped = gather_tokens(state[:, tokens])
    return ratio.float(), clipped.long()


def token_texts(decode: Callable[[list[int]], str], token_ids: Sequence[int]) -> list[str]:
    """The text that each token adds; together they are the text of all.

    A token that ends within a character adds nothing, and the one that completes it adds all of it. Each token is decoded with
    the one before it, because tokenizers drop a space at the start of a text.

    Args:
        decode: the tokenizer's, special tokens included.
        token_ids: of one completion.
    """
    ids = list(token_ids)
    texts: list[str] = []
    start = read = 0  # the context, and what has been shown
    for end in range(1, len(ids) + 1):
        shown, text = decode(ids[start:read]), decode(ids[start:end])
        if text.endswith(_HALF_CHARACTER) and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(shown) :])
        start, read = read, end
    return texts


def sample_rows(
    experience: Experience,
    batch: TrainingBatch,
    records: Sequence[MicroBatchRecord],
    *,
    count: int,
    bounds: ClipBounds,
    decode: Callable[[list[int]], str],
    gather_tokens: Callable[[Tensor], Tensor],
) -> list[dict[str, Any]]:
    """The step's rows of `samples.jsonl`, the same on every rank; collective.

    Args:
        experience: the step's completions.
        batch: the same, with advantages and old log-probabilities.
        records: see `last_updates`.
        count: rows at most.
        bounds: in force during the step; of a loss that changes them between updates, those of the last one.
        decode: see `token_texts`.
        gather_tokens: see `last_updates`.
    """
    prompts, trajectories = experience.prompts, batch.trajectories
    assert batch.old_log_probs is not None
    chosen = chosen_sequences(trajectories.num_sequences, count)
    if not chosen:
        return []
    ids = trajectories.sequence_ids
    places = [torch.nonzero(trajectories.response_mask & (ids == index)).flatten() for index in chosen]
    ratio, clipped = last_updates(records, torch.cat(places), num_tokens=ids.numel(), gather_tokens=gather_tokens)
    sizes = [place.numel() for place in places]
    rows = []
    for index, place, own_ratio, own_clipped in zip(
        chosen, places, ratio.split(sizes), clipped.split(sizes), strict=True
    ):
        prompt = prompts[int(trajectories.groups[index])]
        rows.append(
            {
                "sample_id": int(trajectories.sample_ids[index]),
                "policy_version": int(trajectories.policy_versions[index]),
                "prompt": prompt.text,
                "completion": experience.texts[index],
                "answer": prompt.answer,
                "reward": float(experience.rewards[index]),
                "finished": bool(trajectories.finished[index]),
                "advantage": float(batch.advantages[place[0]]) if len(place) else 0.0,
                "bounds": [bounds.lower, bounds.upper],
                "tokens": token_texts(decode, trajectories.tokens[place].tolist()),
                "sampler_log_probs": _rounded(trajectories.sampler_log_probs[place]),
                "old_log_probs": _rounded(batch.old_log_probs[place]),
                "ratio": _rounded(own_ratio),
                "clipped": "".join(CLIP_LETTERS[state] for state in own_clipped.tolist()),
            }
        )
    return rows


def _rounded(values: Tensor) -> list[float]:
    return [round(value, _DIGITS) for value in values.tolist()]
