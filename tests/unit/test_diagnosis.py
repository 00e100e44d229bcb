"""Errors of probabilities and ratios by hand, masters between boundaries, and what the command shows of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from megatron_calclip import cli
from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.commands import diagnose
from megatron_calclip.config import Config
from megatron_calclip.diagnosis import (
    ClipShares,
    LayerNoise,
    LogProbPair,
    ProbabilityNoise,
    RatioNoise,
    RecipeReport,
    Report,
    between_boundaries,
    clip_shares,
    nmae,
    probability_noise,
    ratio_noise,
)
from megatron_calclip.diagnosis_report import as_json, plot, tables
from megatron_calclip.errors import UserError

BOUNDS = ClipBounds(0.8, 1.2)


def logs(*values: float) -> torch.Tensor:
    return torch.tensor(values).log()


def test_nmae_by_hand() -> None:
    # (0.1 + 0.2) / (0.5 + 0.25 + 0.25)
    assert nmae(torch.tensor([0.6, 0.05, 0.25]), torch.tensor([0.5, 0.25, 0.25])) == pytest.approx(0.3)


def test_probability_noise_by_hand() -> None:
    noise = probability_noise(logs(0.5, 0.2, 0.4), logs(0.5, 0.4, 0.1))
    assert noise.mean_abs_dlogp == pytest.approx((math.log(2) + math.log(4)) / 3)
    assert noise.nmae_p == pytest.approx((0.2 + 0.3) / 1.0)


@pytest.mark.parametrize(("count", "index"), [(1, 0), (20, 18), (21, 19), (100, 94)])
def test_p95_is_the_smallest_error_that_95_percent_do_not_exceed(count: int, index: int) -> None:
    errors = torch.arange(1, count + 1, dtype=torch.float32)
    shuffled = errors[torch.randperm(count, generator=torch.Generator().manual_seed(0))]
    assert probability_noise(-shuffled, torch.zeros(count)).p95_abs_dlogp == errors[index]


def test_clip_shares_by_hand() -> None:
    """Bounds are outside; each share has its own denominator."""
    ratio = torch.tensor([0.5, 0.8, 0.9, 1.3, 0.7, 1.2, 1.0])
    is_positive = torch.tensor([False, False, False, False, True, True, True])
    shares = clip_shares(ratio, is_positive, BOUNDS)
    assert vars(shares) == pytest.approx(
        {
            "low_negative": 2 / 4,
            "low_positive": 1 / 3,
            "high_negative": 1 / 4,
            "high_positive": 1 / 3,
            "outside": 5 / 7,
            "clipped": 3 / 7,
        }
    )


def test_shares_of_no_tokens_are_nan() -> None:
    shares = clip_shares(torch.tensor([0.5]), torch.tensor([False]), BOUNDS)
    assert (shares.low_negative, shares.outside) == (1.0, 1.0)
    assert math.isnan(shares.low_positive) and math.isnan(shares.high_positive)


def test_ratio_noise_by_hand() -> None:
    fp8 = LogProbPair(old=logs(0.5, 0.5), new=logs(0.25, 0.75))  # r = 0.5, 1.5
    bf16 = LogProbPair(old=logs(0.5, 0.5), new=logs(0.5, 0.5))  # r = 1, 1
    noise = ratio_noise(fp8, bf16, torch.tensor([False, True]), bounds=BOUNDS, lr=1e-6)
    assert noise.nmae_p == pytest.approx(0.5 / 1.0)
    assert noise.nmae_r == pytest.approx(1.0 / 2.0)
    assert noise.amplification == pytest.approx(1.0)
    assert (noise.fp8.low_negative, noise.fp8.high_positive) == (1.0, 1.0)
    assert noise.bf16.outside == 0.0
    assert math.isnan(ratio_noise(bf16, bf16, torch.tensor([False, True]), bounds=BOUNDS, lr=1e-6).amplification)


def test_independent_errors_add_up_in_the_ratio() -> None:
    """Errors of both passes with the same spread, small: the ratio's is larger by sqrt(2), if they are independent."""
    random = torch.Generator().manual_seed(0)
    errors = 1e-3 * torch.randn(2, 200_000, generator=random)
    base = torch.full((200_000,), -1.0)
    noise = ratio_noise(
        LogProbPair(base + errors[0], base + errors[1]),
        LogProbPair(base, base),
        torch.ones(200_000, dtype=torch.bool),
        bounds=BOUNDS,
        lr=1.0,
    )
    assert noise.amplification == pytest.approx(math.sqrt(2), rel=0.01)


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False), min_size=1, max_size=64)
)
def test_masters_round_to_their_weights(values: list[float]) -> None:
    weight = torch.tensor(values)
    masters = between_boundaries(weight, torch.Generator().manual_seed(0))
    assert masters.dtype == torch.float32
    assert torch.equal(masters.to(torch.bfloat16), weight.to(torch.bfloat16))


def test_masters_are_spread_over_the_whole_rounding_interval() -> None:
    """Half a unit in the last place to each side (2^-8 of a number just above 1), uniformly, the middle not favoured."""
    weight = torch.full((100_000,), 1.0 + 2**-7)
    offsets = (between_boundaries(weight, torch.Generator().manual_seed(0)) - weight) / 2**-7
    assert 0.499 < float(offsets.max()) <= 0.5 and -0.5 <= float(offsets.min()) < -0.499
    assert float(offsets.mean()) == pytest.approx(0.0, abs=0.005)
    assert float(offsets.std()) == pytest.approx(12**-0.5, rel=0.01)
    assert torch.equal(between_boundaries(torch.zeros(3), torch.Generator()), torch.zeros(3))


def shares(outside: float) -> ClipShares:
    return ClipShares(outside, outside, math.nan, outside, outside, outside)


def make_report(*, layers: bool = True) -> Report:
    updates = [RatioNoise(lr, 0.08, 0.16 + lr, 2.0, fp8=shares(0.25), bf16=shares(0.002)) for lr in (1e-7, 1.6e-6)]
    first = RecipeReport(
        recipe="tensorwise",
        unmoved=ProbabilityNoise(0.2, 0.7, 0.09),
        floor=shares(0.05),
        repeated=shares(0.0),
        updates=updates,
        seconds=2.0,
        layers=LayerNoise(0.2, [0.01, 0.09, 0.03], 0.15) if layers else None,
    )
    second = replace(first, recipe="blockwise:power_of_two_scales=false")
    return Report(24, 2645, (0.8, 1.2), 1.5, shares(0.0), 1.0, [first, second])


def printed(report: Report) -> str:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in tables(report):
        console.print(table)
    return console.export_text()


def test_tables_fit_a_narrow_terminal() -> None:
    text = printed(make_report())
    assert "…" not in text
    for part in ("2645 tokens, NLL 1.500", "0.2000", "25.0%", "power_of_two_scales", "2:0.090 3:0.030 1:0.010", "25%"):
        assert part in text
    assert len(tables(make_report(layers=False))) == 2


def test_json_has_everything_and_no_nan() -> None:
    values = json.loads(json.dumps(as_json(make_report()), allow_nan=False))
    first = values["recipes"][0]
    assert first["updates"][1]["fp8"] == {
        "low_negative": 0.25,
        "low_positive": 0.25,
        "high_negative": None,
        "high_positive": 0.25,
        "outside": 0.25,
        "clipped": 0.25,
    }
    assert first["layers"]["one_layer"] == [0.01, 0.09, 0.03]
    assert values["bounds"] == [0.8, 1.2]


def test_plot_shows_errors_clipping_and_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path: figures.append(figure))
    plot(make_report(), tmp_path / "noise.png")
    errors, outside, layers = figures[0].axes
    assert [bar.get_height() for bar in errors.patches] == pytest.approx([0.08, 0.08, 0.16, 0.16], rel=1e-4)
    assert outside.lines[1].get_xdata().tolist() == [1e-7, 1.6e-6]
    assert outside.lines[0].get_ydata().tolist() == [0.002, 0.002]
    assert layers.lines[0].get_ydata().tolist() == [0.01, 0.09, 0.03]


def failure(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int | str | None, str]:
    """Exit status and stderr of a command that fails before it imports Megatron."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(["diagnose", *map(str, argv)])
    return stopped.value.code, capsys.readouterr().err


def test_options_that_cannot_be_used_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("--config", "tiny_cpu")
    (tmp_path / "config.json").write_text("{}")
    code, error = failure(capsys, tmp_path / "none", *common)
    assert code == 2 and error.startswith("error: MODEL: ") and error.count("\n") == 1
    for recipe, message in (
        ("bf16", "error: --recipe: bf16 is what all recipes are compared with"),
        ("rowwise:scales=1", "error: precision.scales: no such setting"),
        ("columnwise", "error: precision.recipe: "),
    ):
        code, error = failure(capsys, tmp_path, *common, "--recipe", recipe)
        assert code == 2 and error.startswith(message), error
    assert "names no picture" in failure(capsys, tmp_path, *common, "--plot", "noise.gif")[1]
    for option in (("--lr", "0"), ("--lr", "1e-6,nan"), ("--num-prompts", "0"), ("--layer-prompts", "-1")):
        code, error = failure(capsys, tmp_path, *common, *option)
        assert code == 2 and f"argument {option[0]}" in error
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'megatron-calclip[plot]'" in failure(capsys, tmp_path, *common, "--plot", "noise.png")[1]


def test_a_variant_keeps_nothing_of_another_recipe() -> None:
    overrides = ["precision.power_of_two_scales=false", "precision.format=e4m3", "precision.fp8_param=true"]
    plain = diagnose.variant("tensorwise", "tiny_cpu", overrides).config.precision
    assert (plain.power_of_two_scales, plain.format, plain.fp8_param) == (None, "auto", True)
    name, config = diagnose.variant("blockwise:power_of_two_scales=false:fp8_param=false", "tiny_cpu", overrides)
    assert name == "blockwise:power_of_two_scales=false:fp8_param=false"
    assert (config.precision.recipe, config.precision.power_of_two_scales) == ("blockwise", False)
    assert not config.precision.fp8_param
    with pytest.raises(UserError, match=r"^precision.power_of_two_scales: "):
        diagnose.variant("mxfp8:power_of_two_scales=false", "tiny_cpu", [])


def test_recipes_that_a_device_cannot_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the default ones they are left out, and said; one that was asked for is an error, before any is measured."""
    names = ["tensorwise", "rowwise", "mxfp8"]
    variants = [diagnose.variant(name, "tiny_cpu", []) for name in names]
    refused = {"rowwise", "mxfp8"}

    def check(config: Config, shape: object) -> None:
        if config.precision.recipe in refused:
            raise UserError("precision.recipe", "cannot be computed here; use another")

    monkeypatch.setattr("megatron_calclip.precision.backend.check", check)
    said: list[str] = []
    kept = diagnose.able(variants, object(), asked_for=False, say=said.append)
    assert [one.name for one in kept] == ["tensorwise"]
    assert [line.split(":")[1] for line in said] == [" rowwise", " mxfp8"] and "use another" in said[0]
    with pytest.raises(UserError, match=r"^--recipe rowwise: precision.recipe: cannot be computed here"):
        diagnose.able(variants, object(), asked_for=True, say=said.append)
    refused.add("tensorwise")
    with pytest.raises(UserError, match=r"^--recipe: none of the default recipes"):
        diagnose.able(variants, object(), asked_for=False, say=said.append)
