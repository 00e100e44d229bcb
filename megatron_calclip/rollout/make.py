"""The rollout engine that a configuration names."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM

from megatron_calclip.config import Config
from megatron_calclip.errors import UserError
from megatron_calclip.rollout.engine import RolloutEngine
from megatron_calclip.rollout.local import LocalEngine
from megatron_calclip.rollout.vllm import VllmEngine
from megatron_calclip.rollout.vllm_key import KEY_VARIABLE, needs_key
from megatron_calclip.rollout.vllm_server import MODEL_NAME, LaunchedServers
from megatron_calclip.rollout.vllm_transfer import BroadcastTransfer, FileTransfer

if TYPE_CHECKING:
    from megatron_calclip.learner.runtime import Runtime

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def make_engine(
    config: Config, hf_config: Any, tokenizer: Any, runtime: Runtime, say: Callable[[str], None]
) -> RolloutEngine:
    """This rank's engine, without weights; collective.

    Raises:
        UserError: when servers cannot be started, or nothing guards them.
    """
    rollout = config.rollout
    if rollout.engine == "local":
        return LocalEngine(
            hf_config,
            device=runtime.device,
            dtype=_DTYPES[rollout.dtype],
            precision=rollout.precision,
            max_batch_size=rollout.max_batch_size,
            kv_cache=rollout.kv_cache,
        )
    check_key(rollout.vllm.urls)
    folder = Path(config.run_dir).resolve() / "vllm"
    servers = None
    if rollout.vllm.launch and runtime.rank == 0:
        say(f"rollout: starting {rollout.vllm.num_servers} vLLM server(s)")
        model = Path(config.model.hf) if config.model.hf else _random_model(hf_config, tokenizer, folder / "model")
        servers = LaunchedServers(rollout, model, folder=folder, max_sequence_length=config.model.max_sequence_length)
    urls = runtime.gather_objects(servers.urls if servers else list(rollout.vllm.urls))[0]
    return VllmEngine(
        urls,
        transfer=BroadcastTransfer(runtime.device) if rollout.vllm.transfer == "broadcast" else FileTransfer(folder),
        leader=runtime.rank == 0,
        model=MODEL_NAME,
        vocab_size=hf_config.vocab_size,
        timeout_seconds=rollout.vllm.request_timeout_seconds,
        num_retries=rollout.vllm.num_retries,
        recovery_seconds=rollout.vllm.recovery_timeout_seconds,
        say=say,
        revive=servers.revive if servers else lambda: None,
        stop=servers.stop if servers else lambda: None,
        sleeps=rollout.vllm.colocated,
    )


def check_key(urls: Sequence[str]) -> None:
    """Refuse servers that others can reach and that nothing guards.

    Raises:
        UserError: naming the first such server, when the environment holds no key.
    """
    for url in urls:
        if needs_key(url) and not os.environ.get(KEY_VARIABLE):
            raise UserError(
                "rollout.vllm.urls",
                f"{url} is not on this machine's loopback address; set {KEY_VARIABLE} here and for the server "
                "(docs/security.md)",
            )


def _random_model(hf_config: Any, tokenizer: Any, folder: Path) -> Path:
    """A HF folder with any weights, for servers to start from; small, since models made from scratch are."""
    AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
