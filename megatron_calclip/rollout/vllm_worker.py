"""Runs inside vLLM's workers: takes a step's weights from a file or a broadcast, and says what it took.

A server loads this module by `--worker-extension-cls` and finds the transfer backend `calclip` in vLLM's registry. It needs this package's folder on PYTHONPATH, but none of its dependencies beyond torch and safetensors.

Weights go through vLLM's layerwise reload: a plain `load_weights` would write over layers that have been quantised or
repacked since. Until an update has finished, the worker holds no policy version, so that a server that failed in the
middle is not taken for one that serves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from megatron_calclip.rollout.broadcast import TIMEOUT, BroadcastGroup, Muster
from megatron_calclip.rollout.fingerprint import fingerprint

BACKEND = "calclip"
EMBEDDING = "model.embed_tokens.weight"


@dataclass
class _Held:
    """What this worker process holds."""

    policy_version: int | None = None
    fingerprints: dict[str, int] | None = None


_held = _Held()


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing has to be set up."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One complete set of weights, and where to find it: exactly one of `path` and `broadcast`."""

    path: str | None = None
    """A safetensors file that every worker can read."""
    broadcast: dict[str, Any] | None = None
    """`host` and `port` of the store, `first_rank` of this server's workers."""
    policy_version: int = -1


class CalclipEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Weight transfer with fingerprints of what arrived."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to connect: each update brings its own."""

    def start_weight_update(self) -> None:
        """From here on the worker holds no complete weights."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        _held.policy_version, _held.fingerprints = None, {}
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Take every tensor once: into the model, and into the fingerprints."""
        fingerprints: dict[str, int] = {}
        embeddings: list[Tensor] = []

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self._arriving(update_info):
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

    def _arriving(self, update_info: UpdateInfo) -> Iterator[tuple[str, Tensor]]:
        if update_info.path is not None:
            with safe_open(update_info.path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (no dictionary)
                    yield name, file.get_tensor(name)
            return
        place = update_info.broadcast
        if place is None:
            raise ValueError("an update names neither a file nor a broadcast")
        parallel = self.parallel_config
        rank = place["first_rank"] + parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = dist.TCPStore(place["host"], place["port"], None, False, timeout=TIMEOUT)
        group = BroadcastGroup(store, rank=rank, members=Muster(store).report(rank), device=self.device)
        yield from group.receive()
        group.close()

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
    WeightTransferEngineFactory.register_engine(BACKEND, CalclipEngine)
