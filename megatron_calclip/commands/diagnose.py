"""`megatron-calclip diagnose`: what each FP8 recipe does to a model's probabilities and importance ratios.

    megatron-calclip diagnose MODEL --config tiny_cpu --set data.train=prompts.jsonl --json noise.json --plot noise.svg
    torchrun --nproc-per-node 2 --no-python megatron-calclip diagnose MODEL --config CONFIG --set parallel.pp=2

What: before a run is paid for, the noise that FP8 will put into its ratios, by the run's own learner on the run's own
layout. MODEL is a HF folder, or a checkpoint of ours with its FP32 masters. Tokens are answers sampled in BF16 by the
embedded engine, or with `--text` those of the file. See docs/diagnose.md for every column.

Left out on purpose: how rewards would develop, which no forward pass can tell.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from megatron_calclip.commands.output import check_plot, rank_zero_speaks_first, writing
from megatron_calclip.config import Config
from megatron_calclip.config_file import launch_world_size, load_config
from megatron_calclip.errors import UserError
from megatron_calclip.launch import wrong_apex

if TYPE_CHECKING:  # usage errors come before heavy imports
    from megatron_calclip.batch import Trajectories
    from megatron_calclip.diagnosis import Report
    from megatron_calclip.diagnosis_passes import Model
    from megatron_calclip.learner.runtime import Runtime
    from megatron_calclip.weights.mapping import ModelShape

FP32_SCALES = "power_of_two_scales=false"
DEFAULT_RECIPES = (
    "tensorwise",
    "rowwise",
    f"rowwise:{FP32_SCALES}",
    "blockwise",
    f"blockwise:{FP32_SCALES}",
    "mxfp8",
)
# Answers, too, are sampled in BF16: their tokens should not depend on the sampler's noise.
_BF16 = (
    *("precision.recipe=bf16", "precision.fp8_param=false", "precision.output_layer=false"),
    "rollout.precision=bf16",
)
# What belongs to one recipe must not be inherited by another.
_OWN = ("precision.format=auto", "precision.power_of_two_scales=null")


class Variant(NamedTuple):
    """One recipe to be measured."""

    name: str
    config: Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="a HF folder, or a checkpoint such as RUN_DIR/step_200"
    )
    parser.add_argument("--config", required=True, metavar="CONFIG", help="path or name of the run's configuration")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="section.key=value", help="replaces a setting"
    )
    parser.add_argument(
        "--recipe",
        dest="recipes",
        action="append",
        default=[],
        metavar="NAME[:key=value]",
        help="a recipe, with settings of `precision` joined by colons; repeated. Default: "
        + ", ".join(DEFAULT_RECIPES),
    )
    parser.add_argument("--prompts", metavar="FILE.jsonl", help="problems; default: data.train of the configuration")
    parser.add_argument(
        "--text", action="store_true", help="measure on the answers in the file instead of sampling some"
    )
    parser.add_argument("--num-prompts", type=_positive, default=24, metavar="N", help="answers (default 24)")
    parser.add_argument(
        "--lr", dest="lrs", type=_rates, metavar="LR,LR", help="sizes of the update; default: the configuration's"
    )
    parser.add_argument(
        "--layer-prompts",
        type=_count,
        default=4,
        metavar="N",
        help="answers on which each layer alone is in FP8, a pass for each; 0 leaves that out (default 4)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot them (.png, .svg, .pdf)")


def _count(text: str) -> int:
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 on")


def _positive(text: str) -> int:
    if text.isdecimal() and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")


def _rates(text: str) -> list[float]:
    with contextlib.suppress(ValueError):
        values = [float(part) for part in text.split(",")]
        if all(0 < value < math.inf for value in values):
            return values
    raise argparse.ArgumentTypeError(f"{text!r}: give learning rates above 0, such as 1e-6,4e-6")


def run(arguments: argparse.Namespace) -> None:
    """Measure, print the tables, write the files; on every rank of a launch.

    Raises:
        UserError: for a model, settings, prompts or files that cannot be used.
    """
    with rank_zero_speaks_first():
        _run(arguments)


def _run(arguments: argparse.Namespace) -> None:
    if arguments.plot is not None:
        check_plot(arguments.plot)
    hf_folder = _hf_folder(arguments.model)
    overrides = [
        f"model.hf={json.dumps(str(hf_folder), ensure_ascii=False)}",
        "model.shape=null",
        # A run's checkpoint is read with the run's configuration, which names its tokenizer; a HF folder has its own.
        *(["model.tokenizer=null"] if hf_folder == arguments.model else []),
        "model.warm_start.num_steps=0",
        *([f"data.train={json.dumps(arguments.prompts, ensure_ascii=False)}"] if arguments.prompts else []),
        *arguments.overrides,
    ]
    reference = load_config(arguments.config, [*overrides, *_BF16], world_size=launch_world_size())
    variants = [variant(name, arguments.config, overrides) for name in arguments.recipes or DEFAULT_RECIPES]
    if (problem := wrong_apex()) is not None:
        raise problem
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    from megatron_calclip.learner import cpu, runtime

    cpu.install()  # before anything else imports Megatron
    from megatron_calclip.diagnosis_report import as_json, plot, tables

    started = runtime.start(reference)
    report = diagnose(arguments, reference, variants, started)
    if started.rank == 0:
        for table in tables(report):
            Console(highlight=False).print(table)
        if arguments.json is not None:
            with writing(arguments.json, "--json"):
                arguments.json.write_text(json.dumps(as_json(report), indent=1) + "\n", encoding="utf-8")
        if arguments.plot is not None:
            with writing(arguments.plot, "--plot"):
                plot(report, arguments.plot)
    runtime.stop()


def variant(name: str, config: str, overrides: Sequence[str]) -> Variant:
    """A recipe with its settings, checked.

    Args:
        name: `recipe:key=value:...`.
        config: path or name of the configuration.
        overrides: for all recipes.

    Raises:
        UserError: for what is no recipe, or a setting that is none of `precision`.
    """
    recipe, *settings = name.split(":")
    own = [*_OWN, f"precision.recipe={recipe}", *(f"precision.{setting}" for setting in settings)]
    if recipe == "bf16":
        raise UserError("--recipe", "bf16 is what all recipes are compared with; name FP8 recipes")
    return Variant(name, load_config(config, [*overrides, *own], world_size=launch_world_size()))


def _hf_folder(model: Path) -> Path:
    """Where configuration and tokenizer of MODEL are."""
    if not os.path.isdir(model):
        raise UserError(
            "MODEL", f"{str(model)!r} is no folder; give a HF folder, or a checkpoint such as RUN_DIR/step_200"
        )
    return model if (model / "config.json").is_file() else model / "hf"


def diagnose(arguments: argparse.Namespace, reference: Config, variants: Sequence[Variant], started: Runtime) -> Report:
    """All passes.

    Args:
        arguments: of the command.
        reference: configuration of the BF16 learner.
        variants: the recipes.
        started: this rank.
    """
    from megatron_calclip.algorithms.bounds import ClipBounds
    from megatron_calclip.data import train_stream
    from megatron_calclip.diagnosis_passes import Diagnosis, Model
    from megatron_calclip.hf import load_hf_config, load_tokenizer
    from megatron_calclip.precision.backend import remarks
    from megatron_calclip.weights.mapping import ModelShape

    def say(text: str) -> None:
        if started.rank == 0:
            print(text, flush=True)

    tokenizer = load_tokenizer(reference.model)
    hf_config = load_hf_config(reference, tokenizer)
    shape = ModelShape.from_hf_config(hf_config)
    variants = able(variants, shape, asked_for=bool(arguments.recipes), say=say)
    model = Model.open(arguments.model, hf_config)
    num_prompts = arguments.num_prompts
    prompts = train_stream(reference, tokenizer).take(0, num_prompts)
    if arguments.text:
        trajectories = given_answers(reference, tokenizer, prompts)
    else:
        trajectories = sampled_answers(reference, model, tokenizer, prompts, started)
    say(f"{trajectories.num_sequences} answers, {trajectories.num_response_tokens} tokens")
    clip = reference.algorithm.clip
    diagnosis = Diagnosis(
        reference,
        model,
        started,
        trajectories,
        bounds=ClipBounds(clip.lower, clip.upper),
        lrs=arguments.lrs or [reference.optimizer.lr],
        num_layer_sequences=arguments.layer_prompts,
        say=say,
    )
    reports = []
    for name, config in variants:
        for line in remarks(config, shape):
            say(f"{name}: {line}")
        reports.append(diagnosis.measure(name, config))
    return diagnosis.report(reports)


def able(
    variants: Sequence[Variant], shape: ModelShape, *, asked_for: bool, say: Callable[[str], None]
) -> list[Variant]:
    """Those of the recipes that this device can compute, before any is measured.

    Args:
        variants: the recipes.
        shape: the model.
        asked_for: they were named, so that one which cannot be computed is an error; else it is left out, and said.
        say: prints a line.

    Raises:
        UserError: for a recipe that was asked for, or when none is left.
    """
    from megatron_calclip.precision.backend import check

    found = []
    for one in variants:
        try:
            check(one.config, shape)
            found.append(one)
        except UserError as error:
            if asked_for:
                raise UserError(f"--recipe {one.name}", str(error)) from None
            say(f"left out: {one.name}: {error}")
    if not found:
        raise UserError(
            "--recipe", "none of the default recipes can be computed here; see the lines above, and name one"
        )
    return found


def given_answers(config: Config, tokenizer: Any, prompts: Sequence[Any]) -> Trajectories:
    """Answers as they stand in the file, cut to `rollout.max_new_tokens`."""
    from megatron_calclip.batch import Completion, Trajectories

    answers = []
    for prompt in prompts:
        ids = tuple(tokenizer(prompt.answer, add_special_tokens=False)["input_ids"])[: config.rollout.max_new_tokens]
        if not ids:
            raise UserError(
                "--text", f"the answer to {prompt.text[:40]!r} has no tokens; give one, or leave --text out"
            )
        answers.append([Completion(ids, (0.0,) * len(ids), finished=True, policy_version=0)])
    return Trajectories.from_completions(prompts, answers)


def sampled_answers(
    config: Config, model: Model, tokenizer: Any, prompts: Sequence[Any], started: Runtime
) -> Trajectories:
    """One answer to each prompt from the embedded engine, the same on every rank."""
    from megatron_calclip.hf import stop_token_ids
    from megatron_calclip.learner.model import DTYPES
    from megatron_calclip.rollout.local import LocalEngine
    from megatron_calclip.rollout.sampler import Sampler

    rollout = config.rollout
    engine = LocalEngine(
        model.hf_config,
        device=started.device,
        dtype=DTYPES[rollout.dtype],
        precision=rollout.precision,
        max_batch_size=rollout.max_batch_size,
    )
    engine.load_weights(model.source.stream(), policy_version=0)
    sampler = Sampler(config, engine, started, stop_token_ids=stop_token_ids(config.model, tokenizer))
    return sampler.sample(list(prompts), samples_per_prompt=1, temperature=rollout.temperature, seed_step=0)
