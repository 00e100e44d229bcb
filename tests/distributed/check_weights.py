"""Two ranks: HF checkpoints go into real Megatron models of every layout and come back bit for bit.

    torchrun --nproc-per-node 2 tests/distributed/check_weights.py

Each check prints a line; the exit code is not 0 when one fails. One launch does them all, because starting
processes costs more than the checks. Random weights everywhere, so that any swap of rows, columns, layers or
experts is seen.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megatron_calclip.config import Config, ParallelConfig, PrecisionConfig
from megatron_calclip.errors import UserError
from megatron_calclip.learner import cpu, model, runtime
from megatron_calclip.weights.load import HFSource, load_hf
from megatron_calclip.weights.mapping import ModelShape, hf_shapes, megatron_names
from megatron_calclip.weights.save import save_hf
from megatron_calclip.weights.stream import ParallelGroups, global_parameters, stream_hf

SIZES: dict[str, Any] = dict(
    vocab_size=150,  # padded to 256
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen2-tied": Qwen2Config(**SIZES | {"tie_word_embeddings": True}),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    # One query group on two ranks: Megatron cuts through the group.
    "llama": LlamaConfig(**SIZES | {"num_key_value_heads": 1}),
}
LAYOUTS = {
    "TP2": ParallelConfig(tp=2),
    "PP2": ParallelConfig(pp=2),
    "PP2 VPP2": ParallelConfig(pp=2, vpp=2),
}
MOE_CONFIG = Qwen3MoeConfig(
    **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8, mlp_only_layers=[1]
)

failures: list[str] = []


def check(name: str, passed: bool) -> None:
    """Record one check of this rank; all ranks must pass it."""
    verdict = torch.tensor(int(passed))
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
    if not verdict.item():
        failures.append(name)
    if dist.get_rank() == 0:
        print(f"{'ok  ' if verdict.item() else 'FAIL'} {name}", flush=True)


def random_checkpoint(config: PretrainedConfig, folder: Path) -> None:
    """Write a HF model whose every value is random; biases start at 0 and norms at 1 otherwise."""
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in hf.parameters():
            nn.init.normal_(parameter)
        hf.save_pretrained(folder)
    dist.barrier()


def same(stream: list[tuple[str, Tensor]], source: HFSource, shape: ModelShape, dtype: torch.dtype) -> bool:
    """Whether a stream has the checkpoint's tensors, all of them, in order, bit for bit."""
    return [name for name, _ in stream] == list(hf_shapes(shape)) and all(
        torch.equal(tensor, source.read(name).to(dtype)) for name, tensor in stream
    )


def row_parallel_shards_are_right(
    chunks: list[Any], source: HFSource, shape: ModelShape, groups: ParallelGroups
) -> bool:
    """Compare row-parallel weights with plain slices of the file, without the mapping's own code.

    Such a shard is a block of columns, not contiguous. Gloo scatters such blocks wrongly and silently, which
    corrupts exactly these weights where a converter scatters them; here each rank reads its own.
    """
    rank, size = dist.get_rank(groups.tp), dist.get_world_size(groups.tp)
    parameters = global_parameters(chunks, shape, groups)
    pairs = {"self_attention.linear_proj": "self_attn.o_proj", "mlp.linear_fc2": "mlp.down_proj"}
    for layer, (megatron, hf) in itertools.product(range(shape.num_layers), pairs.items()):
        full = source.read(f"model.layers.{layer}.{hf}.weight")
        width = full.shape[1] // size
        mine = parameters[f"decoder.layers.{layer}.{megatron}.weight"]
        if not torch.equal(mine, full[:, rank * width : (rank + 1) * width]):
            return False
    return True


def check_dense(name: str, layout: str, dtype: Literal["fp32", "bf16"], folder: Path, last_saved: Path) -> None:
    """Load, compare, stream; then save from this layout and load what the previous layout saved."""
    title = f"{name} {layout} {dtype}"
    config = Config(parallel=LAYOUTS[layout], precision=PrecisionConfig(params_dtype=dtype))
    started = runtime.start(config)
    hf_config = CONFIGS[name]
    shape = ModelShape.from_hf_config(hf_config)
    megatron = model.transformer_config(config, hf_config)
    chunks = model.build_chunks(config, hf_config, shape, megatron, started)
    groups, source = started.groups, HFSource.from_folder(folder)
    torch_dtype = model.DTYPES[dtype]

    local = set(global_parameters(chunks, shape, groups))
    check(f"{title}: no unmapped parameter", local <= {*megatron_names(shape, "local"), "output_layer.weight"})
    incomplete = HFSource.from_tensors({key: source.read(key) for key in list(source.shapes)[:-1]})
    before = [parameter.clone() for chunk in chunks for parameter in chunk.parameters()]
    try:
        load_hf(chunks, shape, groups, incomplete)
        raised = False
    except UserError:
        raised = True
    after = [parameter for chunk in chunks for parameter in chunk.parameters()]
    check(
        f"{title}: a checkpoint with a tensor missing changes nothing",
        raised and all(map(torch.equal, before, after)),
    )

    load_hf(chunks, shape, groups, source)
    if layout == "TP2" and dtype == "fp32":
        shards = row_parallel_shards_are_right(chunks, source, shape, groups)
        check(f"{title}: row-parallel shards equal slices of the file", shards)
    wrapped = model.wrap_chunks(config, megatron, chunks)
    check(f"{title}: stream", same(list(stream_hf(wrapped, shape, groups)), source, shape, torch_dtype))

    def transposed(_: str, parameter: nn.Parameter) -> Tensor:
        return parameter.t().contiguous().t()

    stream = list(stream_hf(wrapped, shape, groups, source=transposed))
    check(f"{title}: stream of non-contiguous values", same(stream, source, shape, torch_dtype))

    if (last_saved / "config.json").is_file() and dtype == "fp32":
        for parameter in (parameter for chunk in wrapped for parameter in chunk.parameters()):
            nn.init.zeros_(parameter)
        load_hf(wrapped, shape, groups, HFSource.from_folder(last_saved))
        stream = list(stream_hf(wrapped, shape, groups))
        check(f"{title}: loads what the layout before saved", same(stream, source, shape, torch_dtype))
    dist.barrier()
    tensors = stream_hf(wrapped, shape, groups, dtype=torch.float32)
    if dist.get_rank() == 0:
        save_hf(tensors, last_saved, hf_config=hf_config, max_shard_bytes=60_000, overwrite=True)
    else:
        for _ in tensors:
            pass
    dist.barrier()


def check_experts(tp: int, ep: int, folder: Path) -> None:
    """Qwen3-MoE with its experts over ranks (EP2), or each expert cut over ranks (TP2)."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(tp, expert_model_parallel_size=ep)
    model_parallel_cuda_manual_seed(0)
    shape = ModelShape.from_hf_config(MOE_CONFIG)
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        gated_linear_unit=True,
        add_bias_linear=False,
        qk_layernorm=True,
        num_moe_experts=shape.num_experts,
        moe_ffn_hidden_size=shape.expert_ffn_size,
        moe_layer_freq=[int(shape.is_moe(layer)) for layer in range(shape.num_layers)],
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
    )
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm"
        ),
        vocab_size=shape.padded_vocab_size,
        max_sequence_length=64,
        position_embedding_type="rope",
    )
    groups = ParallelGroups(
        tp=parallel_state.get_tensor_model_parallel_group(),
        ep=parallel_state.get_expert_model_parallel_group(),
        expert_tp=parallel_state.get_expert_tensor_parallel_group(),
    )
    source = HFSource.from_folder(folder)
    load_hf([chunk], shape, groups, source)
    held = sum(".local_experts." in name for name in global_parameters([chunk], shape, groups))
    # 3 MoE layers, 4 experts over `ep` ranks, 2 weights each.
    check(f"qwen3_moe TP{tp} EP{ep}: experts are shared out", held == 3 * (4 // ep) * 2)
    stream = list(stream_hf([chunk], shape, groups))
    check(f"qwen3_moe TP{tp} EP{ep}: stream", same(stream, source, shape, torch.float32))
    parallel_state.destroy_model_parallel()


def main() -> int:
    """Run all checks; 0 when every rank passed them."""
    cpu.install()
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)  # all ranks use that of rank 0
        root = Path(shared[0])
        for name, config in CONFIGS.items():
            random_checkpoint(config, root / name)
            for layout in LAYOUTS:
                check_dense(name, layout, "fp32", root / name, root / f"{name}-saved")
                parallel_state.destroy_model_parallel()
        check_dense("qwen3", "TP2", "bf16", root / "qwen3", root / "bf16-saved")
        parallel_state.destroy_model_parallel()
        random_checkpoint(MOE_CONFIG, root / "moe")
        check_experts(1, 2, root / "moe")
        check_experts(2, 1, root / "moe")
        dist.barrier()
    dist.destroy_process_group()
    return len(failures)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
