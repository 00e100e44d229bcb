"""Tokens per second of the embedded rollout engine against transformers' `generate`, in the same run.

    OMP_NUM_THREADS=1 python benchmarks/rollout.py [--device cpu] [--repetitions 7]

Both sample from the same randomly initialised Qwen3 of 0.6M parameters in FP32: 8 samples for each prompt,
prompts of 8 to 16 tokens, temperature 1, at most 64 new tokens. In the case `full` every completion runs to
that limit; in `stops` 4 of the 128 (about equally likely) tokens end a completion, and only tokens up to the
end count. Repetitions alternate between the two, so that a slow phase of the machine hits both, and medians
are compared. The engine also returns log-probabilities, which `generate` is not asked for. Exits with status
1 when the engine is slower anywhere.

Left out on purpose: trained weights. Speed depends on them only through where completions end.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from megatron_calclip.batch import SamplingParams
from megatron_calclip.rollout.engine import Request
from megatron_calclip.rollout.local import LocalEngine

BATCH_SIZES = (16, 64, 128)
NUM_SAMPLES_PER_PROMPT = 8
PROMPT_LENGTHS = (8, 16)
MAX_NEW_TOKENS = 64
CASES: dict[str, tuple[int, ...]] = {"full": (), "stops": (0, 1, 2, 3)}
"""Name of the case -> its stop tokens."""

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


def main() -> int:
    """Print one line per case and batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repetitions", type=int, default=7)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).to(arguments.device).eval()
    engine = LocalEngine(CONFIG, device=arguments.device)
    engine.load_weights(iter(model.state_dict().items()), policy_version=0)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{num_parameters / 1e6:.2f}M parameters, {arguments.device}, {torch.get_num_threads()} thread(s)")
    print(f"{'case':>6} {'batch':>6} {'engine tok/s':>14} {'generate tok/s':>16} {'ratio':>7}")
    slower = False
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
            slower |= ours < theirs
            print(f"{case:>6} {batch_size:>6} {ours:>14,.0f} {theirs:>16,.0f} {ours / theirs:>6.2f}x")
    return int(slower)


if __name__ == "__main__":
    sys.exit(main())
