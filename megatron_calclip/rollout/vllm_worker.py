"""Runs inside vLLM's workers: reads a step's weights from a safetensors file, and says what it read.

A server loads this module by `--worker-extension-cls` and finds the transfer backend `safetensors_file` in vLLM's
registry. It needs this package's folder on PYTHONPATH, but none of its dependencies beyond torch and safetensors.

Weights go through vLLM's layerwise reload: a plain `load_weights` would write over layers that have been quantised or
repacked since. Until an update has finished, the worker holds no policy version, so that a server that failed in the
middle is not taken for one that serves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from megatron_calclip.rollout.fingerprint import fingerprint

BACKEND = "safetensors_file"
EMBEDDING = "model.embed_tokens.weight"


@dataclass
class _Held:
    """What this worker process holds."""

    policy_version: int | None = None
    fingerprints: dict[str, int] | None = None


_held = _Held()


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Nothing has to be set up."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """One complete set of weights."""

    path: str = ""
    """A safetensors file that every worker can read."""
    policy_version: int = -1


class SafetensorsFileEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Weight transfer through a file on a disk that learner and server share."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        """From here on the worker holds no complete weights."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        _held.policy_version, _held.fingerprints = None, {}
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Read the file once: into the model, and into the fingerprints."""
        fingerprints: dict[str, int] = {}
        embeddings: list[Tensor] = []

        def tensors() -> Iterator[tuple[str, Tensor]]:
            with safe_open(update_info.path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (no dictionary)
                    tensor = file.get_tensor(name)
                    fingerprints[name] = fingerprint(tensor)
                    if name == EMBEDDING:
                        embeddings.append(tensor)
                    yield name, tensor

        self.model.load_weights(tensors())
        if self.model_config.hf_config.tie_word_embeddings and embeddings:
            # The reload gives the output layer a tensor of its own, and loading skips it: it would stay behind.
            head = self.model.lm_head.weight
            head.weight_loader(head, embeddings[0])
        self._arrived = _Held(update_info.policy_version, fingerprints)

    def finish_weight_update(self) -> None:
        """Quantise and repack the new weights."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        _held.policy_version, _held.fingerprints = self._arrived.policy_version, self._arrived.fingerprints

    def shutdown(self) -> None:
        """Nothing to close."""


class CalclipWorkerExtension:
    """Methods that a server's `/collective_rpc` can call on every worker."""

    def calclip_receipt(self) -> list[Any]:
        """[policy version or None, {HF name: fingerprint}] of the newest complete weights."""
        return [_held.policy_version, _held.fingerprints or {}]


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SafetensorsFileEngine)
