"""What emulated FP8 and the BF16 shadow pass cost on a CPU: optimizer steps and forward passes of our own learner.

    python -m benchmarks.precision                              # both models, all recipes: about ten minutes
    python -m benchmarks.precision --models 4M --recipes rowwise  # about one
    python -m benchmarks.precision --quick                      # the small model, three repetitions

One learner computes in BF16, another, with the same weights, in a recipe; both hold BF16 parameters with FP32 masters,
and one micro-batch of 16 sequences of 128 tokens. Two ratios are taken:

* step: forward, backward, gradient clipping and AdamW (`Learner.update`), FP8 over BF16;
* shadow: `Learner.shadow_log_probs` of the FP8 learner over `Learner.log_probs` of the BF16 one, with the FP32 masters
  rounded at the start of the pass where weights live in FP8 (`+ fp8_param`), and nothing to do where they do not.

The arms alternate in one process on one thread. Time is CPU time: for one thread equal to wall time on an idle machine,
and still meaningful on a shared one. The result is the median of the ratios within a repetition. `products` is the share
of the BF16 step that its bare decoder products would take: what is left for everything else, quantising included.

Left out on purpose: CUDA (`tools/gpu_check.sh`), tensor parallelism (its costs are communication), how exact the
recipes are (tests).
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.results import FOLDER, Result, write_report
from megatron_calclip.batch import Completion, Prompt, ScoredTokens, Trajectories
from megatron_calclip.config import Config
from megatron_calclip.config_file import config_from_dict

NUM_SEQUENCES, PROMPT_LENGTH, RESPONSE_LENGTH = 16, 32, 96
NUM_TOKENS = NUM_SEQUENCES * (PROMPT_LENGTH + RESPONSE_LENGTH)
LEARNING_RATE = 1e-5
# Hidden size, inner size, layers, heads, vocabulary.
MODELS = {"4M": (256, 704, 4, 8, 2048), "60M": (512, 1408, 12, 8, 32768)}
# Most that a step may cost over BF16.
GOALS = {"tensorwise_delayed": 1.35, "tensorwise": 1.35, "rowwise": 1.35, "blockwise": 1.8, "mxfp8": 1.8}
SHADOW_GOAL = 1.1  # without FP8 parameters


def model_config(name: str) -> Qwen2Config:
    """The shape of `4M` (3.9M parameters) or `60M` (67M, half of them embeddings)."""
    hidden_size, inner_size, num_layers, num_heads, vocab_size = MODELS[name]
    return Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=inner_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=2,
        max_position_embeddings=PROMPT_LENGTH + RESPONSE_LENGTH,
        tie_word_embeddings=False,
    )


def make_trajectories(vocab_size: int) -> Trajectories:
    """Random tokens."""
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, vocab_size, (count,), generator=generator).tolist())

    prompts = [Prompt(index, draw(PROMPT_LENGTH), "", "") for index in range(NUM_SEQUENCES)]
    answers = [[Completion(draw(RESPONSE_LENGTH), (0.0,) * RESPONSE_LENGTH, True, 0)] for _ in prompts]
    return Trajectories.from_completions(prompts, answers)


def make_config(recipe: str, *, fp8_param: bool = False) -> Config:
    """Default settings but for the recipe; the whole batch is one micro-batch."""
    return config_from_dict(
        {
            "model": {"shape": {}, "tokenizer": "characters"},
            "precision": {"recipe": recipe, "fp8_param": fp8_param},
            "optimizer": {"lr": LEARNING_RATE},
            "algorithm": {"num_minibatches": 1},
            "train": {"tokens_per_microbatch": NUM_TOKENS},
        }
    )


class Arm:
    """A learner in one precision, ready to be timed."""

    def __init__(self, model: str, config: Config, runtime: Any, tensors: dict[str, Tensor]) -> None:
        from megatron_calclip.learner.learner import Learner
        from megatron_calclip.weights.load import HFSource

        self.learner = Learner(
            config,
            model_config(model),
            runtime,
            source=HFSource.from_tensors(tensors),
            lr=LEARNING_RATE,
            num_steps=1,
            warmup_steps=0,
            decay="constant",
            min_lr=0.0,
        )
        self.batch = self.learner.prepare(make_trajectories(MODELS[model][-1]), num_minibatches=1)
        self.learner.warm_up(self.batch)

    def step(self) -> None:
        """One optimizer step on the mean negative log-probability."""

        def loss(scored: ScoredTokens) -> tuple[Tensor, None]:
            return -scored.log_probs.mean(), None

        assert self.learner.update(self.batch, 0, loss).applied

    def forward(self) -> None:
        """Log-probabilities in the learner's precision."""
        self.learner.log_probs(self.batch)

    def shadow(self) -> None:
        """Log-probabilities of the shadow pass."""
        self.learner.shadow_log_probs(self.batch)


def seconds(work: Callable[[], object]) -> float:
    """CPU time of one call."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def alternate(first: Callable[[], object], second: Callable[[], object], repetitions: int) -> list[tuple[float, float]]:
    """CPU seconds of two kinds of work, one after the other, after one uncounted call of each."""
    first(), second()
    return [(seconds(first), seconds(second)) for _ in range(repetitions)]


def bare_products(model: str) -> Callable[[], None]:
    """The three products of every decoder linear, on random BF16 operands of the right shapes."""
    hidden, inner, num_layers, num_heads, _ = MODELS[model]
    kv = hidden * 2 // num_heads
    shapes = [(hidden, hidden + 2 * kv), (hidden, hidden), (hidden, 2 * inner), (inner, hidden)]
    operands = [
        tuple(torch.randn(*size).bfloat16() for size in ((NUM_TOKENS, k), (n, k), (NUM_TOKENS, n))) for k, n in shapes
    ]

    def run() -> None:
        for x, weight, dy in operands * num_layers:
            torch.mm(x, weight.t()), torch.mm(dy, weight), torch.mm(dy.t(), x)

    return run


def compare(rows: Sequence[dict[str, Any]]) -> list[Result]:
    """Step and shadow pass of each row by BF16's."""
    return [
        Result.of(
            f"{part}, {row['model']} {row['recipe']}{' + fp8_param' if row['fp8_param'] else ''}",
            "BF16",
            "x time",
            [second / first for first, second in row[f"{part}s" if part == "step" else "forwards"]],
            goal=row[f"{part}_goal"],
            better="lower",
        )
        for row in rows
        for part in ("step", "shadow")
    ]


def median_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Of the second kind of work over the first."""
    return statistics.median(second / first for first, second in pairs)


def measure(model: str, recipes: Sequence[str], repetitions: int, started: Any) -> list[dict[str, Any]]:
    """All comparisons of one model on a runtime of one process."""
    torch.manual_seed(0)
    tensors = dict(AutoModelForCausalLM.from_config(model_config(model), dtype=torch.float32).state_dict())
    bf16 = Arm(model, make_config("bf16"), started, tensors)
    products = median_ratio(alternate(bf16.step, bare_products(model), repetitions))
    rows = []
    for recipe in recipes:
        for fp8_param in (False, True):
            fp8 = Arm(model, make_config(recipe, fp8_param=fp8_param), started, tensors)
            steps = alternate(bf16.step, fp8.step, repetitions)
            forwards = alternate(bf16.forward, fp8.shadow, repetitions)
            step, shadow = median_ratio(steps), median_ratio(forwards)
            rows.append(
                {
                    "model": model,
                    "recipe": recipe,
                    "fp8_param": fp8_param,
                    "bf16_step_seconds": statistics.median(pair[0] for pair in steps),
                    "products": products,
                    "step": step,
                    "step_goal": GOALS[recipe],
                    "shadow": shadow,
                    "shadow_goal": None if fp8_param else SHADOW_GOAL,
                    "met": step <= GOALS[recipe] and (fp8_param or shadow <= SHADOW_GOAL),
                    "steps": steps,
                    "forwards": forwards,
                }
            )
            print_row(rows[-1])
    return rows


def print_row(row: dict[str, Any]) -> None:
    """One line of the table."""
    name = row["recipe"] + (" + fp8_param" if row["fp8_param"] else "")
    shadow_goal = "" if row["shadow_goal"] is None else f"{row['shadow_goal']:.2f}"
    print(
        f"{row['model']:>5} {name:30} {row['bf16_step_seconds']:7.2f} {row['products']:8.0%} {row['step']:6.2f} "
        f"{row['step_goal']:6.2f} {row['shadow']:7.2f} {shadow_goal:>6}  {'yes' if row['met'] else 'no'}",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write all numbers as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="the smaller model and three repetitions")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--recipes", nargs="+", choices=list(GOALS), default=list(GOALS))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output", type=Path, default=FOLDER / "precision.json")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.models, arguments.repetitions = ["4M"], 3
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    from megatron_calclip.learner import runtime

    started = runtime.start(make_config("bf16"))
    print(f"{'':36} BF16 s products   step  asked  shadow  asked  met")
    rows = [
        row for model in arguments.models for row in measure(model, arguments.recipes, arguments.repetitions, started)
    ]
    write_report(arguments.output, compare(rows), tokens=NUM_TOKENS, rows=rows)


if __name__ == "__main__":
    main()
