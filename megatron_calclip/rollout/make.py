"""The rollout engine that a configuration names."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM

from megatron_calclip.config import Config, RolloutConfig
from megatron_calclip.errors import UserError
from megatron_calclip.rollout.engine import RolloutEngine
from megatron_calclip.rollout.local import LocalEngine
from megatron_calclip.rollout.vllm import VllmEngine
from megatron_calclip.rollout.vllm_key import KEY_VARIABLE, needs_key
from megatron_calclip.rollout.vllm_server import MODEL_NAME, LaunchedServers
from megatron_calclip.rollout.vllm_transfer import BroadcastTransfer, FileTransfer

if TYPE_CHECKING:
    from megatron_calclip.learner.runtime import Runtime

_CPU_PRECISIONS = ("bf16", "fp8_per_channel")
_FIRST_CAPABILITY = {"fp8_per_tensor": (8, 9), "fp8_per_channel": (8, 9), "fp8_per_block": (8, 9), "mxfp8": (10, 0)}
"""W8A8 FP8 came with Ada and Hopper, block scales in hardware with Blackwell."""

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
        if "sliding_attention" in (getattr(hf_config, "layer_types", None) or ()):
            raise UserError("rollout.engine", "local has no sliding-window attention, which this model has; use vllm")
        return LocalEngine(
            hf_config,
            device=runtime.device,
            dtype=_DTYPES[rollout.dtype],
            precision=rollout.precision,
            max_batch_size=rollout.max_batch_size,
            kv_cache=rollout.kv_cache,
        )
    check_key(rollout.vllm.urls)
    if rollout.vllm.launch:
        capability = torch.cuda.get_device_capability(runtime.device) if runtime.device.type == "cuda" else None
        check_device(rollout, capability)
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


def check_device(rollout: RolloutConfig, capability: tuple[int, int] | None) -> None:
    """Refuse what vLLM cannot do on the machine that the run starts its servers on.

    Args:
        rollout: precision, colocation.
        capability: CUDA compute capability; None without a GPU.

    Raises:
        UserError: naming the setting, with the reason.
    """
    precision = rollout.precision
    if capability is None:
        if rollout.vllm.colocated:
            raise UserError("rollout.vllm.colocated", "vLLM puts servers to sleep on GPUs only; use false without one")
        if precision not in _CPU_PRECISIONS:
            raise UserError(
                "rollout.precision",
                f"vLLM without a GPU has no kernel for {precision}; use {' or '.join(_CPU_PRECISIONS)}, or "
                "rollout.engine=local, which emulates all schemes",
            )
        return
    needed = _FIRST_CAPABILITY.get(precision, (0, 0))
    if capability < needed:
        raise UserError(
            "rollout.precision",
            f"{precision} needs compute capability {needed[0]}.{needed[1]}, this GPU has {capability[0]}.{capability[1]}; "
            "use fp8_per_channel on Ada and Hopper, bf16 on older ones",
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
