"""The contract on verl 0.9.1: its real policy losses, `ppo_loss`, and training worker around an engine without a model.

Real: registration, configuration classes, aggregation, the worker's loop over mini-batches, nested tensors, micro-batches,
metrics. Played: the engine's forward pass, which reads log-probabilities from a table.
"""

from __future__ import annotations

import os

import pytest

# Not "verl": this folder would pass for a package of that name.
pytest.importorskip("verl.version", reason="verl 0.9.1 is not installed; tests/integrations/run.sh verl")

import contextlib
import functools
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contract import OWN_BOUNDS, SETTINGS, Adapter, AdapterContract, Minibatch, Result, make_minibatch, result
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.utils import tensordict_utils as tu
from verl.utils.profiler import DistProfiler
from verl.workers import engine_workers
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.engine.base import BaseEngine, BaseEngineCtx
from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches
from verl.workers.utils.losses import ppo_loss

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.errors import UserError
from megatron_calclip.integrations import verl as adapter_module
from megatron_calclip.integrations.controller import ClipController

pytestmark = pytest.mark.integration

NO_DUAL_CLIP = 1e9
NUM_PROMPT_TOKENS = 2


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # A table is no GPTModel; the shadow pass has tests of its own.
    monkeypatch.setattr(adapter_module, "framework_shadow_pass", lambda module, _: module.shadow_pass())
    yield
    adapter_module._Active.is_set, adapter_module._Active.bounds = False, None
    dist.destroy_process_group()


def actor_config(loss_mode: str, *, aggregation: str = "token-mean") -> ActorConfig:
    epsilon = 1.0 - OWN_BOUNDS.lower
    return ActorConfig(
        strategy="megatron",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=2,
        clip_ratio=epsilon,
        clip_ratio_low=epsilon,
        clip_ratio_high=epsilon,
        clip_ratio_c=NO_DUAL_CLIP,
        loss_agg_mode=aggregation,
        policy_loss=PolicyLossConfig(loss_mode=loss_mode),
    )


def nested(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def full_log_probs(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Nested [B, prompt + response] as a model gives them: position t predicts token t + 1."""
    rows = []
    for row, length in enumerate(mask.sum(dim=1).long().tolist()):
        own = log_probs[row, :length]
        rows.append(torch.cat([own.new_zeros(NUM_PROMPT_TOKENS - 1), own, own.new_zeros(1)]))
    return nested(rows)


def batch_of(data: Minibatch) -> TensorDict:
    """verl's batch without padding; token 0 of a sequence is its row."""
    lengths = data.mask.sum(dim=1).long().tolist()
    count = len(lengths)

    def cut(values: Tensor) -> Tensor:
        return nested([values[row, :length] for row, length in enumerate(lengths)])

    prompts = torch.ones(count, NUM_PROMPT_TOKENS, dtype=torch.long)
    prompts[:, 0] = torch.arange(count)
    tokens = [torch.cat([prompts[row], torch.ones(length, dtype=torch.long)]) for row, length in enumerate(lengths)]
    batch = TensorDict(
        {
            "input_ids": nested(tokens),
            "position_ids": nested([torch.arange(len(row)) for row in tokens]),
            "prompts": nested(list(prompts)),
            "responses": nested([row[NUM_PROMPT_TOKENS:] for row in tokens]),
            "response_mask": cut(data.mask),
            "loss_mask": cut(data.mask),
            "old_log_probs": cut(data.old),
            "rollout_log_probs": cut(data.sampler),
            "advantages": cut(data.advantages),
            "rollout_is_weights": cut(data.importance_weights),
        },
        batch_size=count,
    )
    tu.assign_non_tensor(
        batch, dp_size=1, batch_num_tokens=int(data.mask.sum()), global_batch_size=count, calculate_entropy=False
    )
    return batch


def loss_of(config: ActorConfig, data: Minibatch) -> Result:
    output = {"log_probs": full_log_probs(data.log_probs, data.mask)}
    return result(ppo_loss(config, output, batch_of(data))[0], data)


class TableEngine(BaseEngine):
    """verl's `train_batch` and `infer_batch` on a forward pass that reads a table."""

    def __init__(self, minibatches: list[Minibatch]) -> None:
        def join(name: str) -> Tensor:
            return torch.cat([getattr(m, name) for m in minibatches]) if minibatches else torch.zeros(1, 1)

        self.x, self.shadow, self.shadow_old = join("x").requires_grad_(), join("shadow"), join("shadow_old")
        self.mask = join("mask")
        self.is_shadow, self.num_updates = False, 0
        self.shadow_rows: list[tuple[int, int]] = []
        self.module, self.optimizer = self, None

    is_param_offload_enabled = is_optimizer_offload_enabled = False

    @contextlib.contextmanager
    def shadow_pass(self) -> Iterator[None]:
        self.is_shadow = True
        yield
        self.is_shadow = False

    def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool = False) -> Any:
        tu.assign_non_tensor(data, sp_size=1, dp_size=1, batch_num_tokens=int(data["loss_mask"].values().sum()))
        micros, indices = prepare_micro_batches(data=data, dp_group=None)
        outputs = []
        if self.is_shadow:
            self.shadow_rows.append((self.num_updates, len(data)))
        for micro in micros:
            rows = micro["input_ids"].values()[micro["input_ids"].offsets()[:-1]]
            if self.is_shadow:
                log_probs = (self.shadow if self.num_updates else self.shadow_old)[rows]
            else:
                log_probs = torch.nn.functional.logsigmoid(self.x[rows])
            output = {"log_probs": full_log_probs(log_probs, self.mask[rows])}
            loss, metrics = torch.zeros(()), {}
            if loss_function is not None:
                loss, metrics = loss_function(model_output=output, data=micro, dp_group=None)
            if not forward_only:
                loss.backward()
            output = {"log_probs": nested([row.detach() for row in output["log_probs"].unbind()])}
            outputs.append({"model_output": output, "loss": loss.item(), "metrics": metrics})
        return postprocess_batch_func(output_lst=outputs, indices=indices, data=data)

    def optimizer_zero_grad(self) -> None:
        self.x.grad = None

    def optimizer_step(self) -> float:
        assert self.x.grad is not None and self.x.grad.abs().sum() > 0
        self.num_updates += 1
        return 0.0

    def lr_scheduler_step(self) -> float:
        return 0.0

    def train_mode(self, **kwargs: Any) -> BaseEngineCtx:
        return BaseEngineCtx(self, mode="train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> BaseEngineCtx:
        return BaseEngineCtx(self, mode="eval", **kwargs)

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_size(self) -> int:
        return 1

    def get_data_parallel_group(self) -> Any:
        return dist.group.WORLD

    def save_checkpoint(self, local_path: str, *_: Any) -> None:
        Path(local_path).mkdir(parents=True)

    def load_checkpoint(self, local_path: str, *_: Any) -> None:
        assert Path(local_path).is_dir()


def make_worker(
    engine: TableEngine, settings: dict[str, Any], *, strategy: str = "megatron", aggregation: str = "token-mean"
) -> adapter_module.CalibratedTrainingWorker:
    """A worker without its constructor, which builds a model."""
    worker = adapter_module.CalibratedTrainingWorker.__new__(adapter_module.CalibratedTrainingWorker)
    worker.engine, worker.model_config, worker.device_name = engine, {}, "cpu"
    worker.engine_config = types.SimpleNamespace(
        strategy=strategy,
        use_dynamic_bsz=False,
        max_token_len_per_gpu=None,
        micro_batch_size_per_gpu=16,
        infer_max_token_len_per_gpu=None,
        infer_micro_batch_size_per_gpu=16,
        use_fused_kernels=False,
        forward_only=False,
    )
    worker.flops_counter, worker.loss_fn = None, None
    worker.profiler = DistProfiler(rank=0, config=None, tool_config=None)
    worker._rank = 0
    worker.start_calibration(settings)
    worker.set_loss_fn(functools.partial(ppo_loss, config=actor_config("calclip", aggregation=aggregation)))
    return worker


class Verl(Adapter):
    aggregation = "token-mean"

    def own_loss(self, batch: Minibatch) -> Result:
        return loss_of(actor_config("vanilla", aggregation=self.aggregation), batch)

    def adapted_loss(self, batch: Minibatch, settings: dict[str, Any], bounds: ClipBounds | None) -> Result:
        worker = make_worker(TableEngine([]), settings)
        adapter_module._Active.bounds = bounds
        assert (worker.calclip is None) == (bounds is None)
        return loss_of(actor_config("calclip", aggregation=self.aggregation), batch)

    def train_step(self, settings: dict[str, Any], minibatches: list[Minibatch], folder: Path) -> ClipController:
        engine = TableEngine(minibatches)
        worker = make_worker(engine, settings, aggregation=self.aggregation)
        fields = {
            name: torch.cat([getattr(m, name) for m in minibatches])
            for name in ("x", "old", "shadow", "shadow_old", "sampler", "advantages", "mask")
        }
        data, rows = batch_of(Minibatch(**fields)), len(minibatches[0].old)
        tu.assign_non_tensor(
            data, mini_batch_size=rows, epochs=1, seed=0, dataloader_kwargs={"shuffle": False}, global_batch_size=rows
        )
        output = worker.train_mini_batch(data)
        metrics = tu.get(output, "metrics")
        assert metrics["actor/calclip_low_negative"][0] == 0 < metrics["actor/calclip_low_negative"][-1], (
            "r is 1 at first"
        )
        assert {*metrics["actor/calclip_lower"], *metrics["actor/calclip_upper"]} == {0.6, 1.8}
        count = len(minibatches)
        assert engine.shadow_rows == [(0, count * rows), *((update, rows) for update in range(1, count))]
        assert engine.num_updates == count
        worker.save_checkpoint(str(folder / "actor"))
        assert worker.calclip is not None
        return worker.calclip

    def resumed(self, settings: dict[str, Any], folder: Path) -> ClipController:
        worker = make_worker(TableEngine([]), settings)
        worker.load_checkpoint(str(folder / "actor"))
        assert worker.calclip is not None
        return worker.calclip


class SequenceMean(Verl):
    aggregation = "seq-mean-token-mean"

    def loss_weights(self, batch: Minibatch) -> Tensor:
        return batch.mask / batch.mask.sum(dim=1, keepdim=True) / len(batch.mask)

    def measured_weights(self, batch: Minibatch) -> Tensor:
        return torch.ones_like(batch.mask) / batch.mask.sum(dim=1, keepdim=True)


@pytest.fixture(params=[Verl, SequenceMean], ids=lambda cls: cls.aggregation)
def adapter(request: pytest.FixtureRequest) -> Verl:
    return request.param()


class TestVerl(AdapterContract):
    pass


def test_the_loss_is_registered_and_the_worker_is_in_place() -> None:
    assert core_algos.get_policy_loss_fn("calclip") is adapter_module.calclip_policy_loss
    assert engine_workers.ActorRolloutRefWorker.actor_worker_cls is adapter_module.CalibratedTrainingWorker


def test_verl_imports_the_adapter_by_itself() -> None:
    """As its workers do: verl is imported first and imports the module that the environment names."""
    code = "import verl; from verl.trainer.ppo import core_algos; assert 'calclip' in core_algos.POLICY_LOSS_REGISTRY"
    env = os.environ | {"VERL_USE_EXTERNAL_MODULES": "megatron_calclip.integrations.verl"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=env, check=True, timeout=300)


def test_the_example_is_a_configuration_of_verl() -> None:
    """Every override of the example script exists in verl's configuration, which is composed and printed, not run."""
    script = Path(__file__).resolve().parents[3] / "examples" / "verl" / "run_grpo_calibrated.sh"
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    run = subprocess.run(
        ["bash", str(script), "--cfg", "job"], env=env, check=True, capture_output=True, text=True, timeout=300
    )
    for line in ("loss_mode: calclip", "strategy: megatron", "fp8_recipe: tensorwise", "rollout_is_threshold: 2.0"):
        assert line in run.stdout
    assert "verl.workers.config.McoreActorConfig" in run.stdout


def test_a_process_without_a_calibrating_worker_is_told() -> None:
    with pytest.raises(UserError, match="no calibrating worker"):
        loss_of(actor_config("calclip"), make_minibatch(1).leaf())


def test_other_engines_cannot_calibrate() -> None:
    with pytest.raises(UserError, match="fsdp has no shadow pass"):
        make_worker(TableEngine([]), SETTINGS, strategy="fsdp")
    assert make_worker(TableEngine([]), {"enabled": False}, strategy="fsdp").calclip is None


def test_bypass_mode_is_refused() -> None:
    """There pi_old is the sampler, token by token."""
    data = make_minibatch(1)
    worker, batch = make_worker(TableEngine([data]), SETTINGS), batch_of(data)
    batch["old_log_probs"] = batch["rollout_log_probs"]
    with pytest.raises(UserError, match="bypass_mode"):
        worker.train_mini_batch(batch)


def test_settings_come_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(adapter_module.SETTINGS_VARIABLE, raising=False)
    with pytest.raises(UserError, match="not set"):
        adapter_module._settings()
    monkeypatch.setenv(adapter_module.SETTINGS_VARIABLE, str(tmp_path / "calclip.yaml"))
    with pytest.raises(UserError, match="no file"):
        adapter_module._settings()
    (tmp_path / "calclip.yaml").write_text("preset: paper\nstart: [0.62, 1.7]\n")
    assert adapter_module._settings() == {"preset": "paper", "start": [0.62, 1.7]}
