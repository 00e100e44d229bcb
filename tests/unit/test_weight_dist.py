"""Megatron's distributed checkpoint format: against PyTorch's own reader and writer, damaged in every way, and by hand."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tiny_checkpoints import CONFIGS, NUM_LAYERS, write_checkpoint
from torch import Tensor

from megatron_calclip.errors import UserError
from megatron_calclip.weights.dist_load import METADATA_FILE, DistCheckpoint, checkpoint_keys, hf_source
from megatron_calclip.weights.dist_save import ShardLayout, write_dist_checkpoint
from megatron_calclip.weights.load import HFSource
from megatron_calclip.weights.mapping import ModelShape, find_tensor, mapped_tensors

LAYOUTS = [ShardLayout(), ShardLayout(tp=2), ShardLayout(tp=4), ShardLayout(pp=2, vpp=2), ShardLayout(tp=2, pp=2)]
SHAPES = {name: ModelShape.from_hf_config(config) for name, config in CONFIGS.items()}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HFSource]:
    return {
        name: HFSource.from_folder(write_checkpoint(config, tmp_path_factory.mktemp(name)))
        for name, config in CONFIGS.items()
    }


def full_tensors(source: HFSource, shape: ModelShape) -> dict[str, Tensor]:
    """Global name -> Megatron's full tensor, without the code under test; experts stacked."""
    result: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    for tensor in mapped_tensors(shape):
        full = tensor.join([source.read(hf.name) for hf in tensor.hf])
        if tensor.expert is None:
            result[tensor.te_name] = full
        else:
            name = tensor.te_name.removesuffix(str(tensor.expert)).replace("mlp.experts.", "mlp.experts.experts.")
            experts.setdefault(name, []).append(full)
    return result | {name: torch.stack(parts) for name, parts in experts.items()}


def same(actual: HFSource, expected: HFSource) -> bool:
    return actual.specs.keys() == expected.specs.keys() and all(
        torch.equal(value, expected.read(name)) for name, value in actual.stream()
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_torch_reads_what_we_write(
    name: str, layout: ShardLayout, sources: dict[str, HFSource], tmp_path: Path
) -> None:
    source, shape = sources[name], SHAPES[name]
    write_dist_checkpoint(source, shape, tmp_path, layout=layout)
    expected = full_tensors(source, shape)
    loaded = {key: torch.zeros_like(value) for key, value in expected.items()}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(loaded[key], value) for key, value in expected.items())
    assert len(list(tmp_path.glob("*.distcp"))) == layout.num_ranks
    assert same(hf_source(DistCheckpoint(tmp_path), shape), source)


# Megatron stacks layers only where all are alike.
@pytest.mark.parametrize(
    ("name", "stacked"),
    [(name, stacked) for name in CONFIGS for stacked in (False, True) if not stacked or "moe" not in name],
)
def test_we_read_what_torch_writes(name: str, stacked: bool, sources: dict[str, HFSource], tmp_path: Path) -> None:
    shape = SHAPES[name]
    state: dict[str, Tensor] = full_tensors(sources[name], shape)
    if stacked:
        first = [key for key in state if key.startswith("decoder.layers.0.")]
        for key in first:
            layers = [state.pop(key.replace(".0.", f".{layer}.", 1)) for layer in range(NUM_LAYERS)]
            state[key.replace(".0.", ".", 1)] = torch.stack(layers)
    state["optimizer.state.exp_avg.whatever"] = torch.zeros(1)
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    assert same(hf_source(DistCheckpoint(tmp_path), shape), sources[name])


def test_masters_are_preferred_and_cast_to_the_weights_type(sources: dict[str, HFSource], tmp_path: Path) -> None:
    shape = SHAPES["qwen2"]
    masters = full_tensors(sources["qwen2"], shape)
    state = {key: torch.zeros_like(value, dtype=torch.bfloat16) for key, value in masters.items()}
    dcp.save(
        state | {f"optimizer.state.param.{k}": v for k, v in masters.items()}, checkpoint_id=tmp_path, no_dist=True
    )
    checkpoint = DistCheckpoint(tmp_path)
    assert same(hf_source(checkpoint, shape), sources["qwen2"].cast(torch.bfloat16))
    assert same(hf_source(checkpoint, shape, dtype=torch.float32), sources["qwen2"])


def test_vocabulary_padded_to_another_multiple(sources: dict[str, HFSource], tmp_path: Path) -> None:
    state = full_tensors(sources["qwen2"], SHAPES["qwen2"])
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        state[name] = torch.cat([state[name], torch.full((64, 32), 7.0)])  # and not with zeros
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    assert same(hf_source(DistCheckpoint(tmp_path), SHAPES["qwen2"]), sources["qwen2"])


def test_ranks_of_a_layout() -> None:
    # 4 layers on 2 pipeline ranks with 2 virtual stages each: layers 0 and 2 on the first, 1 and 3 on the second.
    layout = ShardLayout(tp=2, pp=2, vpp=2)
    qwen = SHAPES["qwen2"]
    linears = [find_tensor(qwen, f"decoder.layers.{layer}.mlp.linear_fc2.weight") for layer in range(4)]
    assert [layout.stage(tensor) for tensor in linears] == [0, 1, 0, 1]
    assert [layout.ranks(tensor) for tensor in linears[:2]] == [[0, 1], [2, 3]]
    assert layout.ranks(find_tensor(qwen, "embedding.word_embeddings.weight")) == [0, 1]
    assert layout.ranks(find_tensor(qwen, "output_layer.weight")) == [2, 3]
    assert layout.ranks(find_tensor(qwen, "decoder.final_layernorm.weight")) == [2]  # whole, so saved once
    # Without virtual stages they are consecutive.
    assert [ShardLayout(pp=2).stage(tensor) for tensor in linears] == [0, 0, 1, 1]
    # 4 experts on 2 ranks: the first two on the first.
    layout = ShardLayout(tp=2, pp=2, ep=2)
    experts = [
        find_tensor(SHAPES["qwen3_moe"], f"decoder.layers.2.mlp.experts.local_experts.{expert}.linear_fc1.weight")
        for expert in range(4)
    ]
    assert [layout.ranks(tensor) for tensor in experts] == [[4, 5], [4, 5], [6, 7], [6, 7]]


def test_names_of_experts_and_of_the_norm_before_a_router() -> None:
    shape = SHAPES["qwen3_moe"]
    expert = find_tensor(shape, "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight")
    assert checkpoint_keys(expert) == ("decoder.layers.0.mlp.experts.experts.linear_fc1.weight",)
    norm = find_tensor(shape, "decoder.layers.0.pre_mlp_layernorm.weight")
    assert checkpoint_keys(norm) == (
        "decoder.layers.0.pre_mlp_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
    )


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (ShardLayout(tp=3), "num_attention_heads is 8, which tp=3 does not divide"),
        (ShardLayout(pp=3), "num_hidden_layers is 4, which 3 x 1 stages do not divide"),
        (ShardLayout(pp=2, vpp=4), "num_hidden_layers is 4, which 2 x 4 stages do not divide"),
        (ShardLayout(ep=2), "the model has no experts"),
    ],
)
def test_layouts_that_do_not_divide(layout: ShardLayout, message: str) -> None:
    with pytest.raises(UserError, match=message):
        layout.check(SHAPES["qwen2"])


def test_parts_of_several_types_are_refused(sources: dict[str, HFSource], tmp_path: Path) -> None:
    tensors = dict(sources["qwen2"].stream())
    tensors["model.layers.1.self_attn.k_proj.weight"] = tensors["model.layers.1.self_attn.k_proj.weight"].half()
    source = HFSource.from_tensors(tensors)
    with pytest.raises(UserError, match=r"differ in type .*k_proj\.weight: torch\.float16.*give --torch-dtype"):
        write_dist_checkpoint(source, SHAPES["qwen2"], tmp_path, layout=ShardLayout())


def _message(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        list(hf_source(DistCheckpoint(folder), SHAPES["qwen2"]).stream())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_damaged_checkpoints_are_named(sources: dict[str, HFSource], tmp_path: Path) -> None:
    assert "has no .metadata" in _message(tmp_path)
    write_dist_checkpoint(sources["qwen2"], SHAPES["qwen2"], tmp_path, layout=ShardLayout(tp=2))
    file, metadata = tmp_path / "__1_0.distcp", tmp_path / METADATA_FILE
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert "__1_0.distcp: is cut short or damaged at 'decoder.layers." in _message(tmp_path)
    file.unlink()
    assert "__1_0.distcp: is missing" in _message(tmp_path)
    file.write_bytes(whole)
    good = metadata.read_bytes()
    metadata.write_bytes(good[: len(good) // 2])
    assert ".metadata: cannot be read" in _message(tmp_path)

    def edited(**changes: Any) -> str:
        parsed = pickle.loads(good)
        for key, entry in changes.items():
            key = key.replace("__", ".")
            parsed.state_dict_metadata.pop(key, None)
            if entry is not None:
                parsed.state_dict_metadata[key] = entry
        metadata.write_bytes(pickle.dumps(parsed))
        return _message(tmp_path)

    entries = pickle.loads(good).state_dict_metadata
    fc2 = entries["decoder.layers.2.mlp.linear_fc2.weight"]
    assert "'decoder.layers.2.mlp.linear_fc2.weight' is missing" in edited(
        decoder__layers__2__mlp__linear_fc2__weight=None
    )
    assert "'decoder.layers.4.mlp.linear_fc2.weight' is not part" in edited(
        decoder__layers__4__mlp__linear_fc2__weight=fc2
    )
    norm = entries["decoder.final_layernorm.weight"]
    assert "has shape [32], but the configuration says [32, 48]" in edited(
        decoder__layers__2__mlp__linear_fc2__weight=norm
    )
    fc2.chunks.pop()
    assert "has only a part of tensor 'decoder.layers.2.mlp.linear_fc2.weight'" in edited(
        decoder__layers__2__mlp__linear_fc2__weight=fc2
    )


class _Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def test_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    (tmp_path / METADATA_FILE).write_bytes(pickle.dumps(_Malicious(tmp_path / "made")))
    assert "it refers to posix.mkdir, which is no part of the format" in _message(tmp_path)
    assert not (tmp_path / "made").exists()

    class Attribute:
        def __reduce__(self) -> Any:
            return getattr, (torch.Size, "numel")

    # Some versions of Python write the members of an enumeration by `getattr`; nothing else may be got that way.
    (tmp_path / METADATA_FILE).write_bytes(pickle.dumps(Attribute()))
    assert "it asks for numel of <class 'torch.Size'>" in _message(tmp_path)
