"""Two or four ranks: checkpoints go into real Megatron models of every layout and come back bit for bit.

    torchrun --nproc-per-node 2 tests/distributed/check_weights.py

HF checkpoints are loaded and streamed; what the converter writes is loaded by Megatron's own loader, and what Megatron
saves is read by ours. Each check prints a line; the exit code is not 0 when one fails. One launch does them all, because
starting processes costs more than the checks. Random weights everywhere, so that any swap of rows, columns, layers or
experts is seen.
"""

from __future__ import annotations

import itertools
import queue
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny_learners import make_config, make_learner
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
from megatron_calclip.convert.checkpoints import open_megatron
from megatron_calclip.errors import UserError
from megatron_calclip.hf import character_tokenizer
from megatron_calclip.learner import checkpoint, cpu, model, runtime
from megatron_calclip.weights.dist_load import DistCheckpoint, hf_source
from megatron_calclip.weights.dist_save import ShardLayout, write_dist_checkpoint
from megatron_calclip.weights.load import HFSource, load_hf
from megatron_calclip.weights.mapping import ModelShape, hf_shapes, hf_specs, mapped_tensors
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
LAYOUTS: dict[int, dict[str, ParallelConfig]] = {
    2: {"TP2": ParallelConfig(tp=2), "PP2": ParallelConfig(pp=2), "PP2 VPP2": ParallelConfig(pp=2, vpp=2)},
    4: {
        "TP4": ParallelConfig(tp=4),
        "TP2 PP2": ParallelConfig(tp=2, pp=2),
        "TP2 PP2 VPP2": ParallelConfig(tp=2, pp=2, vpp=2),
        "PP4": ParallelConfig(pp=4),
    },
}
"""Number of ranks -> layouts."""
CONVERTED = ShardLayout(tp=2, pp=2, vpp=2)
"""How the converter cuts the checkpoint that every layout loads."""
MOE_CONFIG = Qwen3MoeConfig(
    **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8, mlp_only_layers=[1]
)

EXPERT_LAYOUTS = {2: [(1, 2), (2, 1)], 4: [(2, 2), (1, 4)]}
"""Number of ranks -> TP and EP of the mixture of experts."""

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


def convert(folder: Path, target: Path, shape: ModelShape) -> None:
    """Write a HF checkpoint in Megatron's format with the converter, once."""
    if dist.get_rank() == 0 and not target.exists():
        target.mkdir()
        write_dist_checkpoint(HFSource.from_folder(folder), shape, target, layout=CONVERTED)
    dist.barrier()


def megatron_state(chunks: list[Any]) -> dict[str, Any]:
    """What Megatron saves or loads of the chunks."""
    metadata = {"non_homogeneous_layers": True, "singleton_local_shards": False}
    return {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks)}


def check_dist_checkpoint(title: str, chunks: list[Any], shape: ModelShape, groups: ParallelGroups, root: Path) -> None:
    """Megatron loads what the converter wrote; the converter reads what Megatron saves."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    source = HFSource.from_folder(root)
    convert(root, root / "converted", shape)
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        nn.init.zeros_(parameter)
    loaded = dist_checkpointing.load(megatron_state(chunks), str(root / "converted"))
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{index}"])
    stream = list(stream_hf(chunks, shape, groups))
    check(f"{title}: Megatron loads a converted checkpoint", same(stream, source, shape, torch.float32))

    saved = root / f"saved {title}"
    if dist.get_rank() == 0:
        saved.mkdir()
    dist.barrier()
    # Else its writers report through a manager process, which would import this script once more in every rank.
    filesystem_async._results_queue = queue.SimpleQueue()
    dist_checkpointing.save(megatron_state(chunks), str(saved))
    dist.barrier()
    stream = list(hf_source(DistCheckpoint(saved), shape).stream())
    check(f"{title}: the converter reads what Megatron saves", same(stream, source, shape, torch.float32))


def check_run_checkpoint(root: Path) -> None:
    """A checkpoint of training with FP8 parameters converts into what the learner streams: its masters in BF16."""
    config = make_config(
        parallel={"tp": 2}, precision={"recipe": "tensorwise", "fp8_param": True, "params_dtype": "bf16"}
    )
    learner = make_learner(config, runtime.start(config), "qwen2 tied")
    tokenizer = character_tokenizer("01")
    saved = checkpoint.save(root, 1, learner, tokenizer=tokenizer, state={}, tensors={"a": torch.zeros(1)}, keep=1)
    dist.barrier()
    opened = open_megatron(saved)
    streamed = dict(learner.stream_hf())
    check(
        "run with FP8 parameters: the converter gives what the learner streams",
        streamed.keys() == opened.source.specs.keys()
        and all(torch.equal(value, opened.source.read(name)) for name, value in streamed.items()),
    )
    name = "model.layers.0.mlp.down_proj.weight"
    key = "decoder.layers.0.mlp.linear_fc2.weight"
    live = DistCheckpoint(saved / "megatron").read(key)
    check("run with FP8 parameters: the live weights are others", not torch.equal(live, streamed[name]))


def check_dense(name: str, layout: str, dtype: Literal["fp32", "bf16"], folder: Path, last_saved: Path) -> None:
    """Load, compare, stream; then save from this layout and load what the previous layout saved."""
    title = f"{name} {layout} {dtype}"
    config = Config(parallel=LAYOUTS[dist.get_world_size()][layout], precision=PrecisionConfig(params_dtype=dtype))
    started = runtime.start(config)
    hf_config = CONFIGS[name]
    shape = ModelShape.from_hf_config(hf_config)
    megatron = model.transformer_config(config, hf_config)
    chunks = model.build_chunks(config, hf_config, shape, megatron, started)
    groups, source = started.groups, HFSource.from_folder(folder)
    torch_dtype = model.DTYPES[dtype]

    local = set(global_parameters(chunks, shape, groups))
    check(
        f"{title}: no unmapped parameter",
        local <= {*(tensor.name for tensor in mapped_tensors(shape)), "output_layer.weight"},
    )
    incomplete = HFSource.from_tensors({key: source.read(key) for key in list(source.specs)[:-1]})
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
    if dtype == "fp32":
        check_dist_checkpoint(title, chunks, shape, groups, folder)
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
        specs = hf_specs(shape, torch.float32)
        save_hf(tensors, last_saved, specs=specs, hf_config=hf_config, max_shard_bytes=60_000, overwrite=True)
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
        layernorm_epsilon=MOE_CONFIG.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        add_bias_linear=False,
        qk_layernorm=True,
        num_moe_experts=shape.num_experts,
        moe_ffn_hidden_size=shape.expert_ffn_size,
        moe_layer_freq=[int(shape.is_moe(layer)) for layer in range(shape.num_layers)],
        moe_router_topk=MOE_CONFIG.num_experts_per_tok,
        moe_router_pre_softmax=not MOE_CONFIG.norm_topk_prob,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp64",
        moe_token_dispatcher_type="allgather",  # the others need CUDA streams
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
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
        rotary_base=MOE_CONFIG.rope_parameters["rope_theta"],
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
    check_dist_checkpoint(f"qwen3_moe TP{tp} EP{ep}", [chunk], shape, groups, folder)
    check_expert_logits(f"qwen3_moe TP{tp} EP{ep}", chunk, groups, folder)
    parallel_state.destroy_model_parallel()


@torch.no_grad()
def check_expert_logits(title: str, chunk: Any, groups: ParallelGroups, folder: Path) -> None:
    """Megatron's forward pass against transformers'."""
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # not defined in 0.16.1 where TransformerEngine is missing
    tokens = torch.arange(0, 140, 7)[None]
    mask = torch.ones(1, 1, tokens.numel(), tokens.numel(), dtype=torch.bool).triu(1)
    own = chunk.eval()(tokens, torch.arange(tokens.numel())[None], mask)[0]
    shards = [torch.empty_like(own) for _ in range(dist.get_world_size(groups.tp))]
    dist.all_gather(shards, own.contiguous(), group=groups.tp)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(tokens).logits[0]
    error = (torch.cat(shards, dim=1)[:, : expected.shape[1]] - expected).abs().max() / expected.abs().max()
    check(f"{title}: logits are transformers' ({float(error):.1e})", bool(error < 1e-5))


def main() -> int:
    """Run all checks; 0 when every rank passed them."""
    cpu.install()
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)  # all ranks use that of rank 0
        root = Path(shared[0])
        num_ranks = dist.get_world_size()
        for name, config in CONFIGS.items():
            random_checkpoint(config, root / name)
            for layout in LAYOUTS[num_ranks]:
                check_dense(name, layout, "fp32", root / name, root / f"{name}-saved")
                parallel_state.destroy_model_parallel()
        if num_ranks == 2:
            check_dense("qwen3", "TP2", "bf16", root / "qwen3", root / "bf16-saved")
            parallel_state.destroy_model_parallel()
            check_run_checkpoint(root / "run")
            parallel_state.destroy_model_parallel()
        random_checkpoint(MOE_CONFIG, root / "moe")
        for tp, ep in EXPERT_LAYOUTS[num_ranks]:
            check_experts(tp, ep, root / "moe")
        dist.barrier()
    dist.destroy_process_group()
    return len(failures)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
