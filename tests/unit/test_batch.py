"""Laying completions out flat, and what a batch refuses."""

from dataclasses import replace

import pytest
import torch

from megatron_calclip.batch import Completion, Prompt, Trajectories

PROMPTS = [
    Prompt(id=7, token_ids=(1, 2), text="a", answer="x", metadata={}),
    Prompt(id=9, token_ids=(3,), text="b", answer="y", metadata={}),
]


def completion(*tokens: int, finished: bool = True) -> Completion:
    return Completion(tokens, tuple(-float(token) for token in tokens), finished=finished, policy_version=4)


def make_trajectories() -> Trajectories:
    return Trajectories.from_completions(
        PROMPTS, [[completion(5), completion(6, 7, finished=False)], [completion(8), completion(9)]]
    )


def test_layout_by_hand() -> None:
    batch = make_trajectories()
    assert batch.tokens.tolist() == [1, 2, 5, 1, 2, 6, 7, 3, 8, 3, 9]
    assert batch.lengths.tolist() == [3, 4, 2, 2]
    assert batch.response_mask.int().tolist() == [0, 0, 1, 0, 0, 1, 1, 0, 1, 0, 1]
    assert batch.sampler_log_probs.tolist() == [0, 0, -5, 0, 0, -6, -7, 0, -8, 0, -9]
    assert batch.groups.tolist() == [0, 0, 1, 1]
    assert batch.sample_ids.tolist() == [14, 15, 18, 19]  # prompt id x samples + index: the same at any number of ranks
    assert batch.finished.tolist() == [True, False, True, True]
    assert batch.response_lengths.tolist() == [1, 2, 1, 1] and batch.num_response_tokens == 5
    assert [response.tolist() for response in batch.responses()] == [[5], [6, 7], [8], [9]]


@pytest.mark.parametrize("broken", [completion(), Completion((1, 2), (0.0,), finished=True, policy_version=0)])
def test_completions_of_a_broken_engine(broken: Completion) -> None:
    with pytest.raises(ValueError, match="prompt 9 has"):
        Trajectories.from_completions(PROMPTS, [[completion(5)], [broken]])


def test_a_first_token_has_no_prediction_to_score() -> None:
    batch = make_trajectories()
    for token, refused in ((7, True), (8, False)):  # the first and second token of the third sequence
        mask = torch.zeros_like(batch.response_mask)
        mask[token] = True
        if refused:
            with pytest.raises(ValueError, match="first token"):
                replace(batch, response_mask=mask)
        else:
            assert replace(batch, response_mask=mask).num_response_tokens == 1
