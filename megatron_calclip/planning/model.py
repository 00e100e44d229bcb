"""The shape of the model that a configuration names, from settings or a `config.json` alone: no weights, no tokenizer files.

For `model.hf` the folder itself is read where it is there. Where it is not (planning happens before anything is downloaded)
the shipped configuration of a folder of the same name is taken: `conf/hf/qwen2.5-32b` for `anywhere/Qwen2.5-32B`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megatron_calclip.config import Config
from megatron_calclip.config_file import shipped_folder
from megatron_calclip.errors import UserError
from megatron_calclip.weights.mapping import ModelShape


@dataclass(frozen=True)
class PlannedModel:
    """A model that need not be there."""

    shape: ModelShape
    folder: Path | None
    """Where its `config.json` was read; None for a shape made from settings."""
    is_stand_in: bool = False
    """Whether that is a shipped configuration in place of an absent folder."""

    def describe(self, config: Config) -> str:
        """What is planned, in words."""
        if self.folder is None:
            return f"{self.shape.model_type} of model.shape"
        if self.is_stand_in:
            return f"{config.model.hf} (not here; sizes of the shipped {self.folder.name})"
        return str(config.model.hf)


def find_folder(name: str) -> tuple[Path, bool] | None:
    """The folder to read a model's `config.json` in, and whether it is a shipped stand-in; None if there is neither.

    Args:
        name: `model.hf`.
    """
    folder = Path(name)
    if os.path.isfile(folder / "config.json"):  # pathlib's raises for a name that is too long
        return folder, False
    shipped = shipped_folder()
    known = {path.name: path for path in shipped.glob("hf/*")} if shipped else {}
    stand_in = known.get(folder.name.lower())
    return (stand_in, True) if stand_in is not None else None


def planned_model(config: Config) -> PlannedModel:
    """The model of a configuration, checked against its layout and context.

    Raises:
        UserError: when neither the folder nor a shipped configuration of its name exists, or it does not fit the layout.
    """
    from megatron_calclip.hf import load_hf_config, load_tokenizer, read_hf_config  # imports transformers

    if config.model.hf is None:
        hf_config = load_hf_config(config, load_tokenizer(config.model))
        return PlannedModel(ModelShape.from_hf_config(hf_config), None)
    found = find_folder(config.model.hf)
    if found is None:
        raise UserError(
            "model.hf",
            f"{config.model.hf!r} has no config.json, and no configuration of that name is shipped; give the folder of "
            "a Hugging Face model",
        )
    folder, is_stand_in = found
    return PlannedModel(ModelShape.from_hf_config(read_hf_config(config, folder)), folder, is_stand_in)
