"""`megatron-calclip serve`: one vLLM server for a run, on this machine, in the place of this process.

    megatron-calclip serve qwen25_32b --host "$(hostname)" --index 1

What: for servers on nodes of their own (`rollout.vllm.urls`), the very command that `rollout.vllm.launch` starts on the
learner's machine, with the configuration's precision, lengths and arguments. `--index` tells the servers of one machine
apart: it sets the port, and which of the visible GPUs are used. On any but the loopback address a key is needed; see
docs/security.md.

Left out on purpose: supervision. A batch system or a loop in the shell restarts it (examples/slurm); the learner brings
a server that came back up to date.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path

from megatron_calclip.config_file import load_config
from megatron_calclip.errors import EXIT_FAILED, UserError
from megatron_calclip.rollout.vllm_arguments import tensor_parallel
from megatron_calclip.rollout.vllm_key import KEY_VARIABLE, is_loopback


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("config", metavar="CONFIG", help="path of a YAML file, or the name of a shipped configuration")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="to listen on (default 127.0.0.1)")
    parser.add_argument("--index", type=_index, default=0, metavar="N", help="of the servers on this machine, from 0")


def _index(text: str) -> int:
    with contextlib.suppress(ValueError):
        if 0 <= (value := int(text)) < 500:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 499")


def visible_gpus(visible: str | None, *, index: int, count: int) -> str:
    """Which GPUs a server gets: CUDA_VISIBLE_DEVICES for it.

    Args:
        visible: the variable's present value; a batch system may have chosen already.
        index: of the server on this machine.
        count: GPUs of each server.

    Raises:
        UserError: when more are visible than it needs, but not so many as the index asks for.
    """
    if visible is None:
        return ",".join(str(index * count + offset) for offset in range(count))
    names = [name for name in visible.split(",") if name]
    if len(names) <= count:
        return visible
    chosen = names[index * count : (index + 1) * count]
    if len(chosen) < count:
        raise UserError(
            "--index", f"server {index} of {count} GPU(s) each needs more than the {len(names)} visible ones"
        )
    return ",".join(chosen)


def run(arguments: argparse.Namespace) -> None:
    """Become the server.

    Raises:
        UserError: for a configuration without a model for servers, an unguarded address, or a missing interpreter.
    """
    config = load_config(arguments.config, arguments.overrides)
    if config.rollout.engine != "vllm" or config.model.hf is None:
        raise UserError("serve", "needs rollout.engine: vllm and a pretrained model (model.hf); set both")
    if not is_loopback(arguments.host) and not os.environ.get(KEY_VARIABLE):
        raise UserError("--host", f"{arguments.host} can be reached by others; set {KEY_VARIABLE}, or use 127.0.0.1")
    # Heavy imports only now: a wrong configuration is reported at once.
    import torch

    from megatron_calclip.rollout.vllm_server import command, environment

    words = command(
        config.rollout,
        Path(config.model.hf),
        port=config.rollout.vllm.first_port + arguments.index,
        max_sequence_length=config.model.max_sequence_length,
        host=arguments.host,
    )
    variables = environment()
    if torch.cuda.is_available():
        count = tensor_parallel(config.rollout.vllm.arguments)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        variables["CUDA_VISIBLE_DEVICES"] = visible_gpus(visible, index=arguments.index, count=count)
    try:
        os.execvpe(words[0], words, variables)
    except OSError as error:
        raise UserError("rollout.vllm.python", f"{words[0]}: {error.strerror}", exit_code=EXIT_FAILED) from None
