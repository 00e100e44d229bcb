"""Tokenizers and HF configurations: a faithful alphabet, and every broken folder as one clear error."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaConfig, Qwen2Config, Qwen3Config

from megatron_calclip.config import Config, ModelConfig, ParallelConfig, ShapeConfig
from megatron_calclip.errors import UserError
from megatron_calclip.hf import character_tokenizer, load_hf_config, load_tokenizer, stop_token_ids
from megatron_calclip.weights.mapping import ModelShape

ALPHABET = "0123456789+-*= \n<eospad>'.,é€"
TOKENIZER = character_tokenizer(ALPHABET)
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


# The character tokenizer


@given(text=st.text(alphabet=ALPHABET) | st.sampled_from(["<eos>", "<pad>0<eos>", "\n\n", "  1 , 2 .", " '0"]))
def test_round_trip(text: str) -> None:
    ids = TOKENIZER(text)["input_ids"]
    assert ids == [2 + ALPHABET.index(character) for character in text]
    assert TOKENIZER.decode(ids) == TOKENIZER.decode(ids, skip_special_tokens=True) == text


def test_special_tokens() -> None:
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, len(TOKENIZER)) == (0, 1, 2 + len(ALPHABET))
    assert TOKENIZER.decode([2, 3, 1, 0, 0], skip_special_tokens=True) == "01"


def test_saved_tokenizer_loads_as_any_other(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    loaded = load_tokenizer(ModelConfig(tokenizer=str(tmp_path)))
    text = "1+1=\n<eos>"
    assert loaded(text)["input_ids"] == TOKENIZER(text)["input_ids"] and loaded.eos_token_id == 1


# Loading a tokenizer


def test_a_tokenizer_beside_a_model_stays_what_it_is(tmp_path: Path) -> None:
    """AutoTokenizer makes a Qwen2 tokenizer, with one token more, of whatever lies beside a Qwen2 model."""
    TOKENIZER.save_pretrained(tmp_path)
    Qwen2Config(vocab_size=64).save_pretrained(tmp_path)
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == len(TOKENIZER) + 1
    assert load_tokenizer(ModelConfig(hf=str(tmp_path))).get_vocab() == TOKENIZER.get_vocab()


def test_characters() -> None:
    assert load_tokenizer(ModelConfig(tokenizer="characters", characters="ab"))("ba")["input_ids"] == [3, 2]


def test_tokenizer_defaults_to_the_model_folder(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    assert load_tokenizer(ModelConfig(hf=str(tmp_path))).eos_token_id == 1


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer.json": "{"},
        {"tokenizer.json": "{}"},
        {"tokenizer.json": "[]", "tokenizer_config.json": "[]"},
        {"tokenizer_config.json": '{"tokenizer_class": "NoSuchTokenizer"}'},
        {"tokenizer.json": '{"model": {"type": "BPE"}}'},
        {
            "tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["code.Own", null]}}',
            "code.py": "exit(3)",
        },
    ],
)
def test_broken_tokenizer_folder(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=r"^model\.tokenizer: cannot load ") as caught:
        load_tokenizer(ModelConfig(tokenizer=str(tmp_path)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["/no/such/folder", "a b", "x" * 5000])
def test_impossible_tokenizer_name(name: str) -> None:
    with pytest.raises(UserError, match=r"^model\.tokenizer: cannot load "):
        load_tokenizer(ModelConfig(tokenizer=name))


def test_unreachable_hub_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.hf_api.ENDPOINT", "http://127.0.0.1:9", raising=False)
    start = time.monotonic()
    with pytest.raises(UserError, match=r"^model\.tokenizer: cannot load 'no/such-tokenizer'"):
        load_tokenizer(ModelConfig(tokenizer="no/such-tokenizer"))
    assert time.monotonic() - start < 20  # transformers alone retries for a minute


def test_tokenizer_without_an_end(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    settings_of = json.loads(path.read_text())
    del settings_of["eos_token"]
    path.write_text(json.dumps(settings_of))
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token_id is None
    with pytest.raises(UserError, match=r"^model\.tokenizer: .* no end-of-sequence token"):
        load_tokenizer(ModelConfig(tokenizer=str(tmp_path)))


# HF configurations


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, (1,)),
        ("{}", (1,)),
        ('{"eos_token_id": null}', (1,)),
        ('{"eos_token_id": 7}', (1, 7)),
        ('{"eos_token_id": 0}', (1, 0)),
        ('{"eos_token_id": [7, 1, 5]}', (1, 7, 5)),
    ],
)
def test_tokens_that_end_a_completion(tmp_path: Path, text: str | None, expected: tuple[int, ...]) -> None:
    """vLLM stops at what generation_config.json names; so must we, or its answers would be refused."""
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    tokenizer = character_tokenizer("abc")
    assert stop_token_ids(ModelConfig(hf=str(tmp_path)), tokenizer) == expected
    assert stop_token_ids(ModelConfig(), tokenizer) == (1,)


@pytest.mark.parametrize("text", ["[]", "{", '{"eos_token_id": "a"}'])
def test_generation_config_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(UserError, match=r"^model.hf: .*generation_config.json cannot be read"):
        stop_token_ids(ModelConfig(hf=str(tmp_path)), character_tokenizer("abc"))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_config_made_from_a_shape(architecture: Any) -> None:
    shape = ShapeConfig(architecture, num_layers=2, hidden_size=32, ffn_hidden_size=64, num_query_groups=2, head_dim=16)
    config = load_hf_config(Config(model=ModelConfig(shape=shape, max_sequence_length=48)), TOKENIZER)
    assert config.model_type == architecture and config.max_position_embeddings == 48
    made = ModelShape.from_hf_config(config)
    assert (made.num_layers, made.hidden_size, made.ffn_size, made.num_heads) == (2, 32, 64, 4)
    assert (made.num_kv_heads, made.head_dim, made.vocab_size, made.tied) == (2, 16, len(TOKENIZER), True)
    assert (config.eos_token_id, config.pad_token_id) == (1, 0)


@pytest.mark.parametrize("make", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_config_read_from_a_folder(tmp_path: Path, make: Any) -> None:
    make(**TINY).save_pretrained(tmp_path)
    config = load_hf_config(
        Config(model=ModelConfig(hf=str(tmp_path), max_sequence_length=64), parallel=ParallelConfig(tp=2)), TOKENIZER
    )
    assert config.to_dict()["hidden_size"] == 32


def refused(folder: Path, values: dict[str, Any] | str, *, parallel: ParallelConfig | None = None) -> str:
    text = values if isinstance(values, str) else json.dumps(values)
    (folder / "config.json").write_text(text)
    with pytest.raises(UserError) as caught:
        model = ModelConfig(hf=str(folder), max_sequence_length=64)
        load_hf_config(Config(model=model, parallel=parallel or ParallelConfig()), TOKENIZER)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"model_type": "gpt2"},
            "model.hf: architecture 'gpt2' is not supported; use one of llama, qwen2, qwen3",
        ),
        ({"model_type": "no_such_model"}, "cannot be read"),
        ({"model_type": None}, "cannot be read"),
        ({"hidden_size": "wide"}, "model.hf: config.json"),
        ({"hidden_size": None}, "model.hf: config.json"),
        ({"num_hidden_layers": -1}, "model.hf: config.json"),
        ({"num_attention_heads": 0}, "model.hf: config.json"),
        ({"num_key_value_heads": 3}, "model.hf: num_query_groups 3 does not divide"),
        ({"hidden_act": "gelu"}, "model.hf: hidden_act 'gelu' is not supported"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "model.hf: RoPE scaling 'dynamic' is not supported",
        ),
        ({"vocab_size": 8}, f"model.tokenizer: has {len(TOKENIZER)} tokens, but the model only 8"),
        ({"max_position_embeddings": 32}, "model.max_sequence_length: 64 exceeds the model's context of 32"),
        (
            {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
            "model.max_sequence_length: 64 exceeds the model's attention window of 16",
        ),
    ],
)
def test_config_that_is_refused(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    assert complaint in refused(tmp_path, {"model_type": "qwen2", **TINY, **changes})


def test_biases_that_llama_may_have_are_refused(tmp_path: Path) -> None:
    assert "attention_bias" in refused(tmp_path, {"model_type": "llama", **TINY, "attention_bias": True})


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"qwen2"', "{}"])
def test_config_that_is_no_configuration(tmp_path: Path, text: str) -> None:
    assert refused(tmp_path, text).startswith("model.hf: config.json")


def test_folder_without_config(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError, match=r"^model\.hf: .* has no config\.json"):
            load_hf_config(Config(model=ModelConfig(hf=str(folder))), TOKENIZER)


@pytest.mark.parametrize(
    ("parallel", "complaint"),
    [
        (ParallelConfig(tp=4), "parallel.tp: 4 does not divide the model's num_query_groups = 2"),
        (ParallelConfig(pp=3), "parallel.pp: pp x vpp = 3 does not divide the model's 2 layers"),
    ],
)
def test_model_that_cannot_be_split_so(tmp_path: Path, parallel: ParallelConfig, complaint: str) -> None:
    assert complaint in refused(tmp_path, {"model_type": "qwen2", **TINY}, parallel=parallel)


def test_a_padded_vocabulary_that_cannot_be_cut(tmp_path: Path) -> None:
    """128 rows in 3 parts, though heads and widths divide: found before anything is built, for a made model too."""
    values = LlamaConfig(
        **TINY | {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    )
    complaint = refused(tmp_path, values.to_dict(), parallel=ParallelConfig(tp=3))
    assert complaint.startswith("parallel.tp: the padded vocabulary is 128, which tp=3 does not divide")
    shape = ShapeConfig(
        "llama", num_layers=2, hidden_size=48, ffn_hidden_size=96, num_attention_heads=6, num_query_groups=3
    )
    model = ModelConfig(shape=shape, max_sequence_length=48)
    with pytest.raises(UserError, match=r"^parallel.tp: the padded vocabulary"):
        load_hf_config(Config(model=model, parallel=ParallelConfig(tp=3)), TOKENIZER)
