"""Conversion through Megatron-Bridge, for architectures that have no table here.

Megatron-Bridge builds the model, so it needs memory for all of it, TransformerEngine and thus a GPU. What it writes goes
aside and is verified as ours is, by the other direction: an import is exported again and compared with the source, an
export is imported again and compared with the Megatron checkpoint, all tensors bit for bit.

Not yet run with a real Megatron-Bridge (it imports on GPU machines only); the tests have a stand-in for it.
"""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import torch

from megatron_calclip.convert.checkpoints import read_hf_config
from megatron_calclip.convert.conversion import HF_FOLDER
from megatron_calclip.convert.verification import first_difference
from megatron_calclip.errors import EXIT_FAILED, UserError
from megatron_calclip.weights.dist_load import DistCheckpoint
from megatron_calclip.weights.folders import written_aside
from megatron_calclip.weights.load import HFSource

_MEGATRON_FOLDER = {"mark": "latest_checkpointed_iteration.txt", "kind": "Megatron checkpoint"}


def _auto_bridge() -> Any:
    """Megatron-Bridge's entry point.

    Raises:
        UserError: when it is not installed, or cannot be imported (without TransformerEngine, say).
    """
    try:
        return importlib.import_module("megatron.bridge").AutoBridge
    except Exception as error:  # without a GPU its dependencies fail with errors of many kinds
        raise UserError(
            "--backend",
            f"bridge needs Megatron-Bridge, which cannot be imported here ({type(error).__name__}: {error}); install "
            "megatron-bridge on a machine with a GPU, or use --backend native",
        ) from None


def hf_to_megatron(
    hf_model: Path, megatron_path: Path, *, dtype: torch.dtype | None, overwrite: bool, verify: bool
) -> None:
    """Write a Megatron checkpoint in Megatron-Bridge's own layout.

    Args:
        hf_model: HF folder.
        megatron_path: where the checkpoint goes; see `folders.written_aside`.
        dtype: type of the weights; None keeps the configuration's.
        overwrite: replace a Megatron checkpoint that is there.
        verify: export it again and compare all bits.

    Raises:
        UserError: without Megatron-Bridge, for a taken name, a failed write or a failed verification.
    """
    bridge = _auto_bridge()
    source = HFSource.from_folder(hf_model).cast(dtype)
    with written_aside(megatron_path, overwrite=overwrite, **_MEGATRON_FOLDER) as partial:
        options = {} if dtype is None else {"torch_dtype": dtype}
        bridge.import_ckpt(str(hf_model), str(partial), **options)
        if verify:
            again = partial / "exported_again"
            bridge.from_hf_pretrained(str(hf_model)).export_ckpt(str(partial), str(again))
            _refuse(first_difference(source.stream(), source.specs, HFSource.from_folder(again)), megatron_path)
            shutil.rmtree(again)


def megatron_to_hf(megatron_path: Path, hf_path: Path, *, hf_model: Path, overwrite: bool, verify: bool) -> None:
    """Write a HF checkpoint from a Megatron checkpoint.

    Args:
        megatron_path: a distributed checkpoint, or a folder whose newest iteration is one.
        hf_path: where the HF checkpoint goes; see `folders.written_aside`.
        hf_model: HF checkpoint of the same architecture; configuration and tokenizer are taken from it.
        overwrite: replace a HF checkpoint that is there.
        verify: import it again and compare all bits.

    Raises:
        UserError: without Megatron-Bridge, for a taken name, a failed write or a failed verification.
    """
    bridge = _auto_bridge()
    vocab_size = read_hf_config(hf_model)["vocab_size"]
    source = DistCheckpoint(_newest(megatron_path)).weights(vocab_size=vocab_size)
    with written_aside(hf_path, overwrite=overwrite, **HF_FOLDER) as partial:
        bridge.from_hf_pretrained(str(hf_model)).export_ckpt(str(megatron_path), str(partial))
        if verify:
            again = partial / "imported_again"
            dtype = next(iter(source.specs.values())).dtype
            bridge.import_ckpt(str(partial), str(again), torch_dtype=dtype)
            actual = DistCheckpoint(_newest(again)).weights(vocab_size=vocab_size)
            _refuse(first_difference(source.stream(), source.specs, actual), hf_path)
            shutil.rmtree(again)


def _newest(folder: Path) -> Path:
    """The distributed checkpoint in a folder as Megatron writes it: `iter_0000100`, named by the tracker file.

    Without a tracker file the folder itself is taken; `DistCheckpoint` refuses it when it is none.
    """
    tracker = folder / str(_MEGATRON_FOLDER["mark"])
    iteration = tracker.read_text().strip() if tracker.is_file() else ""
    return folder / f"iter_{int(iteration):07d}" if iteration.isdecimal() else folder


def _refuse(difference: str | None, where: Path) -> None:
    if difference is not None:
        raise UserError(str(where), f"read back, {difference}; nothing was kept", exit_code=EXIT_FAILED)
