"""The study's search: is there a setting in which a better clip earns reward?

    python -m examples.study --part search

What: the oracle, which clips by BF16's ratios at every mini-batch and so bounds what any calibration can win, against FP8 with
fixed bounds, in settings harsher than the study's: more noise, larger steps, two epochs, rollouts that are a step old, longer
answers. Both arms of a seed see the same prompts from the same supervised start; a difference is taken seed by seed.

Of five settings one may differ by chance. So the one in which the oracle won reward with the first three seeds is run again with five new
ones, which alone are to be believed, and with calibrated bounds, on the regime's grid and on a wider one.

Left out on purpose: calibrated arms elsewhere. Where the oracle wins nothing, no bounds can.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import environment
from examples.study.arms import ARMS, Variant
from examples.study.tables import CALIBRATED, VANILLA, Row, Run, cell, says, summarise

ORACLE = "fp8, oracle"
RECIPE = "tensorwise"
SEEDS = (0, 1, 2)
STEPS = 24


@dataclass(frozen=True)
class Setting:
    """What differs from the study."""

    overrides: tuple[str, ...]
    """Of the runs."""
    of_start: tuple[str, ...] = ()
    """Of the supervised start and of the runs."""


def _noise(times: int) -> str:
    outlier, first = 32768 * times, 8192 * times
    return f"precision.emulation={{block_size: 32, channel_outlier: {outlier}, first_token_outlier: {first}}}"


WIDE = "fp8, calibrated, grid from 0.02"
"""The regime's grid begins at 0.2, where L ends when FP8 clips so much too much."""
SEARCHED = ARMS | {WIDE: (*ARMS[CALIBRATED], "calibration.grid_lower=[0.02, 0.9, 0.02]")}
"""All arms by name."""
FASTER = "optimizer.lr=2.0e-4"
SETTINGS = {
    "noise x 2, learning rate x 2": Setting((_noise(2), FASTER)),
    "noise x 4": Setting((_noise(4),)),
    "two epochs, learning rate x 2": Setting(("algorithm.num_epochs=2", FASTER)),
    "rollouts a step old, 16 mini-batches, learning rate x 2": Setting(
        ("rollout.max_staleness=1", "algorithm.num_minibatches=16", FASTER)
    ),
    "answers of 24 tokens instead of 18": Setting(
        (),
        of_start=("data.scratchpad.num_digits=8", "rollout.max_new_tokens=24", "model.max_sequence_length=41"),
    ),
}
"""Name -> what differs."""


CONFIRMED, NEW_SEEDS = "noise x 4", (3, 4, 5, 6, 7)
"""The setting that is run again, and its seeds."""


def wanted() -> Iterator[tuple[str, str, str, int]]:
    """All runs: a row's label, the setting, the arm, the seed. Seed by seed, so that there are whole rows early."""
    for seed in SEEDS:
        for name in SETTINGS:
            for arm in (VANILLA, ORACLE):
                yield name, name, arm, seed
    for seed in NEW_SEEDS:
        for arm in (VANILLA, ORACLE, CALIBRATED, WIDE):
            yield f"{CONFIRMED}, new seeds", CONFIRMED, arm, seed


def overrides_of(setting: Setting, arm: str, seed: int, start: Sequence[str]) -> list[str]:
    """Of one run."""
    common = [f"train.num_steps={STEPS}", f"train.seed={seed}"]
    return [*start, *setting.of_start, *common, *SEARCHED[arm], *setting.overrides]


def folder_of(runs: Path, name: str, arm: str, seed: int) -> Path:
    """Where a run lies."""
    words = "".join(letter if letter.isalnum() else "_" for letter in f"{name}-{arm}")
    return runs / f"{words}-{seed}"


def run_part(
    runs: Path,
    *,
    start_of: Callable[[str, Variant, Path], list[str]],
    train_all: Callable[[Sequence[tuple[str, Sequence[str], Path]]], None] | None,
) -> str:
    """Run what is missing, and write the table.

    Args:
        runs: folder of all runs.
        start_of: makes a supervised start, and returns what loads it.
        train_all: trains those of the runs (what to print, overrides, folder) that are not complete; None: run nothing.
    """
    runs_wanted = list(wanted())
    if train_all:
        variants = {name: Variant(STEPS, SEEDS, recipes={}, overrides=one.of_start) for name, one in SETTINGS.items()}
        starts = {name: start_of(RECIPE, variant, runs) for name, variant in variants.items()}
        train_all(
            [
                (
                    f"{name}: {arm}, seed {seed}",
                    overrides_of(SETTINGS[name], arm, seed, starts[name]),
                    folder_of(runs, name, arm, seed),
                )
                for _, name, arm, seed in runs_wanted
            ]
        )
    found = [
        Run(label, arm, seed, folder)
        for label, name, arm, seed in runs_wanted
        if Run.steps_done(folder := folder_of(runs, name, arm, seed)) >= STEPS
    ]
    results = summarise(found)
    runs.mkdir(parents=True, exist_ok=True)
    (runs / "results.json").write_text(json.dumps({"environment": environment(), **results}, indent=1) + "\n")
    text = markdown(results)
    (runs / "tables.md").write_text(text + "\n")
    return text


def markdown(results: Row) -> str:
    """The table, and what it says; settings of which an arm is missing are left out."""
    lines = [
        f"An arm less vanilla, {STEPS} steps, means over seeds ± half of their 95% interval (Student's t).",
        "",
        "| setting | arm | seeds | FP8 / BF16 clips of A < 0, vanilla | clipped of A < 0, %: vanilla | arm | L at the arm's end "
        "| vanilla: held-out score | reward, last third "
        "| arm less vanilla: held-out score | reward, last third | entropy, last third |",
        "|---" * 12 + "|",
    ]
    verdicts = []
    for label, arms in results["arms"].items():
        vanilla = arms.get(VANILLA)
        for arm, differences in results["differences"].get(label, {}).items():
            reward = differences["reward/mean"]
            cells = [
                cell(vanilla["overclip low"]),
                *(cell(one["clip/low_negative"], scale=100) for one in (vanilla, arms[arm])),
                cell(arms[arm]["clip/lower"]),
                *(cell(vanilla[column]) for column in ("eval/score", "reward/mean")),
                *(cell(differences[column]) for column in ("eval/score", "reward/mean", "entropy")),
            ]
            lines.append(f"| {label} | {arm} | {reward['seeds']} | " + " | ".join(cells) + " |")
            verdicts.append(f"- {label}: reward of *{arm}* less that of *{VANILLA}* {cell(reward)}: {says(reward)}")
    return "\n".join([*lines, "", *verdicts])
