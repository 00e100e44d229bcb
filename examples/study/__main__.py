"""What FP8 does to the clip, what calibration repairs of it, and what it does not: runs, and tables of them.

    python -m examples.study --variant short     # minutes, most of them the supervised start; a single seed and few steps
    python -m examples.study                     # the hour: tensorwise with all arms, other recipes with two, three seeds
    python -m examples.study --variant full      # hours
    python -m examples.study --tables-only       # tables of what is there
    python -m examples.study --part search       # an hour: is there a setting in which a better clip earns reward?
    python -m examples.study --part smollm2      # a real model instead of the toy: needs its weights and GSM8K (`smollm2`)

Runs that are there and complete are not repeated: it may be stopped and started again, and the tables are valid for what
there is. `--jobs` of them run side by side. `runs/study/<variant>/tables.md` and `results.json` are written at the end, and
by `--tables-only`; `megatron-calclip report` draws the curves of any of the run folders.

The first part is a toy: 0.4M parameters, a generated task, noise dialled in. It shows the statistics of clipping and their repair. Whether a
better clip earns reward is measured, too: not shown in the study's regime, a little with four times its noise; see the tables.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from benchmarks.results import environment
from examples.study import search
from examples.study.arms import ARMS, RECIPE_OVERRIDES, VARIANTS, Variant
from examples.study.smollm2 import call, run_part
from examples.study.tables import Run, summarise, write_tables
from megatron_calclip.config_file import load_config
from megatron_calclip.errors import UserError

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "conf" / "noisy_cpu.yaml")
COMMON = ("eval.every=0", "checkpoint={save_every: 0, keep_best: false}", "tracking.tensorboard=false")


def train(overrides: Sequence[str], folder: Path) -> None:
    """Train, unless the run is there and complete. Output goes to `folder/output.txt`.

    Raises:
        UserError: when the run fails.
    """
    overrides = [*COMMON, *overrides, f"run_dir={folder}"]
    if Run.steps_done(folder) < load_config(CONFIG, overrides).train.num_steps:
        folder.mkdir(parents=True, exist_ok=True)
        call([sys.executable, str(ROOT / "examples" / "grpo_fp8.py"), CONFIG, *overrides], folder / "output.txt")


def train_all(runs: Sequence[tuple[str, Sequence[str], Path]], *, jobs: int) -> None:
    """Train what is missing, `jobs` runs at a time; after a failure those under way end, and no other begins.

    Args:
        runs: what to print, overrides and folder of each, in the order of their start.
        jobs: how many processes may train at a time.

    Raises:
        UserError: when a run fails.
    """

    def one(number: int, label: str, overrides: Sequence[str], folder: Path) -> None:
        print(f"{number}/{len(runs)}  {label}", flush=True)
        train(overrides, folder)

    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(one, number, *run) for number, run in enumerate(runs, 1)]
        try:
            for future in as_completed(futures):
                future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def start_of(recipe: str, variant: Variant, runs: Path) -> list[str]:
    """Overrides that load a recipe's supervised start as an ordinary model; a run of one step makes it where it is missing."""
    from megatron_calclip import warm_start  # Megatron: seconds that the tables alone do not need

    overrides = [f"precision.recipe={recipe}", *RECIPE_OVERRIDES.get(recipe, ()), *variant.overrides]
    start = warm_start.cached_folder(load_config(CONFIG, overrides))
    if not start.is_dir():
        print(f"supervised start of {recipe} ...", flush=True)
        train([*overrides, "train.num_steps=1"], runs / f"start_{recipe}")
    loads = [f"model.hf={start}", "model.shape=null", "model.warm_start.num_steps=0"]
    return [one for one in overrides if not one.startswith("model.")] + loads


def folder_of(runs: Path, recipe: str, arm: str, seed: int) -> Path:
    """Where a run lies."""
    return runs / f"{recipe}-{arm.replace(', ', '-').replace(' ', '_')}-{seed}"


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=VARIANTS, default="hour")
    parser.add_argument("--runs", type=Path, default=Path("runs/study"), help="folder of all runs")
    parser.add_argument("--tables-only", action="store_true", help="run nothing")
    parser.add_argument("--part", choices=("toy", "search", "smollm2"), default="toy")
    parser.add_argument(
        "--model",
        type=Path,
        default=Path("smollm2-135m"),
        metavar="FOLDER",
        help="of the real model (default smollm2-135m)",
    )
    parser.add_argument(
        "--gsm8k", default="gsm8k_train.jsonl", metavar="FILE", help="GSM8K as published (default gsm8k_train.jsonl)"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs side by side, but in --part smollm2 (default 1)"
    )
    arguments = parser.parse_args(argv)
    if arguments.jobs < 1:
        parser.error("--jobs must be at least 1")
    try:
        print(run(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


def run(arguments: argparse.Namespace) -> str:
    """Run what is missing, and write the tables, which are returned."""
    if arguments.part == "smollm2":
        return run_part(
            arguments.variant,
            arguments.runs,
            model=arguments.model,
            gsm8k=arguments.gsm8k,
            tables_only=arguments.tables_only,
        )
    train_missing = None if arguments.tables_only else partial(train_all, jobs=arguments.jobs)
    if arguments.part == "search":
        return search.run_part(arguments.runs / "search", start_of=start_of, train_all=train_missing)
    variant, runs = VARIANTS[arguments.variant], arguments.runs / arguments.variant
    # Seed by seed, so that a study that is stopped has whole rounds of all arms.
    wanted = [(recipe, arm, seed) for seed in variant.seeds for recipe, arms in variant.recipes.items() for arm in arms]
    if train_missing:
        starts = {recipe: start_of(recipe, variant, runs) for recipe in variant.recipes}
        train_missing(
            [
                (
                    f"{recipe}: {arm}, seed {seed}",
                    [*starts[recipe], f"train.num_steps={variant.steps}", f"train.seed={seed}", *ARMS[arm]],
                    folder_of(runs, recipe, arm, seed),
                )
                for recipe, arm, seed in wanted
            ]
        )
    found = [
        Run(recipe, arm, seed, folder)
        for recipe, arm, seed in wanted
        if Run.steps_done(folder := folder_of(runs, recipe, arm, seed)) >= variant.steps
    ]
    results = summarise(found)
    runs.mkdir(parents=True, exist_ok=True)
    (runs / "results.json").write_text(json.dumps({"environment": environment(), **results}, indent=1) + "\n")
    return write_tables(results, runs / "tables.md")


if __name__ == "__main__":
    main()
