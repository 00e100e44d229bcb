"""HF -> Megatron and Megatron -> HF, streamed: memory holds about one parameter, whatever the size of the model.

Both directions write aside, verify what they wrote while it is still aside, and rename. The verification reads it back
through the importer of the other direction and compares bits: by default all names, shapes and types, and the values
of a sample (`verification.quick_sample`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from megatron_calclip.convert.checkpoints import HF_PART, MEGATRON_PART, open_hf, open_megatron
from megatron_calclip.convert.verification import first_difference, quick_sample
from megatron_calclip.errors import EXIT_FAILED, UserError
from megatron_calclip.weights.dist_load import METADATA_FILE, DistCheckpoint, hf_source
from megatron_calclip.weights.dist_save import ShardLayout, write_dist_checkpoint
from megatron_calclip.weights.folders import check_free, copy_tokenizer, written_aside
from megatron_calclip.weights.fp8 import BlockQuantization
from megatron_calclip.weights.load import HFSource
from megatron_calclip.weights.mapping import ModelShape
from megatron_calclip.weights.save import CONFIG_FILE, write_hf

Verification = Literal["quick", "full", "none"]
Progress = Callable[[HFSource, str], HFSource]
"""(source, what is done) -> the same source, reporting what is read of it."""

MEGATRON_FOLDER: dict[str, str] = {"mark": f"{MEGATRON_PART}/{METADATA_FILE}", "kind": "Megatron checkpoint"}
HF_FOLDER: dict[str, str] = {"mark": CONFIG_FILE, "kind": "HF checkpoint"}


def hf_to_megatron(
    hf_model: Path,
    megatron_path: Path,
    *,
    layout: ShardLayout,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    verify: Verification = "quick",
    progress: Progress,
) -> None:
    """Write `megatron_path/megatron` (distributed checkpoint) and `megatron_path/hf` (configuration, tokenizer).

    Args:
        hf_model: HF folder; block-quantised FP8 weights are dequantised.
        megatron_path: where the checkpoint goes; see `folders.written_aside`.
        layout: how its files are cut.
        dtype: type of all tensors; None keeps that of each (BF16 for FP8 weights).
        overwrite: replace a Megatron checkpoint that is there.
        verify: how much of the result is read back and compared.
        progress: reports what is read.

    Raises:
        UserError: for bad input, a taken name, a failed write or a failed verification. Nothing is left then.
    """
    check_free(megatron_path, overwrite=overwrite, **MEGATRON_FOLDER)
    checkpoint = open_hf(hf_model, dtype=dtype)
    shape, source = checkpoint.shape, checkpoint.source
    layout.check(shape)
    with written_aside(megatron_path, overwrite=overwrite, **MEGATRON_FOLDER) as partial:
        weights, hf = partial / MEGATRON_PART, partial / HF_PART
        weights.mkdir()
        hf.mkdir()
        write_dist_checkpoint(progress(source, "converting"), shape, weights, layout=layout)
        (hf / CONFIG_FILE).write_text(json.dumps(checkpoint.hf_config, indent=2, sort_keys=True) + "\n")
        copy_tokenizer(checkpoint.hf_folder, hf)
        if verify != "none":
            _verify(source, hf_source(DistCheckpoint(weights), shape), shape, verify, progress)


def megatron_to_hf(
    megatron_path: Path,
    hf_path: Path,
    *,
    hf_model: Path | None = None,
    dtype: torch.dtype | None = None,
    fp8_power_of_two: bool | None = None,
    max_shard_bytes: int,
    overwrite: bool = False,
    verify: Verification = "quick",
    progress: Progress,
) -> None:
    """Write a HF checkpoint from a Megatron one.

    Args:
        megatron_path: what `checkpoints.open_megatron` takes.
        hf_path: where the checkpoint goes; see `folders.written_aside`.
        hf_model: folder with configuration and tokenizer; None takes those beside the weights.
        dtype: type of all tensors; None keeps that of each.
        fp8_power_of_two: quantise linears to FP8 in blocks, with scales that are powers of two or not; None does not.
        max_shard_bytes: most bytes of tensors in a file.
        overwrite: replace a HF checkpoint that is there.
        verify: how much of the result is read back and compared.
        progress: reports what is read.

    Raises:
        UserError: for bad input, a taken name, a failed write or a failed verification. Nothing is left then.
    """
    check_free(hf_path, overwrite=overwrite, **HF_FOLDER)
    checkpoint = open_megatron(megatron_path, hf_model=hf_model, dtype=dtype)
    shape, source, config = checkpoint.shape, checkpoint.source, dict(checkpoint.hf_config)
    blocks = None if fp8_power_of_two is None else BlockQuantization(shape, power_of_two=fp8_power_of_two)
    if blocks is not None:
        config["quantization_config"] = blocks.config()
    with written_aside(hf_path, overwrite=overwrite, **HF_FOLDER) as partial:
        stream = progress(source, "converting").stream()
        write_hf(
            stream if blocks is None else blocks.stream(stream),
            partial,
            specs=source.specs if blocks is None else blocks.specs(source.specs),
            hf_config=config,
            tokenizer_files_from=checkpoint.hf_folder,
            max_shard_bytes=max_shard_bytes,
        )
        if verify != "none":
            _verify(source, HFSource.from_folder(partial), shape, verify, progress, blocks=blocks)


def _verify(
    expected: HFSource,
    actual: HFSource,
    shape: ModelShape,
    verify: Verification,
    progress: Progress,
    *,
    blocks: BlockQuantization | None = None,
) -> None:
    names = quick_sample(shape) if verify == "quick" else set(expected.specs)
    specs = {name: spec for name, spec in expected.specs.items() if name in names}
    reported = progress(HFSource(expected.where, specs=specs, read=expected.read), "verifying")
    stream, expected_specs = reported.stream(), expected.specs
    if blocks is not None:
        stream, expected_specs = blocks.stream(stream), blocks.specs(expected.specs)
    difference = first_difference(stream, expected_specs, actual)
    if difference is not None:
        raise UserError(
            actual.where, f"read back, {difference}; nothing was kept, convert again", exit_code=EXIT_FAILED
        )
