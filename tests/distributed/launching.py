"""Starts a script under torchrun, with a time-out that leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def command(script: Path, *arguments: str, num_processes: int) -> list[str]:
    """How to start a script on several local processes; a single one starts without a launcher."""
    if num_processes == 1:
        return [sys.executable, str(script), *arguments]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    return [sys.executable, *launcher, str(script), *arguments]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """One thread a process, this checkout and this folder importable, no trace of a launcher around the tests."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    path = os.pathsep.join(filter(None, [str(ROOT), str(HERE), os.environ.get("PYTHONPATH")]))
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(extra or {})}


def start(
    script: Path, *arguments: str, num_processes: int, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start it in a process group of its own, output captured; see `kill`."""
    return subprocess.Popen(
        command(script, *arguments, num_processes=num_processes),
        env=environment(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL the launcher and all its workers: a power cut, as far as they can tell."""
    if process.poll() is None:
        # torchrun's workers have sessions of their own, so that the group of the launcher is not enough.
        workers = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=True
        )
        for pid in [process.pid, *map(int, workers.stdout.split())]:
            os.kill(pid, signal.SIGKILL)
    process.wait()


def run(script: Path, *arguments: str, num_processes: int, timeout: float, env: Mapping[str, str] | None = None) -> str:
    """Run to the end and return the output; fails the test on an exit code other than 0, or on a hang."""
    process = start(script, *arguments, num_processes=num_processes, env=env)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill(process)
        output, _ = process.communicate()
        raise AssertionError(f"{script.name} hangs: {timeout} s passed\n{output}") from None
    assert process.returncode == 0, output
    return output
