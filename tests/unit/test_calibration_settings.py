"""Grids from whole numbers, presets, and refusals that name the setting."""

import math
from itertools import pairwise

import pytest
import torch

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.calibration_settings import REFERENCES, CalibrationSettings


def test_paper_grid_is_exact():
    settings = CalibrationSettings.paper()
    lower, upper = settings.grids(settings.start)
    # gcd(20, 50, 100, 300) = 10 thousandths: 0.50, 0.51 ... 0.90; candidates every second one.
    assert lower.edges == tuple(hundredth / 100 for hundredth in range(50, 91))
    assert [lower.edges[index] for index in lower.candidates] == [k / 100 for k in range(50, 91, 2)]
    # gcd(20, 100, 600, 40) = 20 thousandths: the candidates themselves.
    assert upper.edges == tuple(hundredth / 100 for hundredth in range(120, 201, 2))
    assert upper.candidates == tuple(range(41))
    assert (lower.max_move, upper.max_move) == (5, 5)
    assert (lower.edges[lower.reference], upper.edges[upper.reference]) == (0.8, 1.24)
    # A float32 accumulation would have made 0.51999998 of 0.52.
    assert torch.tensor(lower.edges)[2] == torch.tensor(0.52)


def test_edges_hold_present_bounds_and_what_smoothing_reaches():
    settings = CalibrationSettings(start=ClipBounds(0.605, 1.8), delta_lower=0.03, grid_lower=(0.4, 0.9, 0.05))
    lower, _ = settings.grids(ClipBounds(0.777, 1.8))
    assert lower.edges[lower.index(0.777)] == 0.777
    for bound in (0.605, 0.777, 0.4, 0.9):
        for sign in (-1, 1):
            reached = round(bound + sign * 0.03, 3)
            assert not 0.4 <= reached <= 0.9 or reached in lower.edges
    with pytest.raises(ValueError, match="not among"):
        lower.index(0.6054)


def test_reference_between_or_outside_the_candidates_is_an_edge():
    settings = CalibrationSettings(reference=ClipBounds(0.95, 1.1))
    lower, upper = settings.grids(settings.start)
    assert (lower.edges[lower.reference], upper.edges[upper.reference]) == (0.95, 1.1)
    assert lower.reference not in lower.candidates
    assert upper.reference not in upper.candidates
    # Inside the grid it only refines the lattice: a move of 0.05 across it stays 0.05.
    inside, _ = CalibrationSettings(reference=ClipBounds(0.725, 1.24)).grids(settings.start)
    assert inside.edges[inside.index(0.7) + inside.max_move] == 0.75
    # Moves count edges; the extra one lies at the end and lengthens none of them.
    assert lower.edges[lower.index(0.6) + lower.max_move] == 0.65


def test_cost_of_a_start_value():
    settings = CalibrationSettings()
    lower, upper = settings.grids(settings.start)
    assert lower.num_calibrations(0.6, 0.5) == 2
    assert lower.num_calibrations(0.6, 0.8) == 4
    assert upper.num_calibrations(1.8, 1.24) == 6
    assert upper.num_calibrations(1.24, 1.24) == 0


def test_sequence_grid_is_logarithmic_and_holds_reference_and_start():
    settings = CalibrationSettings.robust("gspo", start=ClipBounds(1 - 1.234e-3, 1 + 2e-3))
    lower, upper = settings.grids(ClipBounds(math.exp(-2e-5), 1 + 2e-3))
    assert lower.edges[lower.reference] == 1 - 3e-4
    assert upper.edges[upper.reference] == 1 + 4e-4
    for bound in (1 - 1.234e-3, math.exp(-2e-5)):
        assert lower.edges[lower.index(bound)] == bound
    for grid, sign in ((lower, -1), (upper, 1)):
        magnitudes = sorted(math.log(edge) * sign for edge in grid.edges)
        assert magnitudes[0] == pytest.approx(1e-5)
        assert magnitudes[-1] == pytest.approx(0.091)
        steps = [b / a for a, b in pairwise(magnitudes)]
        assert min(steps) > 1.01
        assert max(steps) < 1.2
        assert len(set(torch.tensor(grid.edges).tolist())) == len(grid.edges)


def test_presets():
    paper, robust = CalibrationSettings.paper("dapo"), CalibrationSettings.robust("dapo")
    assert CalibrationSettings() == CalibrationSettings.robust()
    assert paper.reference == robust.reference == ClipBounds(0.8, 1.28)
    for settings in (paper, robust):
        assert settings.start == ClipBounds(0.6, 1.8)
        assert (settings.grid_lower, settings.grid_upper) == ((0.5, 0.9, 0.02), (1.2, 2.0, 0.02))
        assert (settings.delta_lower, settings.delta_upper, settings.interval) == (0.05, 0.1, 20)
    # The paper's method with nothing of ours.
    assert (paper.min_tail_tokens, paper.pool, paper.start_step) == (1, 1, 1)
    assert (paper.balance_ratio_cap, paper.weighting, paper.hold_unsolvable) == (None, "token", False)
    assert (paper.min_balance_range, paper.max_interval_share) == (0.0, 1.0)
    assert (robust.min_tail_tokens, robust.balance_ratio_cap, robust.weighting) == (8, 2.0, "loss")
    assert CalibrationSettings.paper("gspo").mode == "sequence"
    assert CalibrationSettings.robust("gspo").start == REFERENCES["gspo"]
    assert CalibrationSettings.paper(interval=10).interval == 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "word"}, r"calibration\.mode: word is not allowed; choose one of \('token', 'sequence'\)"),
        ({"interval": 0}, r"calibration\.interval: 0 is not allowed; choose at least 1"),
        ({"token_fraction": 0.0}, r"calibration\.token_fraction"),
        ({"max_interval_share": 1.5}, r"calibration\.max_interval_share"),
        ({"num_replicates": -1}, r"calibration\.num_replicates"),
        ({"delta_lower": 0.0333}, r"calibration\.delta_lower: 0\.0333 .* a multiple of 0\.001"),
        ({"delta_upper": 0.0}, r"calibration\.delta_upper"),
        ({"grid_lower": (0.5, 0.9, 0.03)}, r"calibration\.grid_lower.*whole steps"),
        ({"grid_lower": (0.5, 1.0, 0.02)}, r"calibration\.grid_lower.*on its side of 1"),
        ({"grid_upper": (2.0, 1.2, 0.02)}, r"calibration\.grid_upper"),
        ({"start": ClipBounds(0.4, 1.8)}, r"calibration\.start: 0\.4 .* 0\.5 to 0\.9 for the lower bound"),
        ({"start": ClipBounds(0.6, 3.0)}, r"calibration\.start: 3\.0 .* for the upper bound"),
        ({"balance_ratio_cap": 1.5}, r"calibration\.balance_ratio_cap: 1\.5 .* largest bound 2\.0"),
        ({"sequence_grid_width": 1.0}, r"calibration\.sequence_grid_width"),
        ({"sequence_grid_quantile": 0.5}, r"calibration\.sequence_grid_quantile"),
    ],
)
def test_refusals_name_setting_and_range(changes, message):
    with pytest.raises(ValueError, match=message):
        CalibrationSettings(**changes)
