"""What the command line finds in the environment before Megatron is imported."""

from pathlib import Path

import pytest

from megatron_calclip.launch import wrong_apex


@pytest.mark.parametrize(("contents", "is_wrong"), [("", True), ("multi_tensor_apply", False)])
def test_apex_of_another_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contents: str, is_wrong: bool) -> None:
    (tmp_path / "apex" / contents).mkdir(parents=True)
    (tmp_path / "apex" / "__init__.py").write_text("raise SyntaxError('Python 2')")
    monkeypatch.syspath_prepend(tmp_path)
    error = wrong_apex()
    assert (error is not None) == is_wrong
    if error is not None:
        assert str(error).startswith("apex: ") and "pip uninstall apex" in str(error)


def test_without_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert wrong_apex() is None
