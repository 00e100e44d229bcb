"""The rollout engine that a configuration names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM

from megatron_calclip.config import Config
from megatron_calclip.rollout.engine import RolloutEngine
from megatron_calclip.rollout.local import LocalEngine
from megatron_calclip.rollout.vllm import VllmEngine
from megatron_calclip.rollout.vllm_server import MODEL_NAME, LaunchedServers

if TYPE_CHECKING:
    from megatron_calclip.learner.runtime import Runtime

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def make_engine(
    config: Config, hf_config: Any, tokenizer: Any, runtime: Runtime, say: Callable[[str], None]
) -> RolloutEngine:
    """This rank's engine, without weights; collective.

    Raises:
        UserError: when servers cannot be started.
    """
    rollout = config.rollout
    if rollout.engine == "local":
        return LocalEngine(
            hf_config,
            device=runtime.device,
            dtype=_DTYPES[rollout.dtype],
            precision=rollout.precision,
            max_batch_size=rollout.max_batch_size,
        )
    folder = Path(config.run_dir).resolve() / "vllm"
    servers = None
    if rollout.vllm.launch and runtime.rank == 0:
        say(f"rollout: starting {rollout.vllm.num_servers} vLLM server(s)")
        model = Path(config.model.hf) if config.model.hf else _random_model(hf_config, tokenizer, folder / "model")
        servers = LaunchedServers(rollout, model, folder=folder, max_sequence_length=config.model.max_sequence_length)
    urls = runtime.gather_objects(servers.urls if servers else list(rollout.vllm.urls))[0]
    return VllmEngine(
        urls,
        folder=folder,
        leader=runtime.rank == 0,
        model=MODEL_NAME,
        vocab_size=hf_config.vocab_size,
        timeout_seconds=rollout.vllm.request_timeout_seconds,
        num_retries=rollout.vllm.num_retries,
        recovery_seconds=rollout.vllm.recovery_timeout_seconds,
        say=say,
        revive=servers.revive if servers else lambda: None,
        stop=servers.stop if servers else lambda: None,
    )


def _random_model(hf_config: Any, tokenizer: Any, folder: Path) -> Path:
    """A HF folder with any weights, for servers to start from; small, since models made from scratch are."""
    AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
