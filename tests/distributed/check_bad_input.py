"""Runs the main job's command line many times: heavy imports once, then a forked child for each case.

    check_bad_input.py CASES RESULTS

CASES is a JSON file with a list of argument lists. RESULTS becomes one with {code, out, err, seconds} for
each of them: exit code (null: killed after `TIMEOUT_SECONDS`), what it printed, and how long it took.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import megatron_calclip.trainer  # noqa: F401 (heavy; what the children share)
from megatron_calclip.launch import main

TIMEOUT_SECONDS = 30.0


def run(arguments: list[str]) -> dict[str, Any]:
    """One command line, in a child of its own."""
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            code = 0
            try:
                main(arguments)
            except SystemExit as stop:
                code = int(stop.code or 0)
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            os._exit(code)
        ended: int | None = None
        while ended is None and time.monotonic() - start < TIMEOUT_SECONDS:
            pid, status = os.waitpid(child, os.WNOHANG)
            ended = os.waitstatus_to_exitcode(status) if pid else None
            time.sleep(0.02)
        if ended is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        out.seek(0)
        err.seek(0)
        return {"code": ended, "out": out.read(), "err": err.read(), "seconds": time.monotonic() - start}


if __name__ == "__main__":
    cases, results = map(Path, sys.argv[1:])
    results.write_text(json.dumps([run(arguments) for arguments in json.loads(cases.read_text())]))
