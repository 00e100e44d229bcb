"""Emulated W8A8 inference: codes and scales by hand and against a plain formula, whole models, reloading."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from megatron_calclip.rollout import fp8
from megatron_calclip.rollout.local import LocalEngine

SHAPE = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 160,  # not a multiple of 128, and two blocks
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
}
SCHEMES = ["fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "mxfp8"]
SEQUENCES = [[5, 6, 7, 8, 9], [11, 12, 13], [1, 2, 3, 4, 5, 6, 7]]


def rounded(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def test_codes_by_hand() -> None:
    # The largest, 3.5, becomes 448: a scale of 2^-7. 0.3 * 128 = 38.4 lies between 36 and 40.
    codes, scale = fp8.quantize_rows(torch.tensor([[3.5, -0.3, 0.0]]))
    assert scale.tolist() == [[2.0**-7]] and codes.float().tolist() == [[448.0, -40.0, 0.0]]
    # A row of zeros has vLLM's smallest scale.
    codes, scale = fp8.quantize_rows(torch.zeros(1, 3))
    assert scale.item() == pytest.approx(1 / (448 * 512)) and codes.float().tolist() == [[0.0] * 3]
    # Two tensors that share a scale: that of the larger one, 7 / 448 = 2^-6.
    codes, scale = fp8.quantize_tensor(torch.tensor([[3.5, 1.0]]), torch.tensor(7.0))
    assert scale.tolist() == [[2.0**-6]] and codes.float().tolist() == [[224.0, 64.0]]
    codes, scale = fp8.quantize_tensor(torch.zeros(1, 2), torch.tensor(0.0))
    assert codes.float().tolist() == [[0.0, 0.0]]


def test_blocks_have_their_own_scales() -> None:
    x = torch.ones(130, 200)
    x[:128, 128:] = 4.0
    x[128:] = 16.0
    codes, scale = fp8.quantize_blocks(x, 128)
    assert scale.shape == (2, 2) and (codes.float() == 448).all()
    torch.testing.assert_close(scale * 448, torch.tensor([[1.0, 4.0], [16.0, 16.0]]))
    _, scale = fp8.quantize_blocks(torch.zeros(1, 128), 128)
    assert scale.item() == pytest.approx(1e-4 / 448)
    _, scale = fp8.quantize_blocks(torch.zeros(1, 128), 1)
    assert scale.item() == pytest.approx(1e-10 / 448)
    _, scale = fp8.quantize_blocks(x, 1)
    assert scale.shape == (130, 2) and (scale[:128, 1] == scale[0, 1]).all() and scale[0, 0] < scale[0, 1]


@given(st.integers(0, 2**31), st.sampled_from([1e-9, 1.0, 1e6]))
@settings(max_examples=20)
def test_rows_against_the_plain_formula(seed: int, size: float) -> None:
    x = torch.randn(7, 33, generator=torch.Generator().manual_seed(seed)) * size
    codes, scale = fp8.quantize_rows(x)
    expected = torch.stack([(row.abs().max() / 448).clamp(min=1 / (448 * 512)) for row in x])
    assert torch.equal(scale[:, 0], expected)
    assert torch.equal(codes.float(), torch.stack([rounded(row / s) for row, s in zip(x, expected, strict=True)]))


def plain_output(x: Tensor, weight: Tensor, scheme: str) -> Tensor:
    """x W^T of dequantised operands, in float64."""
    token_scale = (x.abs().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
    by_token = rounded(x / token_scale).double() * token_scale
    if scheme == "fp8_per_tensor":
        scale = weight.abs().max() / 448
        return by_token @ (rounded(weight * scale.reciprocal()).double() * scale).t()
    if scheme == "fp8_per_channel":
        scale = weight.abs().amax(1, keepdim=True) / 448
        return by_token @ (rounded(weight / scale).double() * scale).t()

    def blocks(values: Tensor, rows: int, columns: int, power_of_two: bool) -> Tensor:
        result = torch.empty_like(values, dtype=torch.float64)
        starts = itertools.product(range(0, len(values), rows), range(0, values.shape[1], columns))
        for row, column in starts:
            tile = values[row : row + rows, column : column + columns]
            scale = tile.abs().max() / 448
            if power_of_two:
                scale = torch.exp2(torch.ceil(torch.log2(scale)))
            result[row : row + rows, column : column + columns] = rounded(tile / scale).double() * scale
        return result

    if scheme == "fp8_per_block":
        return blocks(x, 1, 128, False) @ blocks(weight, 128, 128, False).t()
    return blocks(x, 1, 32, True) @ blocks(weight, 1, 32, True).t()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_against_the_plain_formula(scheme: fp8.Scheme, bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(200, 150, bias=bias)
    layer = fp8.Fp8Linear(plain, scheme)
    layer.quantize_weight([plain.weight])
    x = torch.randn(2, 5, 200)
    expected = plain_output(x.view(10, 200), plain.weight.detach(), scheme).view(2, 5, 150)
    if bias:
        expected = expected + plain.bias.detach()
    y = layer(x)
    assert y.dtype is torch.float32
    torch.testing.assert_close(y.detach().double(), expected, rtol=1e-5, atol=1e-6)
    assert (y - linear(x, plain.weight, plain.bias)).abs().max() > 1e-3  # it does quantise


def make_model(config: LlamaConfig | Qwen2Config, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_engine_quantises_what_it_loads_and_nothing_stale(scheme: fp8.Scheme, dtype: torch.dtype) -> None:
    config = Qwen2Config(**SHAPE, tie_word_embeddings=True)
    first, second = make_model(config, 0), make_model(config, 1)
    engine = LocalEngine(config, device="cpu", dtype=dtype, precision=scheme)
    plain = LocalEngine(config, device="cpu", dtype=dtype)
    for model in (first, second):
        engine.load_weights(model.named_parameters(), policy_version=0)
        plain.load_weights(model.named_parameters(), policy_version=0)
    scores, unquantised = engine.score(SEQUENCES), plain.score(SEQUENCES)
    fresh = LocalEngine(config, device="cpu", dtype=dtype, precision=scheme)
    fresh.load_weights(second.named_parameters(), policy_version=0)
    for score, other, plain_score in zip(scores, fresh.score(SEQUENCES), unquantised, strict=True):
        assert torch.equal(score, other)
        distance = (score - plain_score).abs()[1:]
        assert 1e-4 < distance.mean() < 0.5


def test_layers_that_vllm_fuses_share_a_scale() -> None:
    config = LlamaConfig(**SHAPE, tie_word_embeddings=False)
    model = make_model(config, 0)
    fp8.convert(model, "fp8_per_tensor")
    with torch.no_grad():
        attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
        attention.k_proj.weight[0, 0] = 7.0
        mlp.up_proj.weight[0, 0] = 14.0
    fp8.quantize_weights(model)
    scales = {
        name: float(layer.codes.scale) for name, layer in model.named_modules() if isinstance(layer, fp8.Fp8Linear)
    }
    prefix = "model.layers.0."
    shared = [scales[f"{prefix}self_attn.{name}_proj"] for name in "qkv"]
    assert shared == [7 / 448] * 3
    assert scales[f"{prefix}mlp.gate_proj"] == scales[f"{prefix}mlp.up_proj"] == 14 / 448
    assert scales[f"{prefix}self_attn.o_proj"] < 7 / 448 and scales[f"{prefix}mlp.down_proj"] < 7 / 448
    assert (
        len(scales) == 2 * 7 and isinstance(model.lm_head, nn.Linear) and not isinstance(model.lm_head, fp8.Fp8Linear)
    )


def test_unknown_scheme() -> None:
    with pytest.raises(ValueError, match="'int4' is unknown; choose from fp8_per_tensor"):
        fp8.convert(nn.Linear(1, 1), "int4")  # type: ignore[arg-type]
