"""Conversion through Megatron-Bridge, for architectures that have no table here.

Megatron-Bridge builds the model, so it needs memory for all of it, TransformerEngine and thus a GPU. What it writes goes
aside and is verified as ours is: an import is exported again and compared with the source, bit for bit; an export is
compared with the given HF checkpoint in names and shapes.

Not yet run with a real Megatron-Bridge (it imports on GPU machines only); the tests have a stand-in for it.
"""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import torch

from megatron_calclip.convert.conversion import HF_FOLDER
from megatron_calclip.convert.verification import first_difference
from megatron_calclip.errors import EXIT_FAILED, UserError
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
    """Write a HF checkpoint from a Megatron checkpoint of Megatron-Bridge.

    Args:
        megatron_path: the Megatron checkpoint.
        hf_path: where the HF checkpoint goes; see `folders.written_aside`.
        hf_model: HF checkpoint of the same architecture, with its weights.
        overwrite: replace a HF checkpoint that is there.
        verify: compare names and shapes with those of `hf_model`.

    Raises:
        UserError: without Megatron-Bridge, for a taken name, a failed write or a failed verification.
    """
    bridge = _auto_bridge()
    expected = HFSource.from_folder(hf_model)
    with written_aside(hf_path, overwrite=overwrite, **HF_FOLDER) as partial:
        bridge.from_hf_pretrained(str(hf_model)).export_ckpt(str(megatron_path), str(partial))
        if verify:
            actual = HFSource.from_folder(partial)
            kinds = {
                name: spec.to(actual.specs[name].dtype) if name in actual.specs else spec
                for name, spec in expected.specs.items()
            }
            _refuse(first_difference((), kinds, actual), hf_path)


def _refuse(difference: str | None, where: Path) -> None:
    if difference is not None:
        raise UserError(str(where), f"read back, {difference}; nothing was kept", exit_code=EXIT_FAILED)
