"""Block-quantised FP8 checkpoints: by hand, against a plain loop, against transformers' own reader, and refused ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_checkpoints import write_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Qwen3Config, Qwen3MoeConfig

from megatron_calclip.errors import UserError
from megatron_calclip.weights.fp8 import BlockQuantization, dequantized
from megatron_calclip.weights.load import HFSource, check_source
from megatron_calclip.weights.mapping import ModelShape
from megatron_calclip.weights.save import save_hf

SIZES: dict[str, Any] = dict(
    vocab_size=100,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=128,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
DENSE = Qwen3Config(**SIZES)
MOE = Qwen3MoeConfig(**SIZES, num_experts=2, moe_intermediate_size=128, num_experts_per_tok=1)
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(DENSE, tmp_path_factory.mktemp("plain"), dtype=torch.bfloat16)


def export(source: HFSource, folder: Path, config: Any, *, power_of_two: bool = True) -> Path:
    blocks = BlockQuantization(ModelShape.from_hf_config(config), power_of_two=power_of_two)
    hf_config = config.to_dict() | {"quantization_config": blocks.config()}
    save_hf(blocks.stream(source.stream()), folder, specs=blocks.specs(source.specs), hf_config=hf_config)
    return folder


def reread(folder: Path, dtype: torch.dtype = torch.bfloat16) -> HFSource:
    return dequantized(HFSource.from_folder(folder), json.loads((folder / "config.json").read_text()), dtype=dtype)


def test_files_are_laid_out_as_servers_read_them(plain: Path, tmp_path: Path) -> None:
    folder = export(HFSource.from_folder(plain), tmp_path / "fp8", DENSE)
    tensors = load_file(folder / "model.safetensors")
    q, factors = tensors[Q_PROJ], tensors[Q_PROJ + "_scale_inv"]
    assert q.dtype is torch.float8_e4m3fn and q.shape == (256, 128)
    assert factors.dtype is torch.float32 and factors.shape == (2, 1)
    for name in (
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.0.self_attn.q_norm.weight",
    ):
        assert tensors[name].dtype is torch.bfloat16 and f"{name}_scale_inv" not in tensors
    # 7 linears in each of 2 layers.
    assert sum(name.endswith("_scale_inv") for name in tensors) == 14
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }


def test_scales_by_hand() -> None:
    blocks = BlockQuantization(ModelShape.from_hf_config(DENSE))
    weight = torch.zeros(256, 128, dtype=torch.bfloat16)
    weight[0, 0], weight[1, 1] = 3.0, -0.75
    weight[128, 5] = 448.0
    stream = dict(blocks.stream([(Q_PROJ, weight)]))
    # 448 / 3 = 149.3; the power of two below is 128, so 3 becomes the code 384 and -0.75 becomes -96.
    assert stream[Q_PROJ + "_scale_inv"].tolist() == [[1 / 128], [1.0]]
    codes = stream[Q_PROJ].float()
    assert (codes[0, 0], codes[1, 1], codes[128, 5]) == (384, -96, 448)
    # With FP32 scales the largest magnitude becomes 448 itself.
    exact = dict(BlockQuantization(blocks.shape, power_of_two=False).stream([(Q_PROJ, weight)]))
    assert exact[Q_PROJ].float()[0, 0] == 448 and exact[Q_PROJ + "_scale_inv"][0, 0] == pytest.approx(3 / 448, rel=1e-6)


@settings(max_examples=15)
@given(seed=st.integers(0, 1000), exponent=st.integers(-20, 20))
def test_codes_are_those_of_a_plain_loop(seed: int, exponent: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(256, 128, generator=generator) * 2.0**exponent).bfloat16()
    blocks = BlockQuantization(ModelShape.from_hf_config(DENSE))
    stream = dict(blocks.stream([(Q_PROJ, weight)]))
    for row in range(2):
        block = weight[row * 128 : (row + 1) * 128].float()
        scale = 2.0 ** math.floor(math.log2(448 / float(block.abs().max())))
        assert stream[Q_PROJ + "_scale_inv"][row, 0] == 1 / scale
        codes = (block * scale).to(torch.float8_e4m3fn)
        assert torch.equal(stream[Q_PROJ][row * 128 : (row + 1) * 128].view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("power_of_two", [True, False])
def test_import_gives_weights_within_half_a_step(power_of_two: bool, plain: Path, tmp_path: Path) -> None:
    source = HFSource.from_folder(plain)
    again = reread(export(source, tmp_path / "fp8", DENSE, power_of_two=power_of_two), torch.float32)
    check_source(again, ModelShape.from_hf_config(DENSE))
    quantized = BlockQuantization(ModelShape.from_hf_config(DENSE)).names()
    for name, value in source.stream():
        error = (again.read(name).float() - value.float()).abs()
        if name not in quantized:
            assert error.max() == 0
            continue
        # E4M3 has 3 bits of mantissa: half a step is 1/16 of a value; subnormals end at 2^-9 of a block's scale.
        assert (
            bool((error <= value.float().abs() / 16 + value.float().abs().max() * 2.0**-16).all()) and error.max() > 0
        )


def test_dequantised_weights_keep_their_values(plain: Path, tmp_path: Path) -> None:
    # What a live model with FP8 parameters holds: values of codes. Quantising them again changes nothing.
    first = reread(export(HFSource.from_folder(plain), tmp_path / "one", DENSE))
    second = reread(export(first, tmp_path / "two", DENSE))
    assert all(torch.equal(value, second.read(name)) for name, value in first.stream())


def test_transformers_reads_the_same_weights(plain: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers dequantises with accelerate")
    folder = export(HFSource.from_folder(plain), tmp_path / "fp8", DENSE)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    state: dict[str, Tensor] = model.state_dict()
    for name, value in reread(folder).stream():
        assert torch.equal(state[name].bfloat16(), value), name


def test_routers_stay_and_linears_that_servers_fuse_stay_together() -> None:
    moe = BlockQuantization(ModelShape.from_hf_config(MOE))
    assert "model.layers.0.mlp.experts.1.gate_proj.weight" in moe.names()
    assert "model.layers.1.mlp.gate" in moe.config()["modules_to_not_convert"]
    # Keys and values have 64 rows, half a block: q, k and v are one linear in a server, so q stays, too.
    narrow = BlockQuantization(ModelShape.from_hf_config(DENSE.to_dict() | {"num_attention_heads": 4, "head_dim": 64}))
    assert Q_PROJ not in narrow.names() and "model.layers.0.self_attn.o_proj.weight" in narrow.names()
    assert "model.layers.0.self_attn.q_proj" in narrow.config()["modules_to_not_convert"]
    with pytest.raises(UserError, match="no linear of this model has sizes that are multiples of 128"):
        BlockQuantization(ModelShape.from_hf_config(DENSE.to_dict() | {"hidden_size": 96})).config()


def test_other_formats_and_incomplete_ones_are_refused() -> None:
    codes = {"a.weight": torch.zeros(256, 128).to(torch.float8_e4m3fn)}
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}

    def message(tensors: dict[str, Tensor], **changes: Any) -> str:
        with pytest.raises(UserError) as caught:
            dequantized(HFSource.from_tensors(tensors), {"quantization_config": settings | changes})
        return str(caught.value)

    assert "is quantised as 'gptq'" in message(codes, quant_method="gptq")
    assert "without FP8 blocks" in message(codes, weight_block_size=None)
    assert "'a.weight_scale_inv' is missing" in message(codes)
    wrong = codes | {"a.weight_scale_inv": torch.ones(1, 1)}
    assert "has shape [1, 1], but blocks of [128, 128] make [2, 1]" in message(wrong)
    plain = HFSource.from_tensors({"a": torch.ones(1)})
    assert dequantized(plain, {}) is plain
