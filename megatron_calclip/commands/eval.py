"""`megatron-calclip eval`: Avg@n, pass@k and maj@n of a model on sets of problems, with intervals, in one command.

    megatron-calclip eval MODEL --sets aime24 math500 gsm8k=test.jsonl --n 32 --temperature 0.6 --out results/math
    torchrun --nproc-per-node 8 --no-python megatron-calclip eval RUN_DIR/step_200 -- --sets aime25 --n 32 --out results/step_200

MODEL is a HF folder, a run's folder (its newest checkpoint), or one checkpoint of it. A run is evaluated under its own
configuration, a HF folder under the defaults, with its tokenizer's chat template where there is one; `--config` and `--set`
change either. Completions come from the rollout engine that the configuration names: by default transformers inside every rank,
or vLLM servers (`--set rollout.engine=vllm --set rollout.vllm.launch=true`). See docs/evaluation.md.

Left out on purpose: training data and learner; nothing here needs the layout that a checkpoint was trained in.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_calclip.commands.output import rank_zero_speaks_first, writing
from megatron_calclip.config import Config
from megatron_calclip.config_file import launch_world_size, load_config, names_setting
from megatron_calclip.errors import UserError
from megatron_calclip.launch import wrong_apex

_MAX_NEW_TOKENS = 4096
"""Longest completion of a HF folder's model, where nobody says; at most half of its context."""
_ONE_RANK_EACH = (
    "model.warm_start.num_steps=0",
    "parallel={tp: 1, pp: 1, vpp: null, cp: 1, sequence_parallel: false}",
    "algorithm={num_minibatches: 1, old_log_probs: matched}",
    "data.bad_rows=skip",
)
"""Every rank holds an engine of its own; bad rows of a set are reported, and end nothing."""


@dataclass(frozen=True)
class Target:
    """What MODEL names."""

    folder: Path
    """With weights; of a run's folder, where its checkpoints are."""
    kind: str
    """`hf`, `checkpoint` or `run`."""
    config: Path | None
    """The run's configuration."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        help="a HF folder, a run's folder, or a checkpoint such as RUN_DIR/step_200",
    )
    parser.add_argument(
        "--sets",
        nargs="+",
        metavar="[LAYOUT=]SET",
        help="sets by layout and file, layout alone, or hub name (docs/data.md); default: the configuration's",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where report and completions go")
    parser.add_argument("--n", type=int, metavar="N", help="completions per problem")
    parser.add_argument("--temperature", type=float, metavar="T", help="of sampling; 0 is greedy")
    parser.add_argument("--top-p", type=float, metavar="P", help="nucleus mass")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="longest completion")
    parser.add_argument("--num-prompts", type=int, metavar="N", help="only the first problems of each set")
    parser.add_argument("--seed", type=int, metavar="N", help="of all random numbers")
    parser.add_argument("--config", metavar="CONFIG", help="path or name of a configuration; default: the run's")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="section.key=value", help="replaces a setting"
    )


def run(arguments: argparse.Namespace) -> None:
    """Evaluate, print the table, write the files; on every rank of a launch.

    Raises:
        UserError: for a model, settings, sets or a folder that cannot be used.
    """
    with rank_zero_speaks_first():
        _run(arguments)


def _run(arguments: argparse.Namespace) -> None:
    if os.path.exists(arguments.out / "report.json"):
        raise UserError("--out", f"{arguments.out} holds the report of another evaluation; name another folder")
    target = find_target(arguments.model)
    config = make_config(arguments, target)
    if not config.eval_sets:
        raise UserError("--sets", "the configuration names no evaluation sets; give some, such as math500")
    if (problem := wrong_apex()) is not None:
        raise problem
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    from megatron_calclip.learner import cpu, runtime

    cpu.install()  # before anything else imports Megatron
    started = runtime.start(config)
    evaluate(config, target, arguments, started)
    runtime.stop()


def find_target(model: Path) -> Target:
    """What MODEL is.

    Raises:
        UserError: when it is none of what can be evaluated.
    """
    if os.path.isfile(model / "config.json"):
        return Target(model, "hf", None)
    for kind, mark, config in (
        ("checkpoint", "megatron", model.parent / "config.yaml"),
        ("run", "latest_checkpoint.json", model / "config.yaml"),
    ):
        if os.path.exists(model / mark):
            return Target(model, kind, config if config.is_file() else None)
    raise UserError(
        "MODEL", f"{str(model)!r} is no HF folder, run or checkpoint; give one, such as RUN_DIR or RUN_DIR/step_200"
    )


def make_config(arguments: argparse.Namespace, target: Target) -> Config:
    """The configuration of the evaluation: the run's, `--config` or the defaults, with what the options say.

    Raises:
        UserError: for settings that cannot be used.
    """
    chosen = {
        "eval.sets": arguments.sets,
        "eval.samples_per_prompt": arguments.n,
        "eval.temperature": arguments.temperature,
        "eval.top_p": arguments.top_p,
        "eval.max_new_tokens": arguments.max_new_tokens,
        "eval.num_prompts": arguments.num_prompts,
        "train.seed": arguments.seed,
    }
    options = [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in chosen.items() if value is not None]
    overrides = [
        "eval.num_prompts=null",
        *(_hf_settings(target.folder, defaults=arguments.config is None) if target.kind == "hf" else []),
        *_ONE_RANK_EACH,
        f"run_dir={json.dumps(str(arguments.out), ensure_ascii=False)}",
        *options,
        *arguments.overrides,
    ]
    name = arguments.config or (str(target.config) if target.config else None)
    if name is None and target.kind != "hf":
        raise UserError("--config", f"{target.folder} has no config.yaml beside it; give the run's configuration")
    return load_config(name, overrides, world_size=launch_world_size())


def _hf_settings(folder: Path, *, defaults: bool) -> list[str]:
    """Settings of a HF folder's model.

    Args:
        folder: with its config.json.
        defaults: also what a configuration would say, where there is none.
    """
    settings = [f"model.hf={json.dumps(str(folder), ensure_ascii=False)}", "model.shape=null", "model.tokenizer=null"]
    if not defaults:
        return settings
    try:
        context = int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError("MODEL", f"config.json of {folder} cannot be read ({error!r}); correct or replace it") from None
    return [
        *settings,
        f"model.max_sequence_length={context}",
        f"eval.max_new_tokens={min(_MAX_NEW_TOKENS, context // 2)}",
        "eval.sets=[]",
        "reward.name=math",
    ]


def evaluate(config: Config, target: Target, arguments: argparse.Namespace, started: Any) -> None:
    """Build engine and sets, evaluate, report.

    Args:
        config: of the evaluation.
        target: the model.
        arguments: of the command.
        started: this rank (`learner.runtime.Runtime`).
    """
    from megatron_calclip.checkpoint_files import STATE, read_state
    from megatron_calclip.convert.checkpoints import open_checkpoint
    from megatron_calclip.data import eval_sets
    from megatron_calclip.evaluation import Evaluation
    from megatron_calclip.evaluation_report import ReportWriter, table
    from megatron_calclip.hf import load_hf_config, load_tokenizer, stop_token_ids
    from megatron_calclip.rollout.make import make_engine
    from megatron_calclip.rollout.sampler import Sampler

    console = Console(highlight=False, quiet=started.rank != 0)

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    folder = _checkpoint_of(target, started, say)
    if target.kind != "hf" and config.rollout.engine == "local":  # a checkpoint needs nothing but itself
        config = replace(config, model=replace(config.model, hf=str(folder / "hf"), shape=None))
    tokenizer = load_tokenizer(config.model)
    if target.kind == "hf" and not _chosen("data.chat_template", arguments):
        has_template = bool(getattr(tokenizer, "chat_template", None))
        config = replace(config, data=replace(config.data, chat_template=has_template))
    hf_config = load_hf_config(config, tokenizer)
    sets = eval_sets(config, tokenizer)
    for one in sets:
        for line in one.report:
            say(f"{one.name}: {line}")
    step = int(read_state(folder)["step"]) if (folder / STATE).is_file() else 0
    model = {"path": str(arguments.model), "weights": str(folder), "step": step, "kind": target.kind}
    engine = make_engine(config.for_evaluation, hf_config, tokenizer, started, say)
    with contextlib.closing(engine):
        engine.load_weights(open_checkpoint(folder).source.stream(), policy_version=step)
        sampler = Sampler(
            config.for_evaluation, engine, started, stop_token_ids=stop_token_ids(config.model, tokenizer)
        )
        evaluation = Evaluation(config, sets, tokenizer=tokenizer, sampler=sampler, runtime=started)
        with contextlib.closing(evaluation):
            results = []
            with writing(arguments.out, "--out"):
                writer = ReportWriter(arguments.out, config, model=model) if started.rank == 0 else None
                for result in evaluation.run():
                    results.append(result)
                    say(f"{result.eval_set.name}: {100 * result.score:.1f} ({len(result.graded)} problems)")
                    if writer is not None:
                        writer.add(result)
                if writer is not None:
                    writer.finish()
    console.print(table(results, title=str(arguments.model)))
    say(f"report and completions: {arguments.out}")


def _checkpoint_of(target: Target, started: Any, say: Callable[[str], None]) -> Path:
    """The folder with the weights; those of a run have been read and are whole. Collective."""
    from megatron_calclip.checkpoint_files import STATE
    from megatron_calclip.saving import find_checkpoint

    if target.kind != "run" and not (target.folder / STATE).is_file():
        return target.folder
    resume = "auto" if target.kind == "run" else str(target.folder)
    try:
        found = find_checkpoint(target.folder, resume, started, say)
    except UserError as error:
        raise UserError("MODEL", error.problem, exit_code=error.exit_code) from None
    assert found is not None  # the file that names it is there
    return found


def _chosen(setting: str, arguments: argparse.Namespace) -> bool:
    """Whether the user has said what a setting is to be."""
    return arguments.config is not None or names_setting(arguments.overrides, setting)
