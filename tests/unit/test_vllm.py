"""The client of vLLM servers, against servers that hang, close, lie and forget: no wrong sample gets through."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_vllm import LOG_PROB, STOP, FakeVllm, weights_file

from megatron_calclip.batch import SamplingParams
from megatron_calclip.config import RolloutConfig, VllmConfig
from megatron_calclip.errors import EXIT_FAILED, UserError
from megatron_calclip.rollout import vllm, vllm_server
from megatron_calclip.rollout.broadcast import Muster
from megatron_calclip.rollout.engine import Request
from megatron_calclip.rollout.fingerprint import fingerprint
from megatron_calclip.rollout.make import check_device
from megatron_calclip.rollout.vllm import VllmEngine
from megatron_calclip.rollout.vllm_transfer import BroadcastTransfer, FileTransfer, Transfer

SAMPLING = SamplingParams(max_new_tokens=6, temperature=1.0, top_p=1.0, stop_token_ids=(STOP,))
WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
REQUESTS = [Request((prompt, 9), 3 * prompt + index, (0, 1)) for prompt in range(2, 8) for index in range(3)]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "_FIRST_PAUSE_SECONDS", 0.01)


@pytest.fixture
def servers() -> Iterator[list[FakeVllm]]:
    fakes = [FakeVllm(0), FakeVllm(1)]
    yield fakes
    for fake in fakes:
        fake.close()


def make_engine(
    servers: list[FakeVllm],
    folder: Path,
    *,
    leader: bool = True,
    retries: int = 3,
    transfer: Transfer | None = None,
    **hooks: Any,
) -> VllmEngine:
    engine = VllmEngine(
        [fake.url for fake in servers],
        transfer=transfer or FileTransfer(folder),
        leader=leader,
        model="policy",
        vocab_size=100,
        timeout_seconds=0.5,
        num_retries=retries,
        recovery_seconds=0.2,
        say=lambda line: None,
        **hooks,
    )
    engine.load_weights(iter(WEIGHTS.items()), policy_version=4)
    return engine


def check_answers(engine: VllmEngine) -> set[int]:
    """Every request has the answer to its own prompt and place; returns the servers that gave them."""
    completions = engine.generate(REQUESTS, SAMPLING)
    for request, completion in zip(REQUESTS, completions, strict=True):
        prompt, _, sample, stop = completion.token_ids
        assert prompt == request.prompt_token_ids[0] and sample == 20 + request.sample_id % 3 and stop == STOP
        assert completion.log_probs == (LOG_PROB,) * 4 and completion.finished and completion.policy_version == 4
    return {completion.token_ids[1] - 10 for completion in completions}


def test_samples_of_a_prompt_share_a_request(servers: list[FakeVllm], tmp_path: Path) -> None:
    check_answers(make_engine(servers, tmp_path))
    bodies = [body for fake in servers for body in fake.bodies]
    assert sorted(tuple(body["prompt"]) for body in bodies) == [(prompt, 9) for prompt in range(2, 8)]
    assert all(body["n"] == 3 and body["stop_token_ids"] == [STOP] and body["max_tokens"] == 6 for body in bodies)
    assert len({body["seed"] for body in bodies}) == len(bodies)


def test_seeds_are_of_the_sample_and_the_step(servers: list[FakeVllm], tmp_path: Path) -> None:
    engine = make_engine(servers, tmp_path)
    seeds = []
    for requests in (
        REQUESTS[:3],
        REQUESTS[:3],
        [Request(r.prompt_token_ids, r.sample_id, (0, 2)) for r in REQUESTS[:3]],
    ):
        engine.generate(requests, SAMPLING)
        seeds.append(next(body["seed"] for fake in servers for body in fake.bodies))
        for fake in servers:
            fake.bodies.clear()
    assert seeds[0] == seeds[1] != seeds[2] and all(0 <= seed < 2**31 for seed in seeds)


def test_weights_arrive_and_old_files_go(servers: list[FakeVllm], tmp_path: Path) -> None:
    engine = make_engine(servers, tmp_path)
    receipt = engine.load_weights(iter(WEIGHTS.items()), policy_version=5)
    assert receipt.policy_version == engine.policy_version == 5
    assert receipt.fingerprints == {name: fingerprint(tensor) for name, tensor in WEIGHTS.items()}
    assert [path.name for path in weights_file(tmp_path)] == ["weights_5.safetensors"]
    order = [path for path in servers[0].calls if path != "/collective_rpc"]
    assert order[-7:] == [
        "/pause?mode=wait",
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache",
        "/resume",
    ]


def test_weights_arrive_by_broadcast(servers: list[FakeVllm], tmp_path: Path) -> None:
    weights = WEIGHTS | {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5)}
    engine = make_engine(servers, tmp_path, transfer=BroadcastTransfer(torch.device("cpu")))
    receipt = engine.load_weights(iter(weights.items()), policy_version=5)
    assert receipt.policy_version == engine.policy_version == 5
    assert receipt.fingerprints == {name: fingerprint(tensor) for name, tensor in weights.items()}
    assert all(fake.held == [5, receipt.fingerprints] for fake in servers)
    assert not weights_file(tmp_path)


def test_a_broadcast_goes_on_without_servers_that_fail(servers: list[FakeVllm], tmp_path: Path) -> None:
    """One that refuses the update, one that is gone; the first gets the weights before it gets a prompt again."""
    engine = make_engine(servers, tmp_path, transfer=BroadcastTransfer(torch.device("cpu")))
    servers[1].fault = "fails to update"
    receipt = engine.load_weights(iter(WEIGHTS.items()), policy_version=4)
    assert receipt.policy_version == 4 and servers[0].held[0] == 4 and servers[1].held[0] is None
    assert check_answers(engine) == {0}
    servers[1].fault = None
    servers[0].fault, servers[0].num_faults = "error 500", 1
    check_answers(engine)
    assert servers[1].held[0] == 4
    servers[0].close()
    engine.load_weights(iter(WEIGHTS.items()), policy_version=4)
    assert check_answers(engine) == {1}
    servers[1].fault = "fails to update"
    with pytest.raises(UserError, match=r"rollout\.vllm: no server could load the weights"):
        engine.load_weights(iter(WEIGHTS.items()), policy_version=5)


def test_a_receiver_that_is_not_waited_for_is_told_so() -> None:
    store = dist.HashStore()
    Muster(store).decide([0, 2])
    with pytest.raises(RuntimeError, match="goes on without receiver 1"):
        Muster(store).report(1)
    assert Muster(store).report(2) == [0, 2] and Muster(store).has_reported(1)


def test_colocated_servers_sleep_while_the_learner_trains(servers: list[FakeVllm], tmp_path: Path) -> None:
    engine = make_engine(servers, tmp_path, sleeps=True)
    check_answers(engine)
    engine.release()
    assert all(fake.calls[-1] == "/sleep?level=1" for fake in servers)
    engine.load_weights(iter(WEIGHTS.items()), policy_version=5)
    for fake in servers:
        order = [path for path in fake.calls if path != "/collective_rpc"]
        assert order[order.index("/sleep?level=1") + 1 :][:2] == ["/wake_up", "/pause?mode=wait"]
    servers[1].unknown = ("/sleep?level=1",)
    with pytest.raises(UserError, match=r"rollout\.vllm\.colocated: .*sleep mode needs a GPU"):
        engine.release()
    awake = make_engine(servers, tmp_path)
    awake.release()
    assert "/sleep?level=1" not in servers[0].calls[-3:]


def test_a_follower_moves_nothing(servers: list[FakeVllm], tmp_path: Path) -> None:
    make_engine(servers, tmp_path)
    updates = len(servers[0].calls)
    follower = make_engine(servers, tmp_path / "other", leader=False)
    assert len(servers[0].calls) == updates and not (tmp_path / "other").exists()
    check_answers(follower)


def test_the_leader_helps_a_follower_whose_server_came_back(
    servers: list[FakeVllm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has its answers and waits for the others; the only server loses its weights while it answers one of them."""
    monkeypatch.setattr(vllm, "_KEEPER_SECONDS", 0.05)
    leader = make_engine(servers[:1], tmp_path)
    follower = make_engine(servers[:1], tmp_path / "other", leader=False)
    follower.recovery_seconds = 30.0
    servers[0].fault, servers[0].num_faults = "restarts", 1
    assert check_answers(follower) == {0} and servers[0].num_faults == 0
    leader.close()
    calls = len(servers[0].calls)
    time.sleep(0.3)
    assert len(servers[0].calls) == calls  # a closed engine asks nothing any more


def test_sleeping_servers_are_left_alone(
    servers: list[FakeVllm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner has the GPUs then: a server that lost its weights gets them with the next update."""
    monkeypatch.setattr(vllm, "_KEEPER_SECONDS", 0.05)
    leader = make_engine(servers[:1], tmp_path, sleeps=True)
    leader.release()
    calls = len(servers[0].calls)
    time.sleep(0.3)
    assert len(servers[0].calls) == calls
    leader.load_weights(iter(WEIGHTS.items()), policy_version=4)
    assert check_answers(leader) == {0}
    leader.close()


ANSWER_FAULTS = [
    "hangs",
    "closes",
    "error 500",
    "garbage",
    "too few",
    "twice the same",
    "NaN",
    "short of log-probs",
    "unknown token",
    "no stop token",
    "empty",
    "cut short",
    "aborted",
    "restarts",
    "stale",
]


@pytest.mark.parametrize("fault", ANSWER_FAULTS)
def test_what_one_server_does_wrong_another_does_again(servers: list[FakeVllm], tmp_path: Path, fault: str) -> None:
    engine = make_engine(servers, tmp_path)
    servers[0].fault, servers[0].num_faults = fault, 1
    check_answers(engine)
    assert servers[0].num_faults == 0


@pytest.mark.parametrize("fault", [fault for fault in ANSWER_FAULTS if fault != "hangs"])
def test_a_fault_of_all_servers_stops_the_step(servers: list[FakeVllm], tmp_path: Path, fault: str) -> None:
    engine = make_engine(servers, tmp_path, retries=1)
    for fake in servers:
        fake.fault, fake.num_faults = fault, 10**6
    with pytest.raises(UserError, match=r"^rollout\.vllm: \d+ prompts have no answer after 2 attempts") as error:
        engine.generate(REQUESTS, SAMPLING)
    assert error.value.exit_code == EXIT_FAILED


def test_a_dead_server_is_left_out(servers: list[FakeVllm], tmp_path: Path) -> None:
    engine = make_engine(servers, tmp_path)
    servers[1].close()
    assert check_answers(engine) == {0}
    engine.load_weights(iter(WEIGHTS.items()), policy_version=4)
    assert engine.health().ready and "1 of 2" in engine.health().detail
    servers[0].close()
    with pytest.raises(UserError, match=r"rollout\.vllm: 6 prompts have no answer"):
        engine.generate(REQUESTS, SAMPLING)
    with pytest.raises(UserError, match=r"rollout\.vllm: no server could load the weights"):
        engine.load_weights(iter(WEIGHTS.items()), policy_version=5)
    assert not engine.health().ready
    with pytest.raises(ValueError, match="no complete weights"):
        engine.generate(REQUESTS, SAMPLING)


class Reviver:
    """Stands for servers that a run started: a fake in the place of one that was closed."""

    def __init__(self) -> None:
        self.engine: VllmEngine | None = None
        self.started: list[FakeVllm] = []

    def kill(self, engine: VllmEngine, fake: FakeVllm) -> None:
        fake.close()
        self.engine = engine

    def __call__(self) -> None:
        if self.engine is not None and not self.started:
            self.started.append(FakeVllm(7))
            self.engine.servers[0].url = self.started[0].url


def test_a_lone_server_that_dies_is_started_anew(servers: list[FakeVllm], tmp_path: Path) -> None:
    """It comes back on its port without weights, and gets them before any prompt."""
    revive = Reviver()
    engine = make_engine(servers[:1], tmp_path, revive=revive)
    revive.kill(engine, servers[0])
    assert check_answers(engine) == {7} and revive.started[0].held[0] == 4
    revive.started[0].close()


@pytest.mark.parametrize("broadcast", [False, True])
def test_a_lone_server_that_died_before_an_update_is_started_anew(
    servers: list[FakeVllm], tmp_path: Path, broadcast: bool
) -> None:
    revive = Reviver()
    transfer = BroadcastTransfer(torch.device("cpu")) if broadcast else FileTransfer(tmp_path)
    engine = make_engine(servers[:1], tmp_path, transfer=transfer, revive=revive)
    revive.kill(engine, servers[0])
    assert engine.load_weights(iter(WEIGHTS.items()), policy_version=5).policy_version == 5
    assert revive.started[0].held[0] == 5
    revive.started[0].close()


def test_a_lone_server_that_fails_in_its_update_is_updated_again(servers: list[FakeVllm], tmp_path: Path) -> None:
    """Here it answers again by itself; its first update left it without weights."""
    engine = make_engine(servers[:1], tmp_path)
    servers[0].fault = "fails to update once"
    assert engine.load_weights(iter(WEIGHTS.items()), policy_version=4).policy_version == 4
    assert servers[0].fault is None and check_answers(engine) == {0}


def test_a_server_that_failed_to_update_gets_no_prompts_until_it_has(servers: list[FakeVllm], tmp_path: Path) -> None:
    engine = make_engine(servers, tmp_path)
    servers[1].fault = "fails to update"
    receipt = engine.load_weights(iter(WEIGHTS.items()), policy_version=4)
    assert receipt.policy_version == 4 and servers[1].held[0] is None
    assert check_answers(engine) == {0}
    servers[1].fault = None
    servers[0].fault, servers[0].num_faults = "error 500", 1  # a second attempt brings the other one up to date
    check_answers(engine)
    assert servers[1].held[0] == 4


def test_servers_that_differ_show(servers: list[FakeVllm], tmp_path: Path) -> None:
    engine = make_engine(servers, tmp_path)
    real = servers[1].handle

    def damaged(handler: Any, path: str, body: Any) -> None:
        real(handler, path, body)
        if path == "/update_weights":
            servers[1].arrived[1]["a"] += 1

    servers[1].handle = damaged  # type: ignore[method-assign]
    receipt = engine.load_weights(iter(WEIGHTS.items()), policy_version=5)
    assert receipt.fingerprints["a"] == fingerprint(WEIGHTS["a"]) + 1


def test_scores(servers: list[FakeVllm], tmp_path: Path) -> None:
    engine = make_engine(servers, tmp_path)
    scores = engine.score([[5, 6, 7], [8], [1, 2]])
    assert [score.tolist() for score in scores] == [
        [0.0, pytest.approx(-0.6), pytest.approx(-0.7)],
        [0.0],
        [0.0, pytest.approx(-0.2)],
    ]
    with pytest.raises(ValueError, match="temperature 1 only"):
        engine.score([[5, 6]], temperature=0.5)


# Starting servers.


def test_command_line() -> None:
    rollout = RolloutConfig(
        engine="vllm",
        precision="fp8_per_channel",
        vllm=VllmConfig(launch=True, python="/v/python", arguments=("--seed", "1")),
    )
    line = vllm_server.command(rollout, Path("m"), port=8400, max_sequence_length=64)
    assert line[:3] == ["/v/python", "-m", "vllm.entrypoints.openai.api_server"] and line[-2:] == ["--seed", "1"]
    options = dict(zip(line[3::2], line[4::2], strict=True))
    assert options["--quantization"] == "fp8_per_channel" and options["--host"] == "127.0.0.1"
    assert options["--max-model-len"] == "64" and options["--logprobs-mode"] == "processed_logprobs"
    assert "--kv-cache-dtype" not in line and "--enable-sleep-mode" not in line
    colocated = RolloutConfig(kv_cache="fp8_e4m3", vllm=VllmConfig(launch=True, colocated=True))
    line = vllm_server.command(colocated, Path("m"), port=8400, max_sequence_length=64)
    assert line[line.index("--kv-cache-dtype") + 1] == "fp8_e4m3" and "--enable-sleep-mode" in line
    assert "--quantization" not in vllm_server.command(RolloutConfig(), Path("m"), port=1, max_sequence_length=1)


@pytest.mark.parametrize(
    ("settings", "capability", "problem"),
    [
        ({"precision": "fp8_per_channel"}, None, None),
        (
            {"precision": "fp8_per_block"},
            None,
            r"rollout\.precision: vLLM without a GPU has no kernel for fp8_per_block",
        ),
        (
            {"precision": "mxfp8"},
            (9, 0),
            r"rollout\.precision: mxfp8 needs compute capability 10\.0, this GPU has 9\.0",
        ),
        ({"precision": "mxfp8"}, (10, 0), None),
        ({"precision": "fp8_per_tensor"}, (8, 0), r"fp8_per_tensor needs compute capability 8\.9"),
        ({"precision": "fp8_per_block"}, (9, 0), None),
        ({"vllm": VllmConfig(launch=True, colocated=True)}, None, r"rollout\.vllm\.colocated: .*on GPUs only"),
    ],
)
def test_what_a_device_cannot_do_is_refused(
    settings: dict[str, Any], capability: tuple[int, int] | None, problem: str | None
) -> None:
    rollout = RolloutConfig(engine="vllm", **settings)
    if problem is None:
        check_device(rollout, capability)
    else:
        with pytest.raises(UserError, match=problem):
            check_device(rollout, capability)


def launch(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, *, timeout: float) -> None:
    """Servers that are a Python script."""
    monkeypatch.setattr(vllm_server, "command", lambda *args, **kwargs: [sys.executable, "-c", script])
    rollout = RolloutConfig(vllm=VllmConfig(launch=True, num_servers=2, start_timeout_seconds=timeout))
    vllm_server.LaunchedServers(rollout, folder / "model", folder=folder, max_sequence_length=8)


def test_a_server_that_does_not_come_up_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"rollout\.vllm\.launch: the server .* ended with status 3; its log is .*8400"):
        launch(tmp_path, monkeypatch, "import sys; print('out of memory'); sys.exit(3)", timeout=30)
    assert "out of memory" in (tmp_path / "server_8400.log").read_text()
    started = time.monotonic()
    with pytest.raises(UserError, match=r"was not ready after 1 s"):
        launch(tmp_path, monkeypatch, "import time; time.sleep(60)", timeout=1)
    assert time.monotonic() - started < 15


def test_ended_servers_are_started_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start appends to the log; servers that live are left alone."""
    script = "import time; print('up', flush=True); time.sleep(60)"
    monkeypatch.setattr(vllm_server, "command", lambda *args, **kwargs: [sys.executable, "-c", script])
    monkeypatch.setattr(vllm_server.Server, "call", lambda *args, **kwargs: None)
    rollout = RolloutConfig(vllm=VllmConfig(launch=True, num_servers=2))
    servers = vllm_server.LaunchedServers(rollout, tmp_path / "model", folder=tmp_path, max_sequence_length=8)
    try:
        first, second = servers._processes
        first.kill()
        first.wait()
        servers.revive()
        assert servers._processes[0] is not first and servers._processes[0].poll() is None
        assert servers._processes[1] is second and second.poll() is None
    finally:
        servers.stop()
    assert all(process.poll() is not None for process in servers._processes)


def test_a_server_outlives_the_thread_that_revived_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Completions that are drawn ahead are drawn on a thread of their own, which ends."""
    monkeypatch.setattr(
        vllm_server, "command", lambda *args, **kwargs: [sys.executable, "-c", "import time; time.sleep(60)"]
    )
    monkeypatch.setattr(vllm_server.Server, "call", lambda *args, **kwargs: None)
    rollout = RolloutConfig(vllm=VllmConfig(launch=True))
    servers = vllm_server.LaunchedServers(rollout, tmp_path / "model", folder=tmp_path, max_sequence_length=8)
    try:
        servers._processes[0].kill()
        servers._processes[0].wait()
        thread = threading.Thread(target=servers.revive)
        thread.start()
        thread.join()
        with pytest.raises(subprocess.TimeoutExpired):
            servers._processes[0].wait(timeout=1.0)
    finally:
        servers.stop()


def test_servers_end_with_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    class Library:
        def prctl(self, option: int, how: int) -> None:
            calls.append((option, how))

    monkeypatch.setattr(vllm_server.ctypes, "CDLL", lambda name: Library())
    vllm_server._die_with_parent()
    assert calls == [(1, signal.SIGTERM)]
