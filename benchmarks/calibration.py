"""Ratio statistics against gathering all ratios and calling `torch.quantile`; what calibration costs a run.

    python -m benchmarks.calibration             # 10^7 tokens: about four minutes, 1 GiB
    python -m benchmarks.calibration --quick     # 10^6 tokens: about a minute
    python -m benchmarks.calibration --run       # share of a tiny run at interval 20: minutes

The tokens of `NUM_RANKS` data-parallel ranks lie in one process. A baseline concatenates the ranks' tensors,
as a gather would (its network time is not counted).

| variant | finds |
|---|---|
| quantile | alpha, and by `torch.quantile` the lower bound; nothing about the upper one |
| quantile + balance | also p_ref and the balance at every upper edge, by one more sort: both bounds |
| quantile + balance + bootstrap | also the shares and balances of 100 replicates at all edges: both intervals |
| ours, no bootstrap | all of `quantile + balance`, and shares and sums of both precisions at all edges |
| ours, bootstrap | the same for 100 replicates, for sequences of 4,096 and of 512 tokens |

So `quantile` does less than ours; the peer of equal results is `quantile + balance` without intervals and
`quantile + balance + bootstrap` with them. What the variants find is checked for agreement.

Every measurement is one call in a process of its own, on one thread, after a small warm-up call. Repetitions
alternate between the variants, and the result is the median of the ratios within a repetition. Time is CPU
time of the process: equal to wall time on an idle machine, still meaningful on a shared one, though there our
short passes lose more to a polluted cache than a long sort does. Extra memory is the peak resident size
during the call (VmHWM, reset just before) minus the resident size before it.

Exits with status 1 when ours (no bootstrap) is not 5 times as fast as `quantile`, or takes more than 5% of its extra
memory.

`--run` trains `conf/tiny_cpu.yaml` from random weights (its cost is that of any weights) for 20 steps with one
calibration, with all tokens and with half of them, and reads its ledger: the share of wall clock, and the share of
FLOPs if a token costs the same forward everywhere (sampling, pi_old and shadow passes one forward, an update three).

Left out on purpose: the network, of which a calibration uses one all-reduce of the bytes in the table.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.results import FOLDER, Result, write_report
from megatron_calclip.algorithms.bootstrap import poisson_weights
from megatron_calclip.algorithms.calibration import CalibrationSettings, ClipCalibrator

NUM_RANKS = 8
NUM_WARM_UP_TOKENS = 10_000
SIGMA16, NOISE = 0.1, 0.15
"""Standard deviations of the BF16 log-ratio and of the noise that FP8 adds to it."""
REQUIRED_SPEEDUP = 5.0
REQUIRED_MEMORY_SHARE = 0.05
RUN_STEPS = 20
"""Steps of the tiny run, and its interval: one calibration."""
FORWARDS_PER_STEP = 5
"""Sampling, pi_old, and an update of three, each of all tokens."""
REQUIRED_SECONDS_SHARE = 0.03
REQUIRED_FLOPS_SHARE = {1.0: 0.02, 0.5: 0.01}
"""By token fraction."""
SETTINGS = CalibrationSettings.paper()
RATIO_CAP = 2.0
OURS = "ours, no bootstrap"
BOOTSTRAP_PEER = "quantile + balance + bootstrap"
VARIANTS = {
    "quantile": (0, 4096),
    "quantile + balance": (0, 4096),
    BOOTSTRAP_PEER: (100, 4096),
    OURS: (0, 4096),
    "ours, bootstrap": (100, 4096),
    "ours, bootstrap, 512-token sequences": (100, 512),
}
"""Name -> bootstrap replicates, tokens per sequence."""


@dataclass(frozen=True)
class Measurement:
    """One call of one variant."""

    seconds: float
    """CPU time."""
    extra_mib: float
    """Peak resident size during the call minus the size before it."""
    alpha: float
    lower: float
    """The lower bound: a quantile, or a grid point."""
    target: float
    """p_ref; NaN where the variant does not compute it."""
    num_bytes: int
    """What a rank sends."""


def make_ranks(num_tokens: int, sequence_length: int) -> list[dict[str, Tensor]]:
    """Log-normal ratios, one advantage per sequence, sharded over ranks."""
    random = torch.Generator().manual_seed(0)
    ranks = []
    for rank in range(NUM_RANKS):
        size = num_tokens // NUM_RANKS
        num_sequences = math.ceil(size / sequence_length)
        rows = torch.arange(size) // sequence_length
        ratio16 = torch.randn(size, generator=random).mul_(SIGMA16)
        ratio8 = torch.randn(size, generator=random).mul_(NOISE).add_(ratio16).exp_()
        ranks.append(
            {
                "ratio8": ratio8,
                "ratio16": ratio16.exp_(),
                "advantages": torch.randn(num_sequences, generator=random)[rows],
                "importance_weights": torch.rand(size, generator=random).add_(0.5),
                "loss_weights": torch.full((size,), 1 / num_tokens),
                "response_mask": torch.ones(size, dtype=torch.bool),
                "sequence_ids": rows + rank * num_sequences,
            }
        )
    return ranks


def run_quantile(
    ranks: list[dict[str, Tensor]], *, with_balance: bool, num_replicates: int
) -> tuple[float, float, float, int]:
    """Gather, then alpha and the quantile, then (if asked) the balance at every upper edge, and replicates of both."""

    def gather(name: str) -> Tensor:
        return torch.cat([rank[name] for rank in ranks])

    ratio8, ratio16, advantages, mask = map(gather, ("ratio8", "ratio16", "advantages", "response_mask"))
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (ratio8, ratio16, advantages, mask))
    negative = mask & (advantages < 0)
    clipped16 = ratio16[negative] <= SETTINGS.reference.lower
    alpha = clipped16.double().mean()
    lower = torch.quantile(ratio8[negative], alpha.float())
    target = math.nan
    if with_balance:
        weights = gather("importance_weights").mul_(gather("loss_weights")).mul_(advantages.abs())
        num_bytes += 2 * weights.numel() * weights.element_size()
        positive = mask & (advantages > 0)

        def update(ratio: Tensor, kept: Tensor) -> Tensor:
            return (weights[kept] * ratio[kept].clamp(max=RATIO_CAP)).sum(dtype=torch.float64)

        kept_positive = positive & (ratio16 < SETTINGS.reference.upper)
        kept_negative = negative & (ratio16 > SETTINGS.reference.lower)
        target = float(update(ratio16, kept_positive) / update(ratio16, kept_negative))
        ordered, order = ratio8[positive].sort()
        contributions = weights[positive][order] * ordered.clamp(max=RATIO_CAP)
        _, grid = SETTINGS.grids(SETTINGS.start)
        last = torch.searchsorted(ordered, torch.tensor(grid.edges)) - 1
        curve = contributions.cumsum(0, dtype=torch.float64)[last] / update(ratio8, negative & (ratio8 > lower))
        assert bool(curve.isfinite().all())
    if num_replicates:
        sequence_ids = gather("sequence_ids")
        num_bytes += sequence_ids.numel() * sequence_ids.element_size()
        resampled = poisson_weights(torch.arange(int(sequence_ids.max()) + 1), num_replicates=num_replicates).float()
        for sorted_ids, values, positions in (
            (*_sorted_by(ratio8[negative], sequence_ids[negative]), _lower_positions(ratio8[negative])),
            (sequence_ids[positive][order], contributions, last),
        ):
            for replicate in range(num_replicates):
                counts = resampled[:, replicate].index_select(0, sorted_ids)
                at_edges = counts.mul_(values).cumsum(0, dtype=torch.float64)[positions]
                assert bool(at_edges.isfinite().all())
    return float(alpha), float(lower), target, num_bytes // NUM_RANKS


def _sorted_by(ratio: Tensor, sequence_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Sequence ids in the order of the ratios, and ones to count with."""
    return sequence_ids[ratio.argsort()], torch.ones_like(ratio)


def _lower_positions(ratio: Tensor) -> Tensor:
    """Where the lower edges lie among sorted ratios."""
    grid, _ = SETTINGS.grids(SETTINGS.start)
    below = torch.stack([(ratio <= edge).sum() for edge in grid.edges])
    return (below - 1).clamp(min=0)


def run_ours(ranks: list[dict[str, Tensor]], *, num_replicates: int) -> tuple[float, float, float, int]:
    """The statistics and a whole calibration, both bounds."""
    num_tokens = sum(rank["ratio8"].numel() for rank in ranks)
    calibrator = ClipCalibrator(CalibrationSettings.robust(num_replicates=num_replicates))
    total = calibrator.new_statistics(weight_scale=num_tokens)
    for rank in ranks:
        tokens = dict(rank)
        total.update(tokens.pop("ratio8"), tokens.pop("ratio16"), **tokens)  # type: ignore[arg-type]
    report = calibrator.calibrate(total, 20)
    assert report.alpha is not None and report.lower.choice is not None and report.balance_target is not None
    return report.alpha, report.lower.choice, report.balance_target, total.num_bytes


def memory_kib(field: str) -> int:
    """A field of /proc/self/status, such as VmRSS or VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


def measure(variant: str, num_tokens: int) -> Measurement:
    """One call in this process."""
    torch.set_num_threads(1)
    num_replicates, sequence_length = VARIANTS[variant]

    def call(ranks: list[dict[str, Tensor]]) -> tuple[float, float, float, int]:
        if variant.startswith("ours"):
            return run_ours(ranks, num_replicates=num_replicates)
        return run_quantile(ranks, with_balance=variant != "quantile", num_replicates=num_replicates)

    call(make_ranks(NUM_WARM_UP_TOKENS, sequence_length))
    ranks = make_ranks(num_tokens, sequence_length)
    ctypes.CDLL(None).malloc_trim(0)  # memory freed so far must not serve the measured call
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
    before_kib, before_seconds = memory_kib("VmRSS"), time.process_time()
    result = call(ranks)
    seconds = time.process_time() - before_seconds
    return Measurement(seconds, (memory_kib("VmHWM") - before_kib) / 2**10, *result)


def measure_in_process(variant: str, num_tokens: int) -> Measurement:
    """One call in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.calibration",
        "--tokens",
        str(num_tokens),
        "--measure",
        variant,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    completed = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return Measurement(**json.loads(completed.stdout.splitlines()[-1]))


def check_agreement(run: dict[str, Measurement]) -> None:
    """The variants of one repetition found the same numbers."""
    expected = run["quantile + balance"]
    for variant, found in run.items():
        if VARIANTS[variant][1] != VARIANTS["quantile"][1]:
            continue  # other sequences, other advantages
        assert found.alpha == expected.alpha, variant
        # The grid has steps of 0.02.
        assert abs(found.lower - expected.lower) <= 0.01 + 1e-6, variant
        assert math.isnan(found.target) or abs(found.target / expected.target - 1) < 1e-5, variant


def print_table(runs: list[dict[str, Measurement]], num_tokens: int) -> bool:
    """One line per variant; whether the requirements are met."""

    def median(variant: str, key: str, base: str | None = None) -> float:
        values = [getattr(run[variant], key) for run in runs]
        if base is not None:
            values = [getattr(run[base], key) / max(value, 1e-9) for run, value in zip(runs, values, strict=True)]
        return statistics.median(values)

    print(f"{num_tokens:,} tokens, medians of {len(runs)} repetitions, CPU time, one thread")
    print(f"{'':38} {'s':>7} {'ns/token':>8} {'speed-up over':>14} {'':>9} {'MiB':>7} {'bytes sent':>12}")
    print(f"{'':38} {'':>7} {'':>8} {'quantile':>14} {'+ balance':>9} {'':>7} {'per rank':>12}")
    for variant in VARIANTS:
        seconds = median(variant, "seconds")
        print(
            f"{variant:38} {seconds:7.3f} {seconds / num_tokens * 1e9:8.1f} "
            f"{median(variant, 'seconds', 'quantile'):14.2f} "
            f"{median(variant, 'seconds', 'quantile + balance'):9.2f} "
            f"{median(variant, 'extra_mib'):7.1f} {runs[0][variant].num_bytes:12,}"
        )
    speedup = median(OURS, "seconds", "quantile")
    memory_share = median(OURS, "extra_mib") / median("quantile", "extra_mib")
    print(f"{OURS}: {memory_share:.1%} of the extra memory of `quantile`")
    return speedup >= REQUIRED_SPEEDUP and memory_share <= REQUIRED_MEMORY_SHARE


def compare(runs: list[dict[str, Measurement]]) -> list[Result]:
    """Speed and memory of ours by the peers'."""

    def speed(ours: str, peer: str, goal: float | None = None) -> Result:
        ratios = [run[peer].seconds / run[ours].seconds for run in runs]
        return Result.of(ours, peer, "x speed", ratios, goal=goal)

    memory = [run[OURS].extra_mib / run["quantile"].extra_mib for run in runs]
    return [
        speed(OURS, "quantile", REQUIRED_SPEEDUP),
        speed(OURS, "quantile + balance"),
        speed("ours, bootstrap", BOOTSTRAP_PEER),
        Result.of(OURS, "quantile", "x memory", memory, goal=REQUIRED_MEMORY_SHARE, better="lower"),
    ]


def measure_run(token_fraction: float) -> dict[str, float]:
    """Shares of a tiny run's cost that one calibration in `RUN_STEPS` steps has."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            *(f"calibration.interval={RUN_STEPS}", f"calibration.token_fraction={token_fraction}"),
            *(f"train.num_steps={RUN_STEPS}", "eval.every=0", "eval.num_prompts=8", "checkpoint.save_every=0"),
            *("model.warm_start.num_steps=0", f"run_dir={folder}"),
        ]
        script = Path(__file__).parents[1] / "examples" / "grpo_fp8.py"
        command = [sys.executable, str(script), "tiny_cpu", *overrides]
        subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["step"] > 0]
    num_tokens = sum(row["throughput/tokens_per_s"] * row["timing/step"] for row in rows)
    shadow_tokens = rows[-1]["ledger/shadow_tokens"]
    assert shadow_tokens > 0, "no calibration took place"
    return {
        "token_fraction": token_fraction,
        "seconds": sum(row["timing/step"] for row in rows),
        "seconds_share": rows[-1]["ledger/shadow_share"],
        "flops_share": shadow_tokens / (shadow_tokens + FORWARDS_PER_STEP * num_tokens),
    }


def compare_run(run: dict[str, float]) -> list[Result]:
    """Shares of a run's cost."""
    fraction = run["token_fraction"]
    goals = {"seconds": REQUIRED_SECONDS_SHARE if fraction == 1 else None, "flops": REQUIRED_FLOPS_SHARE[fraction]}
    what = f"one calibration in {RUN_STEPS} steps, token_fraction {fraction}"
    return [
        Result(what, "the whole run", f"of its {name}", run[f"{name}_share"], goal, "lower")
        for name, goal in goals.items()
    ]


def measure_runs(output: Path) -> int:
    """Measure, print and write the shares; the exit status."""
    runs = [measure_run(fraction) for fraction in REQUIRED_FLOPS_SHARE]
    met = runs[0]["seconds_share"] <= REQUIRED_SECONDS_SHARE
    for run in runs:
        met &= run["flops_share"] <= REQUIRED_FLOPS_SHARE[run["token_fraction"]]
        print(
            f"tiny run, {RUN_STEPS} steps, one calibration, token_fraction {run['token_fraction']}: "
            f"{run['seconds_share']:.2%} of {run['seconds']:.0f} s, {run['flops_share']:.2%} of the FLOPs"
        )
    write_report(output, [result for run in runs for result in compare_run(run)], runs=runs)
    return 0 if met else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all variants, print the table, and write all numbers as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="10^6 tokens and a single repetition")
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--output", type=Path, help=f"default: {FOLDER}/calibration.json, calibration_run.json")
    parser.add_argument("--run", action="store_true", help="measure the share of a run instead")
    parser.add_argument("--measure", choices=list(VARIANTS), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    output = arguments.output or FOLDER / ("calibration_run.json" if arguments.run else "calibration.json")
    if arguments.run:
        return measure_runs(output)
    if arguments.measure:
        print(json.dumps(asdict(measure(arguments.measure, arguments.tokens))))
        return 0
    if arguments.quick:
        arguments.tokens, arguments.repetitions = 1_000_000, 1
    runs = []
    for _ in range(arguments.repetitions):
        run = {variant: measure_in_process(variant, arguments.tokens) for variant in VARIANTS}
        check_agreement(run)
        runs.append(run)
    met = print_table(runs, arguments.tokens)
    rows = [{variant: asdict(found) for variant, found in run.items()} for run in runs]
    write_report(output, compare(runs), tokens=arguments.tokens, runs=rows)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
