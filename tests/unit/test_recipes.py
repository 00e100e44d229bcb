"""Recipes by name: what shares a scale, which FP8 format, and the fields that Megatron gets."""

from typing import Any

import pytest
import torch

from megatron_calclip.config import EmulationConfig, PrecisionConfig
from megatron_calclip.precision.quantize import E4M3, E5M2
from megatron_calclip.precision.recipes import Recipe, gradient_format, megatron_fields, resolve
from megatron_calclip.precision.scaling import RowScaling, TensorScaling

NAMES = ("tensorwise_delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
ROWS, COLUMNS = 256, 384
# Rows and columns of a tile: activations (dim -1, dim 0), weights (dim -1, dim 0), gradients' format by default.
TABLE: dict[str, tuple[tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int], torch.dtype]] = {
    "tensorwise": ((ROWS, COLUMNS),) * 4 + (E5M2,),
    "rowwise": ((1, COLUMNS), (ROWS, 1), (1, COLUMNS), (ROWS, 1), E4M3),
    "blockwise": ((1, 128), (128, 1), (128, 128), (128, 128), E4M3),
    "mxfp8": ((1, 32), (32, 1), (1, 32), (32, 1), E4M3),
}


def make(recipe: str, **settings: Any) -> Recipe:
    resolved = resolve(PrecisionConfig(recipe=recipe, **settings))
    assert resolved is not None
    return resolved


def test_bf16_is_no_recipe() -> None:
    assert resolve(PrecisionConfig()) is None
    assert megatron_fields(PrecisionConfig()) == {}


@pytest.mark.parametrize("name", TABLE)
def test_which_elements_share_a_scale(name: str) -> None:
    recipe = make(name)
    tiles = [
        rule.tile(ROWS, COLUMNS, dim=dim)
        for rule in (recipe.activation, recipe.weight)
        for dim in (-1, 0)
        if rule is not None
    ]
    assert (*tiles, recipe.gradient_dtype) == TABLE[name]
    assert recipe.gradient is recipe.activation
    assert recipe.per_tensor == (name == "tensorwise")


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("power_of_two", [None, True, False])
def test_power_of_two_scales(name: str, power_of_two: bool | None) -> None:
    """null is the recipe's own: yes but for one scale a tensor, as in TransformerEngine and torchao."""
    recipe = make(name, power_of_two_scales=power_of_two)
    expected = (name != "tensorwise") if power_of_two is None else power_of_two
    assert recipe.activation is not None and recipe.weight is not None
    assert recipe.activation.power_of_two == recipe.weight.power_of_two == expected


@pytest.mark.parametrize("name", NAMES)
def test_formats(name: str) -> None:
    """hybrid and e4m3 differ in the gradients alone."""
    assert make(name, format="hybrid").gradient_dtype == E5M2
    assert make(name, format="e4m3").gradient_dtype == E4M3
    own = {"tensorwise": "hybrid", "tensorwise_delayed": "hybrid"}.get(name, "e4m3")
    assert gradient_format(PrecisionConfig(recipe=name)) == own


def test_block_size_dial() -> None:
    dial = EmulationConfig(block_size=16)
    blockwise, mxfp8 = make("blockwise", emulation=dial), make("mxfp8", emulation=dial)
    for recipe, weight_tile in ((blockwise, (16, 16)), (mxfp8, (1, 16))):
        assert recipe.activation is not None and recipe.weight is not None
        assert recipe.activation.tile(64, 64, dim=-1) == (1, 16)
        assert recipe.weight.tile(64, 64, dim=-1) == weight_tile
    assert make("rowwise", emulation=dial).activation == RowScaling()


def test_delayed_scaling_gets_its_settings() -> None:
    recipe = make("tensorwise_delayed", amax_history_length=7, amax_compute_algo="most_recent", margin=2)
    assert recipe.per_tensor and recipe.activation is recipe.weight is recipe.gradient is None
    first, second = recipe.delayed_scaling(E4M3), recipe.delayed_scaling(E5M2)
    assert first is not second and first.amax_history.shape == (7,)
    assert first.amax_compute_algo == "most_recent"
    assert (first.largest, second.largest) == (448 / 4, 57344 / 4)
    assert make("tensorwise").delayed is None


@pytest.mark.parametrize(("group", "reduces"), [("te", False), ("global", True)])
def test_amax_group(group: str, reduces: bool) -> None:
    assert make("tensorwise", amax_group=group).reduces_amax == reduces


def test_current_scaling_needs_no_state_of_its_own() -> None:
    assert make("tensorwise").activation == TensorScaling()


FIELDS: dict[str, dict[str, Any]] = {
    "tensorwise_delayed": {
        "fp8": "hybrid",
        "fp8_recipe": "delayed",
        "fp8_margin": 1,
        "fp8_amax_history_len": 16,
        "fp8_amax_compute_algo": "most_recent",
    },
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "rowwise": {
        "fp8": "e4m3",
        "fp8_recipe": "custom",
        "fp8_quantizer_factory": "megatron_calclip.precision.te_rowwise.e4m3_factory",
        "disable_parameter_transpose_cache": True,
    },
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
}


@pytest.mark.parametrize("name", NAMES)
def test_fields_for_megatron(name: str) -> None:
    """Delayed scaling's settings go to no other recipe; the rest goes to all."""
    delayed = {"margin": 1, "amax_history_length": 16, "amax_compute_algo": "most_recent"}
    precision = PrecisionConfig(recipe=name, fp8_param=True, **delayed)
    assert megatron_fields(precision) == FIELDS[name] | {"fp8_param": True}


def test_rowwise_factory_follows_the_format() -> None:
    """TransformerEngine's custom recipe takes formats from the factory alone."""
    for name in ("e4m3", "hybrid"):
        fields = megatron_fields(PrecisionConfig(recipe="rowwise", format=name))
        assert fields["fp8_quantizer_factory"] == f"megatron_calclip.precision.te_rowwise.{name}_factory"


def test_edge_layers_for_megatron() -> None:
    fields = megatron_fields(PrecisionConfig(recipe="tensorwise", first_last_layers_bf16=2))
    edge = {name: value for name, value in fields.items() if "layers" in name}
    assert edge == {
        "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": 2,
        "num_layers_at_end_in_bf16": 2,
    }
