"""The pool: nothing hangs, nothing is lost, whatever is killed, and nothing outlives its parent."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megatron_calclip.config import RewardConfig
from megatron_calclip.errors import UserError
from megatron_calclip.rewards.pool import MAX_ATTEMPTS, Limits, Pool

MODULE = """
import ctypes, os, signal, time

def work(job):
    action, value = job.completion
    if action == "echo":
        return value
    if action == "slow":
        time.sleep(value)
        return 1
    if action == "burn":
        while True:
            pass
    if action == "power":
        return 9 ** (9 ** 9) % 7
    if action == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "die once":
        if not os.path.exists(value):
            open(value, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return 1
    if action == "child":
        import subprocess
        with open(value, "w") as file:
            file.write(str(subprocess.Popen(["sleep", "100"]).pid))
        while True:
            pass
    if action == "pid":
        return os.getpid()
    if action == "meet":  # ends when as many jobs are at work at the same time
        folder, count = value
        open(os.path.join(folder, str(os.getpid())), "w").close()
        while len(os.listdir(folder)) < count:
            time.sleep(0.01)
        return os.getpid()
"""
LIMITS = Limits(cpu_seconds=0.5, wall_seconds=3.0, memory_mib=1024)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "pool_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "pool_rewards.work"


@pytest.fixture
def meeting(tmp_path: Path) -> Path:
    """Where jobs that wait for each other leave their names."""
    (folder := tmp_path / "meeting").mkdir()
    return folder


def job(action: str, value: object = None, **others: object) -> bytes:
    """What stands for a sample: an object with a completion, here an action and its argument."""
    return pickle.dumps(SimpleNamespace(completion=(action, value), **others))


def tasks(results: list[object]) -> list[float | None]:
    return [None if result is None else result["task"] for result in results]  # type: ignore[index]


@pytest.fixture
def make(module: str) -> Iterator[Callable[..., Pool]]:
    pools: list[Pool] = []

    def make_pool(num_workers: int, limits: Limits = LIMITS, name: str = module) -> Pool:
        pools.append(Pool(num_workers, limits=limits, settings=asdict(RewardConfig(name))))
        return pools[-1]

    yield make_pool
    for pool in pools:
        pool.close()


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return False


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_results_come_in_order(make: Callable[..., Pool], meeting: Path) -> None:
    pool = make(3, replace(LIMITS, wall_seconds=60.0))
    jobs = [job("slow", 0.2)] + [job("echo", index) for index in range(100)] + [job("meet", (str(meeting), 3))] * 3
    results = tasks(pool.map(jobs))
    assert results[:101] == [1.0, *map(float, range(100))] and len({*results[101:]}) == 3
    assert pool.map([]) == []
    assert len(pool.worker_pids) == 3


def test_no_more_workers_than_jobs(make: Callable[..., Pool]) -> None:
    pool = make(8)
    pool.map([job("echo", 1), job("echo", 2)])
    assert len(pool.worker_pids) <= 2


@pytest.mark.parametrize("action", ["burn", "power"])
def test_a_job_that_does_not_end_is_ended_and_the_others_are_not(make: Callable[..., Pool], action: str) -> None:
    """`power` is a single call into C, which no signal handler interrupts."""
    start = time.monotonic()
    results = make(2).map([job(action), *(job("echo", index) for index in range(20)), job(action)])
    assert tasks(results) == [None, *map(float, range(20)), None]
    assert time.monotonic() - start < 20


def test_a_sleeping_job_is_ended_by_the_clock(make: Callable[..., Pool]) -> None:
    limits = replace(LIMITS, wall_seconds=2.5)
    assert tasks(make(1, limits).map([job("slow", 60), job("slow", 1.5)])) == [None, 1.0]


def test_a_worker_that_dies_alone_loses_nothing(make: Callable[..., Pool], tmp_path: Path) -> None:
    jobs = [job("die once", str(tmp_path / f"died-{index}")) for index in range(4)]
    assert tasks(make(2).map(jobs)) == [1.0] * 4


def test_a_job_that_kills_every_worker_is_given_up(make: Callable[..., Pool]) -> None:
    assert tasks(make(2).map([job("die"), job("echo", 3), job("die")])) == [None, 3.0, None]
    assert MAX_ATTEMPTS == 3


@pytest.mark.parametrize("victims", ["a worker", "all workers", "the nursery", "everything"])
def test_sigkill_from_outside_loses_no_result(make: Callable[..., Pool], victims: str) -> None:
    pool = make(2)
    pool.map([job("echo", 0)])

    def kill() -> None:
        workers = list(pool.worker_pids)
        nursery = [pool.nursery_pid] if pool.nursery_pid else []
        chosen = {"a worker": workers[:1], "all workers": workers, "the nursery": nursery}.get(
            victims, nursery + workers
        )
        for pid in chosen:
            os.kill(pid, signal.SIGKILL)

    killers = [threading.Timer(seconds, kill) for seconds in (0.15, 0.6)]
    for killer in killers:
        killer.start()
    try:
        assert tasks(pool.map([job("slow", 0.05) for _ in range(40)])) == [1.0] * 40
    finally:
        for killer in killers:
            killer.join()


def test_a_stopped_worker_does_not_hang_the_parent(make: Callable[..., Pool]) -> None:
    pool = make(1)
    (pid,) = map(int, tasks(pool.map([job("pid")])))  # type: ignore[arg-type]
    os.kill(pid, signal.SIGSTOP)
    assert tasks(pool.map([job("echo", 5), job("echo", 6)])) in ([None, 6.0], [5.0, 6.0])
    assert eventually(lambda: gone(pid))


def test_children_of_a_job_end_with_it(make: Callable[..., Pool], tmp_path: Path) -> None:
    assert tasks(make(1).map([job("child", str(tmp_path / "pid"))])) == [None]
    child = int((tmp_path / "pid").read_text())
    assert eventually(lambda: gone(child))


def test_close_ends_all_and_the_next_use_starts_anew(make: Callable[..., Pool]) -> None:
    pool = make(2)
    pool.map([job("echo", 1)] * 4)
    pids = [*pool.worker_pids, pool.nursery_pid]
    pool.close()
    assert all(eventually(lambda pid=pid: gone(pid)) for pid in pids)  # type: ignore[misc]
    assert tasks(pool.map([job("echo", 2)])) == [2.0]


def test_nothing_outlives_a_killed_parent(module: str, tmp_path: Path) -> None:
    program = textwrap.dedent(f"""
        import json, sys
        from dataclasses import asdict
        sys.path.insert(0, {str(tmp_path)!r})
        from megatron_calclip.config import RewardConfig
        from megatron_calclip.rewards.pool import Limits, Pool
        pool = Pool(2, limits=Limits(1000.0, 1000.0, 1024), settings=asdict(RewardConfig({module!r})))
        import pickle, threading
        from types import SimpleNamespace as S
        echo, burn = (pickle.dumps(S(completion=(a, 1))) for a in ("echo", "burn"))
        pool.map([echo] * 8)
        print(json.dumps([pool.nursery_pid, *pool.worker_pids]), flush=True)
        pool.map([burn, burn])
    """)
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = json.loads(parent.stdout.readline())
    busy = pids[1:]
    assert eventually(lambda: all(psutil.Process(pid).cpu_times().user > 0.05 for pid in busy))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert all(eventually(lambda pid=pid: gone(pid)) for pid in pids)  # type: ignore[misc]


def test_processes_that_never_start_are_reported(make: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_calclip.rewards.pool._NURSERY", "raise SystemExit(1)  # {path} {arguments}")
    with pytest.raises(UserError, match="do not start"):
        make(2).map([job("echo", 1)])


def test_work_is_divided(make: Callable[..., Pool], meeting: Path) -> None:
    """Four jobs that come together go to four workers, however late these start; more jobs get no others."""
    pool = make(4, replace(LIMITS, wall_seconds=60.0))
    assert len({*tasks(pool.map([job("meet", (str(meeting), 4))] * 4))}) == 4
    workers = set(pool.worker_pids)
    assert len(workers) == 4
    assert tasks(pool.map([job("echo", index) for index in range(100)])) == [*map(float, range(100))]
    assert set(pool.worker_pids) == workers


def test_a_full_parent_socket_is_no_deadlock(make: Callable[..., Pool]) -> None:
    """Jobs far larger than a socket's buffer reach the workers."""
    results = make(2).map([job("echo", 1), job("echo", 2, padding="x" * 5_000_000)] * 4)
    assert tasks(results) == [1.0, 2.0] * 4
