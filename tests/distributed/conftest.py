"""Under pytest-xdist all launches stay on one worker: each takes the cores of several processes."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of this folder, and no others, into one group (`--dist loadgroup`)."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("launches"))
