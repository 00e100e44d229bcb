"""The calibrator: against plain loops, on known distributions, and its rules one by one."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.calibration import CalibrationReport, CalibrationSettings, ClipCalibrator
from megatron_calclip.algorithms.statistics import RatioStatistics

REFERENCE = ClipBounds(0.8, 1.24)
TOKENS_PER_SEQUENCE = 16


def fill(
    statistics: RatioStatistics,
    ratio8,
    ratio16,
    advantages,
    *,
    importance_weights=None,
    loss_weights=None,
    sequence_ids=None,
    weights_unmoved: bool = False,
) -> RatioStatistics:
    ratio8, ratio16 = torch.as_tensor(ratio8), torch.as_tensor(ratio16)
    ones = torch.ones(ratio8.numel())
    ids = torch.arange(ratio8.numel()) // TOKENS_PER_SEQUENCE if sequence_ids is None else sequence_ids
    statistics.update(
        ratio8,
        ratio16,
        advantages=torch.as_tensor(advantages),
        importance_weights=ones if importance_weights is None else torch.as_tensor(importance_weights),
        loss_weights=ones if loss_weights is None else torch.as_tensor(loss_weights),
        response_mask=torch.ones(ratio8.numel(), dtype=torch.bool),
        sequence_ids=ids,
        weights_unmoved=weights_unmoved,
    )
    return statistics


def lognormal(num_tokens: int, *, sigma16: float, noise: float, seed: int = 0):
    """FP8 ratios are BF16 ratios times independent log-normal noise; advantages are -1 and 1."""
    random = torch.Generator().manual_seed(seed)
    base, error = torch.randn(2, num_tokens, generator=random)
    log16 = sigma16 * base
    advantages = torch.ones(num_tokens)
    advantages[::2] = -1
    return (log16 + noise * error).exp(), log16.exp(), advantages


def calibrate(calibrator: ClipCalibrator, *tokens, step: int = 20, **kwargs) -> CalibrationReport:
    return calibrator.calibrate(fill(calibrator.new_statistics(), *tokens, **kwargs), step)


def normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def normal_quantile(p: float) -> float:
    return torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(p, dtype=torch.float64)).item()


def test_by_hand():
    # Ten tokens with A < 0. BF16 puts two of them at or under 0.8: alpha = 2 / 10.
    #   r16 = .7 .8 .9 .95 1 1 1 1 1 1        r8 = .61 .655 .71 .75 .85 1 1 1 1 1
    # F8(0.66) = 2/10 = alpha, and so at 0.68 and 0.70; of these the nearest to the present 0.6 is L* = 0.66.
    # Smoothing lets L go to 0.65. Under it lies one token, 0.61.
    # Four tokens with A > 0: r16 = 1 1 1.1 1.3, r8 = 1 1.25 1.5 1.9.
    # p_ref = (1 + 1 + 1.1) / (.9 + .95 + 6) = 3.1 / 7.85 = 0.39490
    # denominator of p: .655 + .71 + .75 + .85 + 5 = 7.965
    # p(H) = 1 / 7.965 = .1255 for H <= 1.24, 2.25 / 7.965 = .2825 up to 1.5, 3.75 / 7.965 = .4708 up to 1.9,
    # .7093 beyond. The nearest to p_ref is .4708, from 1.52 to 1.9; the present 1.8 is one of these.
    ratio16 = [0.7, 0.8, 0.9, 0.95, 1, 1, 1, 1, 1, 1, 1.0, 1.0, 1.1, 1.3]
    ratio8 = [0.61, 0.655, 0.71, 0.75, 0.85, 1, 1, 1, 1, 1, 1.0, 1.25, 1.5, 1.9]
    advantages = [-1.0] * 10 + [1.0] * 4
    calibrator = ClipCalibrator(CalibrationSettings.paper(num_replicates=0))
    report = calibrate(calibrator, ratio8, ratio16, advantages)
    assert report.alpha == 0.2
    assert (report.num_tail_tokens, report.num_negative, report.num_positive) == (2, 10, 4)
    assert (report.lower.choice, report.lower.after, report.lower.status) == (0.66, 0.65, "moved")
    assert report.lower.num_calibrations_left == 1
    assert report.lower.share8_after == 0.1
    assert report.balance_target == pytest.approx(3.1 / 7.85)
    assert report.balance_choice == pytest.approx(3.75 / 7.965)
    assert report.balance_range == pytest.approx((1 / 7.965, 5.65 / 7.965))
    assert (report.upper.choice, report.upper.after, report.upper.status) == (1.8, 1.8, "unchanged")
    assert calibrator.bounds == report.after == ClipBounds(0.65, 1.8)


# --- The same, from the formulas, in plain loops ----------------------------------------------------------


def float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def brute_force(tokens, config: CalibrationSettings, bounds: ClipBounds):
    """(raw L, new L, raw H, new H) in thousandths, None for the raw choice of a bound that is held."""
    present_low, present_high = round(bounds.lower * 1000), round(bounds.upper * 1000)
    low_grid, high_grid = range(500, 901, 20), range(1200, 2001, 20)

    def edge(milli):
        return float32(milli / 1000)

    def weight(token):
        _, _, advantage, importance, loss = token
        value = float32(abs(advantage) * importance)
        return value if config.weighting == "token" else float32(value * loss)

    def balance(which, low, high):
        positive = negative = clipped_positive = clipped_negative = 0
        for token in tokens:
            ratio, advantage = token[which], token[2]
            plain = int(weight(token) * 2**28)
            weighted = int(float32(min(ratio, config.balance_ratio_cap or math.inf) * weight(token)) * 2**28)
            if advantage > 0 and ratio < edge(high):
                positive += weighted
            elif advantage > 0:
                clipped_positive += plain
            elif ratio > edge(low):
                negative += weighted
            else:
                clipped_negative += plain
        if config.balance == "surrogate":
            positive += high / 1000 * clipped_positive
            negative += low / 1000 * clipped_negative
        return positive / negative if negative else None

    def nearest(distances, present):
        return min(distances, key=lambda milli: (distances[milli], abs(milli - present), milli))

    def smoothed(present, choice, delta):
        return min(max(choice, present - delta), present + delta)

    held = (None, present_low, None, present_high)
    negatives = [token for token in tokens if token[2] < 0]
    if len(negatives) in (0, len(tokens)) or all(token[0] == 1 for token in tokens):
        return held

    tail = sum(token[1] <= edge(800) for token in negatives)
    raw_low, new_low = None, present_low
    if tail >= config.min_tail_tokens:
        shares = {low: abs(sum(token[0] <= edge(low) for token in negatives) - tail) for low in low_grid}
        raw_low = nearest(shares, present_low)
        new_low = smoothed(present_low, raw_low, 50)

    target = balance(1, 800, 1240)
    curve = {high: balance(0, new_low, high) for high in high_grid}
    solvable = target is not None and curve[1200] is not None
    if solvable and config.hold_unsolvable:
        solvable = curve[1200] <= target <= curve[2000]
    if solvable and target:
        solvable = (curve[2000] - curve[1200]) / target >= config.min_balance_range
    if not solvable:
        return raw_low, new_low, None, present_high
    raw_high = nearest({high: abs(p - target) for high, p in curve.items()}, present_high)
    return raw_low, new_low, raw_high, smoothed(present_high, raw_high, 100)


GRID_VALUES = [float32(milli / 1000) for milli in (500, 600, 640, 800, 820, 900, 1200, 1240, 1300, 1800, 2000)]
ratio_values = st.one_of(st.sampled_from([*GRID_VALUES, 1.0, 5.0]), st.floats(0.25, 3, width=32))
token_rows = st.tuples(
    ratio_values,
    ratio_values,
    st.sampled_from([-1.0, -0.5, 1.0, 2.0]),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([0.25, 0.5, 1.0]),
)
bounds_on_lattice = st.builds(
    lambda low, high: ClipBounds(low / 100, high / 100),
    st.integers(50, 90),
    st.sampled_from(range(120, 201, 2)),
)


@settings(max_examples=150)
@given(
    st.lists(token_rows, min_size=1, max_size=30),
    bounds_on_lattice,
    st.sampled_from(["gradient", "surrogate"]),
    st.booleans(),
)
def test_equals_plain_loops(rows, start, balance, paper):
    preset = CalibrationSettings.paper if paper else CalibrationSettings.robust
    config = preset(start=start, balance=balance, num_replicates=0, max_interval_share=1.0)
    calibrator = ClipCalibrator(config)
    columns = [torch.tensor(column) for column in zip(*rows, strict=True)]
    report = calibrate(calibrator, *columns[:3], importance_weights=columns[3], loss_weights=columns[4])
    raw_low, new_low, raw_high, new_high = brute_force(rows, config, start)

    for bound, raw, new in ((report.lower, raw_low, new_low), (report.upper, raw_high, new_high)):
        assert bound.after == new / 1000
        assert (bound.status == "held") == (raw is None)
        if raw is not None:
            assert bound.choice == raw / 1000
    assert calibrator.bounds == ClipBounds(new_low / 1000, new_high / 1000)


# --- Known distributions ----------------------------------------------------------------------------------


def test_lower_bound_is_the_analytic_quantile():
    sigma16, noise = 0.12, 0.2
    alpha = normal_cdf(math.log(0.8) / sigma16)  # 3.1%
    quantile = math.exp(math.hypot(sigma16, noise) * normal_quantile(alpha))  # 0.648
    calibrator = ClipCalibrator(CalibrationSettings.robust())
    report = calibrate(calibrator, *lognormal(60_000, sigma16=sigma16, noise=noise))
    assert report.alpha == pytest.approx(alpha, abs=0.003)
    assert report.lower.choice == pytest.approx(quantile, abs=0.02)
    low, high = report.lower.interval
    assert low <= report.lower.choice <= high
    assert high - low <= 0.06


def test_calibrated_clip_share_is_that_of_bf16_within_its_interval():
    calibrator = ClipCalibrator(CalibrationSettings.robust())
    for step in range(1, 5):
        tokens = lognormal(60_000, sigma16=0.12, noise=0.2, seed=step)
        uncalibrated = calibrate(calibrator, *tokens, step=20 * step).lower
    assert uncalibrated.overclip_multiple == pytest.approx(5.4, rel=0.1)
    ratio8, ratio16, advantages = lognormal(60_000, sigma16=0.12, noise=0.2, seed=99)
    report = calibrate(calibrator, ratio8, ratio16, advantages, step=100)
    clipped = (ratio8[advantages < 0] <= calibrator.bounds.lower).double().mean().item()
    low, high = report.alpha_interval
    # The grid's step is the other uncertainty: half of it to either side.
    quantile, density = report.lower.after, 0.01
    nearby = ratio8[advantages < 0]
    slack = (nearby <= quantile + density).double().mean() - (nearby <= quantile).double().mean()
    assert low - slack <= clipped <= high + slack


def test_intervals_cover_the_truth_and_widen_with_dependence():
    sigma16 = 0.12
    alpha = normal_cdf(math.log(0.8) / sigma16)
    hits = 0
    for seed in range(20):
        tokens = lognormal(4_000, sigma16=sigma16, noise=0.2, seed=seed)
        low, high = calibrate(ClipCalibrator(CalibrationSettings.robust()), *tokens).alpha_interval
        hits += low <= alpha <= high
    assert hits >= 16
    # Ten copies of a token within its sequence carry no more evidence than one; in ten sequences they do.
    ratio8, ratio16, advantages = (values[:1_000] for values in tokens)

    def interval(copies, sequence_ids):
        batch = [values.repeat(copies) for values in (ratio8, ratio16, advantages)]
        report = calibrate(ClipCalibrator(CalibrationSettings.robust()), *batch, sequence_ids=sequence_ids)
        return report.alpha_interval

    once = interval(1, torch.arange(1_000))
    assert interval(10, torch.arange(1_000).repeat(10)) == once
    low, high = interval(10, torch.arange(10_000))
    assert high - low < 0.5 * (once[1] - once[0])


@pytest.mark.parametrize("preset", [CalibrationSettings.paper, CalibrationSettings.robust])
@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
def test_with_fp8_off_bounds_started_at_the_references_stay(preset, algorithm):
    config = preset(algorithm)
    calibrator = ClipCalibrator(preset(algorithm, start=config.reference))
    for step in (20, 40, 60):
        _, ratio16, advantages = lognormal(20_000, sigma16=0.12, noise=0.0, seed=step)
        report = calibrate(calibrator, ratio16, ratio16, advantages, step=step)
        assert report.lower.overclip_multiple == report.upper.overclip_multiple == 1
        assert (report.lower.status, report.upper.status) == ("unchanged", "unchanged")
        assert report.balance_choice == report.balance_target
        assert report.after == config.reference


@pytest.mark.parametrize("preset", [CalibrationSettings.paper, CalibrationSettings.robust])
def test_with_fp8_off_bounds_arrive_within_six_calibrations(preset):
    calibrator = ClipCalibrator(preset())
    assert calibrator.bounds == ClipBounds(0.6, 1.8)
    path = []
    for step in range(20, 121, 20):
        _, ratio16, advantages = lognormal(40_000, sigma16=0.15, noise=0.0, seed=step)
        path.append(calibrate(calibrator, ratio16, ratio16, advantages, step=step).after)
    assert [bounds.lower for bounds in path] == [0.65, 0.7, 0.75, 0.8, 0.8, 0.8]
    assert [bounds.upper for bounds in path] == [1.7, 1.6, 1.5, 1.4, 1.3, 1.24]


# --- The rules for fragile points -------------------------------------------------------------------------


def log_of(report: CalibrationReport) -> str:
    return "\n".join(report.log_lines)


def tokens_with_tail(num_tail: int, *, num_tokens: int = 400):
    """num_tail BF16 tail tokens; FP8 has three times as many, spread over 0.6 to 0.8."""
    ratio16 = torch.ones(num_tokens)
    ratio8 = torch.linspace(0.95, 1.15, num_tokens)
    ratio16[:num_tail] = 0.7
    ratio8[: 3 * num_tail] = torch.linspace(0.61, 0.79, 3 * num_tail)
    advantages = -torch.ones(num_tokens)
    advantages[num_tokens // 2 :] = 1
    ratio16[num_tokens // 2 :] = torch.linspace(0.9, 1.3, num_tokens - num_tokens // 2)
    ratio8[num_tokens // 2 :] = torch.linspace(0.9, 1.9, num_tokens - num_tokens // 2)
    return ratio8, ratio16, advantages


def test_rule_1_few_tail_tokens_hold_then_pool():
    config = CalibrationSettings.robust(max_interval_share=1.0, start=ClipBounds(0.7, 1.8))
    calibrator = ClipCalibrator(config)
    first = calibrate(calibrator, *tokens_with_tail(5), step=20)
    assert (first.lower.status, first.num_pooled, first.num_tail_tokens) == ("held", 1, 5)
    assert "lower bound held at 0.7: 5 BF16 tail tokens in 1 calibration(s) are fewer than 8" in log_of(first)
    # 3 + 5 are just enough; 200 + 200 tokens with A < 0.
    second = calibrate(calibrator, *tokens_with_tail(3), step=40)
    assert (second.lower.status, second.num_pooled, second.num_tail_tokens) == ("moved", 2, 8)
    assert second.num_negative == 400
    assert "in 2 calibrations" in log_of(second)
    # The newest is pooled first: 5 + 3, not 5 + 5.
    third = calibrate(calibrator, *tokens_with_tail(5), step=60)
    assert (third.num_pooled, third.num_tail_tokens) == (2, 8)
    # A sufficient tail pools nothing, and nothing is pooled beyond the limit.
    assert calibrate(calibrator, *tokens_with_tail(8), step=80).num_pooled == 1
    for step in range(100, 200, 20):
        last = calibrate(calibrator, *tokens_with_tail(1), step=step)
    assert (last.num_pooled, last.num_tail_tokens, last.lower.status) == (4, 4, "held")


def test_rule_1_alpha_zero_never_sets_the_lower_bound():
    calibrator = ClipCalibrator(CalibrationSettings.paper())
    report = calibrate(calibrator, *tokens_with_tail(0))
    assert (report.alpha, report.lower.after, report.lower.status) == (0.0, 0.6, "held")


def test_rule_2_capped_balance_ignores_outliers():
    ratio8, ratio16, advantages = lognormal(4_000, sigma16=0.12, noise=0.05)
    clean = calibrate(ClipCalibrator(CalibrationSettings.robust()), ratio8, ratio16, advantages)
    ratio8[0] = 843.0  # a token with A < 0
    capped = calibrate(ClipCalibrator(CalibrationSettings.robust()), ratio8, ratio16, advantages)
    plain = calibrate(ClipCalibrator(CalibrationSettings.paper()), ratio8, ratio16, advantages)
    assert capped.balance_choice == pytest.approx(clean.balance_choice, rel=1e-3)
    # 843 against about 2,000 other tokens of ratio 1.
    assert plain.balance_range[1] == pytest.approx(clean.balance_range[1] * 2000 / 2843, rel=0.02)
    assert plain.upper.status == "edge"


def test_rule_3_unsolvable_or_flat_balance_holds_the_upper_bound():
    # FP8 has lost half of the positive ratios' size: no H brings the balance back.
    ratio8, ratio16, advantages = lognormal(2_000, sigma16=0.12, noise=0.1)
    ratio8[advantages > 0] *= 0.5
    ratio8[1] = 1.99
    robust = calibrate(ClipCalibrator(CalibrationSettings.robust()), ratio8, ratio16, advantages)
    assert (robust.upper.status, robust.upper.after) == ("held", 1.8)
    assert "no solution, the balance of BF16 is above that of FP8 on the whole grid" in log_of(robust)
    paper = calibrate(ClipCalibrator(CalibrationSettings.paper()), ratio8, ratio16, advantages)
    assert (paper.upper.status, paper.upper.choice) == ("edge", 2.0)
    assert "at the edge: the balance of BF16" in log_of(paper)

    # No positive token between 1.2 and 2.0: any H is as good as any other, and an argmin would say 1.2.
    ratio8 = ratio16.clamp(max=1.1)
    flat = calibrate(ClipCalibrator(CalibrationSettings.robust()), ratio8, ratio16.clamp(max=1.1), advantages)
    assert (flat.upper.status, flat.upper.after) == ("held", 1.8)
    at_references = ClipCalibrator(CalibrationSettings.robust(start=REFERENCE))
    flat = calibrate(at_references, ratio8, ratio16.clamp(max=1.1), advantages)
    assert "the balance varies by only 0.00% over the grid" in log_of(flat)
    paper = calibrate(ClipCalibrator(CalibrationSettings.paper()), ratio8, ratio16.clamp(max=1.1), advantages)
    assert paper.upper.after == 1.8


@pytest.mark.parametrize("preset", [CalibrationSettings.paper, CalibrationSettings.robust])
def test_rule_3_a_balance_without_negative_update_is_undefined(preset):
    # L = 0.6 clips all of FP8's A < 0 tokens, and BF16 has no tail that would move it.
    report = calibrate(ClipCalibrator(preset()), [0.5, 0.5, 1.0, 1.3], [1.0, 1.0, 1.0, 1.3], [-1.0, -1.0, 1.0, 1.0])
    assert report.upper.reason == "no solution, no token with A < 0 survives the lower bound"
    assert (report.upper.status, report.upper.after) == ("held", 1.8)
    assert report.balance_range is None
    assert report.balance_before is None
    assert report.balance_target == 0.5


@pytest.mark.parametrize(
    ("advantage", "reason"),
    [(-1.0, "no token has A > 0"), (1.0, "no token has A < 0"), (0.0, "all groups have equal rewards")],
)
def test_rule_4_one_sided_advantages_hold_both(advantage, reason):
    ratio8, ratio16, _ = lognormal(1_000, sigma16=0.12, noise=0.1)
    report = calibrate(ClipCalibrator(CalibrationSettings.robust()), ratio8, ratio16, torch.full((1_000,), advantage))
    assert report.lower.status == report.upper.status == "held"
    assert report.after == ClipBounds(0.6, 1.8)
    assert log_of(report).count(reason) == 2


def test_rule_5_first_minibatch_counts_in_both_precisions():
    calibrator = ClipCalibrator(CalibrationSettings.robust())
    tokens = lognormal(2_000, sigma16=0.12, noise=0.1)
    statistics = fill(calibrator.new_statistics(), *tokens)
    alpha = calibrate(ClipCalibrator(CalibrationSettings.robust()), *tokens).alpha
    ones = torch.ones(2_000)
    fill(statistics, ones, ones, tokens[2], weights_unmoved=True)
    report = calibrator.calibrate(statistics, 20)
    assert report.alpha == alpha / 2
    assert "2,000 tokens of the first mini-batch count with r = 1 in both precisions" in log_of(report)
    assert "no weight has moved" not in log_of(report)


def test_rule_6_no_calibration_before_the_start_step():
    calibrator = ClipCalibrator(CalibrationSettings.robust(interval=4, start_step=6))
    assert [step for step in range(1, 20) if calibrator.due(step)] == [8, 12, 16]
    assert any("no calibration before step 6" in line for line in calibrator.describe())


def test_rule_7_noise_at_unmoved_weights_is_reported():
    calibrator = ClipCalibrator(CalibrationSettings.robust())
    ratio8, ratio16, advantages = lognormal(2_000, sigma16=0.12, noise=0.1)
    statistics = fill(calibrator.new_statistics(), ratio8, ratio16, advantages)
    ones = torch.ones(2_000)
    first = torch.where(torch.arange(2_000) < 500, ratio8, ones)
    fill(statistics, first, ones, advantages, weights_unmoved=True)
    report = calibrator.calibrate(statistics, 20)
    assert "not 1 on 25.0% of the first mini-batch's tokens although no weight has moved" in log_of(report)


def test_rule_8_equality_clips_and_grids_are_whole_numbers():
    # float32(0.52) = 0.519999981 is at 0.52, not above it, and equality clips on both sides.
    ratio8 = torch.cat([torch.full((10,), 0.52), torch.ones(30), torch.full((10,), 1.5), torch.ones(30)])
    ratio16 = torch.cat([torch.full((10,), 0.8), torch.ones(30), torch.full((10,), 1.24), torch.ones(30)])
    advantages = torch.cat([-torch.ones(40), torch.ones(40)])
    config = CalibrationSettings.robust(start=ClipBounds(0.52, 1.5), max_interval_share=1.0)
    calibrator = ClipCalibrator(config)
    report = calibrate(calibrator, ratio8, ratio16, advantages)
    assert (report.lower.share8_after, report.lower.share16_reference) == (0.25, 0.25)
    assert (report.upper.share8_after, report.upper.share16_reference) == (0.25, 0.25)
    assert (report.lower.status, report.upper.status) == ("unchanged", "unchanged")
    assert "A < 0 is clipped at r <= L; 21 candidates from 0.5 to 0.9" in calibrator.describe()[0]


def test_rule_9_says_what_a_start_value_costs():
    lower, upper = ClipCalibrator(CalibrationSettings.robust()).describe()[:2]
    assert "from 0.6 to the reference 0.8 it takes 4 calibrations" in lower
    assert "from 1.8 to the reference 1.24 it takes 6 calibrations" in upper
    tokens = lognormal(20_000, sigma16=0.12, noise=0.4)
    report = calibrate(ClipCalibrator(CalibrationSettings.robust()), *tokens)
    # L* = 0.5 lies below the grid's end or at it: two moves of 0.05.
    assert (report.lower.after, report.lower.choice) == (0.55, 0.5)
    assert "1 more to get there" in log_of(report)


def test_edge_of_the_grid_is_a_status():
    calibrator = ClipCalibrator(CalibrationSettings.robust())
    tokens = lognormal(20_000, sigma16=0.12, noise=0.5)
    report = calibrate(calibrator, *tokens)
    assert (report.lower.status, report.lower.choice, report.lower.after) == ("edge", 0.5, 0.55)
    assert "at the edge: FP8 clips more than BF16 on the whole grid" in log_of(report)
    wide = CalibrationSettings.robust(grid_lower=(0.2, 0.9, 0.02))
    report = calibrate(ClipCalibrator(wide), *tokens)
    assert report.lower.status == "moved"
    assert report.lower.choice < 0.5
    few = torch.ones(20_000)
    few[::2_000] = 0.89
    less = calibrate(ClipCalibrator(CalibrationSettings.robust()), few, *tokens[1:])
    assert (less.lower.status, less.lower.choice, less.lower.after) == ("edge", 0.9, 0.65)


def test_interval_that_says_nothing_holds():
    # Two sequences disagree: their share of the replicates decides whether L* is low or high.
    ratio8 = torch.cat([torch.full((20,), 0.52), torch.full((20,), 0.88), torch.ones(40)])
    ratio16 = torch.cat([torch.full((10,), 0.7), torch.ones(70)])
    ratio16[20:32] = 0.7
    advantages = torch.cat([-torch.ones(40), torch.ones(40)])
    ids = torch.arange(4).repeat_interleave(20)
    robust = CalibrationSettings.robust()
    report = calibrate(ClipCalibrator(robust), ratio8, ratio16, advantages, sequence_ids=ids)
    assert report.lower.status == "held"
    assert "of the grid and says nothing" in log_of(report)
    paper = calibrate(ClipCalibrator(CalibrationSettings.paper()), ratio8, ratio16, advantages, sequence_ids=ids)
    assert paper.lower.status != "held"


def test_all_ratios_one_is_a_no_op_with_the_reason():
    calibrator = ClipCalibrator(CalibrationSettings.paper())
    ones = torch.ones(100)
    advantages = torch.tensor([-1.0, 1.0]).repeat(50)
    report = calibrate(calibrator, ones, ones, advantages)
    assert report.after == ClipBounds(0.6, 1.8)
    assert log_of(report).count("every ratio is exactly 1, so nothing is clipped") == 2
    assert "use at least two mini-batches or epochs per rollout" in log_of(report)


def test_bad_numbers_hold_both():
    ratio8, ratio16, advantages = lognormal(8_000, sigma16=0.12, noise=0.1)
    broken = ratio8.clone()
    broken[3] = math.nan
    report = calibrate(ClipCalibrator(CalibrationSettings.robust()), broken, ratio16, advantages)
    assert log_of(report).count("1 response tokens have a NaN or inf") == 2
    tiny = torch.full((8_000,), 1e-9)
    calibrator = ClipCalibrator(CalibrationSettings.robust())
    report = calibrate(calibrator, ratio8, ratio16, advantages, loss_weights=tiny)
    assert "raise weight_scale" in report.upper.reason
    statistics = fill(calibrator.new_statistics(weight_scale=1e9), ratio8, ratio16, advantages, loss_weights=tiny)
    assert calibrator.calibrate(statistics, 40).upper.status != "held"
    huge = torch.full((4_096,), 1e9)
    report = calibrate(calibrator, huge, huge, huge.clone().index_fill_(0, torch.tensor([0]), -1.0))
    assert report.lower.reason == report.upper.reason == "a sum exceeded the range of fixed point; lower weight_scale"


# --- Weights, balance, sequences, schedule, state ---------------------------------------------------------


def test_weighting_by_loss_or_token():
    ratio8, ratio16, advantages = lognormal(2_000, sigma16=0.12, noise=0.1)
    weights = torch.where(advantages > 0, 0.25, 1.0)
    for weighting, factor in (("token", 1.0), ("loss", 0.25)):
        config = CalibrationSettings.robust(weighting=weighting)
        plain = calibrate(ClipCalibrator(config), ratio8, ratio16, advantages)
        report = calibrate(ClipCalibrator(config), ratio8, ratio16, advantages, loss_weights=weights)
        assert report.balance_target == pytest.approx(factor * plain.balance_target)
        assert report.lower == plain.lower
    importance = calibrate(ClipCalibrator(config), ratio8, ratio16, advantages, importance_weights=weights)
    assert importance.balance_target == pytest.approx(0.25 * plain.balance_target)


def test_surrogate_balance_by_hand():
    # A > 0: r8 = 1 and 3. A < 0: r8 = 0.5 and 1.5. L = 0.6, H = 1.8, no cap.
    # surrogate: (1 + 1.8) / (0.6 + 1.5); gradient: 1 / 1.5.
    tokens = ([1.0, 3.0, 0.5, 1.5], [1.0, 1.0, 0.7, 1.0], [1.0, 1.0, -1.0, -1.0])
    for balance, expected in (("surrogate", 2.8 / 2.1), ("gradient", 1 / 1.5)):
        report = calibrate(ClipCalibrator(CalibrationSettings.paper(balance=balance)), *tokens)
        assert report.balance_before == pytest.approx(expected)
    # BF16 at the references: (1 + 1) / (0.8 + 1).
    report = calibrate(ClipCalibrator(CalibrationSettings.paper(balance="surrogate")), *tokens)
    assert report.balance_target == pytest.approx(2 / 1.8)


def test_sequence_mode_finds_bounds_at_any_scale():
    for scale in (1e-4, 1e-3):
        config = CalibrationSettings.robust("gspo", interval=1, start_step=1)
        calibrator = ClipCalibrator(config)
        for step in range(1, 16):
            tokens = lognormal(4_000, sigma16=2 * scale, noise=6 * scale, seed=step)
            report = calibrate(calibrator, *tokens, step=step)
        alpha = normal_cdf(math.log(config.reference.lower) / (2 * scale))
        expected = -math.hypot(2, 6) * scale * normal_quantile(alpha)
        # One step of the grid is up to 15% of the distance to 1.
        assert -math.log(calibrator.bounds.lower) == pytest.approx(expected, rel=0.2)
        low, high = report.alpha_interval
        assert low - 0.03 <= report.lower.share8_after <= high + 0.03


def test_sequence_mode_moves_a_limited_number_of_steps_and_reports_the_edge():
    config = CalibrationSettings.robust("gspo", sequence_grid_width=1.5)
    calibrator = ClipCalibrator(config)
    lower, _ = config.grids(config.start)
    report = calibrate(calibrator, *lognormal(4_000, sigma16=1e-3, noise=5e-2))
    assert lower.index(report.lower.before) - lower.index(report.lower.after) == config.sequence_max_move
    assert report.lower.status == "edge"
    # The spread at the 10% quantile of BF16 is 1.28e-3; the candidates end 1.5 times farther out.
    assert -math.log(report.lower.choice) == pytest.approx(1.5 * 1.282e-3, rel=0.2)
    with_fp8_off = ClipCalibrator(CalibrationSettings.robust("gspo"))
    _, ratio16, advantages = lognormal(20_000, sigma16=3e-4, noise=0.0)
    report = calibrate(with_fp8_off, ratio16, ratio16, advantages)
    assert report.after == config.reference


def test_drift_schedule_stretches_at_rest_and_shrinks_on_a_move():
    config = CalibrationSettings.robust(schedule="drift", interval=8, start=REFERENCE, start_step=3, drift_stretch=4)
    calibrator = ClipCalibrator(config)
    assert [step for step in range(1, 6) if calibrator.due(step)] == [3, 4, 5]

    def run(step, noise):
        # Noise that FP8 and BF16 share leaves the bounds at rest.
        _, ratio16, advantages = lognormal(10_000, sigma16=0.12, noise=0.0, seed=1)
        ratio8 = (ratio16.log() * noise).exp()
        return calibrate(calibrator, ratio8, ratio16, advantages, step=step)

    intervals = []
    step = 3
    for _ in range(4):
        intervals.append(run(step, 1.0).interval)
        assert not calibrator.due(step + intervals[-1] - 1)
        step += intervals[-1]
        assert calibrator.due(step)
    assert intervals == [16, 32, 32, 32]
    noises = [1.0 + 0.5 * k for k in range(1, 6)]
    shrinking = []
    for noise in noises:
        shrinking.append(run(step, noise).interval)
        step += shrinking[-1]
    assert shrinking[:2] == [16, 8]
    assert min(shrinking) >= 2
    # Bounds on their way neither stretch nor shrink it, and neither does a bound held for want of data.
    assert run(step, noises[-1]).interval == shrinking[-1]
    held = ClipCalibrator(config)
    ratio8, ratio16, advantages = tokens_with_tail(20)
    report = calibrate(held, ratio8, ratio16, -advantages.abs(), step=3)
    assert (report.before, report.interval) == (report.after, 8)


def test_a_step_that_says_nothing_is_no_drift():
    """No token with A < 0: neither this calibration nor the next one compares its gap of clips with another's."""
    config = CalibrationSettings.robust(schedule="drift", interval=8, start=REFERENCE, start_step=3, drift_stretch=4)
    calibrator = ClipCalibrator(config)
    ratio8, ratio16, advantages = lognormal(10_000, sigma16=0.12, noise=0.1, seed=1)
    first = calibrate(calibrator, ratio8, ratio16, advantages, step=3)
    empty = calibrate(calibrator, ratio8, ratio16, advantages.abs(), step=3 + first.interval)
    assert empty.interval == first.interval and not calibrator.due(2 + first.interval + empty.interval)
    after = calibrate(calibrator, ratio8, ratio16, advantages, step=3 + first.interval + empty.interval)
    assert after.interval >= first.interval


def test_state_round_trip_continues_identically():
    config = CalibrationSettings.robust(schedule="drift", interval=5)
    tokens = [lognormal(300, sigma16=0.1, noise=0.15, seed=seed) for seed in range(8)]
    straight = ClipCalibrator(config)
    reports = [calibrate(straight, *batch, step=5 * index) for index, batch in enumerate(tokens)]
    assert max(report.num_pooled for report in reports) > 1
    resumed = ClipCalibrator(config)
    for index, batch in enumerate(tokens):
        state = resumed.state_dict()
        resumed = ClipCalibrator(config)
        resumed.load_state_dict(state)
        assert calibrate(resumed, *batch, step=5 * index) == reports[index]
    state = resumed.state_dict()
    resumed = ClipCalibrator(config)
    resumed.load_state_dict(state)
    assert [resumed.due(step) for step in range(1, 90)] == [straight.due(step) for step in range(1, 90)]
    assert not straight.due(35 + reports[-1].interval - 1)
    for state in resumed.state_dict()["pool"]:
        assert state.dtype == torch.int64


def test_state_under_other_settings(caplog):
    calibrator = ClipCalibrator(CalibrationSettings.robust())
    calibrate(calibrator, *tokens_with_tail(5))
    calibrate(calibrator, *tokens_with_tail(20))
    state = calibrator.state_dict()
    assert state["bounds"] != [0.6, 1.8]
    other = ClipCalibrator(CalibrationSettings.robust(delta_lower=0.003))
    other.load_state_dict(state)
    assert other.bounds == calibrator.bounds
    assert "pool of the checkpoint is dropped" in caplog.text
    assert calibrate(other, *tokens_with_tail(5)).num_pooled == 1
    narrow = ClipCalibrator(CalibrationSettings.robust(grid_lower=(0.7, 0.9, 0.02), start=REFERENCE))
    with pytest.raises(ValueError, match=r"clip bounds \[0\.6.*widen calibration\.grid_lower"):
        narrow.load_state_dict(state)


def test_report_rows_are_plain_and_statistics_of_others_are_refused():
    calibrator = ClipCalibrator(CalibrationSettings.robust())
    row = calibrate(calibrator, *lognormal(2_000, sigma16=0.12, noise=0.1)).as_row()
    assert all(value is None or isinstance(value, (int, float, str)) for value in row.values())
    assert row["lower_after"] == calibrator.bounds.lower
    foreign = RatioStatistics([0.5], [1.5])
    with pytest.raises(AssertionError, match="other grids"):
        calibrator.calibrate(foreign, 40)


def test_ranks_that_share_sums_agree():
    ratio8, ratio16, advantages = lognormal(3_000, sigma16=0.12, noise=0.15)
    whole = ClipCalibrator(CalibrationSettings.robust())
    expected = calibrate(whole, ratio8, ratio16, advantages)
    parts = []
    for rank in range(3):
        part = ClipCalibrator(CalibrationSettings.robust()).new_statistics()
        index = torch.arange(rank, 3_000, 3)
        fill(part, ratio8[index], ratio16[index], advantages[index], sequence_ids=index // 16)
        parts.append(part)
    reduced = parts[0]
    reduced.load(torch.stack([part.state() for part in parts]).sum(dim=0))
    assert ClipCalibrator(CalibrationSettings.robust()).calibrate(reduced, 20) == expected
