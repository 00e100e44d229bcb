"""Tokens per second of the embedded rollout engine against transformers' `generate`, in the same run.

    OMP_NUM_THREADS=1 python -m benchmarks.rollout [--quick] [--device cpu] [--repetitions 7]

Both sample from the same randomly initialised Qwen3 of 0.6M parameters in FP32: 8 samples for each prompt,
prompts of 8 to 16 tokens, temperature 1, at most 64 new tokens. In the case `full` every completion runs to
that limit; in `stops` 4 of the 128 (about equally likely) tokens end a completion, and only tokens up to the
end count. Repetitions alternate between the two, so that a slow phase of the machine hits both, and medians
are compared. The engine also returns log-probabilities, which `generate` is not asked for. Exits with status
1 when the engine is slower anywhere.

Then what emulated FP8 costs: the engine in each scheme against itself in BF16, all completions to the limit. And the
weight sync, in GB/s beside a plain copy in memory of the same bytes, for a list of random BF16 matrices: into the
embedded engine (with its fingerprints), through a file (written, renamed, read by another process), and by broadcast
over gloo into another process. The learner's own stream is measured in `benchmarks/weights.py`. And what a response
token costs when ranks exchange their completions, which `torch.distributed` pickles: bytes, and nanoseconds on each end.

Left out on purpose: trained weights. Speed depends on them only through where completions end.
"""

from __future__ import annotations

import argparse
import multiprocessing
import pickle
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.results import FOLDER, Result, write_report
from megatron_calclip.batch import Completion, SamplingParams
from megatron_calclip.rollout.broadcast import BroadcastGroup, Muster
from megatron_calclip.rollout.engine import Request
from megatron_calclip.rollout.fingerprint import fingerprint
from megatron_calclip.rollout.local import LocalEngine

BATCH_SIZES = (16, 64, 128)
NUM_SAMPLES_PER_PROMPT = 8
PROMPT_LENGTHS = (8, 16)
MAX_NEW_TOKENS = 64
CASES: dict[str, tuple[int, ...]] = {"full": (), "stops": (0, 1, 2, 3)}
"""Name of the case -> its stop tokens."""

SCHEMES = ("fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "mxfp8")
CONFIG = Qwen3Config(
    vocab_size=128,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
)

SYNC_CONFIG = Qwen3Config(
    vocab_size=32_000,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=64,
    tie_word_embeddings=False,
)
"""A model of about 0.3 GB for the weight sync."""


def make_prompts(batch_size: int) -> list[tuple[int, ...]]:
    """`batch_size` prompts, each repeated for its samples; their tokens are no stop tokens."""
    shortest, longest = PROMPT_LENGTHS
    distinct = [
        tuple(torch.randint(4, CONFIG.vocab_size, (int(torch.randint(shortest, longest + 1, ())),)).tolist())
        for _ in range(batch_size // NUM_SAMPLES_PER_PROMPT)
    ]
    return [prompt for prompt in distinct for _ in range(NUM_SAMPLES_PER_PROMPT)]


def engine_runner(
    engine: LocalEngine, prompts: list[tuple[int, ...]], stop_tokens: tuple[int, ...]
) -> Callable[[], int]:
    """A function that samples with the engine and returns the number of tokens of all completions."""
    requests = [Request(prompt, sample_id, (0, 0)) for sample_id, prompt in enumerate(prompts)]
    sampling = SamplingParams(MAX_NEW_TOKENS, stop_token_ids=stop_tokens)
    return lambda: sum(len(completion.token_ids) for completion in engine.generate(requests, sampling))


def generate_runner(
    model: torch.nn.Module, prompts: list[tuple[int, ...]], stop_tokens: tuple[int, ...], device: str
) -> Callable[[], int]:
    """The same with `model.generate` on left-padded prompts."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)

    def run() -> int:
        output: Tensor = model.generate(  # type: ignore[operator]
            tokens,
            attention_mask=mask,
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=list(stop_tokens) or None,
            pad_token_id=0,
        )
        stops = torch.isin(output[:, width:], torch.tensor(stop_tokens, dtype=torch.int64, device=device))
        return int((stops.cumsum(1) - stops.long() == 0).sum())

    return run


def tokens_per_second(runners: dict[str, Callable[[], int]], num_repetitions: int) -> dict[str, list[float]]:
    """Tokens per second of each repetition; one uncounted repetition first."""
    rates: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(num_repetitions + 1):
        for name, run in runners.items():
            start = time.perf_counter()
            num_tokens = run()
            rates[name].append(num_tokens / (time.perf_counter() - start))
    return {name: values[1:] for name, values in rates.items()}


def compare_fp8(num_repetitions: int) -> list[Result]:
    """Tokens per second of the engine in each FP8 scheme, against BF16."""
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).eval()
    prompts = make_prompts(BATCH_SIZES[1])
    runners = {}
    for scheme in ("bf16", *SCHEMES):
        engine = LocalEngine(CONFIG, device="cpu", dtype=torch.bfloat16, precision=scheme)  # type: ignore[arg-type]
        engine.load_weights(iter(model.state_dict().items()), policy_version=0)
        runners[scheme] = engine_runner(engine, prompts, ())
    rates = tokens_per_second(runners, num_repetitions)
    print(f"{'emulated':>16} {'engine tok/s':>14} {'of BF16':>8}")
    results = []
    for scheme, values in rates.items():
        ratios = [a / b for a, b in zip(values, rates["bf16"], strict=True)]
        results.append(Result.of(f"sampling, {scheme} emulated", "the engine in BF16", "x speed", ratios))
        print(f"{scheme:>16} {statistics.median(values):>14,.0f} {results[-1].ratio:>7.2f}x")
    return results[1:]


def receive(place: dict[str, Any]) -> None:
    """The other process: takes a broadcast, as a server's worker does."""
    store = dist.TCPStore("127.0.0.1", place["port"], None, False)
    members = Muster(store).report(1)
    group = BroadcastGroup(store, rank=1, members=members, device=torch.device("cpu"))
    for _, tensor in group.receive():
        fingerprint(tensor)
    group.close()


def read(path: str, done: Any) -> None:
    """The other process: reads a file of weights, as a server's worker does."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (no dictionary)
            fingerprint(file.get_tensor(name))
    done.set()


def compare_sync(num_repetitions: int) -> list[Result]:
    """GB/s of each way of weights to an engine."""
    model = AutoModelForCausalLM.from_config(SYNC_CONFIG, dtype=torch.bfloat16)
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    engine = LocalEngine(SYNC_CONFIG, device="cpu", dtype=torch.bfloat16)
    target = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    context = multiprocessing.get_context("fork")

    def copy() -> None:
        for name, tensor in weights.items():
            target[name].copy_(tensor)

    def by_file() -> None:
        with tempfile.TemporaryDirectory() as folder:
            path, done = f"{folder}/weights.safetensors", context.Event()
            save_file(weights, path)
            reader = context.Process(target=read, args=(path, done))
            reader.start()
            reader.join()
            assert done.is_set()

    def by_broadcast() -> None:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        receiver = context.Process(target=receive, args=({"port": store.port},))
        receiver.start()
        while not Muster(store).has_reported(1):
            time.sleep(0.001)
        Muster(store).decide([0, 1])
        group = BroadcastGroup(store, rank=0, members=[0, 1], device=torch.device("cpu"))
        group.send(weights.items())
        group.close()
        receiver.join()
        assert receiver.exitcode == 0

    ways: dict[str, Callable[[], object]] = {
        "copy in memory": copy,
        "embedded engine": lambda: engine.load_weights(iter(weights.items()), policy_version=0),
        "file": by_file,
        "broadcast (gloo)": by_broadcast,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(num_repetitions + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - began)
    print(f"{'weight sync':>16} {'GB/s':>8} {'of a copy':>10}   {num_bytes / 1e9:.2f} GB")
    results = []
    for name, values in seconds.items():
        ratios = [base / own for base, own in zip(seconds["copy in memory"][1:], values[1:], strict=True)]
        results.append(Result.of(f"weight sync, {name}", "copy in memory", "x speed", ratios))
        print(f"{name:>16} {num_bytes / 1e9 / statistics.median(values[1:]):>8.2f} {results[-1].ratio:>9.2f}x")
    return results[1:]


def measure_exchange(num_repetitions: int) -> dict[str, float]:
    """Cost of a response token in an exchange of completions: 64 random ones of 2,048 tokens of a vocabulary of 151,936."""
    draw = random.Random(0)
    completions = [
        Completion(
            tuple(draw.randrange(151_936) for _ in range(2048)),
            tuple(-draw.expovariate(1.0) for _ in range(2048)),
            finished=True,
            policy_version=0,
        )
        for _ in range(64)
    ]
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    seconds: dict[str, list[float]] = {"pickle": [], "unpickle": []}
    for _ in range(num_repetitions):
        began = time.perf_counter()
        sent = pickle.dumps(completions)
        seconds["pickle"].append(time.perf_counter() - began)
        began = time.perf_counter()
        received = pickle.loads(sent)
        seconds["unpickle"].append(time.perf_counter() - began)
        assert received == completions
    found = {f"{name}_ns": statistics.median(values) / num_tokens * 1e9 for name, values in seconds.items()}
    found["bytes"] = len(sent) / num_tokens
    print(
        f"completions: {found['bytes']:.1f} bytes a token, {found['pickle_ns']:.0f} ns and {found['unpickle_ns']:.0f} ns"
    )
    return found


def main() -> int:
    """Print one line per case and batch size, and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="three repetitions")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--output", type=Path, default=FOLDER / "rollout.json")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repetitions = 3
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).to(arguments.device).eval()
    engine = LocalEngine(CONFIG, device=arguments.device)
    engine.load_weights(iter(model.state_dict().items()), policy_version=0)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{num_parameters / 1e6:.2f}M parameters, {arguments.device}, {torch.get_num_threads()} thread(s)")
    print(f"{'case':>6} {'batch':>6} {'engine tok/s':>14} {'generate tok/s':>16} {'ratio':>7}")
    results = []
    for case, stop_tokens in CASES.items():
        for batch_size in BATCH_SIZES:
            prompts = make_prompts(batch_size)
            rates = tokens_per_second(
                {
                    "engine": engine_runner(engine, prompts, stop_tokens),
                    "generate": generate_runner(model, prompts, stop_tokens, arguments.device),
                },
                arguments.repetitions,
            )
            ours, theirs = statistics.median(rates["engine"]), statistics.median(rates["generate"])
            ratios = [a / b for a, b in zip(rates["engine"], rates["generate"], strict=True)]
            results.append(Result.of(f"sampling, {case}, batch {batch_size}", "generate", "x speed", ratios, goal=1.0))
            print(f"{case:>6} {batch_size:>6} {ours:>14,.0f} {theirs:>16,.0f} {results[-1].ratio:>6.2f}x")
    slower = any(not result.met for result in results)
    if arguments.device == "cpu":
        results += compare_fp8(arguments.repetitions) + compare_sync(arguments.repetitions)
    write_report(arguments.output, results, exchange=measure_exchange(arguments.repetitions))
    return int(slower)


if __name__ == "__main__":
    sys.exit(main())
