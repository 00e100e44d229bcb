"""Our precision recipes on Megatron-Bridge's real mixed-precision recipes, from a checkout.

Its package needs TransformerEngine to be imported; the one module under test does not, beyond the names of two classes.
"""

# ruff: noqa: E402 (skipped before anything is imported)
from __future__ import annotations

import importlib.util
import os
import sys
import types
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

SOURCE = os.environ.get("MEGATRON_BRIDGE_SRC")
if not SOURCE:
    pytest.skip("MEGATRON_BRIDGE_SRC names no checkout of Megatron-Bridge", allow_module_level=True)

from megatron_calclip.config import PrecisionConfig
from megatron_calclip.integrations import megatron_bridge

pytestmark = pytest.mark.integration


@pytest.fixture
def mixed_precision(monkeypatch: pytest.MonkeyPatch) -> Any:
    from megatron_calclip.learner import cpu

    cpu.install()
    for name in ("megatron.bridge", "megatron.bridge.models", "megatron.bridge.training"):
        module = types.ModuleType(name)
        module.__path__ = []
        module.GPTModelProvider = module.T5ModelProvider = object
        monkeypatch.setitem(sys.modules, name, module)
    name = "megatron.bridge.training.mixed_precision"
    path = Path(SOURCE) / "src" / "megatron" / "bridge" / "training" / "mixed_precision.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("fp8_param", [False, True])
@pytest.mark.parametrize("recipe", ["bf16", "tensorwise_delayed", "tensorwise", "blockwise", "mxfp8"])
def test_every_recipe(mixed_precision: Any, recipe: str, fp8_param: bool) -> None:
    container = types.SimpleNamespace()
    precision = PrecisionConfig(recipe=recipe, fp8_param=fp8_param and recipe != "bf16")
    mixed = megatron_bridge.set_precision(container, precision).mixed_precision
    assert isinstance(mixed, mixed_precision.MixedPrecisionConfig)
    # setattr of a name that the class does not have would go unnoticed
    assert set(vars(mixed)) == {field.name for field in fields(mixed_precision.MixedPrecisionConfig)}
    mixed.finalize()
    expected = {"bf16": None, "tensorwise_delayed": "delayed"}.get(recipe, recipe)
    assert (mixed.fp8_recipe if mixed.fp8 else None) == expected
    assert bool(mixed.fp8_param) == bool(mixed.fp8_param_gather) == precision.fp8_param
    assert mixed.bf16 and not mixed.first_last_layers_bf16
