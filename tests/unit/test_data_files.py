"""Rows from every kind of file: their places, their hash, and one line for what cannot be read."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from megatron_calclip.data_files import DATA_VARIABLE, open_rows
from megatron_calclip.errors import UserError

ROWS = [
    {"q": "a", "n": 1, "tags": ["x"]},
    {"q": "b\u2028\n", "n": 2, "tags": []},
    {"q": "ü", "n": 3, "tags": ["y", "z"]},
]


def read(path: Path | str) -> list[tuple[str, Any]]:
    return [(row.place, row.value) for row in open_rows(str(path), where="here").rows()]


def fault(path: Path | str) -> str:
    with pytest.raises(UserError) as caught:
        read(path)
    return str(caught.value)


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        "\n".join(["", json.dumps(ROWS[0]), "  ", *(json.dumps(row, ensure_ascii=False) for row in ROWS[1:])])
    )
    assert read(path) == [("line 2", ROWS[0]), ("line 4", ROWS[1]), ("line 5", ROWS[2])]


def test_json_lines_under_another_suffix(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert read(path) == [("line 1", ROWS[0]), ("line 2", ROWS[1]), ("line 3", ROWS[2])]


@pytest.mark.parametrize(
    ("indent", "places"), [(None, ["line 1", "line 1", "line 1"]), (1, ["line 2", "line 9", "line 14"])]
)
def test_json_array_names_the_line_of_each_row(tmp_path: Path, indent: int | None, places: list[str]) -> None:
    # With an indent of 1, and a line for each bracket: 7 lines for the first row, 5 for the second.
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ROWS, indent=indent), encoding="utf-8-sig")
    assert read(path) == list(zip(places, ROWS, strict=True))


def test_empty_json_array(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(" [ ]\n")
    assert read(path) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[1, 2", "an array without its end"),
        ("[1 2]", "an array without its end"),
        ('[1,\n{"a": }]', "line 2 is not JSON"),
    ],
)
def test_damaged_json_array(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=problem):
        read(path)


def test_a_line_that_is_no_json_is_a_row_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n{\n{"a": "\xff"}\n')
    (_, first), (place, second), (_, third) = read(path)
    assert first == {"a": 1} and place == "line 2"
    assert all(isinstance(reason, ValueError) and "is not JSON" in str(reason) for reason in (second, third))


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    many = [{"n": number, "prompt": [{"role": "user", "content": str(number)}]} for number in range(2500)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(many), path)
    assert read(path) == [(f"row {number + 1}", row) for number, row in enumerate(many)]
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"Parquet"):
        read(path)


def test_datasets_folder(tmp_path: Path) -> None:
    expected = [("row 1", ROWS[0]), ("row 2", ROWS[1]), ("row 3", ROWS[2])]
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(str(tmp_path / "one"))
    assert read(tmp_path / "one") == expected
    both = datasets.DatasetDict({"train": table, "test": table.select([1])})
    both.save_to_disk(str(tmp_path / "both"))
    assert read(f"{tmp_path}/both@train") == expected
    assert read(f"{tmp_path}/both@test") == [("row 1", ROWS[1])]
    assert fault(tmp_path / "both").endswith("has the splits train, test; end its name in @SPLIT")
    assert "splits train, test" in fault(f"{tmp_path}/both@dev")
    assert fault(f"{tmp_path}/one@train").endswith("has no splits; leave @train out")
    datasets.DatasetDict({"dev": table}).save_to_disk(str(tmp_path / "single"))
    assert read(tmp_path / "single") == expected


def test_folder_of_data_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert [value for _, value in read(tmp_path / "files")] == ROWS


def test_folder_without_data(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.jsonl").write_text("{}")
    assert fault(tmp_path).startswith(f"here: no file '{tmp_path}'")


def test_hub_names(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def load(*arguments: str) -> Any:
        asked.append(arguments)
        return datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS)})

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert len(read("hub:openai/gsm8k/main@test")) == len(read("hub:HuggingFaceH4/MATH-500")) == 3
    assert asked == [("openai/gsm8k", "main"), ("HuggingFaceH4/MATH-500",)]
    for name in ("hub:gsm8k", "hub:a/b/c/d", "hub:/x"):
        assert fault(name).startswith(f"here: {name!r} is no hub name; give hub:OWNER/NAME")

    def fails(*_: str) -> Any:
        raise ConnectionError("the hub is away\nreally")

    monkeypatch.setattr(datasets, "load_dataset", fails)
    assert fault("hub:a/b") == ("here: cannot load 'hub:a/b' (the hub is away); give another data set, or a local copy")


def test_names_are_looked_up_in_the_data_folder_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "aime24.jsonl").write_text('{"where": "folder"}\n')
    assert f"no file 'aime24', here or in {DATA_VARIABLE}" in fault("aime24")
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "data"))
    assert open_rows("aime24", where="here").name == str(tmp_path / "data" / "aime24.jsonl")
    assert read("aime24") == read("aime24.jsonl") == [("line 1", {"where": "folder"})]
    (tmp_path / "aime24.json").write_text('[{"where": "here"}]')
    assert read("aime24") == [("line 1", {"where": "here"})]


def test_hash(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n')
    assert open_rows(str(path), where="here").sha256() == hashlib.sha256(b'{"a": 1}\n').hexdigest()
    datasets.Dataset.from_list([{"b": 2, "a": "x"}, {"b": 3, "a": "y"}]).save_to_disk(str(tmp_path / "saved"))
    lines = b'{"a": "x", "b": 2}\n{"a": "y", "b": 3}\n'
    assert open_rows(str(tmp_path / "saved"), where="here").sha256() == hashlib.sha256(lines).hexdigest()


@pytest.mark.parametrize(("module", "name"), [("pyarrow.parquet", "a.parquet"), ("datasets", "hub:a/b")])
def test_missing_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    package = module.partition(".")[0]
    assert fault(name) == f"here: needs {package}: pip install 'megatron-calclip[data]', or give a JSON file"
