"""Which backend is taken on which machine, and the refusals, each by the name of the setting."""

import importlib.util
from typing import Any

import pytest
import torch

from megatron_calclip.config import Config, EmulationConfig, ParallelConfig, PrecisionConfig, TrainConfig
from megatron_calclip.errors import UserError
from megatron_calclip.precision.backend import check, choose, linear_widths, remarks, token_multiple
from megatron_calclip.weights.mapping import ModelShape

# Per rank at tp 1: hidden 256, attention 4 x 64 = 256, qkv (4 + 2 * 2) * 64 = 512, ffn 512.
SHAPE = ModelShape(
    model_type="qwen3",
    num_layers=4,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    ffn_size=512,
    vocab_size=1000,
    padded_vocab_size=1024,
    tied=False,
)
NONE, AMPERE, ADA, HOPPER, BLACKWELL = None, (8, 0), (8, 9), (9, 0), (10, 0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends to be a machine: compute capability of its GPU (None: no GPU), TransformerEngine or not."""

    def pretend(capability: tuple[int, int] | None, *, te: bool = False) -> None:
        find = importlib.util.find_spec
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: te or None if name == "transformer_engine" else find(name)
        )

    return pretend


def precision(recipe: str, **settings: Any) -> PrecisionConfig:
    return PrecisionConfig(recipe=recipe, **settings)


def config(recipe: str, *, parallel: dict[str, Any] | None = None, fused_head: bool = False, **settings: Any) -> Config:
    return Config(
        precision=precision(recipe, **settings),
        parallel=ParallelConfig(**parallel or {}),
        train=TrainConfig(fused_head=fused_head),
    )


@pytest.mark.parametrize(
    ("capability", "te", "recipe", "expected"),
    [
        (NONE, False, "tensorwise", "emulated"),
        (NONE, True, "tensorwise", "emulated"),  # TransformerEngine without a GPU is of no use
        (AMPERE, False, "tensorwise", "emulated"),
        (ADA, False, "tensorwise", "scaled_mm"),
        (HOPPER, False, "rowwise", "scaled_mm"),
        (HOPPER, False, "tensorwise_delayed", "scaled_mm"),
        (HOPPER, False, "blockwise", "emulated"),
        (BLACKWELL, False, "mxfp8", "emulated"),
        (HOPPER, True, "tensorwise", "te"),
        (HOPPER, True, "blockwise", "te"),
        (BLACKWELL, True, "mxfp8", "te"),
    ],
)
def test_auto(machine: Any, capability: tuple[int, int] | None, te: bool, recipe: str, expected: str) -> None:
    machine(capability, te=te)
    assert choose(precision(recipe)) == expected


@pytest.mark.parametrize(
    "dials", [{"channel_outlier": 2.0}, {"first_token_outlier": 2.0}, {"block_size": 16}], ids=lambda d: next(iter(d))
)
def test_dials_are_for_emulation_alone(machine: Any, dials: dict[str, Any]) -> None:
    machine(BLACKWELL, te=True)
    emulation = EmulationConfig(**dials)
    assert choose(precision("mxfp8", emulation=emulation)) == "emulated"
    assert choose(precision("mxfp8", emulation=emulation, backend="emulated")) == "emulated"
    for backend in ("te", "scaled_mm"):
        with pytest.raises(UserError, match=r"^precision.emulation: .*emulated"):
            choose(precision("tensorwise", emulation=emulation, backend=backend))


def refused(setting: str, settings: Config, *words: str) -> None:
    with pytest.raises(UserError) as error:
        check(settings, SHAPE)
    text = str(error.value)
    assert text.startswith(f"{setting}: ") and "; " in text and "\n" not in text
    assert all(word in text for word in words), text


def test_backends_that_are_not_there(machine: Any) -> None:
    machine(NONE)
    refused("precision.backend", config("tensorwise", backend="te"), "TransformerEngine")
    refused("precision.backend", config("blockwise", backend="scaled_mm"), "blockwise")
    refused("precision.backend", config("mxfp8", backend="scaled_mm"), "mxfp8")
    machine(HOPPER, te=True)
    refused("precision.recipe", config("mxfp8"), "Blackwell")
    machine(ADA, te=True)
    refused("precision.recipe", config("blockwise"), "Hopper")
    machine(AMPERE, te=True)
    refused("precision.recipe", config("tensorwise"), "Ada", "emulated")
    check(config("tensorwise", backend="emulated"), SHAPE)


@pytest.mark.parametrize(
    ("recipe", "tp", "te", "multiple", "size"),
    [
        ("blockwise", 4, True, 128, 64),  # 256 / 4 of attention
        ("mxfp8", 16, True, 32, 16),
        ("tensorwise", 32, True, 16, 8),
        ("rowwise", 32, False, 16, 8),
    ],
)
def test_widths_that_hardware_refuses(machine: Any, recipe: str, tp: int, te: bool, multiple: int, size: int) -> None:
    machine(BLACKWELL, te=te)
    refused("precision.recipe", config(recipe, parallel={"tp": tp}), f"multiples of {multiple}", f" is {size} ")
    check(config(recipe, parallel={"tp": 2}), SHAPE)
    check(config(recipe, parallel={"tp": tp}, backend="emulated"), SHAPE)


def test_widths_by_hand() -> None:
    assert list(linear_widths(SHAPE, 2).values()) == [256, 128, 256, 256]


def test_what_only_emulation_can_do(machine: Any) -> None:
    machine(BLACKWELL, te=True)
    refused("precision.output_layer", config("tensorwise", output_layer=True), "emulated")
    refused("precision.power_of_two_scales", config("tensorwise", power_of_two_scales=True), "te")
    refused("precision.first_last_layers_bf16", config("tensorwise_delayed", first_last_layers_bf16=1))
    refused("precision.fp8_param", config("mxfp8", fp8_param=True), "overlap_param_gather")
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    check(config("mxfp8", fp8_param=True, parallel=overlap), SHAPE)
    tall = {"tp": 4}
    wide = ModelShape(**{**vars(SHAPE), "hidden_size": 1024, "head_dim": 256, "ffn_size": 1024})
    check(config("blockwise", parallel=tall), wide)
    with pytest.raises(UserError, match=r"^precision.fp8_param: .*tp > 2"):
        check(config("blockwise", fp8_param=True, parallel=tall), wide)
    refused("precision.fp8_param", config("rowwise", fp8_param=True), "scaled_mm")
    biased = ModelShape(**{**vars(SHAPE), "model_type": "qwen2"})
    with pytest.raises(UserError, match=r"^precision.recipe: .*biases"):
        check(config("rowwise"), biased)
    check(config("rowwise", backend="scaled_mm", fp8_param=True), biased)
    check(config("tensorwise"), biased)
    machine(HOPPER)
    refused("precision.output_layer", config("rowwise", output_layer=True), "scaled_mm")


def test_token_multiples_are_those_of_te_alone(machine: Any) -> None:
    machine(BLACKWELL, te=True)
    expected = {"bf16": 1, "tensorwise": 16, "tensorwise_delayed": 16, "rowwise": 16, "blockwise": 128, "mxfp8": 32}
    assert {recipe: token_multiple(precision(recipe)) for recipe in expected} == expected
    assert token_multiple(precision("blockwise", backend="emulated")) == 1
    machine(HOPPER)
    assert token_multiple(precision("tensorwise")) == 1


@pytest.mark.parametrize(
    "settings",
    [
        config("bf16"),
        config("tensorwise", fp8_param=True, first_last_layers_bf16=1),
        config("mxfp8", power_of_two_scales=True),
        config("tensorwise_delayed", power_of_two_scales=False, parallel={"recompute": "selective"}),
        config("rowwise", output_layer=True, parallel={"recompute": "full"}),
        config("tensorwise", emulation=EmulationConfig(first_token_outlier=4.0), parallel={"recompute": "full"}),
        config("tensorwise", emulation=EmulationConfig(channel_outlier=1.0)),
    ],
    ids=str,
)
def test_what_goes_well(machine: Any, settings: Config) -> None:
    machine(NONE)
    check(settings, SHAPE)


def test_remarks(machine: Any) -> None:
    machine(NONE)
    assert remarks(config("bf16"), SHAPE) == []
    assert remarks(config("blockwise"), SHAPE) == []
    dialled = config("tensorwise", emulation=EmulationConfig(channel_outlier=64.0, first_token_outlier=2.0))
    assert remarks(dialled, SHAPE) == [
        "DIALLED IN: precision.emulation.channel_outlier = 64",
        "DIALLED IN: precision.emulation.first_token_outlier = 2",
    ]
    (cut,) = remarks(config("blockwise", parallel={"tp": 4}), SHAPE)  # attention 256 / 4 = 64
    assert "block of 128 is cut short in attention heads x head_dim" in cut and "parallel.tp" in cut
    assert remarks(config("blockwise", parallel={"tp": 4}, emulation=EmulationConfig(block_size=64)), SHAPE) == []
    machine(BLACKWELL, te=True)
    assert remarks(config("mxfp8"), SHAPE) == []
