"""The contract on the real `ClippedPGLossFn` of a checkout of NeMo-RL, and the worker's hooks around a small loop.

NeMo-RL's Megatron worker needs a GPU to be built, so its `train` is played here by `Worker`: the same order of calls
(global batches, micro-batches with NeMo-RL's own `BatchedDataDict`, `optimizer.step`), without a model.
"""

# ruff: noqa: E402 (the checkout has to be on the path first)
from __future__ import annotations

import os
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest

SOURCE = os.environ.get("NEMO_RL_SRC")
if not SOURCE:
    pytest.skip("NEMO_RL_SRC names no checkout of NeMo-RL", allow_module_level=True)
sys.path.insert(0, SOURCE)

import torch
import torch.nn.functional as F
from contract import OFF, OWN_BOUNDS, SETTINGS, Adapter, AdapterContract, Minibatch, Result, make_minibatch, result
from nemo_rl.algorithms.loss.interfaces import MetricNormalizer
from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from torch import Tensor

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.errors import UserError
from megatron_calclip.integrations import nemo_rl
from megatron_calclip.integrations.controller import ClipController
from megatron_calclip.integrations.nemo_rl import CLIP_FRACTIONS, CalibratedPGLossFn
from megatron_calclip.integrations.nemo_rl_worker import CalibratingWorker

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_process")]


def config(**changes: Any) -> ClippedPGLossConfig:
    """Of a run with truncated importance sampling and no KL penalty."""
    return ClippedPGLossConfig(
        **{
            "ratio_clip_min": 1.0 - OWN_BOUNDS.lower,
            "ratio_clip_max": OWN_BOUNDS.upper - 1.0,
            "reference_policy_kl_penalty": 0.0,
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_type": "tis",
            "truncated_importance_sampling_ratio": 2.0,
        }
        | changes
    )


def shifted(values: Tensor) -> Tensor:
    """[B, S] to NeMo-RL's [B, S + 1], whose first column belongs to no prediction."""
    return F.pad(values, (1, 0))


def batch_of(data: Minibatch) -> BatchedDataDict[Any]:
    return BatchedDataDict(
        {
            "input_ids": torch.ones(len(data.old), data.old.shape[1] + 1, dtype=torch.long),
            "prev_logprobs": shifted(data.old),
            "generation_logprobs": shifted(data.sampler),
            "advantages": shifted(data.advantages),
            "token_mask": shifted(data.mask),
            "sample_mask": torch.ones(len(data.old)),
        }
    )


def call(loss_fn: Any, data: Minibatch) -> tuple[Tensor, dict[str, Any]]:
    return loss_fn(
        data.log_probs,
        batch_of(data),
        global_valid_seqs=torch.tensor(len(data.old)),
        global_valid_toks=data.mask.sum(),
    )


class Worker:
    """The parts of `MegatronPolicyWorkerImpl` that the hooks touch; see the module's docstring."""

    def __init__(self, config: dict[str, Any], minibatches: list[Minibatch], weights_path: str | None = None) -> None:
        self.cfg, self.dp_size = config, 1
        self.minibatches = minibatches
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = Optimizer()
        self.shadows: list[int] = []

    def train(self, data: Any, loss_fn: Any, eval_mode: bool = False, gbs: int | None = None) -> dict[str, Any]:
        size = self.cfg["train_global_batch_size"]
        for index in range(data.size // size):
            batch = data.get_batch(batch_idx=index, batch_size=size)
            for micro in batch.make_microbatch_iterator(size // 2):
                rows = micro["input_ids"][:, 0]
                x = torch.cat([m.x for m in self.minibatches])[rows]
                loss, _ = loss_fn(F.logsigmoid(x), micro, torch.tensor(size), batch["token_mask"][:, 1:].sum())
                assert torch.isfinite(loss)
            self.optimizer.step()
        return {}

    def get_logprobs(self, *, data: Any) -> dict[str, Tensor]:
        """Shadow log-probabilities of the present weights: old ones before the first update, then each batch's own."""
        self.model.eval()
        rows = data["input_ids"][:, 0]
        name = "shadow" if self.optimizer.count else "shadow_old"
        self.shadows.append(self.optimizer.count)
        return {"logprobs": shifted(torch.cat([getattr(m, name) for m in self.minibatches])[rows])}

    def save_checkpoint(self, weights_path: str) -> None:
        Path(weights_path).mkdir(parents=True)


class Optimizer:
    count = 0

    def step(self) -> None:
        self.count += 1


class CalibratedWorker(CalibratingWorker, Worker):
    pass


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in's model is no GPTModel; the shadow pass has tests of its own."""
    import contextlib

    from megatron_calclip.integrations import nemo_rl_worker

    monkeypatch.setattr(nemo_rl_worker, "framework_shadow_pass", lambda *_: contextlib.nullcontext())


class NemoRl(Adapter):
    def own_loss(self, batch: Minibatch) -> Result:
        return result(call(ClippedPGLossFn(config()), batch)[0], batch)

    def adapted_loss(self, batch: Minibatch, settings: dict[str, Any], bounds: ClipBounds | None) -> Result:
        loss_fn = CalibratedPGLossFn(config(calclip=settings))
        if bounds is not None:
            loss_fn.bounds = bounds
        return result(call(pickle.loads(pickle.dumps(loss_fn)), batch)[0], batch)

    def worker(self, minibatches: list[Minibatch], **kwargs: Any) -> CalibratedWorker:
        rows = len(minibatches[0].old) if minibatches else 1
        return CalibratedWorker({"train_global_batch_size": rows}, minibatches, **kwargs)

    def train_step(self, settings: dict[str, Any], minibatches: list[Minibatch], folder: Path) -> ClipController:
        worker = self.worker(minibatches)
        batches = [batch_of(m) for m in minibatches]
        data = BatchedDataDict({key: torch.cat([b[key] for b in batches]) for key in batches[0]})
        data["input_ids"][:, 0] = torch.arange(data.size)
        loss_fn = CalibratedPGLossFn(config(calclip=settings))
        worker.train(data, loss_fn)
        assert (loss_fn.ratio_clip_min, loss_fn.ratio_clip_max) == (0.4, 0.8), "the start's bounds, [0.6, 1.8]"
        assert worker.shadows == [0, 0, 0, 1, 2], "every batch before the first update, then each right before its own"
        assert worker.model.training
        assert worker.optimizer.step.__func__ is Optimizer.step, "the optimizer is as it was"
        worker.save_checkpoint(str(folder / "policy" / "weights"))
        assert worker.calclip is not None
        return worker.calclip

    def resumed(self, settings: dict[str, Any], folder: Path) -> ClipController:
        worker = self.worker([], weights_path=str(folder / "policy" / "weights"))
        return worker._calclip_controller(CalibratedPGLossFn(config(calclip=settings)))


@pytest.fixture
def adapter() -> NemoRl:
    return NemoRl()


class TestNemoRl(AdapterContract):
    pass


@pytest.mark.parametrize("settings", OFF)
def test_off_leaves_metrics_alone(settings: dict[str, Any]) -> None:
    own, adapted = ClippedPGLossFn(config()), CalibratedPGLossFn(config(calclip=settings))
    data = make_minibatch(2)
    assert call(adapted, data)[1] == call(own, data)[1]
    assert adapted.metric_normalizations == own.metric_normalizations


def test_clip_fractions_add_up_over_microbatches() -> None:
    """Three tokens: A < 0 at r = 0.5 and A > 0 at r = 3 are clipped, A > 0 at r = 0.5 is not."""
    loss_fn = CalibratedPGLossFn(config(calclip=SETTINGS))
    loss_fn.bounds = ClipBounds(0.6, 1.8)
    ratios = torch.tensor([[0.5, 1.0], [3.0, 0.5]])
    old = torch.full((2, 2), -2.0)
    data = Minibatch(
        x=torch.zeros(2, 2),
        old=old,
        shadow=old,
        shadow_old=old,
        sampler=old,
        advantages=torch.tensor([[-1.0, -1.0], [1.0, 1.0]]),
        mask=torch.tensor([[1.0, 0.0], [1.0, 1.0]]),
    )
    batch, log_probs = batch_of(data), old + ratios.log()
    totals = {name: 0.0 for name in CLIP_FRACTIONS}
    for row in range(2):
        micro = batch.slice(row, row + 1)
        _, metrics = loss_fn(log_probs[row : row + 1], micro, torch.tensor(2), torch.tensor(3.0))
        totals = {name: totals[name] + metrics[name] for name in CLIP_FRACTIONS}
    assert totals == pytest.approx({"calclip_low_negative": 1 / 3, "calclip_high_positive": 1 / 3})
    assert {loss_fn.metric_normalizations[name] for name in CLIP_FRACTIONS} == {MetricNormalizer.TOKENS}


def test_a_measurement_does_not_travel() -> None:
    loss_fn = CalibratedPGLossFn(config(calclip=SETTINGS))
    loss_fn.bounds = ClipBounds(0.62, 1.74)
    loss_fn.measurement = object()  # type: ignore[assignment]
    copy = pickle.loads(pickle.dumps(loss_fn))
    assert copy.measurement is None
    assert copy.bounds.lower == pytest.approx(0.62) and copy.bounds.upper == pytest.approx(1.74)


@pytest.mark.parametrize(
    "changes",
    [
        {"force_on_policy_ratio": True},
        {"disable_ppo_ratio": True},
        {"use_cispo": True},
        {"sequence_level_importance_ratios": True, "token_level_loss": False},
        {"truncated_importance_sampling_type": "seq-mask-tis", "truncated_importance_sampling_ratio_min": 0.9},
        {"calclip": {"interval": 0}},
        {"calclip": {"intervall": 5}},
    ],
)
def test_settings_that_do_not_go_together(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        CalibratedPGLossFn(config(**({"calclip": SETTINGS} | changes)))


def test_calibrate_hooks_into_setup_where_the_configuration_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo-RL's `setup` gets our policy factory and makes our loss; without `calclip` it gets nothing."""
    grpo = types.SimpleNamespace(ClippedPGLossFn=ClippedPGLossFn)
    monkeypatch.setattr(nemo_rl, "require", lambda *_, **__: grpo)

    def setup(config: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return grpo.ClippedPGLossFn(config.loss_fn), kwargs

    script = types.ModuleType("run_grpo")
    script.setup = setup  # type: ignore[attr-defined]
    nemo_rl.calibrate(script)
    loss_fn, kwargs = script.setup(types.SimpleNamespace(loss_fn=config()), policy_factory=None)
    assert type(loss_fn) is ClippedPGLossFn and kwargs == {"policy_factory": None}
    asking = types.SimpleNamespace(loss_fn=config(calclip=SETTINGS))
    loss_fn, kwargs = script.setup(asking, policy_factory=None)
    assert type(loss_fn) is CalibratedPGLossFn and kwargs == {"policy_factory": nemo_rl.policy_factory}
    with pytest.raises(UserError, match=r"data_plane\.enabled"):
        script.setup(asking, policy_factory=object())


def test_policy_factory_names_our_worker_and_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    environments = {nemo_rl.MEGATRON_WORKER: "the Megatron environment"}
    modules = {
        "nemo_rl.distributed.ray_actor_environment_registry": types.SimpleNamespace(
            ACTOR_ENVIRONMENT_REGISTRY=environments
        ),
        "nemo_rl.models.policy.lm_policy": types.SimpleNamespace(Policy=lambda **kwargs: kwargs),
    }
    monkeypatch.setattr(nemo_rl, "require", lambda name, **_: modules[name])
    policy = nemo_rl.policy_factory(cluster="cluster", config={"megatron_cfg": {"enabled": True}})
    assert policy["worker_extension_cls_fqn"] == nemo_rl.WORKER and policy["cluster"] == "cluster"
    assert environments[nemo_rl.WORKER] == "the Megatron environment"
    with pytest.raises(UserError, match=r"policy\.megatron_cfg\.enabled"):
        nemo_rl.policy_factory(config={"dtensor_cfg": {"enabled": True}})


RECIPES = sorted((Path(__file__).resolve().parents[3] / "conf" / "nemo_rl").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_overrides_end_in_a_valid_loss(recipe: Path) -> None:
    """NeMo-RL's own loader reads our recipe on top of its FP8 recipe, with overrides from the command line."""
    from nemo_rl.utils.config import load_config, parse_hydra_overrides, register_omegaconf_resolvers
    from omegaconf import OmegaConf

    register_omegaconf_resolvers()
    merged = parse_hydra_overrides(
        load_config(recipe), ["++loss_fn.calclip.interval=7", "loss_fn.calclip.preset=paper"]
    )
    loss = OmegaConf.to_container(merged.loss_fn, resolve=True)
    loss_fn = CalibratedPGLossFn(ClippedPGLossConfig(**loss))
    assert loss_fn.enabled and loss_fn.calclip["interval"] == 7
    assert loss_fn.truncated_importance_sampling_ratio == 2.0
    assert merged.policy.megatron_cfg.fp8_cfg.enabled
    rollouts = merged.grpo.num_prompts_per_step * merged.grpo.num_generations_per_prompt
    assert merged.policy.train_global_batch_size < rollouts, "calibration needs several updates a rollout"
