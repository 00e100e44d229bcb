"""The study's second part: a real model, SmolLM2-135M-Instruct, on GSM8K, with no noise dialled in.

    python tools/fetch_smollm2.py smollm2-135m
    python -m examples.study --part smollm2 --model smollm2-135m --gsm8k gsm8k_train.jsonl

What: (a) `megatron-calclip diagnose` for every recipe on answers that the model samples, and (b) a few GRPO steps in FP8, calibrated
at every step, whose dumps are replayed under other settings. `smollm2_tables` puts the numbers beside the paper's.

A model of this size solves next to no problem of GSM8K, and where all rewards of a group are equal there is no gradient and
nothing to clip. So the problems are easy ones, two solved ones stand before each as turns of the chat, the reward has partial credit
(`gsm8k_reward`), and the learning rate is such that BF16 clips something. All of that is chosen; none of it is a result.

Left out on purpose: a comparison of rewards between arms. Steps of minutes are too few to learn anything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import environment
from examples.study.gsm8k_reward import final, results, without_marks
from examples.study.smollm2_tables import summarise, write_tables
from examples.study.tables import Run
from megatron_calclip.commands.diagnose import DEFAULT_RECIPES
from megatron_calclip.data_files import open_rows
from megatron_calclip.errors import EXIT_FAILED, UserError

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "conf" / "smollm2_135m.yaml")

MAX_RESULTS, MAX_WORDS, MAX_NUMBER = 2, 30, 100
"""Of a problem: steps of its solution, words of its question, and the largest of its results, all of them positive and whole. A
fourteenth of GSM8K is that easy."""
NUM_SHOTS = 2
"""Solved problems before each prompt: the shortest ones, which cost least."""

COMMON = (
    *("data.prompt_field=question", "data.answer_field=answer", "eval.sets=[]"),
    *("reward.name=examples.study.gsm8k_reward.reward", "reward.num_workers=1"),
    *(
        "rollout.max_new_tokens=96",
        "train.tokens_per_microbatch=2048",
        "tracking.tensorboard=false",
        "optimizer.lr=5e-6",
    ),
    "checkpoint={save_every: 2, keep: 1, keep_best: false}",
)
"""Overrides of the configuration for all that is run here."""
CALIBRATION = ("calibration.interval=1", "calibration.start_step=1", "calibration.dump=true")
"""Of the runs: every step is calibrated and dumped."""


@dataclass(frozen=True)
class Size:
    """How much is run."""

    diagnosed: tuple[str, ...]
    """Recipes of the diagnosis."""
    num_answers: int
    """Answers that it samples."""
    trained: tuple[str, ...]
    """Recipes of the GRPO runs."""
    steps: int
    prompts: int
    samples: int
    """Of each prompt."""


SIZES = {
    "short": Size(diagnosed=DEFAULT_RECIPES[:1], num_answers=8, trained=("tensorwise",), steps=2, prompts=4, samples=4),
    "hour": Size(diagnosed=DEFAULT_RECIPES, num_answers=16, trained=("tensorwise",), steps=5, prompts=8, samples=6),
    "full": Size(
        diagnosed=DEFAULT_RECIPES,
        num_answers=32,
        trained=("tensorwise", "rowwise", "blockwise"),
        steps=20,
        prompts=8,
        samples=8,
    ),
}
"""`hour` takes a quarter of an hour of one core; each run's checkpoint 2 GB."""


def run_part(variant: str, runs: Path, *, model: Path, gsm8k: str, tables_only: bool) -> str:
    """Run what is missing, and write the tables.

    Args:
        variant: key of `SIZES`.
        runs: folder of the study.
        model: the model's HF folder.
        gsm8k: a data file of GSM8K as published, in the form of `data.train`.
        tables_only: run nothing.

    Returns:
        The tables.

    Raises:
        UserError: when the model or the data is not there, or a run fails.
    """
    size, runs = SIZES[variant], runs / "smollm2" / variant
    runs.mkdir(parents=True, exist_ok=True)
    if not tables_only:
        common = prepare(runs, model=model, gsm8k=gsm8k)
        if not (runs / "diagnosis.json").is_file():
            print("diagnosis ...", flush=True)
            diagnose(size, common, runs, model=model)
        for recipe in size.trained:
            if Run.steps_done(runs / recipe) < size.steps:
                write(size, runs)
                print(f"GRPO, {recipe} ...", flush=True)
                train(size, recipe, [*common, f"model.hf={json.dumps(str(model))}"], runs / recipe)
    return write(size, runs)


def write(size: Size, runs: Path) -> str:
    """`results.json` and `tables.md` of what is there; returns the tables."""
    found = [Run(recipe, "calibrated", 0, runs / recipe) for recipe in size.trained if Run.steps_done(runs / recipe)]
    diagnosis = runs / "diagnosis.json"
    summary = summarise(json.loads(diagnosis.read_text()) if diagnosis.is_file() else None, found)
    (runs / "results.json").write_text(json.dumps({"environment": environment(), **summary}, indent=1) + "\n")
    return write_tables(summary, runs / "tables.md")


def prepare(runs: Path, *, model: Path, gsm8k: str) -> list[str]:
    """Write the problems and the template with its solved ones; returns the overrides that name them.

    Raises:
        UserError: when the model or the data is not there.
    """
    if not (model / "config.json").is_file():
        raise UserError("--model", f"no model in {str(model)!r}; fetch one: python tools/fetch_smollm2.py {model}")
    from transformers import AutoTokenizer

    rows = [raw.value for raw in open_rows(gsm8k, where="--gsm8k").rows()]
    easy = easy_problems(rows)
    if len(easy) <= NUM_SHOTS:
        raise UserError(
            "--gsm8k", f"{gsm8k!r} has {len(easy)} easy problems; give GSM8K as published (question, answer)"
        )
    shots, problems = easy[:NUM_SHOTS], easy[NUM_SHOTS:]
    (runs / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    template = str(AutoTokenizer.from_pretrained(model).get_chat_template())
    (runs / "template.jinja").write_text(with_shots(template, shots))
    return [
        *COMMON,
        f"data.train={json.dumps(str(runs / 'problems.jsonl'))}",
        f"data.chat_template={json.dumps(str(runs / 'template.jinja'))}",
    ]


def easy_problems(rows: Sequence[Any]) -> list[dict[str, str]]:
    """GSM8K's easy rows, the shortest ones first; rows of another kind are left out."""
    easy = [
        {"question": row["question"], "answer": row["answer"]}
        for row in rows
        if isinstance(row, dict)
        and all(isinstance(row.get(name), str) for name in ("question", "answer"))
        and _is_easy(row["question"], row["answer"])
    ]
    return sorted(easy, key=lambda row: len(row["question"]) + len(row["answer"]))


def _is_easy(question: str, solution: str) -> bool:
    found = results(solution)
    return (
        1 <= len(found) <= MAX_RESULTS
        and len(question.split()) <= MAX_WORDS
        and all(number.isdecimal() and 0 < int(number) <= MAX_NUMBER for number in found | {final(solution)})
    )


def with_shots(template: str, shots: Sequence[dict[str, str]]) -> str:
    """A chat template that puts solved problems before whatever it is given, as earlier turns."""
    turns = [
        {"role": role, "content": text}
        for shot in shots
        for role, text in (("user", shot["question"]), ("assistant", without_marks(shot["answer"])))
    ]
    return "{% set messages = " + json.dumps(turns) + " + messages %}" + template


def diagnose(size: Size, common: Sequence[str], runs: Path, *, model: Path) -> None:
    """Write `diagnosis.json`, on answers that the model samples in BF16."""
    aside = runs / "diagnosis.part"
    command = [
        "diagnose",
        str(model),
        "--config",
        CONFIG,
        "--num-prompts",
        str(size.num_answers),
        "--layer-prompts",
        "0",
    ]
    command += [part for recipe in size.diagnosed for part in ("--recipe", recipe)]
    sets = [*common, "rollout.precision=bf16", "train.num_steps=1", f"train.prompts_per_step={size.num_answers}"]
    command += [part for override in sets for part in ("--set", override)]
    python = "import sys; from megatron_calclip.cli import main; main(sys.argv[1:])"
    call([sys.executable, "-c", python, *command, "--json", str(aside)], runs / "diagnosis.txt")
    os.replace(aside, runs / "diagnosis.json")


def train(size: Size, recipe: str, common: Sequence[str], folder: Path) -> None:
    """Train, or go on with a run that was stopped."""
    overrides = train_overrides(size, recipe, common)
    folder.mkdir(parents=True, exist_ok=True)
    call(
        [sys.executable, "-m", "examples.study.smollm2_train", CONFIG, *overrides, f"run_dir={folder}"],
        folder / "output.txt",
    )


def train_overrides(size: Size, recipe: str, common: Sequence[str]) -> list[str]:
    """What a GRPO run of some size adds to `common`, and `common`."""
    sizes = {"num_steps": size.steps, "prompts_per_step": size.prompts, "samples_per_prompt": size.samples}
    return [
        *common,
        *CALIBRATION,
        f"precision.recipe={recipe}",
        *(f"train.{key}={value}" for key, value in sizes.items()),
    ]


def call(command: Sequence[str], output: Path) -> None:
    """Run a command on one thread, with this checkout importable and its output in a file.

    Raises:
        UserError: when it fails.
    """
    places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)}
    with output.open("a") as file:
        if subprocess.run(command, env=environment, stdout=file, stderr=file).returncode:
            raise UserError(str(output), "ends with what went wrong; mend that and start again", exit_code=EXIT_FAILED)
