"""What only a GPU can tell: FP8 GEMMs against their emulation, speed of FP8 training, cost of the shadow pass.

    tools/gpu_check.sh WHEELS --output gpu_check.md     # on an H100 or H200; see that script
    python tools/gpu_check.py --tiny                    # the same code on a CPU, at sizes that say nothing of speed

Each check is a function that yields rows of a table: what was measured, what is expected, whether it holds. A check that
raises is one row that says so, and the others go on. Expectations on speed hold for a GPU alone.

The model has 1.3B parameters of random weights (20 layers, width 2048) in answers of 4,096 tokens: large enough for GEMMs to
dominate, small enough for one GPU with FP32 masters. Both precisions run the same learner, and times are medians over steps
after two that warm up.

Left out on purpose: more than one GPU, and results that need a trained model.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a dry run needs no torch
    from torch import Tensor

    from megatron_calclip.learner.learner import Learner, PreparedBatch
    from megatron_calclip.learner.runtime import Runtime

PACKAGES = ("torch", "megatron.core", "pydantic", "transformers", "yaml", "rich", "einops", "psutil", "safetensors")
NUM_WARM_UP_STEPS = 2
LR = 1e-4  # at which the loss of a few steps on one batch must fall
# A tensor core adds products with fewer bits than FP32, the emulation in another order: relative to the sum of magnitudes.
ACCUMULATION_ERROR = 2.0**-10
BF16_ROUNDING = 2.0**-8  # of the result, in both
MIN_SPEEDUP = {"tensorwise": 1.15, "rowwise": 1.0}
"""FP8 over BF16, tokens per second. Quantising is eager torch here, not a fused kernel."""
MAX_SHADOW_COST = 1.1
"""Over a plain BF16 forward pass, without FP8 parameters; with them BF16 weights are rebuilt from the masters as well."""
MAX_TE_DISTANCE = 0.05
"""Mean |dlogp| between TransformerEngine's layers and the emulation on random weights, nats."""


@dataclass(frozen=True)
class Sizes:
    """How large everything is."""

    gemms: tuple[tuple[int, int, int], ...]
    """(tokens, inputs, outputs) of the linears."""
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    num_sequences: int
    num_tokens: int
    """Of each sequence."""
    num_steps: int
    """That are timed."""


FULL = Sizes(
    gemms=((4096, 2048, 8192), (4096, 8192, 2048), (1000, 2048, 3072)),
    num_layers=20,
    hidden_size=2048,
    ffn_size=8192,
    num_heads=32,
    num_kv_heads=8,
    vocab_size=32768,
    num_sequences=4,
    num_tokens=4096,
    num_steps=5,
)
TINY = Sizes(
    gemms=((64, 32, 48), (20, 48, 32)),
    num_layers=2,
    hidden_size=32,
    ffn_size=64,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=256,
    num_sequences=2,
    num_tokens=24,
    num_steps=2,
)


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    check: str
    measured: str
    expected: str = ""
    holds: bool | None = None
    """None where nothing is expected."""


class Bench:
    """What all checks share: sizes, device, one set of weights and one batch.

    Args:
        sizes: of everything.
        runtime: this process, alone.
    """

    def __init__(self, sizes: Sizes, runtime: Runtime) -> None:
        import torch
        from transformers import LlamaConfig

        self.sizes, self.runtime, self.device = sizes, runtime, runtime.device
        self.on_gpu = runtime.device.type == "cuda"
        self.hf_config = LlamaConfig(
            vocab_size=sizes.vocab_size,
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.ffn_size,
            num_hidden_layers=sizes.num_layers,
            num_attention_heads=sizes.num_heads,
            num_key_value_heads=sizes.num_kv_heads,
            max_position_embeddings=sizes.num_tokens,
            tie_word_embeddings=True,
        )
        self.tensors: dict[str, Tensor] = {}
        generator = torch.Generator().manual_seed(0)
        from megatron_calclip.weights.mapping import ModelShape, hf_shapes

        for name, shape in hf_shapes(ModelShape.from_hf_config(self.hf_config)).items():
            is_norm = len(shape) == 1
            values = torch.ones(shape) if is_norm else 0.02 * torch.randn(shape, generator=generator)
            self.tensors[name] = values.to(torch.bfloat16)
        self.num_parameters = sum(tensor.numel() for tensor in self.tensors.values())
        self.tokens_per_second: dict[str, float] = {}

    def learner(
        self, recipe: str, *, backend: str = "scaled_mm", fp8_param: bool = False
    ) -> tuple[Learner, PreparedBatch]:
        """A learner with these weights, and the batch; nothing of the one before stays in memory."""
        import torch

        from megatron_calclip.batch import Completion, Prompt, Trajectories
        from megatron_calclip.config_check import check
        from megatron_calclip.config_file import config_from_dict
        from megatron_calclip.learner.learner import Learner
        from megatron_calclip.weights.load import HFSource

        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        s = self.sizes
        config = config_from_dict(
            {
                "model": {"hf": ".", "max_sequence_length": s.num_tokens},
                "rollout": {"max_new_tokens": 1},
                "precision": {"recipe": recipe, "backend": backend, "fp8_param": fp8_param},
                "train": {"tokens_per_microbatch": s.num_tokens, "prompts_per_step": s.num_sequences, "num_steps": 100},
                "optimizer": {"lr": LR},
            }
        )
        check(config, world_size=1)
        learner = Learner(
            config,
            self.hf_config,
            self.runtime,
            source=HFSource.from_tensors(self.tensors),
            lr=LR,
            num_steps=100,
            warmup_steps=0,
            decay="constant",
            min_lr=0.0,
        )
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, s.vocab_size, (s.num_sequences, s.num_tokens), generator=generator).tolist()
        prompts = [Prompt(index, (row[0],), "", "") for index, row in enumerate(ids)]
        answers = [[Completion(tuple(row[1:]), (0.0,) * (s.num_tokens - 1), True, 0)] for row in ids]
        self.trajectories = Trajectories.from_completions(prompts, answers)
        return learner, learner.prepare(self.trajectories, num_minibatches=1)

    def seconds(self, *actions: Callable[[], object]) -> list[float]:
        """Median seconds of each action; they alternate, so that a clock that changes hits all."""
        import torch

        times: list[list[float]] = [[] for _ in actions]
        for step in range(NUM_WARM_UP_STEPS + self.sizes.num_steps):
            for action, found in zip(actions, times, strict=True):
                if self.on_gpu:
                    torch.cuda.synchronize()
                begin = time.perf_counter()
                action()
                if self.on_gpu:
                    torch.cuda.synchronize()
                if step >= NUM_WARM_UP_STEPS:
                    found.append(time.perf_counter() - begin)
        return [statistics.median(found) for found in times]


def check_gemms(bench: Bench) -> Iterator[Row]:
    """Codes and scales of both devices bit for bit; the three GEMMs of a linear against the emulation."""
    import torch

    from megatron_calclip.config import PrecisionConfig
    from megatron_calclip.precision.linear import Fp8Gemms
    from megatron_calclip.precision.quantize import quantize
    from megatron_calclip.precision.recipes import resolve

    for name in ("tensorwise", "rowwise"):
        recipe = resolve(PrecisionConfig(recipe=name))
        assert recipe is not None and recipe.activation is not None
        differing, worst = 0, 0.0
        for index, (num_tokens, num_inputs, num_outputs) in enumerate(bench.sizes.gemms):
            torch.manual_seed(index)
            x, weight, dy = (
                scale * torch.randn(shape).exp2().mul(torch.randn(shape)).to(torch.bfloat16)
                for shape, scale in (
                    ((num_tokens, num_inputs), 1.0),
                    ((num_outputs, num_inputs), 0.02),
                    ((num_tokens, num_outputs), 1e-5),
                )
            )
            for source, dtype in ((x, torch.float8_e4m3fn), (weight, torch.float8_e4m3fn), (dy, recipe.gradient_dtype)):
                for dim in (-1, 0):
                    here = quantize(source.to(bench.device), recipe.activation, dtype, dim=dim)
                    there = quantize(source, recipe.activation, dtype, dim=dim)
                    differing += int((here.codes.cpu().view(torch.uint8) != there.codes.view(torch.uint8)).sum())
                    differing += int((here.inverse_scale.cpu() != there.inverse_scale).sum())

            def products(backend: Any, *operands: Tensor, recipe: Any = recipe) -> list[Tensor]:
                a, b, gradient = (operand.clone().to(bench.device) for operand in operands)
                a, b = a.requires_grad_(), b.requires_grad_()
                y = Fp8Gemms(recipe, backend=backend)(a, b)
                y.backward(gradient)
                assert a.grad is not None and b.grad is not None
                return [y.detach().float(), a.grad.float(), b.grad.float()]

            magnitudes = products("emulated", x.abs(), weight.abs(), dy.abs())  # codes of |x| are the |codes| of x
            real, emulated = products("scaled_mm", x, weight, dy), products("emulated", x, weight, dy)
            for one, other, magnitude in zip(real, emulated, magnitudes, strict=True):
                error = (one - other).abs() - BF16_ROUNDING * other.abs()
                worst = max(worst, float((error / magnitude.clamp(min=1e-30)).max()))
        yield Row(f"{name}: codes and scales, device against CPU", f"{differing} differ", "0 differ", differing == 0)
        yield Row(
            f"{name}: y, dx, dw of scaled_mm against emulated, beyond BF16 rounding, over the sum of magnitudes",
            f"{worst:.1e}",
            f"at most {ACCUMULATION_ERROR:.1e}",
            worst <= ACCUMULATION_ERROR,
        )


def train_steps(bench: Bench, name: str, learner: Learner, batch: PreparedBatch) -> Row:
    """Tokens per second of optimizer steps."""
    import torch

    from megatron_calclip.objective import supervised_objective

    trajectories = bench.trajectories
    objective = supervised_objective(trajectories.response_mask.float() / trajectories.num_response_tokens)
    losses: list[float] = []
    (seconds,) = bench.seconds(lambda: losses.append(float(learner.update(batch, 0, objective).loss)))
    speed = bench.tokens_per_second[name] = trajectories.tokens.numel() / seconds
    memory = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if bench.on_gpu else ""
    falls = losses[-1] < losses[0]
    return Row(
        f"learner {name}",
        f"{speed:,.0f} tokens/s, loss {losses[0]:.4f} to {losses[-1]:.4f}{memory}",
        "loss falls",
        falls,
    )


def speedup(bench: Bench, name: str) -> Row:
    """A learner's speed over BF16's."""
    ratio = bench.tokens_per_second[name] / bench.tokens_per_second["bf16"]
    least = MIN_SPEEDUP[name.split()[0]]
    return Row(
        f"learner {name} over bf16", f"{ratio:.2f}x", f"at least {least}x", ratio >= least if bench.on_gpu else None
    )


def check_learner(bench: Bench) -> Iterator[Row]:
    """Optimizer steps in BF16 and in FP8."""
    yield Row("model", f"{bench.num_parameters / 1e9:.2f}B parameters, {bench.sizes.num_tokens} tokens a sequence")
    yield train_steps(bench, "bf16", *bench.learner("bf16", backend="emulated"))
    for recipe in ("tensorwise", "rowwise"):
        yield train_steps(bench, recipe, *bench.learner(recipe))
        yield speedup(bench, recipe)


def check_shadow(bench: Bench) -> Iterator[Row]:
    """The BF16 shadow pass over a plain BF16 forward pass of the same learner, and that it leaves no trace."""
    import torch

    for fp8_param in (False, True):
        learner, batch = bench.learner("tensorwise", fp8_param=fp8_param)
        before = learner.log_probs(batch).log_probs

        def plain(learner: Learner = learner, batch: PreparedBatch = batch) -> None:
            learner.megatron.fp8_active = False
            learner.log_probs(batch)
            learner.megatron.fp8_active = True

        def shadow(learner: Learner = learner, batch: PreparedBatch = batch) -> None:
            learner.shadow_log_probs(batch)

        in_plain, in_shadow = bench.seconds(plain, shadow)
        cost = in_shadow / in_plain
        holds = cost <= MAX_SHADOW_COST if bench.on_gpu and not fp8_param else None
        yield Row(
            f"shadow pass over a BF16 forward{', FP8 parameters' if fp8_param else ''}",
            f"{cost:.2f}x ({in_shadow:.3f} s)",
            "" if fp8_param else f"at most {MAX_SHADOW_COST}x",
            holds,
        )
        same = torch.equal(learner.log_probs(batch).log_probs, before)
        yield Row("FP8 log-probs after shadow passes", "the same" if same else "others", "the same", same)
        del learner, batch, plain, shadow  # before the next learner is built


def check_te(bench: Bench) -> Iterator[Row]:
    """TransformerEngine's modules, rowwise by our quantiser, against the emulation on the same weights."""
    if not bench.on_gpu or importlib.util.find_spec("transformer_engine") is None:
        yield Row("TransformerEngine", "not here, so not checked")
        return
    for recipe in ("tensorwise", "rowwise"):
        found = {}
        for backend in ("te", "emulated"):
            learner, batch = bench.learner(recipe, backend=backend)
            found[backend] = learner.log_probs(batch).log_probs
            if backend == "te":
                yield train_steps(bench, f"{recipe} te", learner, batch)
                if "bf16" in bench.tokens_per_second:
                    yield speedup(bench, f"{recipe} te")
            del learner, batch  # before the next learner is built
        distance = float((found["te"] - found["emulated"]).abs().mean())
        yield Row(
            f"{recipe}: mean |dlogp| of te against emulated",
            f"{distance:.4f}",
            f"at most {MAX_TE_DISTANCE}",
            distance <= MAX_TE_DISTANCE,
        )


CHECKS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "gemms": check_gemms,
    "learner": check_learner,
    "shadow": check_shadow,
    "te": check_te,
}


def run_check(name: str, bench: Bench) -> Iterator[Row]:
    """A check's rows, the last one an error where it raised."""
    try:
        yield from CHECKS[name](bench)
    except Exception as error:
        traceback.print_exc()
        problem = " ".join(str(error).split())[:200]
        yield Row(name, f"{type(error).__name__}: {problem}", "no error", False)


def markdown(rows: list[Row], heading: str) -> str:
    """The table."""
    verdicts = {True: "holds", False: "FAILS", None: ""}
    lines = [heading, "", "| check | measured | expected | |", "|---|---|---|---|"]
    for row in rows:
        cells = (row.check, row.measured, row.expected, verdicts[row.holds])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def missing_packages() -> list[str]:
    """Those of `PACKAGES` that cannot be imported here."""

    def is_there(name: str) -> bool:
        parent = name.partition(".")[0]
        return importlib.util.find_spec(parent) is not None and importlib.util.find_spec(name) is not None

    return [name for name in PACKAGES if not is_there(name)]


def describe() -> None:
    """What a run would do, and what it lacks on this machine."""
    for name, check in CHECKS.items():
        print(f"{name}: {(check.__doc__ or '').splitlines()[0]}")
    missing = missing_packages()
    print("missing packages: " + (", ".join(missing) or "none"))
    if "torch" not in missing:
        import torch

        print(f"GPU: {torch.cuda.get_device_name() if torch.cuda.is_available() else 'none, so only --tiny would run'}")


def main() -> int:
    """Run what the command line asks for; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=CHECKS, action="append", help="this check; repeated")
    parser.add_argument("--output", type=Path, default=Path("gpu_check.md"), help="the table (default gpu_check.md)")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on a CPU if there is no GPU")
    parser.add_argument("--dry-run", action="store_true", help="list the checks and what is missing here, run nothing")
    arguments = parser.parse_args()
    if arguments.dry_run:
        describe()
        return 0
    if missing := missing_packages():
        print(f"error: {', '.join(missing)}: missing; give their wheels to tools/gpu_check.sh", file=sys.stderr)
        return 2
    import torch

    if not torch.cuda.is_available() and not arguments.tiny:
        print("error: there is no GPU; use --tiny or --dry-run", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    from megatron_calclip.config import Config
    from megatron_calclip.learner import cpu, runtime

    cpu.install()  # before anything else imports Megatron
    os.environ.setdefault("MASTER_PORT", "0")
    started = runtime.start(Config())
    device = torch.cuda.get_device_name() if started.device.type == "cuda" else "CPU"
    heading = f"{device}, torch {torch.__version__}, {'tiny sizes' if arguments.tiny else 'full sizes'}"
    bench, rows, begin = Bench(TINY if arguments.tiny else FULL, started), [], time.perf_counter()
    for name in arguments.only or CHECKS:
        for row in run_check(name, bench):
            rows.append(row)
            seconds = time.perf_counter() - begin
            print(f"{seconds:6.0f} s  {row.check}: {row.measured}", flush=True)
            arguments.output.write_text(markdown(rows, f"{heading}, {seconds:.0f} s"), encoding="utf-8")
    runtime.stop()
    return int(any(row.holds is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
