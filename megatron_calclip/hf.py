"""The Hugging Face side of a run: model configuration and tokenizer, from a folder or made from the configuration.

The HF config is the one description of the model's shape; the Megatron learner, the weight mapping and the embedded rollout
engine are all built from it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config
from transformers import PreTrainedTokenizerFast

from megatron_calclip.config import ModelConfig, ShapeConfig, ParallelConfig, check_shape
from megatron_calclip.errors import UserError

_CONFIG_CLASSES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
_PAD, _EOS = "<pad>", "<eos>"


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character: 0 pads, 1 ends a sequence, then the alphabet in its order."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate([_PAD, _EOS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=_PAD, eos_token=_EOS)


def load_tokenizer(model: ModelConfig) -> Any:
    """The tokenizer of a run.

    Raises:
        UserError: when it cannot be loaded, or has no end-of-sequence token.
    """
    name = model.tokenizer or model.hf
    assert name is not None
    if name == "characters":
        return character_tokenizer(model.characters)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            "model.tokenizer", f"cannot load {name!r} ({reason}); give a folder with a HF tokenizer, or `characters`"
        ) from None
    if tokenizer.eos_token_id is None:
        raise UserError("model.tokenizer", f"{name!r} has no end-of-sequence token; set one in its folder")
    return tokenizer


def load_hf_config(model: ModelConfig, parallel: ParallelConfig, tokenizer: Any) -> PretrainedConfig:
    """The HF config of the policy: read from `model.hf`, or made from `model.shape`.

    Raises:
        UserError: when the folder has no readable config, its architecture is not supported, or it cannot be split over
            `parallel`.
    """
    if model.shape is not None:
        return _make_config(model.shape, model.max_sequence_length, tokenizer)
    assert model.hf is not None
    if not (Path(model.hf) / "config.json").is_file():
        raise UserError("model.hf", f"{model.hf!r} has no config.json; give the folder of a Hugging Face model")
    try:
        config = AutoConfig.from_pretrained(model.hf)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError("model.hf", f"config.json of {model.hf!r} cannot be read ({reason})") from None
    if config.model_type not in _CONFIG_CLASSES:
        supported = ", ".join(_CONFIG_CLASSES)
        raise UserError("model.hf", f"architecture {config.model_type!r} is not supported; supported: {supported}")
    shape = ShapeConfig(
        architecture=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None),
    )
    check_shape(shape, parallel)
    if model.max_sequence_length > config.max_position_embeddings:
        raise UserError(
            "model.max_sequence_length",
            f"{model.max_sequence_length} exceeds the model's context of {config.max_position_embeddings}; lower it",
        )
    return config


def _make_config(shape: ShapeConfig, max_sequence_length: int, tokenizer: Any) -> PretrainedConfig:
    return _CONFIG_CLASSES[shape.architecture](
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_query_groups,
        head_dim=shape.head_dim or shape.hidden_size // shape.num_attention_heads,
        max_position_embeddings=max_sequence_length,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tie_embeddings,
        rms_norm_eps=1e-6,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
