"""A small HTTP server that speaks vLLM's protocol as far as the client uses it, and misbehaves on request."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from megatron_calclip.rollout.broadcast import BroadcastGroup, Muster
from megatron_calclip.rollout.fingerprint import fingerprint

LOG_PROB = -0.5
STOP = 1


class FakeVllm:
    """Answers every prompt with its own tokens plus the sample's number, then a stop token.

    Args:
        name: goes into its answers' second token, so that tests see who answered.
    """

    def __init__(self, name: int = 0) -> None:
        self.name = name
        self.held: list[Any] = [None, {}]
        self.arrived: list[Any] = [None, {}]
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.fault: str | None = None
        self.num_faults = 0
        self.unknown: tuple[str, ...] = ()
        self.lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer({})

            def do_POST(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                fake.handle(self, self.path, body)

            def answer(self, value: Any, code: int = 200) -> None:
                data = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(code)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        """Nobody listens any more."""
        self.server.shutdown()
        self.server.server_close()

    def takes_fault(self) -> str | None:
        """The fault for this call, if any are left."""
        with self.lock:
            if self.num_faults == 0:
                return None
            self.num_faults -= 1
            return self.fault

    def handle(self, handler: Any, path: str, body: Any) -> None:
        """One POST."""
        self.calls.append(path)
        if path in self.unknown:
            return handler.answer({"error": "not found"}, 404)
        if path == "/collective_rpc":
            return handler.answer({"results": [self.held]})
        if path == "/start_weight_update":
            self.held = [None, {}]
        if path == "/update_weights":
            if self.fault in ("fails to update", "fails to update once"):
                self.fault = self.fault if self.fault == "fails to update" else None
                return handler.answer({"error": "no"}, 500)
            info = body["update_info"]
            tensors = load_file(info["path"]) if "path" in info else received(info["broadcast"])
            self.arrived = [info["policy_version"], {name: fingerprint(tensor) for name, tensor in tensors.items()}]
        if path == "/finish_weight_update":
            self.held = self.arrived
        if path != "/v1/completions":
            return handler.answer({})
        self.bodies.append(body)
        if "prompt_logprobs" in body:
            entries = [None] + [{str(token): {"logprob": -token / 10}} for token in body["prompt"][1:]]
            return handler.answer({"choices": [{"prompt_logprobs": entries}]})
        self.complete(handler, body, self.takes_fault())

    def complete(self, handler: Any, body: dict[str, Any], fault: str | None) -> None:
        """The answers to one prompt."""
        if fault == "hangs":
            time.sleep(2.0)
        if fault == "closes":
            return handler.connection.close()
        if fault == "error 500":
            return handler.answer({"error": "overloaded"}, 500)
        if fault == "garbage":
            return handler.answer(b"<html>")
        if fault == "restarts":  # it answers, with the weights that it came up with
            self.held = [None, {}]
        if fault == "stale":
            self.held = [self.held[0] - 1, self.held[1]]
        choices = [self.choice(body["prompt"], index) for index in range(body["n"])]
        if fault == "too few":
            choices = choices[1:]
        if fault == "twice the same":
            choices[0]["index"] = choices[-1]["index"]
        if fault == "NaN":
            choices[0]["logprobs"]["token_logprobs"][0] = float("nan")
        if fault == "short of log-probs":
            choices[0]["logprobs"]["token_logprobs"].pop()
        if fault == "unknown token":
            choices[0]["token_ids"][0] = 10**6
        if fault == "no stop token":
            choices[0]["token_ids"][-1] = 2
        if fault == "empty":
            choices[0]["token_ids"], choices[0]["logprobs"]["token_logprobs"] = [], []
        if fault == "cut short":
            choices[0]["finish_reason"] = "length"
        if fault == "aborted":
            choices[0]["finish_reason"] = "abort"
        handler.answer({"choices": choices[::-1]})

    def choice(self, prompt: list[int], index: int) -> dict[str, Any]:
        """One answer: prompt's first token, this server, the sample, stop."""
        tokens = [prompt[0], 10 + self.name, 20 + index, STOP]
        log_probs = [LOG_PROB] * len(tokens)
        return {"index": index, "token_ids": tokens, "logprobs": {"token_logprobs": log_probs}, "finish_reason": "stop"}


def received(place: dict[str, Any]) -> dict[str, Tensor]:
    """What a broadcast brings, as a worker takes it."""
    store = dist.TCPStore(place["host"], place["port"], None, False)
    rank = place["first_rank"]
    group = BroadcastGroup(store, rank=rank, members=Muster(store).report(rank), device=torch.device("cpu"))
    tensors = dict(group.receive())
    group.close()
    return tensors


def weights_file(folder: Path) -> list[Path]:
    """Weight files that lie in the folder."""
    return sorted(folder.glob("weights_*"))
