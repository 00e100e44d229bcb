"""The code reward: layouts of tests, comparison of outputs, and programs that try to get out of the sandbox."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_calclip.batch import Prompt
from megatron_calclip.config import CodeRewardConfig, RewardConfig
from megatron_calclip.errors import UserError
from megatron_calclip.rewards import RewardSample, check_gold, make_scorer, sandbox
from megatron_calclip.rewards.code import CodeReward, _same_value, extract_program, parse_tests, same_text
from megatron_calclip.rewards.sandbox import ProgramLimits, Run, check_sandbox, run_program, sandbox_problem

# On a busy machine an interpreter may take seconds to start: what is to end by itself gets time, what is to be ended does not.
LIMITS = ProgramLimits(timeout_seconds=20.0, memory_mib=256, num_processes=8, output_kib=64)
SHORT = replace(LIMITS, timeout_seconds=2.0)
SUM = "print(sum(map(int, input().split())))"
needs_sandbox = pytest.mark.skipif(sandbox_problem() is not None, reason=f"no sandbox here: {sandbox_problem()}")


def run(
    program: str, *inputs: str, function: str | None = None, isolate: bool = True, limits: ProgramLimits = LIMITS
) -> list[Run]:
    return list(run_program(program, inputs or ("",), function=function, limits=limits, isolate=isolate))


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


def row_of(inputs: list[Any], outputs: list[Any], **others: Any) -> dict[str, Any]:
    return {"tests": {"inputs": inputs, "outputs": outputs, **others}}


def reward(**settings: Any) -> CodeReward:
    return CodeReward(asdict(CodeRewardConfig(timeout_seconds=20.0, memory_mib=256, **settings)))


# What a completion and a row say.


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```python\na\n```\nor better\n```python\nb\n```", "b\n"),
        ("```python\na\n```\nwhich prints\n```\n3\n```", "a\n"),
        ("```py\na\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("<think>```python\na\n```</think>```python\nb\n```", "b\n"),
        ("print(1)", None),
        ("```python\nprint(1)", None),
    ],
)
def test_extract_program(completion: str, program: str | None) -> None:
    assert extract_program(completion) == program


def test_layouts_of_tests() -> None:
    apps = json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})
    assert parse_tests(apps, {}).inputs == ["1 2\n"]
    taco = {"tests": {"inputs": [["1", "2"]], "outputs": [["3"]]}}
    assert parse_tests("ignored", taco).inputs == ["1\n2"]
    call = parse_tests("", {"tests": {"inputs": [[1, [2]], "3\n[4]"], "outputs": [1, 2], "fn_name": "f"}})
    assert (call.inputs, call.function) == (["[1, [2]]", "[3, [4]]"], "f")


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ("", "not JSON"),
        ("3", "without `inputs`"),
        ('{"inputs": []}', "without `inputs`"),
        ('{"inputs": [], "outputs": []}', "at least 1"),
        ('{"inputs": ["1"], "outputs": []}', "same length"),
        ('{"inputs": ["1"], "outputs": ["1"], "fn_name": "a.b"}', "no name"),
    ],
)
def test_rows_without_usable_tests(answer: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_gold("code", answer, {})


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("3\n", "3", True),
        ("3 \n\n", "3\n", True),
        ("1 2\n3\n", "1 2\n3", True),
        ("0.3333333", "0.33333331", True),
        ("0.33", "0.34", False),
        ("3", "4", False),
        ("1000000", "1000001", False),
        ("1\n2", "1 2", False),
        ("yes", "YES", False),
        ("nan", "1.0", False),
        ("", "1", False),
    ],
)
def test_same_text(output: str, expected: str, same: bool) -> None:
    assert same_text(output, expected) is same


# The sandbox.


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "tests", "value"),
    [
        (SUM, row_of(["1 2\n", "3 4\n"], ["3\n", "7\n"]), 1.0),
        (SUM, row_of(["1 2\n", "3 4\n"], ["3\n", "8\n"]), 0.0),
        ("print(3)", row_of(["1 2\n", "3 4\n"], ["3\n", "7\n"]), 0.0),
        ("def add(a, b): return a + b", row_of([[1, 2]], [3], fn_name="add"), 1.0),
        ("def add(a, b): return a + b", row_of([[1, 2]], [[3]], fn_name="add"), 1.0),
        ("def add(a, b): return a - b", row_of([[1, 2]], [3], fn_name="add"), 0.0),
        ("def add(a, b): print(3)", row_of([[1, 2]], [3], fn_name="add"), 0.0),
        (
            "class Solution:\n    def f(self, a):\n        print('log')\n        return (a, a)",
            row_of([[1]], [[1, 1]], fn_name="f"),
            1.0,
        ),
        ("def f(a): return True", row_of([[1]], [1], fn_name="f"), 0.0),
        ("def f(a): return 0.1 + 0.2", row_of([[1]], [0.3], fn_name="f"), 1.0),
        ("def f(a): return 'x'", row_of(['"a"'], ['"x"'], fn_name="f"), 1.0),
        ("raise ValueError", row_of([""], [""]), 0.0),
        ("print(1", row_of([""], ["1"]), 0.0),
        ("print(1); exit(3)", row_of([""], ["1"]), 0.0),
    ],
)
def test_programs(program: str, tests: dict[str, Any], value: float) -> None:
    assert reward()(fenced(program), "", tests) == value


@needs_sandbox
def test_partial_credit_and_number_of_tests() -> None:
    tests = row_of(["1 1", "1 2", "1 3", "1 4"], ["2", "3", "0", "0"])
    assert reward(partial_credit=True)(fenced(SUM), "", tests) == 0.5
    assert reward(partial_credit=True, max_tests=2)(fenced(SUM), "", tests) == 0.5  # the first and the third
    assert reward(partial_credit=True, max_tests=1)(fenced(SUM), "", tests) == 1.0


@needs_sandbox
def test_all_tests_share_a_budget() -> None:
    """Ten tests of a second each, with two seconds for all of them."""
    start = time.monotonic()
    sleep = "import time\ntime.sleep(1)\nprint(1)"
    assert reward(total_timeout_seconds=2.0)(fenced(sleep), "", row_of([""] * 10, ["1"] * 10)) == 0.0
    assert time.monotonic() - start < 10


@needs_sandbox
def test_in_the_pool() -> None:
    prompt = Prompt(id=0, token_ids=(1,), text="add", answer="", metadata=row_of(["1 2", "2 3"], ["3", "5"]))
    config = RewardConfig("code", num_workers=2, code=CodeRewardConfig(timeout_seconds=5.0, memory_mib=256))
    completions = [fenced(SUM), fenced("while True: pass"), "no program", fenced("print(3)")] * 2
    with closing(make_scorer(config)) as scorer:
        scores = scorer.score([RewardSample(prompt, text, 1, True) for text in completions])
    assert [score.value for score in scores] == [1.0, 0.0, 0.0, 0.0] * 2
    assert not any(score.timed_out for score in scores)  # the program's time-out is a failed test


@needs_sandbox
def test_each_test_starts_afresh() -> None:
    """A program finds nothing of its earlier runs, whatever it left."""
    program = """import os
print([name for name in ("file", "folder", "link") if os.path.lexists(name)], os.path.exists("/tmp/file"))
open("file", "x").write("x" * 1000)
os.makedirs("folder/closed/inner")
open("folder/closed/file", "w")
os.symlink("/etc", "link")
os.chmod("folder/closed", 0)
os.chmod("folder", 0)
"""
    assert [(one.status, one.output) for one in run(program, "", "", "")] == [("ok", "[] False\n")] * 3


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass", "timeout"),
        (
            "import threading, time\nfor _ in range(10**4): threading.Thread(target=time.sleep, args=(9,)).start()",
            "timeout",
        ),
        ("x = bytearray(10**10)", "error"),
        ("x = []\nwhile True: x.append(bytearray(1 << 20))", "error"),
        ("while True: print('x' * 1000)", "output"),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "timeout"),
        ("while True: pass", "timeout"),
        ("import time\ntime.sleep(1000)", "timeout"),
        ("import os\nos.close(1)\nimport time\ntime.sleep(1000)", "timeout"),
        ("f = open('/tmp/big', 'w')\nwhile True: f.write('x' * (1 << 20))", "error"),
        ("import os\ni = 0\nwhile True:\n    open(f'/tmp/{i}', 'w').write('x' * (1 << 20))\n    i += 1", "error"),
        ("fs = [open('/dev/null') for _ in range(1000)]", "error"),
        ("def f(n): return f(n + 1)\nimport sys\nsys.setrecursionlimit(10**9)\nf(0)", "error timeout"),
    ],
)
def test_bombs_go_off_inside(program: str, status: str) -> None:
    start = time.monotonic()
    (result,) = run(program, limits=SHORT if "timeout" in status else LIMITS)
    assert result.status in status.split() and len(result.output) <= LIMITS.output_kib << 10
    assert time.monotonic() - start < 20
    assert run("print(1)") == [Run("ok", "1\n")]  # and nothing of it is left


SECRET = "CALCLIP_TEST_SECRET"


@needs_sandbox
def test_secrets_are_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    secret.chmod(0o644)
    monkeypatch.setenv(SECRET, "s3cret")
    places = [str(secret), "/etc/passwd", "/etc/shadow", "/etc/hostname", os.path.expanduser("~/.bashrc"), __file__]
    program = f"""
import os
for place in {places!r}:
    try:
        print(place, len(open(place).read()))
    except OSError:
        pass
for pid in os.listdir("/proc"):
    for name in ("environ", "cmdline"):
        try:
            print(pid * ("s3cret" in open(f"/proc/{{pid}}/{{name}}").read()), end="")
        except OSError:
            pass
print(os.environ.get({SECRET!r}), os.path.exists("/home"), os.path.exists("/var"))
"""
    assert run(program) == [Run("ok", "None False False\n")]


@needs_sandbox
def test_no_network() -> None:
    """A server on this machine's own address is not reached, nor is a name resolved."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"""
import socket
for address in (("127.0.0.1", {port}), ("1.1.1.1", 53)):
    try:
        socket.create_connection(address, 1)
        print("reached", address)
    except OSError as error:
        print("no")
"""
        assert run(program) == [Run("ok", "no\nno\n")]


@needs_sandbox
def test_nobody_else_can_be_killed() -> None:
    """Neither the scorer, by its number outside, nor the process that runs the tests."""
    program = f"""
import os, signal
for pid in ({os.getpid()}, {os.getppid()}, os.getppid(), 1):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError as error:
        print(type(error).__name__)
print(os.getppid())
"""
    first, second = run(program, "", "")
    assert first.status == second.status == "ok" and first.output.splitlines()[-1] == "1"


@needs_sandbox
def test_nothing_outside_can_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    places = [str(tmp_path), "/", "/usr", "/dev", "/program", sys.prefix, sys.base_prefix]
    program = f"""
import os
for place in {places!r}:
    try:
        open(os.path.join(place, "calclip_was_here"), "w")
        print("wrote", place)
    except OSError:
        pass
for path in ("/program/solution.py", "/dev/null/x", "/proc/sys/kernel/hostname"):
    try:
        open(path, "w").write("x")
        print("wrote", path)
    except OSError:
        pass
"""
    assert run(program) == [Run("ok", "")]
    assert not list(tmp_path.iterdir())


@needs_sandbox
def test_rights_are_gone() -> None:
    program = """
import os
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(status["CapEff"].strip().strip("0"), status["NoNewPrivs"].strip(), 0 in os.getresuid(), os.getgroups())
try:
    os.setuid(0)
    print("root")
except OSError:
    print("no")
"""
    (result,) = run(program)
    groups = "[]" if os.getuid() == 0 else result.output.split(" ", 3)[3].split("\n")[0]
    assert result.output == f" 1 False {groups}\nno\n"


@needs_sandbox
def test_what_a_program_leaves_behind_ends() -> None:
    daemon = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.close(1)
        while True:
            open("/tmp/alive", "w").write(str(time.time()))
            time.sleep(0.01)
    os._exit(0)
print("started")
"""
    look = "import os, time\ntime.sleep(0.3)\nprint(len([p for p in os.listdir('/proc') if p.isdigit()]))"
    both = f"import sys\nif input() == 'daemon':\n    exec({daemon!r})\nelse:\n    exec({look!r})"
    first, second = run(both, "daemon", "look")
    assert first.status == "ok" and second == Run("ok", "2\n")  # the tests' process and the program


@needs_sandbox
def test_abandoned_runs_end() -> None:
    runs = run_program("import time\ntime.sleep(100)", ["", ""], function=None, limits=SHORT, isolate=True)
    with closing(runs):  # type: ignore[type-var]
        assert next(runs).status == "timeout"


def test_without_a_sandbox_it_is_refused_or_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "sandbox_problem", lambda: "no namespaces")
    with pytest.raises(UserError, match=r"no namespaces.*allow user namespaces") as caught:
        check_sandbox(allow_unsandboxed=False)
    assert caught.value.where == "reward.code.allow_unsandboxed"
    with pytest.warns(UserWarning, match="WITHOUT A SANDBOX"):
        check_sandbox(allow_unsandboxed=True)


def readable_interpreter() -> str | None:
    """A Python that the unprivileged user, which programs run as, can start where it lies."""
    if os.getuid() != 0:
        return sys.executable
    for path in (sys.executable, "/usr/bin/python3"):
        try:
            done = subprocess.run([path, "-I", "-c", "import json"], user=65534, group=65534, cwd="/", check=False)
        except OSError:
            continue
        if done.returncode == 0:
            return path
    return None


@pytest.mark.skipif(readable_interpreter() is None, reason="only root can read the interpreters here")
def test_limits_hold_without_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", readable_interpreter())
    assert run(SUM, "1 2", isolate=False) == [Run("ok", "3\n")]
    assert run("import os; print(os.getuid() == 0)", isolate=False) == [Run("ok", "False\n")]
    assert run("x = bytearray(10**10)", isolate=False)[0].status == "error"
    assert run("while True: pass", isolate=False, limits=SHORT)[0].status == "timeout"
    escape = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.close(1)\n    time.sleep(99)\nprint('left')"
    count = (
        "import os\nprint(sum(os.stat(f'/proc/{p}').st_uid == os.getuid() for p in os.listdir('/proc') if p.isdigit()))"
    )
    left, number = run(f"exec({escape!r} if input() == 'go' else {count!r})", "go", "count", isolate=False)
    assert left == Run("ok", "left\n")
    if os.getuid() == 0:  # the user id is the program's own
        assert number == Run("ok", "2\n")


@needs_sandbox
def test_an_interpreter_below_tmp_is_seen(tmp_path: Path) -> None:
    """A clone in /tmp has its environment there, where programs get a scratch folder of their own."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from megatron_calclip.rewards.sandbox import sandbox_problem\nprint(sandbox_problem())"
    )
    command = [str(tmp_path / "venv" / "bin" / "python"), "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "None", found.stdout


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (10**400, 1.5, False),
        ({"a": 0.1 + 0.2, "b": [1]}, {"a": 0.3, "b": [1]}, True),
        ({"a": 0.4}, {"a": 0.3}, False),
        ({"a": 1}, {"b": 1}, False),
        ([0.1 + 0.2], [0.3], True),
        (True, 1, False),
        (True, 1.0, False),
    ],
)
def test_values_that_a_function_returns(value: Any, expected: Any, same: bool) -> None:
    assert _same_value(value, expected) == same
