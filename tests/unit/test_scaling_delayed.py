"""Delayed scaling: its history against a list in plain Python, reductions, and its place in checkpoints."""

import math
from fractions import Fraction

import pytest
import torch
from fp8_matrices import fp32

from megatron_calclip.precision.quantize import E4M3, quantize
from megatron_calclip.precision.scaling import (
    DelayedScaling,
    update_delayed_scaling,
)


def delayed_by_rule(steps: list[list[float]], length: int, algorithm: str, margin: int) -> list[float]:
    """The scale after each step, in plain Python: a list that rolls left, its slot 0 collecting maxima."""
    history, scale, scales = [0.0] * length, 1.0, []
    for amaxes in steps:
        for amax in amaxes:
            history[0] = max(history[0], amax)
        if history[0] != 0:
            amax = max(history) if algorithm == "max" else history[0]
            if math.isfinite(amax) and amax > 0:
                scale = fp32(Fraction(448) / 2**margin / Fraction(amax))
                scale = torch.finfo(torch.float32).max if math.isinf(scale) else scale
            history = [*history[1:], history[0]]
            history[0] = 0.0
        scales.append(scale)
    return scales


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize(("length", "margin"), [(1, 0), (2, 1), (7, 0), (16, 2), (1024, 0)])
def test_delayed_scaling_over_50_steps(algorithm: str, length: int, margin: int) -> None:
    """Two tensors recorded in most steps; some steps record nothing, zeros, an infinity or a subnormal."""
    generator = torch.Generator().manual_seed(length)
    state = DelayedScaling(E4M3, history_length=length, amax_compute_algo=algorithm, margin=margin)
    steps, scales = [], []
    for step in range(50):
        xs = [torch.randn(4, 8, generator=generator) * 2.0 ** (step % 9 - 4) for _ in range(2)]
        if step % 10 == 3:
            xs = []
        elif step % 10 == 5:
            xs = [torch.zeros(4, 8)]
        elif step == 20:
            xs[1][2, 3] = -math.inf
        elif step == 30:
            xs = [torch.full((4, 8), 1e-42)]
        for x in xs:
            before = state.scale.clone()
            ours = quantize(x, state, E4M3)
            assert ours.inverse_scale == 1 / before and state.scale == before
        update_delayed_scaling([state])
        steps.append([x.abs().max().item() for x in xs])
        scales.append(state.scale.item())
    assert scales == delayed_by_rule(steps, length, algorithm, margin)


def test_delayed_history_by_hand() -> None:
    """Slot 0 collects 2, then 6; the roll by -1 puts it last."""
    state = DelayedScaling(E4M3, history_length=3)
    for amax in (2.0, 6.0):
        quantize(torch.full((2, 2), amax), state, E4M3)
    assert state.amax_history.tolist() == [6, 0, 0] and state.scale == 1
    update_delayed_scaling([state])
    assert state.amax_history.tolist() == [0, 0, 6] and state.scale == torch.tensor(448 / 6)
    update_delayed_scaling([state])  # nothing recorded: nothing changes
    assert state.amax_history.tolist() == [0, 0, 6] and state.scale == torch.tensor(448 / 6)


def test_delayed_reduction_covers_all_states_at_once() -> None:
    states = [DelayedScaling(E4M3, amax_compute_algo="most_recent") for _ in range(2)]
    for state, amax in zip(states, (2.0, 7.0), strict=True):
        quantize(torch.full((2, 2), amax), state, E4M3)
    other_rank = torch.tensor([4.0, 3.5])
    update_delayed_scaling(states, reduce_amax=lambda amax: torch.maximum(amax, other_rank))
    assert [state.scale.item() for state in states] == [112.0, 64.0]  # 448/4, 448/7
    assert [state.amax_history[-1].item() for state in states] == [4.0, 7.0]


def test_delayed_state_is_checkpointed_and_stays_fp32() -> None:
    model = torch.nn.ModuleDict({"x": DelayedScaling(E4M3, history_length=4)})
    quantize(torch.full((1, 1), 1.1), model["x"], E4M3)
    update_delayed_scaling([model["x"]])
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    assert set(saved) == {"x.amax_history", "x.scale"}
    model.bfloat16()
    for name, value in model.state_dict().items():
        assert value.dtype is torch.float32 and torch.equal(value, saved[name])
    fresh = torch.nn.ModuleDict({"x": DelayedScaling(E4M3, history_length=4)})
    fresh.load_state_dict(saved)
    assert fresh["x"].scale == torch.tensor(448.0) / torch.tensor(1.1)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="history_length"):
        DelayedScaling(E4M3, history_length=0)
    with pytest.raises(ValueError, match="most_recent"):
        DelayedScaling(E4M3, amax_compute_algo="mean")


def test_a_nan_does_not_rule_the_history() -> None:
    """TransformerEngine reduces amaxes with fmaxf, which drops NaN: the next step's amax counts."""
    state = DelayedScaling(E4M3, history_length=1024)
    for amax in (1.0, math.nan, 100.0):
        state.scales(torch.tensor([[amax]]), E4M3, source=torch.bfloat16)
        update_delayed_scaling([state])
    assert not state.amax_history.isnan().any()
    assert state.scale.item() == pytest.approx(448 / 100)
