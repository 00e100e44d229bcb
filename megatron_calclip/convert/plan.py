"""What a conversion would write, from a configuration alone: every parameter, its shards, the bytes of every file.

No weights are needed and none are made (meta tensors), so a model of any size is listed in a moment. The list of HF tensors
is compared with the model that transformers builds from the same configuration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_calclip.convert.checkpoints import model_shape, read_hf_config
from megatron_calclip.errors import UserError
from megatron_calclip.weights.dist_save import ShardLayout
from megatron_calclip.weights.mapping import ModelShape, hf_shapes, mapped_tensors


def plan(hf_model: Path, *, layout: ShardLayout, dtype: torch.dtype | None) -> list[str]:
    """What a conversion would write, from the configuration alone (meta tensors): a table and its totals.

    Args:
        hf_model: HF folder, or a `config.json`.
        layout: how the files would be cut.
        dtype: type of the tensors; None takes the configuration's.

    Raises:
        UserError: for a configuration that cannot be converted, or a tensor of transformers' model that is not mapped.
    """
    hf_config = read_hf_config(hf_model)
    shape = model_shape(hf_config, hf_model)
    layout.check(shape)
    named = str(hf_config.get("dtype") or hf_config.get("torch_dtype") or "bfloat16")
    itemsize = (dtype or getattr(torch, named)).itemsize
    lines = [f"{'Megatron parameter':<64} {'full':>16} {'shard':>16} {'ranks':>9}  HF tensors"]
    per_rank = [0] * layout.num_ranks
    total = 0
    for tensor in mapped_tensors(shape):
        ranks = layout.ranks(tensor)
        full, shard = tensor.shard_shape(), tensor.shard_shape(len(ranks))
        names = ", ".join(hf.name for hf in tensor.hf)
        lines.append(f"{tensor.te_name:<64} {_by(full):>16} {_by(shard):>16} {ranks[0]:>4}-{ranks[-1]:<4}  {names}")
        total += torch.Size(full).numel() * itemsize
        for rank in ranks:
            per_rank[rank] += torch.Size(shard).numel() * itemsize
    num_tensors, num_elements = _mapped_by_transformers(hf_config, shape)
    lines += [
        f"{len(mapped_tensors(shape))} parameters from {num_tensors} HF tensors, {num_elements:,} elements",
        f"{total:,} bytes with padding; {min(per_rank):,} to {max(per_rank):,} in the file of a rank",
        "none unmapped (compared with transformers' model of this configuration)",
    ]
    return lines


def _by(size: tuple[int, ...]) -> str:
    return " x ".join(map(str, size))


def _mapped_by_transformers(hf_config: dict[str, Any], shape: ModelShape) -> tuple[int, int]:
    """Compare the mapping with the model that transformers builds, on the meta device; its tensors and elements."""
    values = {name: value for name, value in hf_config.items() if name != "quantization_config"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    mapped = hf_shapes(shape)
    # transformers stacks experts in memory; they are compared by their number of elements.
    model_shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if ".mlp.experts." not in name}
    unmapped = model_shapes.keys() ^ {name for name in mapped if ".mlp.experts." not in name}
    wrong = sorted(unmapped) or [name for name, size in model_shapes.items() if mapped[name] != size]
    if wrong:
        raise UserError(
            str(shape.model_type), f"tensor {wrong[0]!r} is mapped wrongly ({len(wrong)} such); extend the table"
        )
    num_elements = sum(torch.Size(size).numel() for size in mapped.values())
    num_in_model = sum(parameter.numel() for parameter in model.parameters())
    assert num_elements == num_in_model, (num_elements, num_in_model)
    return len(mapped), num_elements
