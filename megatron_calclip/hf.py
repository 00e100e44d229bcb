"""The Hugging Face side of a run: model configuration and tokenizer, from a folder or made from settings.

The HF config is the one description of the model's shape; the Megatron learner, the weight mapping and the
embedded rollout engine are all built from it. Whatever is wrong with a folder shows here, before any weight
is read. Calls to transformers are guarded as a whole, since it raises nearly anything for a malformed file.

Left out on purpose: models by hub name (a run must not start with a download of weights on every node), and
code that comes with a model.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoTokenizer,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from megatron_calclip.config import Config, ModelConfig, ShapeConfig
from megatron_calclip.config_check import check_shape
from megatron_calclip.errors import UserError
from megatron_calclip.weights.mapping import ModelShape

# Frequencies that do not depend on the length of the sequence at hand, as those of `dynamic` and `longrope` do.
FIXED_ROPE_SCALINGS = ("linear", "llama3", "yarn")
_CONFIG_CLASSES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
GENERATION = "generation_config.json"
_PAD, _EOS = "<pad>", "<eos>"
# A hub that cannot be reached is reported after this; transformers itself would retry for a minute.
_HUB_TIMEOUT_SECONDS = 10


# What transformers 5 and 4 call a tokenizer that belongs to no model.
_GENERIC_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")


def _reason(error: Exception) -> str:
    """The first line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character: 0 pads, 1 ends a sequence, then the alphabet in its order.

    It has no token for other characters and encodes them as padding; `data.PromptStream` refuses them.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate([_PAD, _EOS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")  # Oniguruma: (?m) is dotall
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_PAD,
        eos_token=_EOS,
        split_special_tokens=True,  # `<eos>` in a text is five characters
    )


def _is_generic(folder: Path) -> bool:
    """Whether a folder's tokenizer is what its tokenizer.json says and nothing else.

    Beside the config of a Qwen2 model AutoTokenizer makes a Qwen2 tokenizer of it all the same.
    """
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        return settings.get("tokenizer_class") in _GENERIC_TOKENIZERS
    except (OSError, ValueError, AttributeError):
        return False


def _load_tokenizer(name: str) -> Any:
    """From a folder or the local cache; else from the hub, when it answers."""
    if _is_generic(Path(name)):
        return PreTrainedTokenizerFast.from_pretrained(name, local_files_only=True)
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except Exception:
        if os.path.isdir(name):
            raise
    from huggingface_hub import HfApi

    HfApi().model_info(name, timeout=_HUB_TIMEOUT_SECONDS)
    return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


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
        tokenizer = _load_tokenizer(name)
    except Exception as error:
        raise UserError(
            "model.tokenizer",
            f"cannot load {name!r} ({_reason(error)}); give a folder with a HF tokenizer, or `characters`",
        ) from None
    if tokenizer.eos_token_id is None:
        raise UserError("model.tokenizer", f"{name!r} has no end-of-sequence token; set one in its folder")
    return tokenizer


def stop_token_ids(model: ModelConfig, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a completion: the tokenizer's end of sequence, and those of the model's generation_config.json.

    Chat models name several there (Qwen2.5 ends a turn, Qwen2 a text), and vLLM stops at all of them.

    Raises:
        UserError: when that file cannot be read.
    """
    path = Path(model.hf or "", GENERATION)
    own = (int(tokenizer.eos_token_id),)
    if model.hf is None or not path.is_file():
        return own
    try:
        named = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        found = tuple(map(int, named if isinstance(named, list) else [] if named is None else [named]))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError("model.hf", f"{path} cannot be read ({_reason(error)}); correct or remove it") from None
    return tuple(dict.fromkeys(own + found))


def load_hf_config(config: Config, tokenizer: Any) -> PretrainedConfig:
    """The HF config of the policy: read from `model.hf`, or made from `model.shape`.

    Raises:
        UserError: when the folder has no readable config, its architecture is not supported, it does not fit
            the tokenizer or the context, or it cannot be split over the layout.
    """
    model = config.model
    if model.shape is not None:
        made = _make_config(model.shape, model.max_sequence_length, tokenizer)
        _check_split(ModelShape.from_hf_config(made), config)
        return made
    assert model.hf is not None
    hf_config = read_hf_config(config, Path(model.hf))
    if len(tokenizer) > hf_config.vocab_size:
        raise UserError(
            "model.tokenizer",
            f"has {len(tokenizer)} tokens, but the model only {hf_config.vocab_size}; give the model's own",
        )
    return hf_config


def read_hf_config(config: Config, folder: Path) -> PretrainedConfig:
    """The HF config in a folder, without its tokenizer or weights, for this run's layout and context.

    Raises:
        UserError: as `load_hf_config`.
    """
    model, name = config.model, str(folder)
    if not os.path.isfile(folder / "config.json"):
        raise UserError("model.hf", f"{name!r} has no config.json; give the folder of a Hugging Face model")
    try:
        hf_config = AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise UserError(
            "model.hf",
            f"config.json of {name!r} cannot be read ({_reason(error)}); correct or replace it",
        ) from None
    _check_architecture(hf_config, model)
    try:
        shape = _shape_of(hf_config)
        whole = ModelShape.from_hf_config(hf_config)
    except Exception as error:
        raise UserError(
            "model.hf", f"config.json of {name!r} describes no model ({_reason(error)}); correct it"
        ) from None
    check_shape(shape, config, where="model.hf")
    _check_split(whole, config)
    if model.max_sequence_length > hf_config.max_position_embeddings:
        raise UserError(
            "model.max_sequence_length",
            f"{model.max_sequence_length} exceeds the model's context of {hf_config.max_position_embeddings}; lower it",
        )
    return hf_config


def _check_split(shape: ModelShape, config: Config) -> None:
    """Refuse a tensor-parallel size that the padded vocabulary cannot be cut into; `check_shape` has seen to the rest."""
    try:
        shape.check_parallel(config.parallel.tp)
    except ValueError as error:
        raise UserError("parallel.tp", str(error)) from None


def _check_architecture(config: PretrainedConfig, model: ModelConfig) -> None:
    """Refuse what the learner's layers would silently compute in another way."""
    if config.model_type not in _CONFIG_CLASSES:
        supported = ", ".join(_CONFIG_CLASSES)
        raise UserError("model.hf", f"architecture {config.model_type!r} is not supported; use one of {supported}")
    if config.hidden_act != "silu":
        raise UserError("model.hf", f"hidden_act {config.hidden_act!r} is not supported; use a model with silu")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in ("default", *FIXED_ROPE_SCALINGS):
        raise UserError(
            "model.hf",
            f"RoPE scaling {rope!r} is not supported; use a model with {', '.join(FIXED_ROPE_SCALINGS)} or none",
        )
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if slides and model.max_sequence_length > config.sliding_window:
        raise UserError(
            "model.max_sequence_length",
            f"{model.max_sequence_length} exceeds the model's attention window of {config.sliding_window}, "
            "which is not supported; lower it",
        )


def _shape_of(config: PretrainedConfig) -> ShapeConfig:
    return ShapeConfig(
        architecture=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None),
    )


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
