"""The planner's arithmetic against numbers worked out by hand, its advice, and the command; reality: tests/distributed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_calclip import cli
from megatron_calclip.config import Config, ParallelConfig
from megatron_calclip.config_check import check
from megatron_calclip.config_file import config_from_dict, load_config
from megatron_calclip.errors import UserError
from megatron_calclip.planning import flops, timing
from megatron_calclip.planning.advice import _changed, advise
from megatron_calclip.planning.devices import DEVICES, GIB, find_device
from megatron_calclip.planning.flops import Workload
from megatron_calclip.planning.memory import MicroBatch, RankMemory, Storage, layer_activations, rank_memory
from megatron_calclip.planning.model import find_folder, planned_model
from megatron_calclip.planning.parameters import rank_parameters
from megatron_calclip.planning.plan import Plan, default_workload, make_plan, micro_batches_in_flight
from megatron_calclip.planning.report import dry_run_lines
from megatron_calclip.weights.mapping import ModelShape

# q 8 wide, k and v 4 each, an MLP of 24, on a residual stream of 16; 100 tokens padded to 128.
SHAPE = ModelShape(
    model_type="qwen2",
    num_layers=4,
    hidden_size=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    ffn_size=24,
    vocab_size=100,
    padded_vocab_size=128,
    tied=False,
)
# qkv 16 x (8 + 4 + 4), out 8 x 16, gate and up 2 x 16 x 24, down 24 x 16
LINEARS = 256 + 128 + 768 + 384
LAYER = LINEARS + 16 + 2 * 16  # and qkv's bias and two norms
EMBEDDING = 128 * 16


def make_config(**sections: Any) -> Config:
    return config_from_dict(
        {
            "model": {"shape": {}, "tokenizer": "characters", "max_sequence_length": 64},
            "rollout": {"max_new_tokens": 32},
        }
        | sections
    )


def plan_32b(*overrides: str) -> Plan:
    config = load_config("qwen25_32b", list(overrides))
    return make_plan(config, planned_model(config).shape)


# Parameters.


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({}, [4 * LAYER + 2 * EMBEDDING + 16]),
        ({"pp": 2}, [2 * LAYER + EMBEDDING, 2 * LAYER + 16 + EMBEDDING]),
        ({"pp": 2, "vpp": 2}, [2 * LAYER + EMBEDDING, 2 * LAYER + 16 + EMBEDDING]),
        ({"pp": 4}, [LAYER + EMBEDDING, LAYER, LAYER, LAYER + 16 + EMBEDDING]),
    ],
)
def test_parameters_of_each_stage(parallel: dict[str, int], expected: list[int]) -> None:
    ranks = rank_parameters(SHAPE, ParallelConfig(**parallel))
    assert [rank.total for rank in ranks] == expected
    assert sum(rank.linears for rank in ranks) == 4 * LINEARS
    assert [rank.head for rank in ranks][-1] == EMBEDDING


def test_interleaved_chunks_take_turns() -> None:
    ranks = rank_parameters(SHAPE, ParallelConfig(pp=2, vpp=2))
    assert [rank.layers for rank in ranks] == [(0, 2), (1, 3)]


def test_tensor_parallel_ranks_share_all_but_norms() -> None:
    two_groups = replace(SHAPE, num_kv_heads=2)
    (whole,) = rank_parameters(two_groups, ParallelConfig())
    (half,) = rank_parameters(two_groups, ParallelConfig(tp=2))
    norms = 4 * 2 * 16 + 16
    assert 2 * (half.total - norms) == whole.total - norms


def test_tied_embeddings_are_held_twice_by_a_pipeline() -> None:
    tied = replace(SHAPE, tied=True)
    assert [r.total for r in rank_parameters(tied, ParallelConfig())] == [4 * LAYER + EMBEDDING + 16]
    assert [r.total for r in rank_parameters(tied, ParallelConfig(pp=2))] == [
        2 * LAYER + EMBEDDING,
        2 * LAYER + EMBEDDING + 16,
    ]


def test_published_sizes_of_the_shipped_models() -> None:
    # In billions, as the models' pages give them.
    for name, billions in (("qwen3-8b", 8.2), ("qwen3-14b", 14.8), ("qwen2.5-32b", 32.8)):
        config = load_config("qwen25_32b", [f"model.hf=somewhere/{name}"])
        assert make_plan(config, planned_model(config).shape).num_parameters / 1e9 == pytest.approx(billions, abs=0.05)


# FLOPs and passes.


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, 5),  # rollout, old log-probs, forward and backward
        ({"parallel": {"recompute": "full"}}, 6),
        ({"algorithm": {"num_epochs": 2}}, 8),
        ({"algorithm": {"kl": {"coefficient": 0.1}}}, 6),
        ({"algorithm": {"loss": "bapo", "num_epochs": 2}}, 10),
    ],
)
def test_forwards_of_a_step(sections: dict[str, Any], expected: float) -> None:
    assert flops.run_forwards(make_config(**sections)) == expected


@pytest.mark.parametrize(
    ("calibration", "algorithm", "expected"),
    [
        ({}, {}, 0),
        ({"enabled": True}, {"num_minibatches": 4}, 1 + 3 / 4),
        ({"enabled": True, "minibatches": "last"}, {"num_minibatches": 4}, 1 / 4 + 1 / 4),
        ({"enabled": True, "token_fraction": 0.5}, {"num_minibatches": 4}, (1 + 3 / 4) / 2),
        ({"enabled": True}, {"num_minibatches": 4, "num_epochs": 2}, 1 + 7 / 4),
        ({"enabled": True}, {"num_minibatches": 1}, 1),
        ({"measure": "every_step"}, {"num_minibatches": 2}, 1 + 1 / 2),
    ],
)
def test_shadow_passes_of_a_calibration(
    calibration: dict[str, Any], algorithm: dict[str, Any], expected: float
) -> None:
    assert flops.shadow_forwards(make_config(calibration=calibration, algorithm=algorithm)) == pytest.approx(expected)


def test_flops_of_one_pass() -> None:
    one = flops.pass_flops(SHAPE, num_tokens=10, num_scored=6, squares=50)
    assert one.linears == 2 * LINEARS * 4 * 10
    assert one.attention == 4 * 50 * 2 * 2 * 8  # layers, two products, two FLOPs, heads x head_dim
    assert one.head == 2 * 128 * 16 * 6
    assert one.backward == 2 * one.linears + 2.5 * one.attention + 2 * one.head


def test_flops_of_a_step() -> None:
    workload = Workload(num_sequences=8, prompt_tokens=10, response_tokens=30)
    one = flops.pass_flops(SHAPE, num_tokens=320, num_scored=240, squares=8 * 40**2)
    config = make_config(calibration={"enabled": True, "interval": 10}, algorithm={"num_minibatches": 4})
    assert flops.step_flops(config, SHAPE, workload) == pytest.approx(
        {
            "rollout": one.forward,
            "old log-probs": one.forward,
            "updates": one.forward + one.backward,
            "shadow": 1.75 / 10 * one.forward,
        }
    )
    again = make_config(parallel={"recompute": "full"}, train={"fused_head": True})
    expected = 2 * one.forward + one.backward  # layers by recomputation, logits by the fused head
    assert flops.step_flops(again, SHAPE, workload)["updates"] == pytest.approx(expected)


def test_the_ledgers_formula_imports_no_torch() -> None:
    code = "import sys, megatron_calclip.planning.flops; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# Memory.


def memory(config: Config, *, device: str = "h100", in_flight: float = 1, dp: int = 4) -> RankMemory:
    (parameters,) = rank_parameters(SHAPE, config.parallel)
    found = find_device(device, ranks_per_node=1)
    return rank_memory(config, SHAPE, found, parameters, MicroBatch(64, 64, in_flight), dp=dp, sampler=(0.0, 0.0))


def test_static_bytes() -> None:
    count = 4 * LAYER + 2 * EMBEDDING + 16
    bf16 = memory(make_config())
    assert (bf16.weights, bf16.gradients, bf16.optimizer) == (2 * count, 4 * count, 12 * count / 4)
    fp32 = memory(make_config(precision={"params_dtype": "fp32"}))
    assert (fp32.weights, fp32.gradients, fp32.optimizer) == (4 * count, 4 * count, 8 * count / 4)


def test_fp8_parameters_take_the_place_of_bf16_ones_in_transformer_engine_only() -> None:
    linears = 4 * LINEARS
    engine = memory(make_config(precision={"recipe": "tensorwise", "fp8_param": True}))
    emulated = memory(make_config(precision={"recipe": "tensorwise", "fp8_param": True, "backend": "emulated"}))
    assert engine.weights == emulated.weights - 2 * linears
    assert engine.fp8_weights == 2 * linears  # rows and columns, a byte each
    assert emulated.fp8_weights == 2 * linears  # one copy, two bytes
    assert engine.shadow == emulated.shadow == 2 * linears
    streamed = {"recipe": "tensorwise", "fp8_param": True, "shadow_streamed": True}
    assert memory(make_config(precision=streamed)).shadow == 2 * LINEARS


def test_activations_of_a_layer_in_transformer_engine() -> None:
    config, storage = make_config(), Storage(True, 2, 0, 0)
    kept = layer_activations(config, SHAPE, storage, tokens=10, fp8=False, recompute="none")
    per_token = (
        2 * (16 + 16)  # inputs of both norms
        + 8  # and their scales
        + 2 * (16 + 16)  # inputs of qkv and fc1
        + 2 * (16 + 8 + 4 + 8)  # qkv; q and k rotated; attention's result
        + 4 * 2  # log-sums of two heads
        + 2 * (48 + 24)  # fc1's output and fc2's input
    )
    assert kept == 10 * per_token
    assert layer_activations(config, SHAPE, storage, tokens=10, fp8=False, recompute="full") == 10 * 2 * 16
    fp8 = Storage(True, 2, 1, 2)
    saved = 10 * (16 + 16 + 24 - 8)  # a byte instead of two, but for the projection's input, which was shared
    assert layer_activations(config, SHAPE, fp8, tokens=10, fp8=True, recompute="none") == kept - saved


def test_sequence_parallelism_divides_the_residual_stream() -> None:
    config = make_config(parallel={"tp": 2, "sequence_parallel": True})
    storage = Storage(True, 2, 0, 0)
    whole = layer_activations(make_config(), SHAPE, storage, tokens=10, fp8=False, recompute="none")
    assert layer_activations(config, SHAPE, storage, tokens=10, fp8=False, recompute="none") == whole / 2


@pytest.mark.parametrize(
    ("parallel", "num_microbatches", "expected"),
    [
        ({}, 8, [1]),
        ({"pp": 4}, 8, [4, 3, 2, 1]),
        ({"pp": 4}, 2, [2, 2, 2, 1]),
        # Megatron's interleaved warm-up: 2 (pp - rank - 1) + (vpp - 1) pp chunks, then one forward before each backward.
        ({"pp": 2, "vpp": 2}, 8, [5 / 2, 3 / 2]),
        ({"pp": 2, "vpp": 2}, 2, [4 / 2, 3 / 2]),
    ],
)
def test_micro_batches_in_flight(parallel: dict[str, int], num_microbatches: int, expected: list[float]) -> None:
    config = make_config(parallel=parallel)
    stages = range(config.parallel.pp)
    assert [micro_batches_in_flight(config, stage, num_microbatches) for stage in stages] == expected


# Samplers and seconds.


def test_vllm_servers_on_nodes_of_their_own() -> None:
    servers = plan_32b().servers
    assert (servers.count, servers.gpus_each) == (4 * 8 // 2, 2)
    linears = 64 * (5120 * (2 * 5120 + 2 * 1024) + 3 * 5120 * 27648)
    others = 32_763_876_352 - linears
    assert servers.weight_bytes == (linears + 2 * others) / 2
    assert servers.cache_bytes_per_token == 2 * 64 * 1024 * 2 / 2  # keys and values, layers, width, bytes, two GPUs
    room = 0.9 * 79.1 * GIB - servers.weight_bytes - 4 * GIB
    assert servers.batch_size(8192) == int(room // (8192 * servers.cache_bytes_per_token))
    assert plan_32b("rollout.kv_cache=fp8_e4m3").servers.cache_bytes_per_token == servers.cache_bytes_per_token / 2


@pytest.mark.parametrize(
    ("vllm", "sampler", "cache"),
    [
        ("{launch: true, colocated: true, arguments: [--gpu-memory-utilization, '0.25']}", 0, 0.25),
        ("{launch: true, colocated: false, arguments: [--gpu-memory-utilization=0.25]}", 0.25, 0),
        ("{urls: ['http://127.0.0.1:1']}", 0, 0),
    ],
)
def test_servers_on_the_learners_gpus_take_their_share(vllm: str, sampler: float, cache: float) -> None:
    rank = plan_32b(f"rollout.vllm={vllm}", "rollout.vllm.urls=[]" if "launch" in vllm else "train.seed=0").ranks[0]
    total = 79.1 * GIB
    assert (rank.sampler, rank.kv_cache) == pytest.approx((sampler * total, cache * total))


def test_a_servers_argument_that_is_no_number() -> None:
    with pytest.raises(UserError, match=r"rollout\.vllm\.arguments: --tensor-parallel-size is 'two'"):
        plan_32b("rollout.vllm.arguments=[--tensor-parallel-size, two]")


def test_seconds() -> None:
    config = make_config(
        precision={"recipe": "tensorwise"}, parallel={"pp": 2}, rollout={"engine": "vllm", "max_new_tokens": 32}
    )
    h100 = DEVICES["h100"]
    learner = timing.learner_seconds(
        config, h100, {"rollout": 1e18, "updates": 1e18, "shadow": 1e17}, num_ranks=16, num_microbatches=4
    )
    assert learner == pytest.approx(
        {"updates": 1.25 * 1e18 / (16 * 989e12 * 0.35 * 1.5), "shadow": 1.25 * 1e17 / (16 * 989e12 * 0.35)}
    )
    # 64 sequences in two rounds of 32: weights are read 2 x 32 times, each sequence's cache once a token.
    servers = timing.Servers(4, 2, 1e9, cache_bytes_per_token=1e5, cache_bytes=8 * 40e5, max_batch_size=99)
    workload = Workload(64, prompt_tokens=8, response_tokens=32)
    expected = (2 * 32 * 1e9 + 64 * 32 * (8 + 16) * 1e5 / 4) / (3.35e12 * 0.6)
    assert timing.rollout_seconds(config, h100, 1.0, servers, workload) == pytest.approx(expected)
    by_compute = timing.rollout_seconds(config, h100, 1e18, servers, workload)
    assert by_compute == pytest.approx(1e18 / (8 * 989e12 * 0.35))


def test_weight_sync_by_file_is_written_and_read() -> None:
    config = load_config("qwen25_32b")
    assert timing.sync_seconds(config, num_parameters=10**9) == 2 * 2e9 / timing.FILE_BANDWIDTH
    broadcast = load_config("qwen25_32b", ["rollout.vllm.transfer=broadcast"])
    assert timing.sync_seconds(broadcast, num_parameters=10**9) == 2e9 / timing.NETWORK_BANDWIDTH


def test_rollouts_ahead_run_beside_training() -> None:
    apart, beside = plan_32b(), plan_32b("rollout.max_staleness=1")
    assert apart.seconds is not None and apart.seconds == beside.seconds
    assert apart.step_seconds == pytest.approx(sum(apart.seconds.values()))
    assert beside.step_seconds == pytest.approx(
        max(apart.seconds["rollout"], apart.step_seconds - apart.seconds["rollout"])
    )
    assert apart.calibration_share == pytest.approx(apart.seconds["shadow"] / apart.step_seconds)


# Whether it fits, and advice.


def test_the_32b_run_fits_on_every_gpu() -> None:
    for device in DEVICES:
        assert plan_32b(f"cluster.device={device}").fits


def _with_advice(config: Config, shape: ModelShape) -> tuple[Config, list[str]]:
    advice = advise(config, shape, default_workload(config), make_plan(config, shape))
    for line in advice[:-1]:
        name, text = line.split("=")
        values = {"true": True, "false": False}
        config = _changed(config, name, values.get(text, int(text) if text.isdigit() else text))
    return config, advice


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.tokens_per_microbatch=65536"],
        ["parallel.tp=2", "parallel.pp=1"],
        ["parallel.tp=1", "parallel.pp=1", "parallel.sequence_parallel=false"],
    ],
)
def test_advice_leads_to_a_valid_run_that_fits(overrides: list[str]) -> None:
    config = load_config("qwen25_32b", overrides)
    shape = planned_model(config).shape
    assert not make_plan(config, shape).fits
    changed, advice = _with_advice(config, shape)
    assert advice[-1].startswith("then it fits")
    check(changed, world_size=changed.cluster.num_nodes * changed.cluster.gpus_per_node)
    assert make_plan(changed, shape).fits


def test_advice_where_nothing_helps() -> None:
    overrides = ["cluster={gpus_per_node: 1, num_nodes: 1}", "parallel={tp: 1, pp: 1, sequence_parallel: false}"]
    # Two sequences a mini-batch, so that no more than two replicas can share them.
    config = load_config("qwen25_32b", [*overrides, "train={prompts_per_step: 4, samples_per_prompt: 2}"])
    shape = planned_model(config).shape
    _, advice = _with_advice(config, shape)
    assert advice[-1].startswith("not enough") and advice[-1].endswith("use more or larger GPUs")


def test_a_run_that_fits_needs_no_advice() -> None:
    config = load_config("qwen25_32b")
    shape = planned_model(config).shape
    assert advise(config, shape, default_workload(config), make_plan(config, shape)) == []


def test_samplers_without_room_for_one_sequence_do_not_fit() -> None:
    plan = plan_32b("rollout.vllm.arguments=[--tensor-parallel-size=2, --gpu-memory-utilization=0.2]")
    assert not plan.fits and plan.fattest.peak < plan.usable and plan.concurrent_sequences == 0


# The model's configuration.


def test_a_folder_that_is_there_comes_first(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    found = find_folder(str(folder))
    assert found is not None and found[1] and found[0].name == "qwen3-8b"
    (folder / "config.json").write_text("{}")
    assert find_folder(str(folder)) == (folder, False)
    with pytest.raises(UserError, match=r"model\.hf: config\.json of"):
        planned_model(load_config("qwen25_32b", [f"model.hf={folder}"]))


@pytest.mark.parametrize("name", ["nowhere", "x" * 5000, "a/b", ".."])
def test_a_model_that_is_not_there(name: str) -> None:
    config = load_config("qwen25_32b", [f"model.hf={name}"])
    with pytest.raises(UserError, match=r"model\.hf: .* has no config\.json"):
        planned_model(config)
    assert "is not here" in dry_run_lines(config)[0]


def test_the_layout_is_checked_against_the_model() -> None:
    config = load_config("qwen25_32b", ["parallel.pp=3", "parallel.tp=8", "cluster.num_nodes=3"])
    with pytest.raises(UserError, match=r"parallel\.pp: pp x vpp = 3 does not divide the model's 64 layers"):
        planned_model(config)


def test_the_dry_run_says_that_it_fits() -> None:
    layout, verdict = dry_run_lines(load_config("qwen25_32b"))
    assert "64 ranks = tp 8 x pp 2 x dp 4" in layout and "shipped qwen2.5-32b" in layout
    assert verdict.startswith("memory: fits: ") and "h100" in verdict


# The command.


def run_command(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        cli.main(["plan", *argv])
        code = 0
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_command_prints_and_writes_everything(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    code, out, err = run_command(
        capsys, "qwen25_32b", "--gpu", "h200", "--response-tokens", "1000", "--json", str(path)
    )
    assert (code, err) == (0, "")
    for words in ("optimizer", "shadow", "weight sync", "calibration:", "assumed:", "fits:"):
        assert words in out
    values = json.loads(path.read_text())
    assert values["fits"] is True and values["device"]["name"] == "h200" and values["advice"] == []
    assert values["workload"]["response_tokens"] == 1000
    assert [rank["num_parameters"] for rank in values["ranks"]] == [2_048_028_672, 2_048_033_792]
    assert values["ranks"][0]["peak"] == max(values["ranks"][0]["phases"].values())
    assert 0 < values["calibration_share"] < 0.1


def test_command_says_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_command(capsys, "qwen25_32b", "train.tokens_per_microbatch=65536")
    assert code == 1 and "change: train.tokens_per_microbatch=8192" in out and "then it fits" in out
    assert err.startswith("error: plan: does NOT fit: ") and err.count("\n") == 1


def test_command_for_a_model_made_from_settings(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_command(capsys, "tiny_cpu", "--gpu", "cpu")
    assert code == 0 and "MiB on each rank" in out and "no time estimate" in out


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["nowhere"], "CONFIG: no file"),
        (["tiny_cpu", "--nodes", "0"], "cluster.num_nodes"),
        (["tiny_cpu", "--gpu", "a100"], "cluster.device"),
        (["qwen25_32b", "--nodes", "3", "--gpus-per-node", "5"], "parallel"),
        (["tiny_cpu", "--json", "/nowhere/plan.json"], "--json"),
    ],
)
def test_command_errors_are_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], complaint: str) -> None:
    code, _, err = run_command(capsys, *argv)
    assert code in (1, 2) and err.startswith(f"error: {complaint}") and err.count("\n") == 1


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "many"])
def test_lengths_that_are_none(capsys: pytest.CaptureFixture[str], value: str) -> None:
    code, _, err = run_command(capsys, "tiny_cpu", f"--prompt-tokens={value}")
    assert code == 2 and "--prompt-tokens" in err
