"""One vLLM server as its HTTP interface shows it: requests, weight updates, receipts, sleep.

Everything that goes wrong becomes a `ServerError`; whether to try again, and with which server, is `vllm.py`'s to decide.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from megatron_calclip.rollout import vllm_key
from megatron_calclip.rollout.engine import WeightsReceipt

CONTROL_TIMEOUT_SECONDS = 600.0
"""For updates: a server finishes what it is generating, then reads all weights."""
_HEALTH_TIMEOUT_SECONDS = 10.0


class ServerError(Exception):
    """A server that did not answer, or not sensibly. The message names it."""


@dataclass
class Server:
    """One server.

    Args:
        url: `http://host:port`.
    """

    url: str
    num_in_hand: int = 0

    def call(self, path: str, body: Any = None, *, method: str = "POST", timeout: float) -> Any:
        """One request; its JSON answer, None for an empty one.

        Raises:
            ServerError: when it cannot be reached, takes too long, or answers with an error or no JSON.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json", **vllm_key.headers()}
        request = urllib.request.Request(f"{self.url}{path}", data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                text = response.read()
            return json.loads(text) if text.strip() else None
        except urllib.error.HTTPError as error:
            raise ServerError(f"{self.url}{path} answered {error.code}: {error.read()[:200]!r}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerError(f"{self.url}{path}: {type(error).__name__} ({error})") from None

    def receipt(self) -> WeightsReceipt | None:
        """What all workers of this server hold; None when they hold nothing complete, or not the same.

        Raises:
            ServerError: when it does not answer.
        """
        results = self._receipts()
        try:
            version, fingerprints = results[0]
            if version is None or any(result != results[0] for result in results):
                return None
            return WeightsReceipt(int(version), {str(name): int(value) for name, value in fingerprints.items()})
        except (TypeError, KeyError, ValueError, IndexError) as error:
            raise ServerError(f"{self.url}: its receipt cannot be read ({error!r})") from None

    def _receipts(self) -> list[Any]:
        answer = self.call("/collective_rpc", {"method": "calclip_receipt"}, timeout=_HEALTH_TIMEOUT_SECONDS)
        if not isinstance(answer, dict) or not isinstance(answer.get("results"), list) or not answer["results"]:
            raise ServerError(f"{self.url}: its receipt cannot be read ({str(answer)[:80]})")
        return list(answer["results"])

    def num_workers(self) -> int:
        """Processes among which it has divided the model.

        Raises:
            ServerError: when it does not answer.
        """
        return len(self._receipts())

    def update(self, source: dict[str, Any], policy_version: int) -> None:
        """Load weights; generation pauses, and caches of the old weights are dropped.

        Args:
            source: where its workers find them, see `vllm_worker.UpdateInfo`.
            policy_version: theirs.

        Raises:
            ServerError: when it fails; the server then holds no complete weights.
        """
        info = {"policy_version": policy_version, **source}
        steps: tuple[tuple[str, Any], ...] = (
            ("/pause?mode=wait", None),
            ("/init_weight_transfer_engine", {"init_info": {}}),
            ("/start_weight_update", {}),
            ("/update_weights", {"update_info": info}),
            ("/finish_weight_update", {"weight_version": str(policy_version)}),
            ("/reset_prefix_cache", None),
            ("/resume", None),
        )
        for step, body in steps:
            self.call(step, body, timeout=CONTROL_TIMEOUT_SECONDS)

    def sleep(self) -> None:
        """Move its weights to host memory and drop its caches (vLLM's level 1).

        Raises:
            ServerError: when it fails.
        """
        self.call("/sleep?level=1", timeout=CONTROL_TIMEOUT_SECONDS)

    def wake_up(self) -> None:
        """Undo `sleep`; a server that is awake stays so.

        Raises:
            ServerError: when it fails.
        """
        self.call("/wake_up", timeout=CONTROL_TIMEOUT_SECONDS)
