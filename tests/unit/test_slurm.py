"""The sbatch script, run with stand-ins for Slurm's commands: what it starts where, and what it does when things go wrong.

The stand-in for `srun` answers health checks on loopback addresses in the place of servers, and in the place of the learner
writes down how it was called, waits or fails as the test says.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_calclip.config_file import load_config

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"
TIMEOUT_SECONDS = 60
LEARNERS, SERVERS = ["127.0.0.11", "127.0.0.12"], ["127.0.0.21"]
PORT = 18400

SRUN = f"""#!{sys.executable}
import http.server, json, os, signal, sys, threading, time
arguments = sys.argv[1:]
options = dict(a[2:].split("=", 1) for a in arguments if a.startswith("--") and "=" in a)
kind = "server" if "serve" in arguments else "learner"
folder = os.environ["STUB_FOLDER"]
record = {{"arguments": arguments, "key": os.environ.get("MEGATRON_CALCLIP_VLLM_KEY"), "pid": os.getpid()}}
with open(f"{{folder}}/{{kind}}.json", "w") as file:
    json.dump(record, file)
if kind == "server":
    if os.environ.get("STUB_SERVERS") == "die":
        sys.exit(1)
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(503 if os.environ.get("STUB_SERVERS") == "ill" else 200)
            self.end_headers()
        def log_message(self, *_): pass
    for host in options["nodelist"].split(","):
        for index in range(int(options["ntasks-per-node"])):
            server = http.server.HTTPServer((host, {PORT} + index), Handler)
            threading.Thread(target=server.serve_forever, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    time.sleep(100)
else:
    def save(*_):
        open(f"{{folder}}/saved", "w").close()
        os._exit(1)  # torchrun reports the signal
    signal.signal(signal.SIGUSR1, save)
    open(f"{{folder}}/learning", "w").close()
    if os.environ.get("STUB_LEARNER") == "waits":
        time.sleep(100)
    sys.exit(int(os.environ.get("STUB_LEARNER", "0")))
"""
SCONTROL = """#!/bin/sh
if [ "$1" = show ]; then echo "$3" | tr , '\\n'; else echo "$@" >> "$STUB_FOLDER/scontrol"; fi
"""


class Job:
    """The script in a folder of its own, with its stand-ins first in PATH."""

    def __init__(self, folder: Path, *overrides: str, nodes: list[str] | None = None, **variables: str) -> None:
        self.folder = folder
        tools = folder / "bin"
        tools.mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        self.run_dir = folder / "run"
        settings = [
            "cluster={num_nodes: 2, gpus_per_node: 8, num_rollout_nodes: 1}",
            "rollout.vllm.arguments=[--tensor-parallel-size=4]",
            f"rollout.vllm.first_port={PORT}",
            f"run_dir={self.run_dir}",
            *overrides,
        ]
        environment = {
            "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "SLURM_JOB_ID": "42",
            "SLURM_JOB_NODELIST": ",".join(LEARNERS + SERVERS if nodes is None else nodes),
            "STUB_FOLDER": str(folder),
            **variables,
        }
        self.process = subprocess.Popen(
            ["bash", str(SCRIPT), "qwen25_32b", *settings],
            cwd=ROOT,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=TIMEOUT_SECONDS)
        return self.process.returncode, output

    def called(self, kind: str) -> dict:
        return json.loads((self.folder / f"{kind}.json").read_text())

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not (self.folder / name).exists():
            assert self.process.poll() is None and time.monotonic() < deadline, self.finish()
            time.sleep(0.05)

    def ended(self, kind: str) -> bool:
        try:
            os.kill(self.called(kind)["pid"], 0)
        except ProcessLookupError:
            return True
        return False


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, str]:
    """A job in which nothing went wrong, and its output."""
    job = Job(tmp_path_factory.mktemp("job"))
    code, output = job.finish()
    assert code == 0, output
    return job, output


def test_it_parses() -> None:
    assert subprocess.run(["bash", "-n", str(SCRIPT)], timeout=TIMEOUT_SECONDS).returncode == 0


def test_servers_and_learner_are_started_on_their_nodes(finished: tuple[Job, str]) -> None:
    job, output = finished
    server, learner = job.called("server"), job.called("learner")
    assert {"--nodes=1", "--ntasks-per-node=2", f"--nodelist={SERVERS[0]}"} <= set(server["arguments"])
    assert {"--nodes=2", "--ntasks-per-node=1", "--nodelist=" + ",".join(LEARNERS)} <= set(learner["arguments"])
    launcher = learner["arguments"][learner["arguments"].index("torchrun") :]
    assert {"--nnodes=2", "--nproc-per-node=8", f"--rdzv-endpoint={LEARNERS[0]}:29500"} <= set(launcher)
    assert "--max-restarts=3" in launcher and "--shutdown-timeout=240" in launcher
    assert any(word.startswith("--signals-to-handle=") and "SIGUSR1" in word for word in launcher)
    urls = launcher[-1]
    assert urls == f"rollout.vllm.urls=[http://{SERVERS[0]}:{PORT},http://{SERVERS[0]}:{PORT + 1}]"
    assert launcher[launcher.index("examples/grpo_fp8.py") + 1] == "qwen25_32b"
    logs = job.run_dir / "logs" / "42.0"
    assert logs.is_dir() and f"--output={logs}/learner_%N.log" in learner["arguments"]
    assert "2 servers are healthy" in output and job.ended("server")


def test_the_learners_command_line_is_a_configuration(finished: tuple[Job, str]) -> None:
    words = finished[0].called("learner")["arguments"]
    name, *overrides = words[words.index("examples/grpo_fp8.py") + 1 :]
    config = load_config(name, overrides)
    assert config.rollout.vllm.urls == (f"http://{SERVERS[0]}:{PORT}", f"http://{SERVERS[0]}:{PORT + 1}")


def test_the_key_is_shared_and_not_shown(finished: tuple[Job, str]) -> None:
    job, output = finished
    key = job.called("server")["key"]
    assert re.fullmatch("[0-9a-f]{64}", key) and job.called("learner")["key"] == key
    shown = output + json.dumps([job.called(kind)["arguments"] for kind in ("server", "learner")])
    assert key not in shown


def test_every_server_gets_its_command_and_a_new_start(finished: tuple[Job, str], tmp_path: Path) -> None:
    words = finished[0].called("server")["arguments"]
    loop = words[words.index("-c") + 1]
    assert "while true" in loop and 'serve "$@" --host "$SLURMD_NODENAME" --index "$SLURM_LOCALID"' in loop
    (tmp_path / "megatron-calclip").write_text('#!/bin/sh\necho "$@"\nkill $PPID\n')
    (tmp_path / "megatron-calclip").chmod(0o755)
    node = {"SLURMD_NODENAME": "node7", "SLURM_LOCALID": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", *words[words.index("-c") :]],
        env=os.environ | node,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.stdout.startswith("serve qwen25_32b ") and done.stdout.rstrip().endswith("--host node7 --index 1")


def test_a_failing_learner_fails_the_job(tmp_path: Path) -> None:
    job = Job(tmp_path, STUB_LEARNER="3")
    code, output = job.finish()
    assert code == 3, output
    assert not (tmp_path / "scontrol").exists() and job.ended("server")


def test_a_signal_lets_the_learner_save_and_requeues_the_job(tmp_path: Path) -> None:
    job = Job(tmp_path, STUB_LEARNER="waits")
    job.wait_for("learning")
    job.process.send_signal(signal.SIGUSR1)
    code, output = job.finish()
    assert code == 0, output
    assert (tmp_path / "saved").exists() and (tmp_path / "scontrol").read_text() == "requeue 42\n"
    assert job.ended("server") and job.ended("learner")


@pytest.mark.parametrize(
    ("state", "complaint"), [("die", "the servers' step ended"), ("ill", "was not healthy after 3 s")]
)
def test_servers_that_do_not_come_up(tmp_path: Path, state: str, complaint: str) -> None:
    job = Job(tmp_path, STUB_SERVERS=state, SERVER_TIMEOUT="3")
    code, output = job.finish()
    assert code == 1 and complaint in output, output
    assert not (tmp_path / "learner.json").exists()


def test_a_wrong_number_of_nodes(tmp_path: Path) -> None:
    code, output = Job(tmp_path, nodes=LEARNERS).finish()
    assert code == 1 and output == "error: this job has 2 nodes; cluster asks for 2 + 1 (sbatch --nodes)\n"


def test_a_wrong_setting_is_one_line(tmp_path: Path) -> None:
    code, output = Job(tmp_path, "parallel.tp=5").finish()
    assert code == 2 and output.startswith("error: parallel: tp 5") and output.count("\n") == 1


def test_without_nodes_for_servers_there_are_none(tmp_path: Path) -> None:
    servers = ["rollout.vllm={urls: [], launch: true, colocated: true}", "cluster.num_rollout_nodes=0"]
    job = Job(tmp_path, *servers, nodes=LEARNERS)
    code, output = job.finish()
    assert code == 0, output
    assert not (tmp_path / "server.json").exists()
    assert not any("rollout.vllm.urls" in word for word in job.called("learner")["arguments"][-1:])


def test_the_script_asks_slurm_for_a_signal_and_another_start() -> None:
    directives = [line for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --signal=B:USR1@300" in directives and "#SBATCH --requeue" in directives
    assert "#SBATCH --nodes=12" in directives  # cluster.num_nodes + cluster.num_rollout_nodes of the shipped run
