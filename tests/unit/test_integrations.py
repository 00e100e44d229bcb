"""The parts of the adapters that need no framework: settings, measurement, state, the shadow pass's refusals, messages."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.calibration_settings import CalibrationSettings
from megatron_calclip.config import PrecisionConfig
from megatron_calclip.errors import UserError
from megatron_calclip.integrations import megatron_bridge, require, require_version
from megatron_calclip.integrations.clip_range import ClipRange
from megatron_calclip.integrations.controller import (
    ClipController,
    PairedLogProbs,
    StateFolder,
    epsilons,
    settings_from,
)
from megatron_calclip.integrations.shadow import bare_chunks, master_weight

SETTINGS: dict[str, Any] = {"interval": 2, "start_step": 2, "num_replicates": 0, "min_tail_tokens": 1}


def test_settings_become_calibration_settings() -> None:
    values = {
        "preset": "paper",
        "algorithm": "dapo",
        "start": [0.7, 1.5],
        "grid_lower": [0.5, 0.9, 0.05],
        "interval": 7,
    }
    expected = CalibrationSettings.paper("dapo", start=ClipBounds(0.7, 1.5), grid_lower=(0.5, 0.9, 0.05), interval=7)
    assert settings_from(values, where="calclip") == expected
    assert settings_from({"enabled": True}, where="calclip") == CalibrationSettings.robust("grpo")


@pytest.mark.parametrize("values", [{}, {"enabled": False}, {"enabled": False, "interval": 3}])
def test_settings_that_switch_calibration_off(values: dict[str, Any]) -> None:
    assert settings_from(values, where="calclip") is None
    assert ClipController.from_settings(values) is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"intervall": 5}, "loss_fn.calclip.intervall: no such setting"),
        ({"token_fraction": 0.5}, "loss_fn.calclip.token_fraction: no such setting"),
        ({"mode": "sequence"}, "loss_fn.calclip.mode: no such setting"),
        ({"algorithm": "gspo"}, "loss_fn.calclip.algorithm: 'gspo' is not offered"),
        ({"preset": "bold"}, "loss_fn.calclip.preset: 'bold' is unknown"),
        ({"interval": 0}, "loss_fn.calclip: calibration.interval: 0"),
        ({"start": [1.2, 0.8]}, "loss_fn.calclip: clip bounds"),
        ({"start": 0.8}, "loss_fn.calclip: "),
        ({"enabled": False, "intervall": 5}, "no such setting"),
    ],
)
def test_wrong_settings_are_one_clear_sentence(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        settings_from(values, where="loss_fn.calclip")
    assert "\n" not in str(caught.value)


def test_epsilons_are_the_numbers_one_would_write() -> None:
    assert epsilons(ClipBounds(0.8, 1.28)) == (0.2, 0.28)
    assert epsilons(ClipBounds(0.62, 1.74)) == (0.38, 0.74)


def test_clip_range_gives_both_bounds() -> None:
    """NeMo-Aligner computes 1.0 - eps and 1.0 + eps from one number."""
    epsilon = ClipRange(ClipBounds(0.62, 1.74))
    assert (1.0 - epsilon, 1.0 + epsilon) == (0.62, 1.74)
    assert float(epsilon) == pytest.approx((0.38 + 0.74) / 2)
    ratios = torch.tensor([0.1, 1.0, 3.0]).clamp(1.0 - epsilon, 1.0 + epsilon)
    torch.testing.assert_close(ratios, torch.tensor([0.62, 1.0, 1.74]))


def quiet_controller(**changes: Any) -> ClipController:
    settings = settings_from(SETTINGS | changes, where="calclip")
    assert settings is not None
    return ClipController(settings, say=lambda _: None)


def tokens(ratio8: list[float], ratio16: list[float], advantages: list[float]) -> PairedLogProbs:
    """One sequence per token."""
    zeros = torch.zeros(len(ratio8), 1)
    return PairedLogProbs(
        log_probs=torch.tensor(ratio8).log()[:, None],
        old_log_probs=zeros,
        shadow_log_probs=torch.tensor(ratio16).log()[:, None],
        shadow_old_log_probs=zeros,
        advantages=torch.tensor(advantages)[:, None],
        importance_weights=torch.ones(()),
        loss_weights=torch.ones(()),
        response_mask=torch.ones(len(ratio8), 1),
        sequence_ids=torch.arange(len(ratio8)),
    )


def test_a_step_by_hand() -> None:
    """Of four tokens with A < 0 BF16 clips one at 0.8. FP8 clips one at any L in [0.5, 0.75): L* is the edge nearest to the start.

    At the start's 0.6 that is the case already, so L stays; the token at r = 1 with A > 0 keeps both updates in balance.
    """
    controller = quiet_controller()
    assert controller.begin(1, num_updates=2) is None
    measurement = controller.begin(2, num_updates=2)
    assert measurement is not None
    negatives = tokens([0.45, 0.75, 1.0, 1.0], [0.7, 0.95, 1.0, 1.0], [-1.0] * 4)
    measurement.add(negatives, weights_unmoved=False)
    measurement.add(tokens([1.0, 1.3], [1.0, 1.1], [1.0, 1.0]), weights_unmoved=False)
    report = controller.finish(measurement)
    assert report.alpha == 0.25
    assert report.lower.share8_reference == 0.5
    assert report.lower.choice == report.lower.after == 0.6
    assert (report.num_negative, report.num_positive, report.num_tail_tokens) == (4, 2, 1)
    assert controller.metrics()["lower"] == 0.6 and controller.metrics()["alpha"] == 0.25


def test_what_lies_outside_the_mask_does_not_count() -> None:
    controller, masked = quiet_controller(), tokens([0.45, 0.45], [0.7, 0.7], [-1.0, -1.0])
    measurement = controller.begin(2, num_updates=2)
    assert measurement is not None
    masked.response_mask[1] = 0
    masked.log_probs[1] = torch.nan
    measurement.add(masked, weights_unmoved=True)
    report = controller.finish(measurement)
    assert report.num_negative == 1 and report.num_unmoved_weights == 1


def test_one_update_per_rollout_is_a_no_op_and_says_so_once() -> None:
    said: list[str] = []
    controller = ClipController(CalibrationSettings.robust(interval=1, start_step=1), say=said.append)
    assert [controller.begin(step, num_updates=1) for step in (1, 2)] == [None, None]
    assert len(said) == 1 and "NO-OP" in said[0]
    assert controller.begin(3, num_updates=2) is not None


def moved_controller() -> ClipController:
    """After one calibration that moves the lower bound."""
    controller = quiet_controller(min_tail_tokens=1, pool=3)
    measurement = controller.begin(2, num_updates=2)
    assert measurement is not None
    measurement.add(
        tokens([0.75, 0.78, 1.0, 1.0, 1.1], [0.7, 0.75, 1.0, 1.0, 1.1], [-1.0] * 4 + [1.0]), weights_unmoved=False
    )
    report = controller.finish(measurement)
    assert report.lower.status == "moved"
    return controller


def test_state_survives_a_file(tmp_path: Path) -> None:
    controller, other = moved_controller(), quiet_controller(min_tail_tokens=1, pool=3)
    controller.save(tmp_path / "new" / "state.safetensors")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["state.safetensors"]
    other.load(tmp_path / "new" / "state.safetensors")
    assert (other.bounds, other.last_step) == (controller.bounds, 2)
    expected, actual = controller.calibrator.state_dict(), other.calibrator.state_dict()
    assert torch.equal(torch.stack(expected.pop("pool")), torch.stack(actual.pop("pool")))
    assert actual == expected


def test_an_empty_pool_survives_a_file(tmp_path: Path) -> None:
    quiet_controller().save(tmp_path / "state.safetensors")
    quiet_controller().load(tmp_path / "state.safetensors")


def test_a_checkpoint_without_state_begins_at_the_start(tmp_path: Path) -> None:
    said: list[str] = []
    controller = ClipController(CalibrationSettings.robust(), say=said.append)
    controller.load(tmp_path / "state.safetensors")
    assert controller.bounds == ClipBounds(0.6, 1.8)
    assert len(said) == 1 and "no calibration state" in said[0]


def test_a_state_of_other_grids_is_refused(tmp_path: Path) -> None:
    controller = moved_controller()
    controller.save(tmp_path / "state.safetensors")
    other = quiet_controller(grid_lower=[0.8, 0.9, 0.05], start=[0.8, 1.8])
    with pytest.raises(UserError, match="do not fit the present grids"):
        other.load(tmp_path / "state.safetensors")


def test_a_folder_gives_the_state_of_its_step(tmp_path: Path) -> None:
    """Bounds change at calibrations alone: a checkpoint between two of them has the state of the earlier one."""
    folder, first = StateFolder(tmp_path), quiet_controller()
    folder.load(quiet_controller(), 0)  # an empty folder, or none
    first.last_step = 4
    folder.save(first)
    second = moved_controller()
    second.last_step = 8
    folder.save(second)
    resumed = quiet_controller()
    folder.load(resumed, 9)
    assert (resumed.bounds, resumed.last_step) == (second.bounds, 9)
    resumed = quiet_controller()
    folder.load(resumed, 7)
    assert (resumed.bounds, resumed.last_step) == (first.bounds, 7)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000004.safetensors"], "later states come again"


class Gpt(nn.Module):
    """As much of a GPTModel as is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList([nn.Linear(2, 2)])


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_wrappers_are_taken_off() -> None:
    first, second = Gpt(), Gpt()
    assert bare_chunks(Wrapper(Wrapper(first))) == [first]
    assert bare_chunks([Wrapper(first), second]) == [first, second]
    with pytest.raises(UserError, match="Linear is no Megatron-Core GPTModel"):
        bare_chunks(Wrapper(nn.Linear(2, 2)))


def test_masters_are_needed_for_weights_in_fp8_alone() -> None:
    model = Gpt()
    master = master_weight([model], None)
    with pytest.raises(AssertionError):
        master(model.decoder.layers[0].weight)
    model.decoder.layers[0].weight.fp8_codes = object()
    with pytest.raises(UserError, match="FP32 masters are not in"):
        master_weight([model], None)


def test_no_framework_is_imported() -> None:
    """Nor Megatron, by the package and by what the adapters share."""
    frameworks = ["verl", "nemo_aligner", "nemo_rl", "ray", "megatron", "transformer_engine"]
    code = (
        "import sys, megatron_calclip.integrations.controller, megatron_calclip.integrations.shadow\n"
        "import megatron_calclip.integrations.megatron_rl, megatron_calclip.integrations.nemo_aligner\n"
        "import megatron_calclip.integrations.megatron_bridge\n"
        f"loaded = [name for name in {frameworks} if name in sys.modules]\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("adapter", ["verl", "nemo_rl", "nemo_rl_worker"])
def test_a_missing_framework_is_one_sentence(adapter: str) -> None:
    code = (
        "import sys\n"
        "for name in ('verl', 'nemo_rl'): sys.modules[name] = None\n"
        f"try: import megatron_calclip.integrations.{adapter}\n"
        "except ImportError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True)
    assert "is needed for this adapter" in run.stdout and run.stdout.count("\n") == 1


def test_a_nemo_rl_that_is_too_old_is_one_sentence() -> None:
    """0.7.0 has no normalisation of metrics to register with."""
    code = (
        "import sys, types\n"
        "for name in ('interfaces', 'loss_functions'):\n"
        "    sys.modules[f'nemo_rl.algorithms.loss.{name}'] = types.ModuleType(name)\n"
        "try: import megatron_calclip.integrations.nemo_rl\n"
        "except ImportError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True)
    assert "this NeMo-RL is older" in run.stdout and run.stdout.count("\n") == 1


def test_require_says_what_is_missing_and_what_to_do() -> None:
    with pytest.raises(
        ImportError, match=r"Nothing 1\.0 is needed for this adapter.*no_such_module.*pip install nothing"
    ):
        require("no_such_module", framework="Nothing 1.0", how="pip install nothing")


def test_a_version_that_was_not_tested_is_refused() -> None:
    require_version("torch", (torch.__version__,))
    with pytest.raises(ImportError, match=r"torch .* is installed, but the adapter was tested with 0\.1 alone"):
        require_version("torch", ("0.1",))
    with pytest.raises(ImportError, match=r"no-such-package is not installed"):
        require_version("no-such-package", ("0.1",))


class Mixed(types.SimpleNamespace):
    """A stand-in for `MixedPrecisionConfig` with what Megatron-Bridge's current-scaling recipe sets."""


@pytest.fixture
def bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("megatron.bridge.training.mixed_precision")
    defaults = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1}
    module.MIXED_PRECISION_RECIPES = {  # type: ignore[attr-defined]
        name: lambda name=name: Mixed(name=name, fp8_param=True, **defaults)
        for name in megatron_bridge.BASE_RECIPES.values()
    }
    monkeypatch.setattr(megatron_bridge, "require", lambda *_, **__: module)


@pytest.mark.usefixtures("bridge")
def test_a_precision_recipe_on_a_container() -> None:
    """Their current-scaling recipe leaves two layers in BF16 and keeps weights in FP8; ours does neither unless told."""
    container = megatron_bridge.set_precision(types.SimpleNamespace(), PrecisionConfig(recipe="tensorwise"))
    mixed = container.mixed_precision
    assert mixed.name == "bf16_with_fp8_current_scaling_mixed"
    assert (mixed.fp8, mixed.fp8_recipe, mixed.fp8_param) == ("hybrid", "tensorwise", False)
    assert not mixed.first_last_layers_bf16
    assert mixed.num_layers_at_start_in_bf16 == mixed.num_layers_at_end_in_bf16 == 0
    edges = PrecisionConfig(recipe="blockwise", fp8_param=True, first_last_layers_bf16=2)
    mixed = megatron_bridge.set_precision(types.SimpleNamespace(), edges).mixed_precision
    assert mixed.name == "bf16_with_fp8_subchannel_scaling_mixed"
    assert (mixed.fp8, mixed.fp8_param, mixed.num_layers_at_end_in_bf16) == ("e4m3", True, 2)
    with pytest.raises(UserError, match="rowwise needs"):
        megatron_bridge.set_precision(types.SimpleNamespace(), PrecisionConfig(recipe="rowwise"))
