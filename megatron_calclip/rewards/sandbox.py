"""Running a program that the policy wrote, against inputs, without trusting it.

Each program gets a sandbox of its own (`sandbox_init`): namespaces of processes, mounts, network and IPC; a file
system of the interpreter's folders, read-only, and a scratch folder in memory; limits on CPU, memory, output, files
and processes; an unprivileged user id under root. It ends with the call, whatever the program has started. Expected
outputs never enter it.

Where the kernel allows no namespaces, programs are refused, unless `reward.code.allow_unsandboxed` says otherwise:
then the limits hold, but the network and all files that the user id can read are open to them.

Left out on purpose: system-call filters (a hole in the kernel is a way out; use virtual machines against attackers)
and control groups, so that memory is bounded by process, and in sum by `memory_mib` x `num_processes`.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_calclip.errors import UserError

# User ids of programs under root: of no account, and another one for each program, because limits count by user id and
# the kernel takes a moment to bury the processes of the program before.
_FIRST_UID, _NUM_UIDS = 60_000, 4_000
_programs = itertools.count()
_INIT = str(Path(__file__).with_name("sandbox_init.py"))
_SYSTEM_FOLDERS = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")


@dataclass(frozen=True)
class ProgramLimits:
    """What one program may use; see `config.CodeRewardConfig`."""

    timeout_seconds: float = 5.0
    memory_mib: int = 1024
    num_processes: int = 16
    output_kib: int = 1024


@dataclass(frozen=True)
class Run:
    """What a program did with one input."""

    status: str
    """ok, error (it failed), timeout, or output (more than its limit)."""
    output: str


def run_program(
    program: str, inputs: Sequence[str], *, function: str | None, limits: ProgramLimits, isolate: bool
) -> Iterator[Run]:
    """Run a Python program once for each input, in one sandbox; closing the iterator ends it.

    Args:
        program: source text.
        inputs: what it reads from stdin or, with `function`, JSON lists of arguments.
        function: of the program, or of its class `Solution`, to be called; its result is the output, as JSON.
        limits: of each run.
        isolate: whether in namespaces; see the module.

    Raises:
        OSError: when the sandbox cannot be made.
    """
    # In a mount namespace any folder will do to build the new root on.
    scratch = tempfile.gettempdir() if isolate else tempfile.mkdtemp(prefix="calclip-")
    job = {
        "program": program,
        "inputs": list(inputs),
        "function": function,
        "isolate": isolate,
        "scratch": scratch,
        "scratch_mib": max(1, limits.memory_mib // 4),
        "folders": _visible_folders(),
        "python": sys.executable,
        "uid": _FIRST_UID + (16 * os.getpid() + next(_programs)) % _NUM_UIDS,
        "timeout_seconds": limits.timeout_seconds,
        "memory_mib": limits.memory_mib,
        "num_processes": limits.num_processes,
        "output_kib": limits.output_kib,
    }
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", _INIT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},
        cwd="/",
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    try:
        try:
            process.stdin.write(json.dumps(job).encode())
            process.stdin.close()
        except BrokenPipeError:  # its message, below, says why
            pass
        for _ in inputs:
            line = process.stdout.readline()
            if not line:
                raise OSError(f"no sandbox: {process.stderr.read().decode(errors='replace').strip()[-300:]}")
            yield Run(**json.loads(line))
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()
        if not isolate:
            shutil.rmtree(scratch, ignore_errors=True)


def _visible_folders() -> list[str]:
    """What a program can read: the system's libraries and the interpreter with its packages."""
    folders = [path for path in _SYSTEM_FOLDERS if os.path.lexists(path)]
    for path in (os.path.realpath(sys.base_prefix), os.path.abspath(sys.base_prefix), os.path.abspath(sys.prefix)):
        if not any(path == seen or path.startswith(f"{seen}/") for seen in folders):
            folders.append(path)
    return folders


@lru_cache(maxsize=1)
def sandbox_problem() -> str | None:
    """Why no sandbox can be made here; None when it can."""
    try:
        runs = list(run_program("print(6 * 7)", [""], function=None, limits=ProgramLimits(), isolate=True))
    except OSError as error:
        return str(error)
    return None if runs == [Run("ok", "42\n")] else f"a test program gave {runs[0]}"


def check_sandbox(*, allow_unsandboxed: bool) -> None:
    """Whether programs can be run as the settings ask.

    Raises:
        UserError: when there is no sandbox and no permission to do without.
    """
    problem = sandbox_problem()
    if problem is None:
        return
    if not allow_unsandboxed:
        raise UserError(
            "reward.code.allow_unsandboxed",
            f"this machine offers no sandbox ({problem}); allow user namespaces, or set it to true, with which "
            "programs that the policy writes can reach the network and read your files",
        )
    warnings.warn(
        "reward.code.allow_unsandboxed: programs that the policy writes run WITHOUT A SANDBOX on this machine; they can "
        "reach the network and read every file that their user id can",
        stacklevel=2,
    )


def limits_of(settings: dict[str, Any]) -> ProgramLimits:
    """The limits in the section `reward.code`."""
    names = ("timeout_seconds", "memory_mib", "num_processes", "output_kib")
    return ProgramLimits(**{name: settings[name] for name in names})
