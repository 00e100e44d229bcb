"""The weight mapping: hand-computed layouts, exact round trips, HF checkpoints, load, stream, save."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest
import tiny_checkpoints
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megatron_calclip.errors import UserError
from megatron_calclip.weights import save
from megatron_calclip.weights.layouts import COLUMNS, GATE_UP, QKV, REPLICATED, VOCABULARY, Layout
from megatron_calclip.weights.load import INDEX_FILE, HFSource, load_hf
from megatron_calclip.weights.mapping import (
    ModelShape,
    find_tensor,
    hf_shapes,
    hf_specs,
    mapped_tensors,
)
from megatron_calclip.weights.save import save_hf
from megatron_calclip.weights.stream import ParallelGroups, stream_hf

SIZES: dict[str, Any] = tiny_checkpoints.SIZES | {"num_hidden_layers": 3}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-tied": Qwen2Config(**SIZES | {"tie_word_embeddings": True}),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    # Layer 1 has a dense MLP, layers 0 and 2 have experts.
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **tiny_checkpoints.MOE, mlp_only_layers=[1]),
}
ALONE = ParallelGroups()
LayerSpec = Literal["local", "te"]


def megatron_names(shape: ModelShape, spec: LayerSpec) -> list[str]:
    """Names of all parameters of a GPTModel with such layers, in streaming order."""
    return [tensor.name if spec == "local" else tensor.te_name for tensor in mapped_tensors(shape)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random HF checkpoint of each architecture, written by transformers itself."""
    folders = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():  # biases start at 0 and norms at 1: a swap would go unseen
            nn.init.normal_(parameter)
        folders[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(folders[name])
    return folders


def fake_chunk(shape: ModelShape, layers: list[int], *, spec: LayerSpec, first: bool = True, last: bool = True) -> Any:
    """A module with the parameter names of a GPTModel chunk that holds `layers`, zero everywhere."""
    chunk: Any = nn.Module()
    chunk.decoder = nn.Module()
    chunk.decoder.layers = nn.ModuleList(nn.Module() for _ in layers)
    for module, layer in zip(chunk.decoder.layers, layers, strict=True):
        module.layer_number = layer + 1
    names = megatron_names(shape, spec)
    if shape.tied and last and not first:
        names.append("output_layer.weight")
    for name in names:
        path = name
        if match := re.match(r"decoder\.layers\.(\d+)\.", name):
            if int(match[1]) not in layers:
                continue
            path = f"decoder.layers.{layers.index(int(match[1]))}.{name[match.end() :]}"
        elif not (first if name.startswith("embedding") else last):
            continue
        *parents, leaf = path.split(".")
        module = chunk
        for parent in parents:
            if not hasattr(module, parent):
                module.add_module(parent, nn.Module())
            module = getattr(module, parent)
        module.register_parameter(leaf, nn.Parameter(torch.zeros(find_tensor(shape, name).shard_shape())))
    return chunk


def tiny(**sizes: Any) -> ModelShape:
    return ModelShape.from_hf_config(CONFIGS["qwen2"].to_dict() | sizes)


def test_qkv_rows_are_interleaved_by_query_group() -> None:
    # 4 query heads in 2 groups, head size 1: group 0 has q0 q1 k0 v0, group 1 has q2 q3 k1 v1.
    shape = tiny(num_attention_heads=4, num_key_value_heads=2, head_dim=1)
    q, k, v = torch.tensor([0.0, 1, 2, 3]), torch.tensor([10.0, 11]), torch.tensor([20.0, 21])
    full = QKV.join([q, k, v], shape)
    assert full.tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert QKV.shard(full, rank=1, size=2).tolist() == [2, 3, 11, 21]
    # Head size 2: the two rows of a head stay together.
    shape = tiny(num_attention_heads=2, num_key_value_heads=1, head_dim=2)
    full = QKV.join([torch.tensor([0.0, 1, 2, 3]), torch.tensor([10.0, 11]), torch.tensor([20.0, 21])], shape)
    assert full.tolist() == [0, 1, 2, 3, 10, 11, 20, 21]


def test_each_rank_gets_its_gate_and_its_up() -> None:
    full = GATE_UP.join([torch.tensor([1.0, 2]), torch.tensor([3.0, 4])], tiny())
    assert full.tolist() == [1, 2, 3, 4]
    assert GATE_UP.shard(full, rank=0, size=2).tolist() == [1, 3]
    assert GATE_UP.shard(full, rank=1, size=2).tolist() == [2, 4]


def test_vocabulary_is_padded_with_zeros_and_cut() -> None:
    shape = tiny(vocab_size=130)
    assert shape.padded_vocab_size == 256  # the next multiple of 128
    rows = torch.ones(130, 2)
    full = VOCABULARY.join([rows], shape)
    assert full.shape == (256, 2) and full[130:].abs().sum() == 0
    full[130:] = 7.0  # training may move the padding; it must not come back
    assert torch.equal(VOCABULARY.split(full, shape)[0], rows)
    assert tiny(vocab_size=256).padded_vocab_size == 256


def test_row_parallel_weights_are_cut_along_their_columns() -> None:
    full = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]])
    assert COLUMNS.shard(full, rank=1, size=2).tolist() == [[2, 3], [6, 7]]
    assert REPLICATED.shard(full, rank=1, size=2) is full


@settings(max_examples=60)
@given(
    layout=st.sampled_from([REPLICATED, COLUMNS, Layout(0), QKV, GATE_UP, VOCABULARY]),
    tp=st.sampled_from([1, 2, 3, 4]),
    groups=st.sampled_from([1, 2, 12]),
    heads_per_group=st.integers(1, 3),
    head_dim=st.sampled_from([12, 24]),
    seed=st.integers(0, 99),
)
def test_layouts_round_trip(
    layout: Layout, tp: int, groups: int, heads_per_group: int, head_dim: int, seed: int
) -> None:
    shape = tiny(
        num_attention_heads=groups * heads_per_group,
        num_key_value_heads=groups,
        head_dim=head_dim,
        vocab_size=3 * 128 - 5,
    )
    generator = torch.Generator().manual_seed(seed)
    rows = {QKV: [shape.q_size, shape.kv_size, shape.kv_size], GATE_UP: [24, 24], VOCABULARY: [3 * 128 - 5]}
    parts = [torch.randn(size, 12, generator=generator) for size in rows.get(layout, [36])]
    full = layout.join(parts, shape)
    shards = [layout.shard(full, rank=rank, size=tp).contiguous() for rank in range(tp)]
    assert len({shard.shape for shard in shards}) == 1
    assert layout.tp_dim is None or sum(shard.numel() for shard in shards) == full.numel()
    restored = layout.unshard(shards)
    assert torch.equal(restored, full)
    assert all(map(torch.equal, layout.split(restored, shape), parts))


@pytest.mark.parametrize("name", CONFIGS)
def test_checkpoints_map_exactly_once_and_back(name: str, checkpoints: dict[str, Path]) -> None:
    tensors = load_file(checkpoints[name] / "model.safetensors")
    shape = ModelShape.from_hf_config(json.loads((checkpoints[name] / "config.json").read_text()))
    assert shape == ModelShape.from_hf_config(CONFIGS[name])
    mapped = mapped_tensors(shape)
    assert Counter(hf.name for tensor in mapped for hf in tensor.hf) == Counter(tensors.keys())
    assert {key: tuple(value.shape) for key, value in tensors.items()} == hf_shapes(shape)
    for tp in (1, 2, 4):
        for tensor in mapped:
            parts = [tensors[hf.name] for hf in tensor.hf]
            full = tensor.join(parts)
            shards = [tensor.shard(full, rank=rank, size=tp) for rank in range(tp)]
            assert all(tuple(shard.shape) == tensor.shard_shape(tp) for shard in shards)
            restored = torch.full_like(full, torch.nan)
            for rank in range(tp):
                for offsets, block in tensor.blocks(full, rank=rank, size=tp):
                    ends = map(sum, zip(offsets, block.shape, strict=True))
                    restored[tuple(map(slice, offsets, ends))] = block
            assert torch.equal(restored, full), tensor.name
            assert all(map(torch.equal, tensor.split(tensor.unshard(shards)), parts)), tensor.name


def test_names_of_both_layer_specs() -> None:
    shape = ModelShape.from_hf_config(CONFIGS["qwen3_moe"])
    local, te = megatron_names(shape, "local"), megatron_names(shape, "te")
    assert len(local) == len(te) == len(set(local)) == len(set(te))
    layer = "decoder.layers.1."
    # A dense layer: TE fuses both norms into the linears that follow.
    assert f"{layer}input_layernorm.weight" in local and f"{layer}pre_mlp_layernorm.weight" in local
    assert f"{layer}self_attention.linear_qkv.layer_norm_weight" in te
    assert f"{layer}mlp.linear_fc1.layer_norm_weight" in te
    # An MoE layer: the norm before the router stays on its own, the experts are one grouped module.
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in te
    assert "decoder.layers.2.mlp.experts.local_experts.3.linear_fc1.weight" in local
    assert "decoder.layers.2.mlp.experts.linear_fc1.weight3" in te
    for name, te_name in zip(local, te, strict=True):
        assert find_tensor(shape, name) is find_tensor(shape, te_name)
    with pytest.raises(ValueError, match=r"mtp\.layers.*no counterpart"):
        find_tensor(shape, "mtp.layers.0.weight")


def test_dry_run_of_a_large_model_from_its_configuration() -> None:
    shape = ModelShape.from_hf_config(
        {
            "model_type": "qwen2",
            "num_hidden_layers": 64,
            "hidden_size": 5120,
            "intermediate_size": 27648,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "vocab_size": 152064,
            "tie_word_embeddings": False,
        }
    )
    # Qwen2.5-32B: per layer q, o 2 * 5120^2; k, v 2 * 1024 * 5120; biases 5120 + 2 * 1024; MLP
    # 3 * 27648 * 5120; norms 2 * 5120; in all 487,605,248; 64 of them, two embeddings of 152064 * 5120 and
    # the last norm.
    assert sum(torch.Size(size).numel() for size in hf_shapes(shape).values()) == 32_763_876_352
    qkv = find_tensor(shape, "decoder.layers.63.self_attention.linear_qkv.weight")
    assert qkv.shard_shape(8) == (896, 5120)  # (40 + 2 * 8) * 128 / 8
    assert find_tensor(shape, "decoder.layers.0.mlp.linear_fc1.weight").shard_shape(8) == (6912, 5120)
    assert find_tensor(shape, "decoder.layers.0.mlp.linear_fc2.weight").shard_shape(8) == (5120, 3456)
    assert find_tensor(shape, "output_layer.weight").shard_shape(8) == (19008, 5120)


def test_configurations_that_cannot_be_mapped() -> None:
    config = CONFIGS["llama"].to_dict()
    with pytest.raises(ValueError, match=r"'gpt2' is not supported; use one of llama, qwen2, qwen3, qwen3_moe"):
        ModelShape.from_hf_config(config | {"model_type": "gpt2"})
    with pytest.raises(ValueError, match="attention_bias=True"):
        ModelShape.from_hf_config(config | {"attention_bias": True})
    with pytest.raises(ValueError, match="no 'hidden_size'"):
        ModelShape.from_hf_config(config | {"hidden_size": None})


def test_which_layers_have_experts() -> None:
    config = CONFIGS["qwen3_moe"].to_dict()
    assert ModelShape.from_hf_config(config).dense_layers == (1,)
    # Every second layer has experts, counted from 1: layers 0 and 2 are dense.
    every_second = ModelShape.from_hf_config(config | {"mlp_only_layers": [], "decoder_sparse_step": 2})
    assert every_second.dense_layers == (0, 2)
    assert [every_second.is_moe(layer) for layer in range(3)] == [False, True, False]
    assert not any(ModelShape.from_hf_config(CONFIGS["qwen3"]).is_moe(layer) for layer in range(3))


def test_parallel_sizes_that_do_not_divide() -> None:
    # SmolLM2-135M: 9 heads, 3 groups, 49152 = 3 * 2^14 rows.
    shape = tiny(num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536, vocab_size=49152)
    shape.check_parallel(3)
    with pytest.raises(ValueError, match="num_attention_heads is 9, which tp=2 does not divide"):
        shape.check_parallel(2)
    grouped = tiny(num_attention_heads=8, num_key_value_heads=2)
    grouped.check_parallel(8)  # more ranks than groups: Megatron shares a group among ranks
    with pytest.raises(ValueError, match="num_key_value_heads is 6, neither"):
        tiny(num_attention_heads=24, num_key_value_heads=6).check_parallel(4)
    with pytest.raises(ValueError, match="num_experts is 4, which ep=3"):
        ModelShape.from_hf_config(CONFIGS["qwen3_moe"]).check_parallel(1, ep=3)


@pytest.mark.parametrize("spec", ["local", "te"])
@pytest.mark.parametrize("name", CONFIGS)
def test_load_and_stream_are_inverse(name: str, spec: LayerSpec, checkpoints: dict[str, Path]) -> None:
    tensors = load_file(checkpoints[name] / "model.safetensors")
    shape = ModelShape.from_hf_config(CONFIGS[name])
    # Chunks as virtual pipeline deals them, one of them in a wrapper.
    chunks = [
        fake_chunk(shape, [0, 2], spec=spec, last=False),
        fake_chunk(shape, [1], spec=spec, first=False),
    ]
    wrapper: Any = nn.Module()
    wrapper.module = chunks[1]
    load_hf([chunks[0], wrapper], shape, ALONE, HFSource.from_folder(checkpoints[name]))
    if shape.tied:
        assert torch.equal(chunks[1].output_layer.weight[:100], tensors["model.embed_tokens.weight"])
    streamed = list(stream_hf([chunks[0], wrapper], shape, ALONE))
    assert [key for key, _ in streamed] == list(hf_shapes(shape))
    assert all(torch.equal(value, tensors[key]) and value.is_contiguous() for key, value in streamed)
    # What was streamed stays when the parameters move on.
    with torch.no_grad():
        for parameter in chunks[0].parameters():
            parameter.zero_()
    assert all(torch.equal(value, tensors[key]) for key, value in streamed)


def test_stream_casts_and_takes_other_sources(checkpoints: dict[str, Path]) -> None:
    shape = ModelShape.from_hf_config(CONFIGS["qwen2"])
    chunk = fake_chunk(shape, [0, 1, 2], spec="local").to(torch.bfloat16)
    load_hf([chunk], shape, ALONE, HFSource.from_folder(checkpoints["qwen2"]))
    tensors = load_file(checkpoints["qwen2"] / "model.safetensors")
    assert all(torch.equal(value, tensors[key].bfloat16()) for key, value in stream_hf([chunk], shape, ALONE))

    def negative(name: str, parameter: nn.Parameter) -> Tensor:
        seen.append(name)
        return -parameter.float().t().contiguous().t()  # not contiguous, and of another type

    seen: list[str] = []
    for key, value in stream_hf([chunk], shape, ALONE, dtype=torch.float16, source=negative):
        assert torch.equal(value, -tensors[key].bfloat16().to(torch.float16))
    assert seen == megatron_names(shape, "local")

    del chunk.decoder.final_layernorm
    with pytest.raises(ValueError, match=r"no rank holds 'decoder\.final_layernorm\.weight'"):
        next(stream_hf([chunk], shape, ALONE))
    with pytest.raises(ValueError, match="not of a floating type"):
        next(stream_hf([fake_chunk(shape, [0, 1, 2], spec="local").to(torch.float64)], shape, ALONE))


def _broken_tensors(checkpoint: Path) -> dict[str, tuple[dict[str, Tensor], str]]:
    good = load_file(checkpoint / "model.safetensors")
    key = "model.layers.1.mlp.up_proj.weight"
    return {
        "missing": ({k: v for k, v in good.items() if k != key}, f"'{key}' is missing"),
        "extra": (good | {key + "_scale_inv": good[key]}, f"'{key}_scale_inv' is not part of this qwen2"),
        "shape": (good | {key: good[key][1:]}, rf"'{key}' has shape \[47, 32\], .* \[48, 32\]"),
    }


@pytest.mark.parametrize("fault", ["missing", "extra", "shape"])
def test_a_bad_checkpoint_changes_nothing(fault: str, checkpoints: dict[str, Path]) -> None:
    tensors, message = _broken_tensors(checkpoints["qwen2"])[fault]
    shape = ModelShape.from_hf_config(CONFIGS["qwen2"])
    chunk = fake_chunk(shape, [0, 1, 2], spec="local")
    with pytest.raises(UserError, match=message):
        load_hf([chunk], shape, ALONE, HFSource.from_tensors(tensors))
    assert all(parameter.abs().sum() == 0 for parameter in chunk.parameters())


def test_harmless_extra_tensors_are_ignored(checkpoints: dict[str, Path]) -> None:
    shape = ModelShape.from_hf_config(CONFIGS["qwen2-tied"])
    tensors = load_file(checkpoints["qwen2-tied"] / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    chunk = fake_chunk(shape, [0, 1, 2], spec="local")
    load_hf([chunk], shape, ALONE, HFSource.from_tensors(tensors))
    assert next(iter(stream_hf([chunk], shape, ALONE)))[0] == "model.embed_tokens.weight"


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    def error() -> str:
        with pytest.raises(UserError) as caught:
            HFSource.from_folder(tmp_path)
        return str(caught.value)

    assert "has neither model.safetensors nor" in error()
    save_file({"a": torch.zeros(64)}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-8])
    assert "model.safetensors: is cut short or no safetensors file" in error()
    (tmp_path / "model.safetensors").write_bytes(data)
    (spec,) = HFSource.from_folder(tmp_path).specs.values()
    assert spec.shape == (64,) and spec.dtype is torch.float32 and spec.is_meta

    (tmp_path / INDEX_FILE).write_text("{}")
    assert "is no index of safetensors files" in error()
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "2.safetensors"}}))
    assert "2.safetensors: is missing" in error()
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"b": "model.safetensors"}}))
    assert "lacks tensor 'b', which the index places there" in error()


@pytest.mark.parametrize("max_shard_bytes", [save.DEFAULT_SHARD_BYTES, 20_000])
def test_saved_checkpoints_load_in_transformers(
    max_shard_bytes: int, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    tensors = load_file(checkpoints["qwen2-tied"] / "model.safetensors")
    (checkpoints["qwen2-tied"] / "tokenizer.json").write_text("{}")
    folder = tmp_path / "out"
    save_hf(
        reversed(tensors.items()),  # any order: every value has its place
        folder,
        specs=hf_specs(ModelShape.from_hf_config(CONFIGS["qwen2-tied"]), torch.bfloat16),
        hf_config=CONFIGS["qwen2-tied"],
        tokenizer_files_from=checkpoints["qwen2-tied"],
        max_shard_bytes=max_shard_bytes,
    )
    files = {path.name: path for path in folder.iterdir()}
    assert ("model.safetensors" in files) == (max_shard_bytes > 20_000)
    assert "tokenizer.json" in files and json.loads(files["config.json"].read_text())["dtype"] == "bfloat16"
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in files.values())  # servers run as other users
    if INDEX_FILE in files:
        index = json.loads(files[INDEX_FILE].read_text())
        assert index["metadata"]["total_size"] == sum(2 * value.numel() for value in tensors.values())
        assert set(index["weight_map"]) == set(tensors) and set(index["weight_map"].values()) <= set(files)
        sizes = [path.stat().st_size for name, path in files.items() if name.endswith(".safetensors")]
        assert len(sizes) > 2 and max(sizes) < 20_000 + 4096  # with room for the header
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert all(torch.equal(model.state_dict()[key], value.bfloat16()) for key, value in tensors.items())


def test_values_are_aligned_to_their_size(tmp_path: Path) -> None:
    # Three bytes before numbers of four: readers that map files need the numbers at multiples of four.
    tensors = {
        "a": torch.ones(3).to(torch.float8_e4m3fn),
        "b": torch.tensor([1.5, -2.0]),
        "c": torch.ones(1).bfloat16(),
    }
    specs = {name: value.to("meta") for name, value in tensors.items()}
    save_hf(tensors.items(), tmp_path / "out", specs=specs, hf_config={})
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert all(header[name]["data_offsets"][0] % value.itemsize == 0 for name, value in tensors.items())
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(loaded[name].float(), value.float()) for name, value in tensors.items())


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "out"
    config = CONFIGS["qwen2"].to_dict()
    arguments: dict[str, Any] = dict(specs={"a": torch.empty(2, device="meta")}, hf_config=config)
    save_hf([("a", torch.ones(2))], folder, **arguments)
    with pytest.raises(UserError, match="exists already"):
        save_hf([("a", torch.zeros(2))], folder, **arguments)

    def full_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(save, "_bytes", full_disk)
        with pytest.raises(UserError, match="No space left on device"):
            save_hf([("a", torch.zeros(2))], folder, **arguments, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert load_file(folder / "model.safetensors")["a"].tolist() == [1, 1]

    save_hf([("a", torch.zeros(2))], folder, **arguments, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert load_file(folder / "model.safetensors")["a"].tolist() == [0, 0]
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match="is no HF checkpoint"):  # never delete what may be the user's own
        save_hf([("a", torch.ones(2))], folder, **arguments, overwrite=True)
