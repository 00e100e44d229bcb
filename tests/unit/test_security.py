"""What untrusted input can do (nothing), what guards the vLLM servers, and where secrets do not go; see docs/security.md."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_calclip import cli
from megatron_calclip.commands.serve import visible_gpus
from megatron_calclip.config import RolloutConfig
from megatron_calclip.config_file import config_to_yaml, load_config
from megatron_calclip.errors import UserError
from megatron_calclip.rollout.make import check_key
from megatron_calclip.rollout.vllm_http import Server, ServerError
from megatron_calclip.rollout.vllm_key import KEY_VARIABLE, RequireKey, needs_key
from megatron_calclip.rollout.vllm_server import command, environment
from megatron_calclip.weights.load import HFSource

ROOT = Path(__file__).resolve().parents[2]
KEY = "k" * 40

# Files that may unpickle, and why that is no way in.
UNPICKLERS = {
    "megatron_calclip/weights/dist_load.py",  # an Unpickler that admits the format's few classes only
    "megatron_calclip/learner/checkpoint_writer.py",  # the report of our own process that saved, from our own folder
    "megatron_calclip/rewards/grading.py",  # jobs from the parent process, through its pipe
}


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Dotted names of all calls in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def sources() -> list[Path]:
    return [path for folder in ("megatron_calclip", "tools", "examples") for path in (ROOT / folder).rglob("*.py")]


# Input.


def test_nothing_read_can_run_code() -> None:
    seen = set()
    for path in sources():
        where = str(path.relative_to(ROOT))
        for name, call in calls(path):
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            seen.add(name)
            if name == "torch.load":
                assert keywords.get("weights_only") == "True", where
            if name in ("pickle.load", "pickle.loads", "pickle.Unpickler"):
                assert where in UNPICKLERS, where
            if name == "yaml.load":
                assert keywords.get("Loader") == "_Loader", where
            assert name not in ("eval", "exec", "os.system", "os.popen", "yaml.unsafe_load", "joblib.load"), where
            assert keywords.get("shell", "False") == "False", where
            assert keywords.get("trust_remote_code", "False") == "False", where
    assert {"torch.load", "pickle.loads", "yaml.load"} <= seen  # or the names above match nothing


class _Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("evil"),))


def test_pickled_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": _Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="safetensors"):
        HFSource.from_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="no safetensors file"):
        HFSource.from_folder(tmp_path)
    assert not (tmp_path / "evil").exists()


def test_configurations_cannot_make_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "evil.yaml"
    path.write_text("run_dir: !!python/object/apply:os.system ['touch evil']\n")
    with pytest.raises(UserError, match="not valid YAML"):
        load_config(str(path))
    assert not (tmp_path / "evil").exists()


# The key of vLLM servers.


def answer(path: str, *headers: tuple[bytes, bytes], kind: str = "http") -> list[dict[str, Any]]:
    """What a guarded application sends for a request."""
    sent: list[dict[str, Any]] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "reached"})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing of a request without the key is read")

    asyncio.run(RequireKey(application)({"type": kind, "path": path, "headers": headers}, receive, send))
    return sent


REACHED = [{"type": "reached"}]
RIGHT = (b"authorization", f"Bearer {KEY}".encode())


def test_only_the_key_opens_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    for path in ("/v1/completions", "/collective_rpc", "/update_weights", "/pause", "/", "/metrics"):
        assert answer(path, RIGHT) == REACHED
        for wrong in ([], [(b"authorization", b"Bearer x")], [(b"authorization", KEY.encode())], [RIGHT, RIGHT]):
            start, body = answer(path, *wrong)
            assert (start["status"], body["body"]) == (401, b"the key is missing or wrong")
    assert answer("/health") == REACHED
    assert answer("/health/../collective_rpc")[0]["status"] == 401
    assert answer("/", kind="websocket")[0] == {"type": "websocket.close", "code": 1008}
    assert answer("", kind="lifespan") == REACHED


def test_a_guard_without_a_key_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match=KEY_VARIABLE):
        RequireKey(lambda *_: None)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("key", [None, KEY])
def test_the_client_sends_the_key(key: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    if key is not None:
        monkeypatch.setenv(KEY_VARIABLE, key)
    seen = []
    monkeypatch.setattr(
        "urllib.request.urlopen", lambda request, timeout: seen.append(dict(request.header_items())) or _refuse()
    )
    with pytest.raises(ServerError):
        Server("http://127.0.0.1:1").call("/health", method="GET", timeout=1)
    assert seen[0].get("Authorization") == (f"Bearer {key}" if key else None)


def _refuse() -> Any:
    raise OSError("no network in this test")


@pytest.mark.parametrize(
    ("url", "needed"),
    [
        ("http://127.0.0.1:8400", False),
        ("http://localhost:8400", False),
        ("http://[::1]:8400", False),
        ("http://node7:8400", True),
        ("http://10.0.0.1:8400", True),
        ("http://0.0.0.0:8400", True),
        ("http://localhost.evil.example:8400", True),
    ],
)
def test_servers_that_others_can_reach_need_a_key(url: str, needed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert needs_key(url) == needed
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    check_key([url])
    monkeypatch.delenv(KEY_VARIABLE)
    if needed:
        with pytest.raises(UserError, match=rf"rollout\.vllm\.urls: .*{KEY_VARIABLE}"):
            check_key(["http://127.0.0.1:1", url])
    else:
        check_key([url])


def test_launched_servers_listen_on_loopback_and_never_show_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    plain = command(RolloutConfig(), Path("model"), port=1, max_sequence_length=8)
    assert plain[plain.index("--host") + 1] == "127.0.0.1" and "--middleware" not in plain
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    guarded = command(RolloutConfig(), Path("model"), port=1, max_sequence_length=8, host="node7")
    assert guarded[guarded.index("--host") + 1] == "node7"
    module, _, name = guarded[guarded.index("--middleware") + 1].rpartition(".")
    assert getattr(__import__(module, fromlist=[name]), name) is RequireKey
    assert not any(KEY in word for word in guarded) and environment()[KEY_VARIABLE] == KEY


# serve.


def served(monkeypatch: pytest.MonkeyPatch, *argv: str) -> list[str]:
    """The command that `serve` becomes."""
    became: list[list[str]] = []
    monkeypatch.setattr("os.execvpe", lambda name, words, variables: became.append(words))
    cli.main(["serve", *argv])
    return became[0]


def test_serve_becomes_the_runs_own_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    words = served(monkeypatch, "qwen25_32b", "--host", "node7", "--index", "2")
    config = load_config("qwen25_32b")
    expected = command(config.rollout, Path("models/Qwen2.5-32B"), port=8402, max_sequence_length=8192, host="node7")
    assert words == expected
    assert {"fp8_per_channel", "--tensor-parallel-size=2", "8402"} <= set(words)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["qwen25_32b", "--host", "node7"], "error: --host: node7 can be reached by others"),
        (["tiny_cpu"], "error: serve: needs rollout.engine: vllm and a pretrained model"),
        (["qwen25_32b", "rollout.vllm.python=/nowhere/python"], "error: rollout.vllm.python: /nowhere/python: No such"),
    ],
)
def test_serve_refuses(
    argv: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(SystemExit):
        cli.main(["serve", *argv])
    assert capsys.readouterr().err.startswith(complaint)


def test_servers_of_one_machine_share_its_gpus() -> None:
    assert [visible_gpus(None, index=index, count=2) for index in range(3)] == ["0,1", "2,3", "4,5"]
    assert [visible_gpus("3,5,6,7", index=index, count=2) for index in range(2)] == ["3,5", "6,7"]
    assert visible_gpus("3,5", index=3, count=2) == "3,5"  # the batch system has chosen already
    with pytest.raises(UserError, match="--index: server 2 of 2"):
        visible_gpus("3,5,6,7", index=2, count=2)


# Secrets.


@pytest.mark.parametrize(
    "override",
    [
        "rollout.vllm.arguments=[--api-key, secret]",
        "rollout.vllm.arguments=[--api-key=secret]",
        "rollout.vllm.urls=['http://user:secret@node7:8400']",
        "rollout.vllm.urls=['http://node7:8400/?key=secret']",
    ],
)
def test_a_configuration_cannot_hold_a_key(override: str) -> None:
    with pytest.raises(UserError, match=f"rollout.*{KEY_VARIABLE}") as caught:
        load_config("qwen25_32b", [override])
    assert "secret" not in str(caught.value)


def test_the_environments_secrets_are_in_no_saved_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (KEY_VARIABLE, "WANDB_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, KEY)
    config = load_config("qwen25_32b", ["tracking.wandb_project=project"])
    assert KEY not in config_to_yaml(config)


def test_a_servers_error_does_not_repeat_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with pytest.raises(ServerError) as caught:
        Server("http://127.0.0.1:1").call("/health", method="GET", timeout=1)
    assert KEY not in str(caught.value)
