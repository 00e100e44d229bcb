"""`megatron-calclip plan`: what a run needs, and whether it fits, from its configuration alone.

    megatron-calclip plan qwen25_32b
    megatron-calclip plan qwen25_32b parallel.tp=4 --gpu h200 --response-tokens 3000 --json plan.json

What: bytes of every pipeline rank, FLOPs and seconds of a step, the share of calibration, and what to change when it does
not fit. No GPU and no weights are needed; of the model only its `config.json`. See docs/scaling.md for how the figures
are made and what they were checked against. Exit status 1 when the run does not fit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path

from rich.console import Console

from megatron_calclip.commands.output import writing
from megatron_calclip.config_file import load_config
from megatron_calclip.errors import EXIT_FAILED, UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("config", metavar="CONFIG", help="path of a YAML file, or the name of a shipped configuration")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's")
    parser.add_argument("--nodes", type=int, metavar="N", help="cluster.num_nodes")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="cluster.gpus_per_node")
    parser.add_argument("--gpu", metavar="NAME", help="cluster.device: h100, h200, b200 or cpu")
    parser.add_argument("--prompt-tokens", type=_length, metavar="N", help="mean length of prompts")
    parser.add_argument("--response-tokens", type=_length, metavar="N", help="mean length of answers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")


def _length(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < 2**31:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens above 0")


def run(arguments: argparse.Namespace) -> None:
    """Plan, print the tables, write the file.

    Raises:
        UserError: for settings or a model that cannot be used, and for a run that does not fit.
    """
    cluster = {"num_nodes": arguments.nodes, "gpus_per_node": arguments.gpus_per_node, "device": arguments.gpu}
    options = [f"cluster.{name}={value}" for name, value in cluster.items() if value is not None]
    config = load_config(arguments.config, [*arguments.overrides, *options])
    # Heavy imports only now: a wrong configuration is reported at once.
    from megatron_calclip.planning.advice import advise
    from megatron_calclip.planning.model import planned_model
    from megatron_calclip.planning.plan import default_workload, make_plan
    from megatron_calclip.planning.report import as_dict, print_plan, verdict

    model = planned_model(config)
    workload = default_workload(
        config, prompt_tokens=arguments.prompt_tokens, response_tokens=arguments.response_tokens
    )
    plan = make_plan(config, model.shape, workload)
    advice = advise(config, model.shape, workload, plan)
    print_plan(Console(), config, model, plan, advice)
    if arguments.json is not None:
        with writing(arguments.json, "--json"):
            arguments.json.write_text(json.dumps(as_dict(config, model, plan, advice), indent=2) + "\n")
    if not plan.fits:
        raise UserError("plan", f"{verdict(plan)}; change the settings named above", exit_code=EXIT_FAILED)
