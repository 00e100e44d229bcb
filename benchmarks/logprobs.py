"""Log-probs and entropy against the naive FP32 log-softmax and against the bare matrix product.

    python -m benchmarks.logprobs            # 4096 tokens x 151,936 vocabulary: about 20 minutes, 10 GiB
    python -m benchmarks.logprobs --quick    # 512 tokens: about a minute

Every measurement is one call in a process of its own, on one thread, after a small warm-up call. Repetitions
alternate between the variants, and the result is the median of the ratios within a repetition, so that a
load that comes and goes hits both sides. Time is CPU time of the process: for one thread equal to wall time
on an idle machine, and still meaningful on a shared one. Extra memory is the peak resident size during the
call (VmHWM, reset just before) minus the resident size before it: inputs do not count, a gradient does.

The baselines are written out below. The naive forward and backward keeps the entropy out of the loss, as we
do; `in place` is for callers that own their logits. The fused form is compared with the product alone, in
blocks of rows with one output buffer, at two hidden sizes (5120 is that of 14B and 32B models). Errors are to float64 over the first rows; hidden states and weights
lie on a grid on which every order of summation gives the same product, so that they are errors of the
reduction also where the product is rounded to BF16.

Left out on purpose: CUDA (another clock and another allocator) and the kernels of other frameworks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.results import FOLDER, Result, write_report
from megatron_calclip.learner.logprobs import linear_token_log_probs, token_log_probs

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LOGIT_SCALE = 4.0  # standard deviation; a distribution about as peaked as that of a trained model
GRID = 64  # hidden states and weights are multiples of 1/64: sums of their products are exact in FP32
NUM_WARM_UP_TOKENS = 4
NUM_CHECKED_TOKENS = 64
MATMUL_BLOCK_ROWS = 1024
MAX_ERROR = 1e-5


@dataclass(frozen=True)
class Problem:
    """The size of one measurement."""

    num_tokens: int
    vocab_size: int
    hidden_size: int
    dtype: str


@dataclass(frozen=True)
class Comparison:
    """One line of the result: a variant, its baseline, and what is asked of it."""

    title: str
    variant: str
    baseline: str
    max_time_share: float
    max_memory_share: float | None = None
    hidden_size: int = 0
    """Of the fused form and its product; logits have none."""


LOGITS_COMPARISONS = (
    Comparison("forward", "tiled_forward", "naive_forward", 1 / 5, 0.05),
    Comparison("forward + backward", "tiled_backward", "naive_backward", 1 / 2, 0.60),
    Comparison("forward + backward in place", "tiled_backward_inplace", "naive_backward", 1 / 2, 0.60),
)
MAX_FUSED_SHARE = 1.15
LogProbs = tuple[Tensor, Tensor | None]
"""Log-probs, and entropies where they are asked for."""
Run = dict[str, dict[str, float]]
"""One repetition: what `measure` found, by `key_of`."""


def naive_forward(logits: Tensor, targets: Tensor) -> LogProbs:
    """The usual formula."""
    log_p = torch.log_softmax(logits.float(), dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def naive_backward(logits: Tensor, targets: Tensor) -> LogProbs:
    """The usual formula with gradients through the log-probs and a detached entropy."""
    log_p = torch.log_softmax(logits.requires_grad_().float(), dim=-1)
    with torch.no_grad():
        entropy = -(log_p.exp() * log_p).sum(-1)
    log_probs = log_p.gather(1, targets[:, None])[:, 0]
    log_probs.sum().backward()
    return log_probs.detach(), entropy


def tiled_forward(logits: Tensor, targets: Tensor) -> LogProbs:
    """Ours, forward."""
    return token_log_probs(logits, targets, with_entropy=True)


def tiled_backward(logits: Tensor, targets: Tensor) -> LogProbs:
    """Ours, forward and backward."""
    log_probs, entropy = token_log_probs(logits.requires_grad_(), targets, with_entropy=True)
    log_probs.sum().backward()
    return log_probs.detach(), entropy


def tiled_backward_inplace(logits: Tensor, targets: Tensor) -> LogProbs:
    """Ours, with the gradient written over the logits; a view stands for the output of a model."""
    owned = logits.requires_grad_().view_as(logits)
    log_probs, entropy = token_log_probs(owned, targets, with_entropy=True, inplace_backward=True)
    torch.autograd.grad(log_probs.sum(), owned)
    return log_probs.detach(), entropy


def matmul(hidden: Tensor, weight: Tensor) -> None:
    """The output linear alone."""
    out = torch.empty(min(MATMUL_BLOCK_ROWS, len(hidden)), len(weight), dtype=hidden.dtype)
    for block in hidden.split(MATMUL_BLOCK_ROWS):
        torch.mm(block, weight.t(), out=out[: len(block)])


def linear_forward(hidden: Tensor, weight: Tensor, targets: Tensor) -> LogProbs:
    """Ours, fused with the output linear."""
    return linear_token_log_probs(hidden, weight, targets, with_entropy=True)


LOGITS_VARIANTS = {
    f.__name__: f for f in (naive_forward, naive_backward, tiled_forward, tiled_backward, tiled_backward_inplace)
}


def make_logits(problem: Problem, generator: torch.Generator) -> Tensor:
    """[tokens, vocabulary], filled by rolls of one block so that no second matrix is ever alive."""
    logits = torch.empty(problem.num_tokens, problem.vocab_size, dtype=DTYPES[problem.dtype])
    block = torch.randn(64, problem.vocab_size, generator=generator).mul_(LOGIT_SCALE)
    for start in range(0, problem.num_tokens, 64):
        logits[start : start + 64] = block[: problem.num_tokens - start].roll(start, 1)
    return logits


def make_on_grid(num_rows: int, scale: float, problem: Problem, generator: torch.Generator) -> Tensor:
    """Normal values of that scale, [rows, hidden size], rounded to the grid; exact in BF16 up to 4."""
    values = torch.randn(num_rows, problem.hidden_size, generator=generator).clamp_(-4, 4)
    return values.mul_(scale * GRID).round_().div_(GRID).to(DTYPES[problem.dtype])


def memory_kib(field: str) -> int:
    """A field of /proc/self/status, such as VmRSS or VmHWM."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0])


def max_errors(result: LogProbs, logits: Tensor, targets: Tensor) -> tuple[float, float]:
    """Largest absolute error of log-prob and entropy to float64, over the rows of `logits`."""
    log_p = torch.log_softmax(logits.double(), dim=-1)
    rows = slice(len(logits))
    assert result[1] is not None
    log_prob_error = result[0][rows].double() - log_p.gather(1, targets[rows, None])[:, 0]
    entropy_error = result[1][rows].double() + (log_p.exp() * log_p).sum(-1)
    return log_prob_error.abs().max().item(), entropy_error.abs().max().item()


def measure(variant: str, problem: Problem) -> dict[str, float]:
    """Run one variant once in this process: CPU and wall seconds, extra GiB, errors of its result if any."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, problem.vocab_size, (problem.num_tokens,), generator=generator)
    call: Callable[[slice], LogProbs | None]
    if variant in LOGITS_VARIANTS:
        logits = make_logits(problem, generator)
        checked = logits[:NUM_CHECKED_TOKENS].clone()

        def call(rows: slice) -> LogProbs | None:
            return LOGITS_VARIANTS[variant](logits.detach()[rows], targets[rows])
    else:
        hidden = make_on_grid(problem.num_tokens, 1.0, problem, generator)
        weight = make_on_grid(problem.vocab_size, LOGIT_SCALE / problem.hidden_size**0.5, problem, generator)
        checked = hidden[:NUM_CHECKED_TOKENS] @ weight.t()

        def call(rows: slice) -> LogProbs | None:
            if variant == "linear_forward":
                return linear_forward(hidden[rows], weight, targets[rows])
            matmul(hidden[rows], weight)
            return None

    call(slice(-NUM_WARM_UP_TOKENS, None))
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
    before_kib = memory_kib("VmRSS")
    start = time.process_time(), time.perf_counter()
    result = call(slice(None))
    measured = {
        "cpu_seconds": time.process_time() - start[0],
        "wall_seconds": time.perf_counter() - start[1],
        "extra_gib": (memory_kib("VmHWM") - before_kib) / 2**20,
    }
    if result is not None:
        errors = max_errors(result, checked, targets)
        measured |= {"log_prob_error": errors[0], "entropy_error": errors[1]}
    return measured


def comparisons(hidden_sizes: Sequence[int]) -> tuple[Comparison, ...]:
    """All lines of the result."""
    return LOGITS_COMPARISONS + tuple(
        Comparison(
            f"fused linear, forward, hidden size {size}", "linear_forward", "matmul", MAX_FUSED_SHARE, None, size
        )
        for size in hidden_sizes
    )


def measure_in_process(variant: str, problem: Problem) -> dict[str, float]:
    """`measure` in a fresh process with one thread."""
    command = [sys.executable, "-m", "benchmarks.logprobs", "--measure", variant, json.dumps(asdict(problem))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    completed = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(completed.stdout.splitlines()[-1])


def key_of(variant: str, hidden_size: int) -> str:
    """Name of a variant's measurement in a repetition."""
    return f"{variant} {hidden_size}" if hidden_size else variant


def sides(comparison: Comparison, run: Run) -> tuple[dict[str, float], dict[str, float]]:
    """Ours and the baseline's, of one repetition."""
    ours, base = (run[key_of(name, comparison.hidden_size)] for name in (comparison.variant, comparison.baseline))
    return ours, base


def summarize(comparison: Comparison, dtype: str, runs: list[Run]) -> dict[str, object]:
    """Medians over the repetitions of the shares of time and memory, and whether the targets are met."""
    ours, base = zip(*(sides(comparison, run) for run in runs), strict=True)

    def share(key: str) -> float:
        return statistics.median(a[key] / b[key] for a, b in zip(ours, base, strict=True))

    time_share, memory_share = share("cpu_seconds"), share("extra_gib")
    error = max(max(run["log_prob_error"], run["entropy_error"]) for run in ours)
    within_memory = comparison.max_memory_share is None or memory_share <= comparison.max_memory_share
    return {
        "title": comparison.title,
        "dtype": dtype,
        "seconds": statistics.median(run["cpu_seconds"] for run in ours),
        "baseline_seconds": statistics.median(run["cpu_seconds"] for run in base),
        "time_share": time_share,
        "max_time_share": comparison.max_time_share,
        "extra_gib": statistics.median(run["extra_gib"] for run in ours),
        "baseline_extra_gib": statistics.median(run["extra_gib"] for run in base),
        "memory_share": memory_share,
        "max_memory_share": comparison.max_memory_share,
        "error": error,
        "met": time_share <= comparison.max_time_share and within_memory and error <= MAX_ERROR,
    }


def compare(comparison: Comparison, dtype: str, runs: list[Run]) -> list[Result]:
    """Time and memory of ours by the baseline's."""
    goals = {
        "x time": ("cpu_seconds", comparison.max_time_share),
        "x memory": ("extra_gib", comparison.max_memory_share),
    }
    return [
        Result.of(
            f"{comparison.title}, {dtype}",
            comparison.baseline.replace("_", " "),
            unit,
            [ours[key] / base[key] for ours, base in (sides(comparison, run) for run in runs)],
            goal=goal,
            better="lower",
        )
        for unit, (key, goal) in goals.items()
        if goal is not None
    ]


def print_table(rows: Sequence[dict[str, object]]) -> None:
    """One line for each comparison; a speed-up of 5 is a time share of 1/5."""
    print(
        f"{'':40} dtype {'s':>7} {'base s':>7} {'speed-up':>8} {'asked':>6} "
        f"{'GiB':>6} {'base':>6} {'share':>6} {'asked':>6} {'error':>8}  met"
    )
    for row in rows:
        asked_memory = "" if row["max_memory_share"] is None else f"{row['max_memory_share']:.0%}"
        print(
            f"{row['title']:40} {row['dtype']:5} {row['seconds']:7.2f} {row['baseline_seconds']:7.2f} "
            f"{1 / row['time_share']:8.2f} {1 / row['max_time_share']:6.2f} "  # type: ignore[operator]
            f"{row['extra_gib']:6.2f} {row['baseline_extra_gib']:6.2f} {row['memory_share']:6.1%} "
            f"{asked_memory:>6} {row['error']:8.1e}  {'yes' if row['met'] else 'no'}"
        )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line; `--measure` is how the benchmark calls itself."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="512 tokens and a single repetition")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024, 5120], help="hidden sizes of the fused form")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output", type=Path, default=FOLDER / "logprobs.json")
    parser.add_argument("--measure", nargs=2, metavar=("VARIANT", "PROBLEM"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.tokens, arguments.repetitions, arguments.hidden = 512, 1, [1024]
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all variants, print the table, and write all numbers as JSON."""
    arguments = parse_arguments(argv)
    if arguments.measure:
        variant, problem = arguments.measure
        print(json.dumps(measure(variant, Problem(**json.loads(problem)))))
        return
    lines = comparisons(arguments.hidden)
    wanted = dict.fromkeys((name, line.hidden_size) for line in lines for name in (line.variant, line.baseline))
    runs: dict[str, list[Run]] = {
        dtype: [
            {
                key_of(variant, size): measure_in_process(
                    variant, Problem(arguments.tokens, arguments.vocab, size, dtype)
                )
                for variant, size in wanted
            }
            for _ in range(arguments.repetitions)
        ]
        for dtype in arguments.dtypes
    }
    rows = [summarize(line, dtype, runs[dtype]) for dtype in runs for line in lines]
    print_table(rows)
    results = [result for dtype in runs for line in lines for result in compare(line, dtype, runs[dtype])]
    sizes = {"tokens": arguments.tokens, "vocab": arguments.vocab, "hidden": arguments.hidden}
    write_report(arguments.output, results, **sizes, summary=rows, runs=runs)


if __name__ == "__main__":
    main()
