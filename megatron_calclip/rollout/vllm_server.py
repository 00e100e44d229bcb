"""Starting vLLM servers on this machine, for runs that bring their own (`rollout.vllm.launch`).

A server is a process of its own, and may have its own virtual environment: inside the trainer vLLM would patch torch and
pin a hundred packages. It listens on the loopback address only, because the weight-transfer endpoints that it opens
(`VLLM_SERVER_DEV_MODE`) let anybody who reaches them replace the model. It ends with the process that started it, also
when that is killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from megatron_calclip.config import RolloutConfig
from megatron_calclip.errors import EXIT_FAILED, UserError
from megatron_calclip.rollout.vllm_http import Server, ServerError
from megatron_calclip.rollout.vllm_key import KEY_VARIABLE

HOST = "127.0.0.1"
MODEL_NAME = "policy"
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_EXTENSION = "megatron_calclip.rollout.vllm_worker.CalclipWorkerExtension"
_GUARD = "megatron_calclip.rollout.vllm_key.RequireKey"
_BACKEND = "calclip"  # as in vllm_worker.py, which only a process with vLLM can import
_PR_SET_PDEATHSIG = 1
_STOP_SECONDS = 20.0
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def command(rollout: RolloutConfig, model: Path, *, port: int, max_sequence_length: int, host: str = HOST) -> list[str]:
    """The command line of one server.

    Args:
        rollout: precision, dtype, and `vllm` settings.
        model: HF folder. Its weights are replaced by the first sync, but they must be there: vLLM's reload of quantised
            layers does nothing to a model that started from `--load-format dummy`.
        port: to listen on.
        max_sequence_length: prompt and answer.
        host: address to listen on.
    """
    quantization = [] if rollout.precision == "bf16" else ["--quantization", rollout.precision]
    cache = [] if rollout.kv_cache == "auto" else ["--kv-cache-dtype", rollout.kv_cache]
    sleep = ["--enable-sleep-mode"] if rollout.vllm.colocated else []
    guard = ["--middleware", _GUARD] if os.environ.get(KEY_VARIABLE) else []
    return [
        rollout.vllm.python or sys.executable,
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", MODEL_NAME),
        *("--host", host, "--port", str(port)),
        *("--dtype", _DTYPES[rollout.dtype], "--max-model-len", str(max_sequence_length)),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--worker-extension-cls", _EXTENSION, "--weight-transfer-config", json.dumps({"backend": _BACKEND})),
        *quantization,
        *cache,
        *sleep,
        *guard,
        *rollout.vllm.arguments,
    ]


def environment() -> dict[str, str]:
    """Environment variables of a server."""
    path = os.pathsep.join(filter(None, [str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH", "")]))
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    if not torch.cuda.is_available():
        settings |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    # A server is no rank of this job.
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCHELASTIC", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_"))
    }
    return inherited | settings


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class LaunchedServers:
    """Servers that this process started.

    Args:
        rollout: their settings.
        model: HF folder that they start from.
        folder: for the logs.
        max_sequence_length: prompt and answer.

    Raises:
        UserError: when one of them does not come up.
    """

    def __init__(self, rollout: RolloutConfig, model: Path, *, folder: Path, max_sequence_length: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        ports = [rollout.vllm.first_port + index for index in range(rollout.vllm.num_servers)]
        self.urls = [f"http://{HOST}:{port}" for port in ports]
        self.logs = [folder / f"server_{port}.log" for port in ports]
        self._commands = [command(rollout, model, port=port, max_sequence_length=max_sequence_length) for port in ports]
        self._timeout = rollout.vllm.start_timeout_seconds
        # A child dies with the thread that started it (PR_SET_PDEATHSIG), so all are started by one that stays.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="vllm starter")
        self._processes = [self._start(index) for index in range(len(ports))]
        self._wait()

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        with self.logs[index].open("ab") as file:
            return self._starter.submit(
                subprocess.Popen,
                self._commands[index],
                env=environment(),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            ).result()

    def revive(self) -> None:
        """Start servers anew that have ended, and wait for them.

        Raises:
            UserError: when one of them does not come up.
        """
        ended = [index for index, process in enumerate(self._processes) if process.poll() is not None]
        for index in ended:
            self._processes[index] = self._start(index)
        if ended:
            self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + self._timeout
        waiting = list(zip(self.urls, self.logs, self._processes, strict=True))
        while waiting:
            url, log, process = waiting[0]
            problem = None
            if process.poll() is not None:
                problem = f"the server {url} ended with status {process.returncode}"
            elif time.monotonic() > deadline:
                problem = f"the server {url} was not ready after {self._timeout:.0f} s"
            if problem is not None:
                self.stop()
                raise UserError("rollout.vllm.launch", f"{problem}; its log is {log}", exit_code=EXIT_FAILED)
            try:
                Server(url).call("/health", method="GET", timeout=2.0)
                waiting.pop(0)
            except ServerError:
                time.sleep(0.5)

    def stop(self) -> None:
        """End all of them."""
        _end(self._processes, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_SECONDS
        while time.monotonic() < deadline and any(process.poll() is None for process in self._processes):
            time.sleep(0.1)
        _end(self._processes, signal.SIGKILL)


def _end(processes: Sequence[subprocess.Popen[bytes]], how: signal.Signals) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, how)
