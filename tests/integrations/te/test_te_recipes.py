"""Our recipes against TransformerEngine's own, from its wheel and without a GPU: names, defaults, and the rowwise quantiser.

The wheel goes into a folder of its own. Where it is importable on a machine without CUDA, `import megatron.core` fails, so it
is never in the environment of the tests; the recipes are loaded from their file, and the quantiser runs in a process apart.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron_calclip.config import PrecisionConfig
from megatron_calclip.precision.recipes import gradient_format, megatron_fields, resolve
from megatron_calclip.precision.scaling import BlockScaling, MXScaling, TensorScaling

pytestmark = [pytest.mark.slow, pytest.mark.te]

WHEEL = "transformer-engine==2.20.2"  # the Python part; the compiled one is another wheel
NAMES = ("tensorwise_delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked into a folder."""
    folder = tmp_path_factory.mktemp("te")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), WHEEL]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"pip cannot get {WHEEL}: {done.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.fixture(scope="session")
def te(wheel: Path) -> Iterator[ModuleType]:
    """The module with TransformerEngine's recipes, alone."""
    file = wheel / "transformer_engine" / "common" / "recipe" / "__init__.py"
    spec = importlib.util.spec_from_file_location("te_recipe_alone", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    assert "transformer_engine" not in sys.modules
    yield module
    del sys.modules[spec.name]


def made_by_te(te: ModuleType, name: str) -> Any:
    """TransformerEngine's recipe of that name with its own defaults."""
    classes = {
        "tensorwise_delayed": te.DelayedScaling,
        "tensorwise": te.Float8CurrentScaling,
        "blockwise": te.Float8BlockScaling,
        "mxfp8": te.MXFP8BlockScaling,
    }
    return te.CustomRecipe(qfactory=print) if name == "rowwise" else classes[name]()


def test_megatron_has_our_names() -> None:
    """Every field that Megatron is given exists, and its recipe names are Megatron's."""
    from megatron.core.enums import Fp8Recipe
    from megatron.core.transformer.transformer_config import TransformerConfig

    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    for name in NAMES:
        fields = megatron_fields(PrecisionConfig(recipe=name, first_last_layers_bf16=1))
        assert fields.keys() <= known
        assert fields["fp8_recipe"] in {recipe.value for recipe in Fp8Recipe}


def test_each_recipe_is_te_s_kind(te: ModuleType) -> None:
    predicates = {
        "tensorwise_delayed": "delayed",
        "tensorwise": "float8_current_scaling",
        "rowwise": "custom",
        "blockwise": "float8_block_scaling",
        "mxfp8": "mxfp8",
    }
    for name, predicate in predicates.items():
        recipe = made_by_te(te, name)
        assert [kind for kind in predicates.values() if getattr(recipe, kind)()] == [predicate]


@pytest.mark.parametrize("name", ["tensorwise_delayed", "tensorwise", "blockwise", "mxfp8"])
def test_formats_are_te_s_defaults(te: ModuleType, name: str) -> None:
    """Rowwise has no such recipe in TransformerEngine: its formats are torchao's."""
    assert made_by_te(te, name).fp8_format.name.lower() == gradient_format(PrecisionConfig(recipe=name))


def test_delayed_scaling_has_te_s_defaults(te: ModuleType) -> None:
    theirs, ours = te.DelayedScaling(), PrecisionConfig(recipe="tensorwise_delayed")
    assert (ours.margin, ours.amax_history_length, ours.amax_compute_algo) == (
        theirs.margin,
        theirs.amax_history_len,
        theirs.amax_compute_algo,
    )
    assert theirs.reduce_amax and theirs.scaling_factor_compute_algo is None
    recipe = resolve(ours)
    assert recipe is not None
    largest = [recipe.delayed_scaling(dtype).largest for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)]
    assert largest == [te.Format.HYBRID.value.max_fwd, te.Format.HYBRID.value.max_bwd]


def test_scales_have_te_s_defaults(te: ModuleType) -> None:
    """Powers of two where TransformerEngine rounds to them, its block shapes, and no lower bound on amaxes."""
    current, block = te.Float8CurrentScaling(), te.Float8BlockScaling()
    for theirs, name in ((current, "tensorwise"), (block, "blockwise")):
        ours = resolve(PrecisionConfig(recipe=name))
        assert ours is not None
        for operand, rule in (("fwd_inp", ours.activation), ("fwd_weight", ours.weight), ("bwd_grad", ours.gradient)):
            settings = getattr(theirs, f"fp8_quant_{operand}")
            assert rule is not None
            assert (settings.power_2_scale, settings.amax_epsilon) == (rule.power_of_two, 0.0)
    dims = (block.x_block_scaling_dim, block.w_block_scaling_dim, block.grad_block_scaling_dim)
    blockwise = resolve(PrecisionConfig(recipe="blockwise"))
    assert blockwise is not None
    rules = (blockwise.activation, blockwise.weight, blockwise.gradient)
    assert dims == tuple(2 if isinstance(rule, BlockScaling) and rule.two_dimensional else 1 for rule in rules)
    tensorwise, mxfp8 = resolve(PrecisionConfig(recipe="tensorwise")), resolve(PrecisionConfig(recipe="mxfp8"))
    assert tensorwise is not None and tensorwise.activation == TensorScaling()
    assert mxfp8 is not None and mxfp8.weight == MXScaling() and not te.MXFP8BlockScaling().enable_2d_quantization


def test_rowwise_under_te_s_own_code(wheel: Path) -> None:
    """Factories, usages and the three GEMMs, equal to the `scaled_mm` backend; see `rowwise_on_cpu.py`."""
    root = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(wheel), str(root)]), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("rowwise_on_cpu.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok   ") == 4
