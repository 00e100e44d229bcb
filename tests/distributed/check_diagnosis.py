"""`megatron-calclip diagnose` on two ranks: masters, the update that is shared by all recipes, single layers in FP8.

    torchrun --nproc-per-node 2 tests/distributed/check_diagnosis.py EMPTY_FOLDER

Each check prints a line; the exit code is not 0 when one fails.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from checks import Checks, layout
from fp8_learners import NoTokenizer
from tiny_learners import MODELS, VOCAB_SIZE, make_batch, make_config, random_model

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.batch import Completion, Prompt, Trajectories
from megatron_calclip.config import Config
from megatron_calclip.diagnosis import RecipeReport
from megatron_calclip.diagnosis_passes import (
    Diagnosis,
    Model,
    build_learner,
    fp8_layers_only,
    get_masters,
    read_masters,
    set_masters,
    with_spread_masters,
)
from megatron_calclip.learner import checkpoint, cpu
from megatron_calclip.learner.parallel_linear import fp8_linears
from megatron_calclip.learner.runtime import Runtime
from megatron_calclip.weights.load import HFSource

LAYOUTS: dict[str, dict[str, Any]] = {"DP2": {}, "TP2": {"tp": 2}, "PP2": {"pp": 2}}
BOUNDS = ClipBounds(0.8, 1.2)
LRS = (1e-4, 1e-3)
NUM_LAYERS = 4
NUM_SEQUENCES = 320
# Results of two layouts differ by what crosses a code's border, one token by a lot, the mean over many by little.
LAYOUT_TOLERANCE = 0.02


def config(name: str, **precision: Any) -> Config:
    """A BF16 learner, or one with an FP8 recipe; no gradient clipping and Adam's usual epsilon: steps of known size."""
    return make_config(
        parallel=LAYOUTS[name],
        precision={"params_dtype": "bf16", "amax_group": "global", **precision},
        optimizer={"lr": 1e-3, "weight_decay": 0.1, "epsilon": 1e-12, "clip_grad": 0.0},
        algorithm={"num_minibatches": 1, "num_epochs": 1},
        train={"tokens_per_microbatch": 512, "deterministic": True},
    )


@functools.cache
def source() -> HFSource:
    """BF16 weights."""
    return HFSource.from_tensors(random_model("llama").state_dict()).cast(torch.bfloat16)


def diagnosis(name: str, runtime: Runtime) -> Diagnosis:
    """All sequences, also for the passes over single layers."""
    trajectories = make_batch("llama").trajectories
    return Diagnosis(
        config(name),
        Model(MODELS["llama"], source(), has_masters=False),
        runtime,
        trajectories,
        bounds=BOUNDS,
        lrs=LRS,
        num_layer_sequences=trajectories.num_sequences,
        say=lambda _: None,
    )


def noise_of_many(name: str, runtime: Runtime) -> float:
    """Mean |dlogp| of rowwise over ten thousand random tokens: over the few of the other checks it scatters by a tenth."""
    generator = torch.Generator().manual_seed(0)
    rows = [tuple(row) for row in torch.randint(0, VOCAB_SIZE, (NUM_SEQUENCES, 36), generator=generator).tolist()]
    prompts = [Prompt(index, row[:4], "", "") for index, row in enumerate(rows)]
    answers = [[Completion(row[4:], (-1.0,) * 32, finished=True, policy_version=0)] for row in rows]
    found = Diagnosis(
        config(name),
        Model(MODELS["llama"], source(), has_masters=False),
        runtime,
        Trajectories.from_completions(prompts, answers),
        bounds=BOUNDS,
        lrs=LRS[:1],
        num_layer_sequences=0,
        say=lambda _: None,
    )
    return found.measure("rowwise", config(name, recipe="rowwise")).unmoved.mean_abs_dlogp


def check_masters(checks: Checks, name: str, found: Diagnosis) -> None:
    """Masters are spread alike on every layout; live weights do not notice."""
    learner = build_learner(config(name), found.model, found.runtime)
    set_masters(learner, found.old)
    held = get_masters(learner)
    same = all(torch.equal(held[key], value) for key, value in found.old.items())
    checks.true(f"{name}: masters are what was set", same and held.keys() == found.old.keys())
    live = {key: value.clone() for key, value in learner.stream_hf()}
    same = all(torch.equal(value, source().read(key)) for key, value in live.items())
    checks.true(f"{name}: live weights are the model's", same)
    spread = with_spread_masters(source(), seed=0).read("model.norm.weight")
    own = found.old.get("decoder.final_layernorm.weight")
    checks.true(f"{name}: offsets depend on the name alone", own is None or torch.equal(own, spread))


def check_checkpoint(checks: Checks, name: str, found: Diagnosis, root: Path) -> None:
    """A run's checkpoint brings its masters, which are not spread again."""
    learner = build_learner(config(name), found.model, found.runtime)
    set_masters(learner, found.old)
    options: dict[str, Any] = {"tokenizer": NoTokenizer(), "state": {"position": 0}, "tensors": {}, "keep": 1}
    model = Model.open(checkpoint.save(root, 1, learner, **options), found.model.hf_config)
    masters = read_masters(learner, model.source)
    same = all(torch.equal(masters[key], value) for key, value in found.old.items())
    checks.true(f"{name}: masters of a checkpoint", model.has_masters and same)


def check_update(checks: Checks, name: str, found: Diagnosis) -> None:
    """Adam's first step is lr in every element with a gradient, and proportional to lr. Masters of a run are not spread."""
    decay = 0.1
    sizes = [(step + decay * found.old[key]).abs() for key, step in found.step.items() if "linear" in key]
    largest = max(float(size.max()) for size in sizes)
    share = sum(float((size > 0.9).sum()) for size in sizes) / sum(size.numel() for size in sizes)
    checks.true(f"{name}: a step of Adam", largest < 1.01 and share > 0.95, f"{largest:.4f} {share:.3f}")
    own = config(name)
    other = Diagnosis(
        replace(own, train=replace(own.train, seed=1)),  # would spread them in another way
        replace(found.model, has_masters=True),
        found.runtime,
        found.trajectories,
        bounds=BOUNDS,
        lrs=LRS[:1],
        num_layer_sequences=0,
        say=lambda _: None,
    )
    same = all(torch.equal(other.old[key], value) for key, value in found.old.items())
    checks.true(f"{name}: masters of a run stay as they are", same)
    pairs = [(other.masters_after(LRS[0])[key], value) for key, value in found.masters_after(LRS[0]).items()]
    worst = max(float((one - two).abs().max()) for one, two in pairs)
    checks.true(f"{name}: steps of two sizes", worst < 0.01 * LRS[0], f"{worst:.1e}")


def check_recipe(checks: Checks, name: str, found: Diagnosis, recipe: str, **precision: Any) -> RecipeReport:
    """What must hold for any recipe."""
    report = found.measure(recipe, config(name, recipe=recipe, **precision))
    label = f"{name}: {recipe} {precision or ''}".rstrip()
    layers = report.layers
    assert layers is not None
    checks.true(f"{label}: has noise", 0 < report.unmoved.mean_abs_dlogp < 1, f"{report.unmoved.mean_abs_dlogp:.4f}")
    if recipe != "tensorwise_delayed":
        checks.true(f"{label}: no floor over the same micro-batches", report.repeated.outside == 0)
    if not precision.get("fp8_param"):
        # All layers, over all sequences, in the same micro-batches: the same passes by another way.
        difference = abs(layers.mean_abs_dlogp - report.unmoved.mean_abs_dlogp)
        checks.true(f"{label}: all layers together", difference < 1e-9, f"{difference:.1e}")
    less = all(0 < noise < 1.5 * layers.mean_abs_dlogp for noise in layers.one_layer)
    checks.true(f"{label}: every layer alone", less and len(layers.one_layer) == NUM_LAYERS)
    small, large = report.updates
    moved = large.bf16.outside > small.bf16.outside and large.fp8.outside > small.fp8.outside
    detail = f"{small.bf16.outside:.3f} {large.bf16.outside:.3f} {large.nmae_r:.3f}"
    checks.true(f"{label}: updates", moved and small.nmae_r < 1 and [small.lr, large.lr] == list(LRS), detail)
    return report


def check_layers(checks: Checks, name: str, found: Diagnosis) -> None:
    """Layers are given their FP8 back, also after an exception."""
    learner = build_learner(config(name, recipe="rowwise", fp8_param=True), found.model, found.runtime)
    set_masters(learner, found.old)
    linears = fp8_linears([chunk.module for chunk in learner.chunks])
    before = [(linear.fp8, linear.weight.detach().clone()) for linear in linears]
    inside: list[bool] = []
    try:
        with fp8_layers_only(learner, (1, NUM_LAYERS)):
            inside = [linear.fp8 is not None for linear in linears]
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    per_rank = {"PP2": NUM_LAYERS // 2}.get(name, NUM_LAYERS)
    num_edges = {"PP2": 1}.get(name, 2)
    checks.true(f"{name}: only the layers asked for", sum(inside) * per_rank == len(linears) * num_edges)
    restored = all(
        linear.fp8 is fp8 and torch.equal(linear.weight, w) for linear, (fp8, w) in zip(linears, before, strict=True)
    )
    checks.true(f"{name}: layers as before", restored)


def main(root: Path) -> int:
    """All layouts; the number of failures.

    Args:
        root: an empty folder, the same for all ranks.
    """
    cpu.install()
    checks = Checks()
    noise: dict[str, float] = {}
    for name in LAYOUTS:
        with layout(config(name)) as runtime:
            found = diagnosis(name, runtime)
            check_masters(checks, name, found)
            check_layers(checks, name, found)
            check_recipe(checks, name, found, "rowwise")
            noise[name] = noise_of_many(name, runtime)
            if name == "DP2":
                check_checkpoint(checks, name, found, root)
                check_update(checks, name, found)
                check_recipe(checks, name, found, "tensorwise_delayed")
                check_recipe(checks, name, found, "tensorwise", fp8_param=True)
    for name, value in noise.items():
        distance = abs(value / noise["DP2"] - 1)
        checks.true(f"{name}: as noisy as DP2", distance < LAYOUT_TOLERANCE, f"{distance:.3f}")
    return len(checks.failures)


if __name__ == "__main__":
    sys.exit(min(main(Path(sys.argv[1])), 1))
