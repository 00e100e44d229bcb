"""Tables of a report against numbers worked out by hand and against the instruments that the loop logs."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from report_runs import calibration_row, evaluation_of, metrics_row, run_of

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.overclip import (
    ATTRIBUTION_COUNTS,
    SUM_NAMES,
    OverclipSums,
    PairedRatios,
    attribution_sums,
    attribution_table,
    no_attribution,
)
from megatron_calclip.report_data import Run
from megatron_calclip.report_settings import differences, versions
from megatron_calclip.report_settings import settings as settings_of
from megatron_calclip.report_tables import (
    NONE,
    Cell,
    Row,
    Table,
    attributions,
    calibrations,
    evaluations,
    overclip,
    summary,
    timing,
)


def texts(row: Row) -> list[str]:
    return [cell.text if isinstance(cell, Cell) else cell for cell in row.cells]


def details(row: Row) -> list[str]:
    return [cell.detail for cell in row.cells if isinstance(cell, Cell)]


def column(table: Table, run: int) -> dict[str, str]:
    """Cells of a run by the name of their row."""
    return {texts(row)[0]: texts(row)[1 + run] for row in table.rows}


def test_overclip_by_hand() -> None:
    """Two steps: 6 and 4 clips of FP8, 4 and 0 of BF16, of which FP8 misses a quarter: 3 of both."""
    rows = [metrics_row(1), metrics_row(2) | {"clip_fp8/num_low": 4.0, "clip_bf16/num_low": 0.0}]
    del rows[1]["missed_clip/low"]
    low, high = overclip([run_of(), run_of([*rows, {"entropy": 1.0}])]).rows
    assert low.run == high.run == 1
    assert texts(low) == ["L, A < 0", "2", "10", "4", "2.50", "7", "70%", "1", "25%"]
    assert texts(high) == ["H, A > 0", "2", "0", "0", NONE, "0", NONE, "0", NONE]
    only_fp8 = overclip([run_of([metrics_row(1) | {"clip_bf16/num_low": 0.0, "missed_clip/low": None}])]).rows[0]
    assert texts(only_fp8)[2:8] == ["6", "0", "6 / 0", "6", "100%", "0"]


@given(st.lists(st.lists(st.integers(0, 50), min_size=8, max_size=8), min_size=1, max_size=6))
def test_overclip_pools_what_the_instruments_counted(steps: list[list[int]]) -> None:
    """Their metrics of single steps, and the table of all, come from the same counts."""
    rows = [
        {"step": index, **OverclipSums(torch.tensor(counts + [1.0] * (len(SUM_NAMES) - 8)).double()).finalize()}
        for index, counts in enumerate(steps, start=1)
    ]
    total = dict(zip(SUM_NAMES, (sum(column) for column in zip(*steps, strict=True)), strict=False))
    for row in overclip([run_of(rows)]).rows:
        side = "low" if row.cells[0] == "L, A < 0" else "high"
        both, false, missed = (total[f"{side}_{name}"] for name in ("both", "fp8_only", "bf16_only"))
        found = texts(row)
        assert [int(found[place].replace(",", "")) for place in (2, 3, 5, 7)] == [
            both + false,
            both + missed,
            false,
            missed,
        ]


@settings(max_examples=30)
@given(st.integers(0, 2**31))
def test_attribution_pools_what_the_instruments_counted(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    edges, lines, pooled = (0.5, 1.0), [], no_attribution((0.5, 1.0))
    for step in range(1, 4):
        pairs = PairedRatios(
            ratio8=torch.rand(60, generator=random) * 2,
            ratio16=torch.rand(60, generator=random) * 2,
            advantages=torch.randn(60, generator=random),
            response_mask=torch.rand(60, generator=random) < 0.9,
            bounds8=ClipBounds(0.8, 1.2),
            bounds16=ClipBounds(0.8, 1.2),
        )
        sums = attribution_sums(pairs, torch.rand(60, generator=random) * 2, edges=edges)
        pooled += sums
        table = [asdict(line) for line in attribution_table(sums, edges=edges)]
        finite = [{k: v if v is None or math.isfinite(v) else None for k, v in line.items()} for line in table]
        lines.append({"step": step, "attribution": {"entropy": finite}})
    (found,) = attributions([run_of(calibrations=tuple(lines))])
    assert found.columns == ("bound", "< 0.5", "0.5 to 1", "≥ 1", "false clips")
    totals = dict(zip(ATTRIBUTION_COUNTS, pooled.T, strict=True))
    for row, (false, tokens) in zip(found.rows, (("false_low", "negative"), ("false_high", "positive")), strict=True):
        shares = [cell.shade for cell in row.cells if isinstance(cell, Cell)][:-1]
        assert shares == pytest.approx((totals[false] / totals[false].sum()).tolist())
        rates = [float(text.removesuffix("‰")) for text in details(row)]
        buckets = (1000 * totals[false] / totals[tokens]).tolist()
        assert rates == pytest.approx([*buckets, float(1000 * totals[false].sum() / totals[tokens].sum())], rel=6e-3)
        assert texts(row)[-1] == str(int(totals[false].sum()))


def attribution_line(lower: float | None, upper: float | None, low: int, of: int | None) -> dict[str, object]:
    """A bucket of `calibration.jsonl` with false clips at L alone; without a number of tokens as older versions wrote it."""
    line = {"lower": lower, "upper": upper, "num_low": low, "num_high": 0, "rate_low": 0.25, "rate_high": None}
    return line if of is None else line | {"num_negative": of, "num_positive": 0}


def test_attribution_rates_by_hand() -> None:
    """Entropy below 1: 3 + 1 false clips of 400 + 100 tokens, 8‰. Above: 12 + 0 of 50 + 30, 150‰. All: 16 of 580, 27.6‰."""
    steps = [
        {"step": 1, "attribution": {"entropy": [attribution_line(None, 1, 3, 400), attribution_line(1, None, 12, 50)]}},
        {"step": 2, "attribution": {"entropy": [attribution_line(None, 1, 1, 100), attribution_line(1, None, 0, 30)]}},
    ]
    (table,) = attributions([run_of(calibrations=tuple(steps))])
    assert texts(table.rows[0]) == ["L", "25%", "75%", "16"] and details(table.rows[0]) == ["8‰", "150‰", "27.6‰"]
    # A step of an older version adds 4 false clips of who knows how many tokens: to the shares alone.
    old = {"step": 3, "attribution": {"entropy": [attribution_line(None, 1, 4, None)]}}
    (table,) = attributions([run_of(calibrations=(*steps, old))])
    assert texts(table.rows[0]) == ["L", "40%", "60%", "20"] and details(table.rows[0]) == ["8‰", "150‰", "27.6‰"]
    old["attribution"]["entropy"].append(attribution_line(1, None, 1, None))
    (table,) = attributions([run_of(calibrations=(old,))])
    assert texts(table.rows[0]) == ["L", "80%", "20%", "5"] and details(table.rows[0]) == ["", "", ""]
    # A bucket whose every token BF16 clips, too, has tokens and no false clip.
    clipped = attribution_line(2, None, 0, 7) | {"rate_low": None}
    first = {"step": 1, "attribution": {"entropy": [attribution_line(None, 1, 3, 400), clipped]}}
    (table,) = attributions([run_of(calibrations=(first,))])
    assert details(table.rows[0]) == ["7.5‰", "0‰", "7.37‰"]  # 3 of 400, of 7, of 407


def test_attribution_shows_only_what_it_divides() -> None:
    (table,) = attributions([run_of(calibrations=(calibration_row(1), calibration_row(2)))])
    assert table.title == "False clips by entropy, nats"
    assert [texts(row) for row in table.rows] == [["L", "0%", "100%", "2"]]
    assert details(table.rows[0]) == ["0‰", "500‰", "23.8‰"]  # of 80, 4 and 84
    empty = {"lower": 1.0, "upper": 2.0, "num_low": 0, "num_high": 0, "rate_low": None, "rate_high": None}
    spread = calibration_row(1)
    spread["attribution"]["entropy"].append(empty)
    (table,) = attributions([run_of(calibrations=(spread,))])
    assert table.columns == ("bound", "< 2", "≥ 2", "false clips")
    whole = calibration_row(1)
    del whole["attribution"]["entropy"][0]
    assert attributions([run_of(calibrations=(whole,))]) == []
    assert attributions([run_of(calibrations=({"step": 1, "attribution": {"entropy": [3]}},))]) == []
    assert attributions([run_of(calibrations=({"step": 1, "attribution": 3},))]) == []


def test_summary_by_hand() -> None:
    rows = [
        metrics_row(step, **{"nmae/amplification": float(step**2), "updates/skipped": step % 2}) for step in range(1, 9)
    ]
    rows[0] |= {"eval/score": 0.25, "eval/stderr": 0.05}
    rows[5] |= {"eval/score": 0.5}
    rows[7] |= {"eval/score": 0.75, "eval/stderr": 0.125, "ledger/shadow_share": 0.0625, "alarm/loss": 1}
    rows[7] |= {"calibration/lower_after": 0.65, "calibration/upper_after": 1.8}
    found = summary([run_of(rows, config={"train.num_steps": "9"}), run_of(), run_of([{}], config={})])
    assert found.columns == ("", 0, 1, 2)
    assert column(found, 0) == {
        "steps": "8 of 9",
        "reward": "0.15 → 0.75",  # steps 1 and 2, 7 and 8
        "held-out score": "0.250 ± 0.050 → 0.750 ± 0.125",
        "entropy": "0.75 → 0.134",
        "length": NONE,
        "clipped at L, A < 0": "2.00%",
        "clipped at H, A > 0": NONE,
        "over-clip L": "1.50",
        "over-clip H": NONE,
        "amplification": "20.50",
        "last bounds": "[0.65, 1.8]",
        "calibration's time": "6.2%",
        "s/step": "2",
        "skipped updates": "4",
        "alarms": "1",
    }
    assert column(found, 1)["steps"] == "0" and column(found, 1)["held-out score"] == NONE
    assert column(found, 2)["steps"] == "1" and column(found, 2)["last bounds"] == NONE


def test_calibrations() -> None:
    held = calibration_row(9, lower_status="held", lower_reason="few", lower_choice=None, lower_after=0.6)
    table = calibrations(run_of(label="a", calibrations=(calibration_row(5), {"step": 7, "report": None}, held)))
    upper = ["1.8", NONE, "held", NONE, "no token with A > 0"]
    assert [texts(row) for row in table.rows] == [
        ["5", "0.6 → 0.65", "0.82 (0.78 to 0.86)", "moved", "2.50", "4.00% (3.00% to 5.00%)", "", *upper],
        ["9", "0.6", f"{NONE} (0.78 to 0.86)", "held", "2.50", "4.00% (3.00% to 5.00%)", "few", *upper],
    ]
    assert all(len(row.cells) == len(table.columns) for row in table.rows)


def test_evaluations_and_time() -> None:
    run = run_of(evaluations=tuple(evaluation_of(step, value) for step, value in ((0, 0.2), (4, 0.3), (8, 0.4))))
    table = evaluations([run_of(), run, run_of(evaluations=(evaluation_of(0, 0.5),))])
    assert table.columns == ("step", "set", "avg@4", "response_length")
    assert [(row.run, *texts(row)) for row in table.rows] == [
        (1, "0", "sums", "20.0%", "7.2"),
        (1, "8", "sums", "40.0%", "7.2"),
        (2, "0", "sums", "50.0%", "7.2"),
    ]
    spent = timing([run_of([metrics_row(1), metrics_row(2, **{"timing/rollout": 1.5})]), run_of()])
    assert spent.columns == ("seconds", "rollout", "calibration, s")
    assert [texts(row) for row in spent.rows] == [["4", "50.0%", NONE]]


def test_settings() -> None:
    def configured(**config: str) -> Run:
        return run_of(config=config, versions={"torch": "2"})

    runs = [configured(a="1", b="2", run_dir="x"), run_of(), configured(a="1", b="3", c="4", run_dir="y")]
    assert [row.cells for row in differences(runs).rows] == [("b", "2", NONE, "3"), ("c", NONE, NONE, "4")]
    assert differences(runs[:2]).rows == ()  # a run without a configuration differs in nothing
    assert [row.cells for row in versions(runs).rows] == [("torch", "2", NONE, "2")]
    assert [row.cells for row in settings_of(runs[0]).rows] == [("a", "1"), ("b", "2"), ("run_dir", "x")]
