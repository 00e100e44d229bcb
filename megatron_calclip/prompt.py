"""One problem. Apart from `batch`, which needs torch, because the processes that score completions do without it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """One problem to be answered."""

    id: int
    """Position in the shuffled stream of prompts, unique within a run; randomness is keyed by it."""
    token_ids: tuple[int, ...]
    """The prompt as the model sees it, chat template applied."""
    text: str
    """The problem as text, for rewards and logs."""
    answer: str
    """The reference answer that the reward compares with."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Any other column of the data set's row."""
