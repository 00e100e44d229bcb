"""What is compared: arms of `conf/noisy_cpu.yaml` as overrides, and how much of it each variant of the study runs.

Every arm starts from the same supervised start, whose end was trained in FP8, so that BF16 and FP8 begin equal. FP8 arms
sample in FP8, too. The noise that large models have by themselves is dialled into the emulated quantiser.
"""

from __future__ import annotations

from dataclasses import dataclass

NO_CALIBRATION = ("calibration.enabled=false", "calibration.measure=every_step")
FP8_ROLLOUT = ("rollout.precision=fp8_per_channel",)
BF16_LEARNER = (
    *("precision.recipe=bf16", "precision.backend=auto", "precision.output_layer=false"),
    "precision.emulation={block_size: null, channel_outlier: 1, first_token_outlier: 1}",
)
RELAXED_LOWER = 0.46
"""About where calibration on the wide grid settles in this regime (docs/results.md)."""

ARMS: dict[str, tuple[str, ...]] = {
    "bf16": (*NO_CALIBRATION, *BF16_LEARNER),
    "bf16, FP8 rollout": (*NO_CALIBRATION, *BF16_LEARNER, *FP8_ROLLOUT),
    "fp8": (*NO_CALIBRATION, *FP8_ROLLOUT),
    "fp8, L relaxed": (*NO_CALIBRATION, *FP8_ROLLOUT, f"algorithm.clip.lower={RELAXED_LOWER}"),
    "fp8, calibrated": ("calibration.measure=every_step", "calibration.dump=true", *FP8_ROLLOUT),
    "fp8, oracle": (*NO_CALIBRATION, *FP8_ROLLOUT, "algorithm.loss=oracle"),
    "fp8, CISPO": (*NO_CALIBRATION, *FP8_ROLLOUT, "algorithm.loss=cispo"),
    "fp8, BAPO": (*NO_CALIBRATION, *FP8_ROLLOUT, "algorithm.loss=bapo"),
    "fp8, calibrated, start at the reference": (
        "calibration.measure=every_step",
        "calibration.start=[0.8, 1.24]",
        *FP8_ROLLOUT,
    ),
    "fp8, calibrated, interval 6": ("calibration.measure=every_step", "calibration.interval=6", *FP8_ROLLOUT),
}
"""Name -> overrides."""

RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "blockwise", "mxfp8")
RECIPE_OVERRIDES = {"tensorwise_delayed": ("precision.output_layer=false",)}
"""Delayed scaling keeps histories for decoder layers only."""
MAIN, PAIR = tuple(ARMS), ("fp8", "fp8, calibrated")

REPLAYED: tuple[tuple[str, ...], ...] = (
    ("grid_lower=0.5:0.9:0.02", "start=0.6:1.8"),  # the paper's grid, from a start that lies on it
    ("token_fraction=0.25,0.5",),
    ("balance=surrogate",),
    ("weighting=token",),
    ("pool=1",),
    ("preset=paper,robust",),
)
"""Ablations that need no new run: each entry, all its changes together, is replayed on the
dumps of the calibrated arm, beside the run's own settings."""


@dataclass(frozen=True)
class Variant:
    """How much is run."""

    steps: int
    seeds: tuple[int, ...]
    recipes: dict[str, tuple[str, ...]]
    """Recipe -> its arms."""
    overrides: tuple[str, ...] = ()


VARIANTS = {
    # A shorter supervised start solves nothing of the task, and then there is no gradient and nothing to clip.
    "short": Variant(steps=8, seeds=(0,), recipes={"tensorwise": ("bf16", "fp8", "fp8, calibrated", "fp8, oracle")}),
    "hour": Variant(steps=24, seeds=(0, 1, 2), recipes={"tensorwise": MAIN} | {recipe: PAIR for recipe in RECIPES[1:]}),
    "full": Variant(steps=60, seeds=(0, 1, 2), recipes={recipe: MAIN for recipe in RECIPES}),
}
