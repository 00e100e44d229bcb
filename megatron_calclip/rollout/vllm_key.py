"""A key for every endpoint of a vLLM server, and when one is needed.

The endpoints that replace weights (`VLLM_SERVER_DEV_MODE`) let anybody who reaches them replace the model, and vLLM's own
`--api-key` does not cover them: it guards `/v1` and a few other prefixes (vLLM's security guide). So a server that
listens on more than the loopback address gets `RequireKey` as middleware, in front of everything but `/health`, and our
client sends the key. It travels in an environment variable alone: a command line can be read by every user of a machine,
and a configuration is saved with the run.

Left out on purpose: encryption. The traffic is plain HTTP, for a private network.

Imports nothing of ours, since it runs inside the server.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import urllib.parse
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY_VARIABLE = "MEGATRON_CALCLIP_VLLM_KEY"
"""Environment variable that holds the key, on the learner's machines and the servers'."""
OPEN_PATHS = ("/health",)
"""Answered without a key: says whether the server runs, and nothing else."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


def headers() -> dict[str, str]:
    """What a client sends with every request; empty without a key."""
    key = os.environ.get(KEY_VARIABLE)
    return {"authorization": f"Bearer {key}"} if key else {}


def is_loopback(host: str) -> bool:
    """Whether a host is this machine's loopback address, which other machines cannot reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name
        return False


def needs_key(url: str) -> bool:
    """Whether a server at this address can be reached by others, so that it must ask for a key."""
    return not is_loopback(urllib.parse.urlsplit(url).hostname or "")


class RequireKey:
    """ASGI middleware that turns requests without the key away; see `vllm serve --middleware`.

    Args:
        app: what is guarded.

    Raises:
        RuntimeError: when the environment holds no key; a server must not start unguarded.
    """

    def __init__(self, app: Application) -> None:
        key = os.environ.get(KEY_VARIABLE)
        if not key:
            raise RuntimeError(f"{KEY_VARIABLE} is not set; give this server the learner's key")
        self._app, self._expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Hand a request on, or answer it with 401."""
        if scope["type"] == "lifespan" or scope.get("path") in OPEN_PATHS or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"the key is missing or wrong"})

    def _has_key(self, scope: Message) -> bool:
        given = [value for name, value in scope.get("headers", ()) if name.lower() == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)
