"""Completions drawn ahead on a thread."""

from __future__ import annotations

import threading

import pytest

from megatron_calclip.batch import Completion, Prompt
from megatron_calclip.rollout.collect import Ahead

PROMPTS = [Prompt(id=0, token_ids=(1,), text="", answer="")]
COMPLETIONS = [Completion((2,), (-0.5,), finished=True, policy_version=3)]


def test_a_batch_is_drawn_beside_the_caller_and_taken_once() -> None:
    ahead, may_finish, began = Ahead(), threading.Event(), threading.Event()

    def draw() -> list[Completion]:
        began.set()
        assert may_finish.wait(30)
        return COMPLETIONS

    assert ahead.take() is None
    ahead.start(PROMPTS, draw, on_thread=True)
    assert began.wait(30)  # while this thread goes on
    with pytest.raises(AssertionError, match="not been taken"):
        ahead.start(PROMPTS, draw, on_thread=True)
    may_finish.set()
    ahead.wait()
    with pytest.raises(AssertionError, match="not been taken"):
        ahead.start(PROMPTS, draw, on_thread=True)
    assert ahead.take() == (PROMPTS, COMPLETIONS)
    assert ahead.take() is None


def test_without_a_thread_a_batch_is_drawn_by_the_caller() -> None:
    """As with the embedded engine on a CPU, whose FP8 products change a setting of the whole process."""
    ahead, drawn_by = Ahead(), []

    def draw() -> list[Completion]:
        drawn_by.append(threading.current_thread())
        return COMPLETIONS

    ahead.start(PROMPTS, draw, on_thread=False)
    assert drawn_by == [threading.current_thread()]
    assert ahead.take() == (PROMPTS, COMPLETIONS)


@pytest.mark.parametrize("on_thread", [True, False])
def test_what_drawing_raises_is_raised_once_where_it_is_waited_for(on_thread: bool) -> None:
    ahead = Ahead()

    def draw() -> list[Completion]:
        raise ValueError("no weights")

    ahead.start(PROMPTS, draw, on_thread=on_thread)
    with pytest.raises(ValueError, match="no weights"):
        ahead.wait()
    assert ahead.take() is None
