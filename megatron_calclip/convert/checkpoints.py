"""Open a checkpoint of either kind: its configuration, and its tensors under HF names, read one at a time.

A HF checkpoint is a folder with `config.json` and safetensors, plain or block-quantised FP8. A Megatron checkpoint is
what `hf_to_megatron.py` writes or a training run of this project (`RUN_DIR/step_200`), both with the weights in
`megatron/` and configuration and tokenizer in `hf/`, of a run also with FP32 masters in `optimizer/`; or the bare folder of another Megatron run, whose configuration
must then come from a HF folder. Nothing is read but headers until a tensor is asked for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_calclip.errors import UserError
from megatron_calclip.weights.dist_load import MASTER_PREFIX, METADATA_FILE, DistCheckpoint, hf_source
from megatron_calclip.weights.fp8 import dequantized
from megatron_calclip.weights.load import HFSource, check_source
from megatron_calclip.weights.mapping import ModelShape, hf_shapes
from megatron_calclip.weights.save import CONFIG_FILE

MEGATRON_PART, OPTIMIZER_PART, HF_PART = "megatron", "optimizer", "hf"
"""Folders of a Megatron checkpoint: the weights; masters and moments of a training run; configuration and tokenizer."""

_OLD_CHECKPOINTS = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk."""

    folder: Path
    hf_folder: Path
    """Where its configuration and tokenizer are."""
    hf_config: dict[str, Any]
    """`config.json`, without `quantization_config`: `source` hands out plain weights."""
    shape: ModelShape
    source: HFSource
    weights_folder: Path | None
    """Megatron's distributed checkpoint; None for a HF checkpoint."""
    has_masters: bool
    """Whether `source` reads the FP32 masters of a training run."""


def read_hf_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a folder, or a file of that kind.

    Raises:
        UserError: when it is missing or no JSON object.
    """
    path = folder if folder.suffix == ".json" else folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise ValueError("it is no JSON object")
    except FileNotFoundError:
        raise UserError(str(folder), f"has no {CONFIG_FILE}; give the folder of a HF model") from None
    except (OSError, ValueError) as error:
        raise UserError(str(path), f"cannot be read ({error}); correct or replace it") from None
    return config


def model_shape(hf_config: dict[str, Any], where: Path) -> ModelShape:
    """The sizes in a configuration.

    Raises:
        UserError: for an architecture without a table, or a configuration that describes no model.
    """
    try:
        return ModelShape.from_hf_config(hf_config)
    except ValueError as error:
        raise UserError(str(where), f"{error}; other architectures need --backend bridge") from None


def open_hf(folder: Path, *, dtype: torch.dtype | None = None) -> Checkpoint:
    """Open a HF checkpoint.

    Args:
        folder: with `config.json` and safetensors.
        dtype: type of the tensors; None keeps that of each (BF16 for FP8 weights).

    Raises:
        UserError: when anything about it is wrong that shows without reading the values.
    """
    hf_config = read_hf_config(folder)
    shape = model_shape(hf_config, folder)
    if not list(folder.glob("*.safetensors*")) and any(list(folder.glob(kind)) for kind in _OLD_CHECKPOINTS):
        raise UserError(str(folder), "has pickled weights only, which may run code; save it as safetensors first")
    source = dequantized(HFSource.from_folder(folder), hf_config, dtype=dtype or torch.bfloat16)
    check_source(source, shape)
    hf_config.pop("quantization_config", None)
    return Checkpoint(
        folder, folder, hf_config, shape, _only_mapped(source, shape).cast(dtype), None, has_masters=False
    )


def _only_mapped(source: HFSource, shape: ModelShape) -> HFSource:
    """Without what a checkpoint may hold and nobody reads: `lm_head` of tied embeddings, old rotary buffers."""
    return HFSource(source.where, specs={name: source.specs[name] for name in hf_shapes(shape)}, read=source.read)


def open_megatron(folder: Path, *, hf_model: Path | None = None, dtype: torch.dtype | None = None) -> Checkpoint:
    """Open a Megatron checkpoint, saved by any layout.

    Args:
        folder: of a run of this project, of `hf_to_megatron.py`, or bare.
        hf_model: folder with configuration and tokenizer; None takes those beside the weights.
        dtype: type of the tensors; None keeps that of each.

    Raises:
        UserError: when anything about it is wrong that shows without reading the values.
    """
    weights = next((path for path in (folder / MEGATRON_PART, folder) if (path / METADATA_FILE).is_file()), None)
    if weights is None:
        raise UserError(
            str(folder),
            f"holds no Megatron distributed checkpoint ({METADATA_FILE}, here or in {MEGATRON_PART}/); give a checkpoint "
            "folder such as RUN_DIR/step_200",
        )
    hf_folder = hf_model or folder / HF_PART
    if hf_model is None and not hf_folder.is_dir():
        raise UserError(
            str(folder), "has no configuration beside its weights; give a HF folder of the model (--hf-model)"
        )
    hf_config = read_hf_config(hf_folder)
    hf_config.pop("quantization_config", None)
    shape = model_shape(hf_config, hf_folder)
    beside = [path for path in (folder / OPTIMIZER_PART,) if (path / METADATA_FILE).is_file()]
    stored = DistCheckpoint(weights, *beside)
    source = hf_source(stored, shape, dtype=dtype)
    has_masters = any(key.startswith(MASTER_PREFIX) for key in stored.tensors)
    return Checkpoint(folder, hf_folder, hf_config, shape, source, weights, has_masters)


def open_checkpoint(folder: Path, *, hf_model: Path | None = None, dtype: torch.dtype | None = None) -> Checkpoint:
    """Open a checkpoint of either kind: HF when it has a `config.json` of its own.

    Raises:
        UserError: as `open_hf` and `open_megatron` do.
    """
    if not folder.is_dir():
        raise UserError(str(folder), "is no folder; give a HF or a Megatron checkpoint")
    if (folder / CONFIG_FILE).is_file():
        return open_hf(folder, dtype=dtype)
    return open_megatron(folder, hf_model=hf_model, dtype=dtype)
