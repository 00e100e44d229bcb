"""Curves of a report: which there are, their axes, and the drawings."""

from __future__ import annotations

import itertools
import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import calibration_row, metrics_row, run_of

from megatron_calclip.report_axes import Axis, log_ticks, step_range, tick_labels, ticks, value_range, value_ticks
from megatron_calclip.report_charts import Bar, Chart, Line, Mark, sections, shown_choices
from megatron_calclip.report_style import DARK, DARK_CARD, DASHES, LIGHT, LIGHT_CARD
from megatron_calclip.report_svg import Stretch, draw, stretches

VALUES = st.one_of(st.none(), st.floats(-1e300, 1e300), st.floats(-2, 2), st.floats(0, 1e-300))


def chart_of(*lines: Line, **parts: object) -> Chart:
    return Chart(key="x", title="X", description="x", lines=lines, **parts)  # type: ignore[arg-type]


def numbers_of(path: str) -> list[float]:
    return [float(text) for text in re.findall(r"-?\d+\.?\d*", path)]


def test_round_ticks() -> None:
    assert ticks(0, 0.95, count=4) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])
    assert ticks(-3, 3, count=4) == [-2, 0, 2]
    assert ticks(17, 43, count=4) == [20, 25, 30, 35, 40]
    assert tick_labels([0, 0.2, 0.4], form="number") == ["0.0", "0.2", "0.4"]
    assert tick_labels([0, 0.005, 0.01], form="percent") == ["0.0%", "0.5%", "1.0%"]
    assert tick_labels([-1000, 0, 1000], form="number") == ["-1,000", "0", "1,000"]
    assert tick_labels([0, 2e-5, 4e-5], form="number") == ["0", "2e-05", "4e-05"]
    assert tick_labels([1.00e9, 1.01e9], form="number") == ["1.00e+09", "1.01e+09"]
    assert log_ticks(0.05, 200) == pytest.approx([0.1, 1, 10, 100])
    assert log_ticks(0.4, 3) == pytest.approx([0.5, 1, 2])
    narrow = chart_of(log=True)
    values, names = value_ticks(narrow, 3.1, 3.2)
    assert values == pytest.approx([3.1, 3.12, 3.14, 3.16, 3.18, 3.2])
    assert names == ["3.10", "3.12", "3.14", "3.16", "3.18", "3.20"]
    assert value_ticks(narrow, 1, 1000) == ([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    assert tick_labels([0.1, 10, 1000], form="number", log=True) == ["0.1", "10", "1,000"]


@given(st.floats(-1e300, 1e300), st.floats(-1e300, 1e300))
def test_ticks_lie_within_and_differ(one: float, other: float) -> None:
    low, high = value_range(chart_of(Line(0, ((1, one), (2, other)))))
    assert low < high and low <= min(one, other) and high >= max(one, other)
    found = ticks(low, high, count=4)
    assert 2 <= len(found) <= 9 and all(low <= value <= high for value in found)
    labels = tick_labels(found, form="number")
    assert len(set(labels)) == len(labels)


@given(st.floats(1e-290, 1e280), st.floats(5.001, 1e10))
def test_long_log_axes_have_ticks(low: float, factor: float) -> None:
    found = log_ticks(low, low * factor)
    assert 2 <= len(found) <= 7 and all(low <= value <= low * factor for value in found)


def test_ranges() -> None:
    def range_of(*values: float, **parts: object) -> tuple[float, float]:
        return value_range(chart_of(Line(0, tuple(enumerate(values, start=1))), **parts))

    assert range_of(0.0, 10.0) == (0.0, 10.5)
    assert range_of(8.0, 10.0) == pytest.approx((7.9, 10.1))
    assert range_of(0.8, 1.0, form="percent") == pytest.approx((0.0, 1.01))
    assert range_of(0.0, 0.0, form="percent") == (0.0, 0.01)
    assert range_of(2.0, 2.0) == pytest.approx((1.78, 2.22))
    assert range_of(8.0, 9.0, reference=1.0) == pytest.approx((0.0, 9.4))
    assert range_of(1.0, 100.0, -3.0, 0.0, log=True) == pytest.approx((10**-0.1, 10**2.1))
    with_marks = Line(0, ((1, 5.0), (2, 6.0)), bars=(Bar(1, 4.0, 8.0),), marks=(Mark(2, 9.0, "edge"),))
    assert value_range(chart_of(with_marks)) == pytest.approx((3.75, 9.25))
    assert step_range([chart_of(Line(0, ((3, 1.0),)), Line(1, ((7, None),)))]) == (3, 7)
    assert step_range([chart_of(Line(0, ((5, 1.0),)))]) == (4.5, 5.5)


def test_axes() -> None:
    assert [Axis(0, 10, start=100, end=0)(value) for value in (0, 2.5, 10)] == [100, 75, 0]
    assert [Axis(1, 100, start=0, end=10, log=True)(value) for value in (1, 10, 100)] == [0, 5, 10]


def paths_of(drawing: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in ElementTree.fromstring(drawing).iter("path"):
        found.setdefault(path.attrib["class"], []).append(path.attrib["d"])
    return found


def test_drawing_by_hand() -> None:
    line = Line(1, ((0, 0.0), (1, None), (2, 10.0), (4, 5.0)), bars=(Bar(4, 4.0, 6.0),))
    drawing = draw(chart_of(line), ["a", '<b & "c">'], steps=(0, 4))
    paths = paths_of(drawing)
    # 10.5 at the top is 8, 0 at the bottom 168; labels of two digits leave 8 + 2 * 6.3 free at the left, 12 at the right.
    left, right = 20.6, 348
    down = {value: 168 - 160 * value / 10.5 for value in (0, 4, 5, 6, 10)}
    (curve,) = paths["line"]
    # A gap where the value was not finite.
    assert curve.count("M") == 2 and curve.count("L") == 1
    assert numbers_of(curve.replace("h0", "")) == pytest.approx(
        [left, down[0], (left + right) / 2, down[10], right, down[5]], abs=0.051
    )
    assert numbers_of(paths["bars"][0]) == pytest.approx([right, down[4], down[6]], abs=0.051)
    assert paths["dots"][0].count("M") == 3 and len(paths["grid"]) == 6  # 0, 2, ..., 10
    root = ElementTree.fromstring(drawing)
    assert [group.attrib["class"] for group in root.iter("g")] == ["r1"]
    assert [title.text for title in root.iter("title")] == ['<b & "c">: 5 at step 4']


def test_stairs_and_marks() -> None:
    marks = (Mark(1, 0.7, "edge"), Mark(2, 0.8, "held"), Mark(3, 0.9, "moved"), Mark(3, 0.9, "unchanged"))
    paths = paths_of(draw(chart_of(Line(0, ((1, 0.6), (3, 0.8)), marks=marks), stairs=True), ["a"], steps=(1, 3)))
    assert re.fullmatch(r"M[\d. ]+h0H348V[\d.]+", paths["line"][0])
    assert (len(paths["edge"]), len(paths["held"]), paths["dots"][0].count("M")) == (1, 1, 2)


def test_values_that_are_not_positive_are_gaps_of_a_log_chart() -> None:
    chart = chart_of(Line(0, ((1, 1.0), (2, 0.0), (3, 100.0))), log=True)
    assert paths_of(draw(chart, ["a"], steps=(1, 3)))["line"][0].count("M") == 2


@given(st.lists(VALUES, min_size=1, max_size=40), st.booleans(), st.booleans())
def test_every_drawing_is_sound(values: list[float | None], stairs: bool, percent: bool) -> None:
    """Well-formed, without a number that is none, and within its frame."""
    chart = chart_of(
        Line(0, tuple(enumerate(values))), stairs=stairs, form="percent" if percent else "number", reference=1.0
    )
    if all(value is None for value in values):
        return
    drawing = draw(chart, ["a"], steps=step_range([chart]))
    assert "nan" not in drawing and "inf" not in drawing
    for curve in paths_of(drawing).get("line", []):
        assert all(-0.1 <= value <= 360.1 for value in numbers_of(curve))


@given(st.lists(VALUES, min_size=1, max_size=400), st.integers(2, 50))
def test_stretches_keep_extremes_and_gaps(values: list[float | None], limit: int) -> None:
    parts = stretches(tuple(enumerate(values)), limit)
    if len(values) <= limit:
        assert [(part.step, part.values and part.values[1]) for part in parts] == list(enumerate(values))
    else:
        assert len(parts) == limit // 2
    assert any(part.values is None for part in parts) == (None in values)
    for part, other in itertools.pairwise(parts):
        assert part.step < other.step
    if None not in values:
        low, means, high = zip(*(part.values for part in parts if part.values), strict=True)
        assert min(low) == min(values) and max(high) == max(values)  # type: ignore[type-var]
        assert all(
            least <= mean * (1 + 1e-12 * (1 if mean > 0 else -1)) for least, mean in zip(low, means, strict=True)
        )


def test_long_lines_by_hand() -> None:
    """Five points as stretches of two and three, with a band between their extremes."""
    points = ((1, 2.0), (2, 4.0), (3, 0.0), (4, 8.0), (5, 10.0))
    assert stretches(points, 4) == [Stretch(1.5, (2.0, 3.0, 4.0)), Stretch(4.0, (0.0, 6.0, 10.0))]
    assert stretches(((1, 2.0), (2, None), (3, 1.0)), 2) == [Stretch(2.0, None)]


def test_long_runs_stay_small_and_show_their_extremes() -> None:
    points = tuple((step, 5.0 if step == 70_000 else math.sin(step / 5000)) for step in range(100_000))
    drawing = draw(chart_of(Line(0, points)), ["a"], steps=(0, 99_999))
    assert len(drawing) < 8_000
    paths = paths_of(drawing)
    assert len(paths["line"]) == len(paths["band"]) == 1 and "dots" not in paths
    low, high = value_range(chart_of(Line(0, points)))
    y = Axis(low, high, start=168, end=8)
    # Pairs of numbers, around the area: the spike is its highest point.
    assert min(numbers_of(paths["band"][0])[1::2]) == pytest.approx(y(5.0), abs=0.051)
    assert min(numbers_of(paths["line"][0].replace("h0", ""))[1::2]) > y(1.01)


def test_many_calibrations_are_drawn_in_part() -> None:
    marks = tuple(Mark(step, 0.5, "held") for step in range(1, 102))
    line = Line(0, ((1, 0.5), (100, 0.5)), bars=tuple(Bar(mark.step, 0.4, 0.6) for mark in marks), marks=marks)
    bars, shown = shown_choices(line)
    assert [mark.step for mark in shown] == [bar.step for bar in bars] == list(range(2, 102, 3))
    evaluated = Line(0, line.points, bars=line.bars)
    assert shown_choices(evaluated) == (line.bars, ())


def test_charts_of_runs() -> None:
    runs = [
        run_of([metrics_row(1), metrics_row(2)], calibrations=(calibration_row(2), {"step": 3, "report": None})),
        run_of([{"eval/score": 0.5, "eval/stderr": 0.1, "reward/my_$part": 1.0, "eval/b/score": 0.2, "odd": 3}]),
    ]
    found, absent = sections(runs)
    charts = {chart.title: chart for section in found for chart in section.charts}
    assert [line.run for line in charts["Reward"].lines] == [0]
    assert charts["Held-out score"].lines == (Line(1, ((1, 0.5),), bars=(Bar(1, 0.4, 0.6),)),)
    assert charts["Reward: my_$part"].key == "reward_my_part"
    assert charts["Held-out score: b"].lines[0].points == ((1, 0.2),)
    lower = charts["Lower bound L"].lines[0]
    assert lower.points == ((1, 0.6), (2, 0.6)) and lower.marks == (Mark(2, 0.82, "moved"),)
    assert lower.bars == (Bar(2, 0.78, 0.86),)
    assert charts["Upper bound H"].lines[0].marks == ()  # the calibration made no choice
    assert "Canary" in absent and "Canary" not in charts and "Reward" not in absent
    assert all(chart.description for chart in charts.values())


# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
VISIONS = {
    "normal": np.eye(3),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    channels = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE 1976 L*a*b*, D65."""
    x, y, z = TO_XYZ @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
    fx, fy, fz = (np.cbrt(v) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return np.array([116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)])


@pytest.mark.parametrize(("colours", "card"), [(LIGHT, LIGHT_CARD), (DARK, DARK_CARD)])
def test_colours_can_be_told_apart_by_everyone(colours: tuple[str, ...], card: str) -> None:
    for matrix in VISIONS.values():
        for one, other in itertools.combinations(colours, 2):
            assert np.linalg.norm(lab(matrix @ linear(one)) - lab(matrix @ linear(other))) > 30
    luminance = {colour: float(TO_XYZ[1] @ linear(colour)) for colour in (*colours, card)}
    for colour in colours:
        dark, light = sorted((luminance[colour], luminance[card]))
        assert (light + 0.05) / (dark + 0.05) >= 3
    assert len(set(DASHES)) == len(DASHES) and len(LIGHT) == len(DARK) == 6
