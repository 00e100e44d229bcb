"""The page, the pictures and the command."""

from __future__ import annotations

import html.parser
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from report_runs import calibration_row, evaluation_of, metrics_row, run_of, write_run

from megatron_calclip import cli
from megatron_calclip.html_page import text
from megatron_calclip.report_attribution import attributions
from megatron_calclip.report_data import MAX_RUNS
from megatron_calclip.report_page import page
from megatron_calclip.report_plots import draw_attribution, save_plots

ATTACK = "<script>alert('x')</script>&\"$_^{\u202e"
VOID = {"meta", "br", "input", "wbr"}


class Outline(html.parser.HTMLParser):
    """Elements with their attributes; fails where one is not closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def count(self, tag: str) -> int:
        return [name for name, _ in self.tags].count(tag)


def two_runs() -> list:
    measured = [metrics_row(step) for step in (1, 2, 3)]
    return [
        run_of(measured, label="a", calibrations=(calibration_row(2),), config={"x": "1"}, notes=("half a line",)),
        run_of(
            measured[:1],
            label="b",
            evaluations=(evaluation_of(0, 0.5),),
            config={"x": "2"},
            versions={"t": "1"},
            notes=("half a line", "no x"),
        ),
    ]


def test_page_stands_alone() -> None:
    written = page(two_runs())
    outline = Outline(written)
    assert written.startswith("<!doctype html>") and "<h1>Report of 2 runs</h1>" in written
    assert outline.count("script") == outline.count("link") == outline.count("img") == 0
    links = [attributes["href"] for tag, attributes in outline.tags if "href" in attributes]
    places = {f"#{attributes['id']}" for _, attributes in outline.tags if "id" in attributes}
    assert links and set(links) <= places
    assert not any("src" in attributes for _, attributes in outline.tags) and "url(" not in written
    assert ("meta", {"http-equiv": "Content-Security-Policy", "content": "default-src 'none'; style-src 'unsafe-inline'"}) in (
        outline.tags
    )  # fmt: skip
    assert "prefers-color-scheme: dark" in written and 'name="viewport"' in written
    # Each run has a box, and what the box hides.
    for index in range(2):
        assert f'id="show{index}"' in written and f"body:has(#show{index}:not(:checked))" in written
    groups = [attributes["class"] for tag, attributes in outline.tags if tag == "g"]
    assert set(groups) == {"r0", "r1"}
    assert all(
        attributes.get("tabindex") == "0" for _, attributes in outline.tags if attributes.get("class") == "scroll"
    )
    assert "<li><b>a, b</b>: half a line</li><li><b>b</b>: no x</li>" in written
    assert "Not logged by any of the runs: Held-out score" in written
    assert "Settings that differ" in written and "Calibrations of a" in written


def test_page_is_the_same_every_time() -> None:
    assert page(two_runs()) == page(two_runs())
    alone = page(two_runs()[:1])
    assert "<h1>Report of a</h1>" in alone and "Settings that differ" not in alone


def test_everything_is_escaped() -> None:
    row = metrics_row(1) | {f"reward/{ATTACK.replace('/', '')}": 1.0}
    calibration = calibration_row(1, lower_status=ATTACK, lower_reason=ATTACK)
    evaluation = evaluation_of(0, 0.5)
    hostile = run_of(
        [row],
        label=ATTACK,
        calibrations=(calibration,),
        evaluations=(type(evaluation)(0, {ATTACK: {ATTACK: evaluation.sets["sums"]["avg@4"]}}),),
        config={ATTACK: ATTACK},
        versions={ATTACK: ATTACK},
        notes=(ATTACK,),
    )
    written = page([hostile])
    assert Outline(written).count("script") == 0 and "<script" not in written and "\u202e" not in written
    assert written.count("&lt;script&gt;") >= 15
    assert text("a\x00\udc80\n<") == "a\\x00\\udc80\\n&lt;"


def test_as_many_runs_as_allowed() -> None:
    runs = [run_of([metrics_row(1)], label=str(index)) for index in range(MAX_RUNS)]
    assert f'class="r{MAX_RUNS - 1}"' in page(runs)


def test_a_run_without_steps_beside_another() -> None:
    Outline(page([run_of(label="empty"), run_of([{"reward/mean": None}, {"reward/mean": 1.0}])]))


def test_runs_that_logged_nothing_to_draw() -> None:
    written = page([run_of([{"odd": 1}])])
    assert "<figure>" not in written and Outline(written).count("table") == 1 and Outline(written).count("h2") == 2
    calibrated = page([run_of([{"odd": 1}], calibrations=(calibration_row(1),))])
    assert "<figure>" not in calibrated and "Calibrations of run" in calibrated


def test_plots(tmp_path: Path) -> None:
    runs = two_runs()
    runs[1] = run_of([metrics_row(1)], label=f"_{ATTACK}x$")
    count = save_plots(runs, tmp_path / "one")
    save_plots(runs, tmp_path / "two")
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    wanted = {
        "reward_mean.png",
        "reward_mean.svg",
        "bound_lower.svg",
        "attribution_entropy.png",
        "attribution_entropy.svg",
    }
    assert len(names) == 2 * count and wanted <= set(names)
    for name in names:
        content = (tmp_path / "one" / name).read_bytes()
        assert content == (tmp_path / "two" / name).read_bytes()
        assert content.startswith(b"\x89PNG") == name.endswith("png")
    drawn = ElementTree.parse(tmp_path / "one" / "reward_mean.svg")
    words = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "a" in words and "_<script>alert('x')</script>&\"$_^{\\u202ex$" in words


def test_picture_of_an_attribution_by_hand() -> None:
    """3 of 4 false clips below entropy 1, in 400 of its 450 tokens with A < 0; an older file has shares alone."""
    lines = [
        {"lower": None, "upper": 1, "num_low": 3, "num_high": 0, "rate_low": 0.1, "num_negative": 400},
        {"lower": 1, "upper": None, "num_low": 1, "num_high": 0, "rate_low": 0.1, "num_negative": 50},
    ]
    for drop, expected in (((), [[75, 25], [7.5, 20]]), (("num_negative",), [[75, 25]])):
        kept = [{name: value for name, value in line.items() if name not in drop} for line in lines]
        run = run_of(label="a", calibrations=({"step": 1, "attribution": {"entropy": kept}},))
        (found,) = attributions([run_of(), run])
        figure = draw_attribution(found, ["none", "a"])
        heights = [[bar.get_height() for bar in axes.patches] for axes in figure.axes]
        assert heights == [pytest.approx(values) for values in expected]
        assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a, L"]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a <b>", [metrics_row(1), metrics_row(2), '{"step'], calibrations=[calibration_row(2)])
    write_run(tmp_path / "c", [metrics_row(1)])
    cli.main(["report", "a <b>"])
    assert capsys.readouterr().out == "report: report.html\n"
    assert "a &lt;b&gt;" in Path("report.html").read_text() and "2 of 9" in Path("report.html").read_text()
    cli.main(["report", "a <b>", "c", "--html", "both.html", "--plots", "figures/both"])
    shown = capsys.readouterr().out
    num_plots = len(list(Path("figures/both").glob("*.png")))
    assert num_plots and shown == f"report: both.html\nplots: {num_plots} in figures/both, each as PNG and SVG\n"
    Path("file").write_text("")
    write_run(tmp_path / "empty")
    for arguments, code, message in (
        (["absent"], 2, "RUN: no folder 'absent'"),
        (["c", "c"], 2, "given twice"),
        (["empty"], 2, "no step in metrics.jsonl yet"),
        (["c", "--html", "no/page.html"], 1, "--html: no/page.html cannot be written"),
        (["c", "--plots", "file"], 1, "--plots: file cannot be written"),
    ):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["report", *arguments])
        error = capsys.readouterr().err
        assert stopped.value.code == code and error.startswith("error: ") and message in error, error
        assert error.count("\n") == 1


def test_plots_of_names_that_no_file_name_keeps(tmp_path: Path) -> None:
    """Components of a user's reward: each has its picture."""
    own = {"reward/αβ": 1.0, "reward/γδ": 2.0, "reward/a-b": 3.0, "reward/a_b": 4.0}
    count = save_plots([run_of([own, own])], tmp_path)
    assert len(list(tmp_path.glob("*.png"))) == count == 4


@pytest.mark.parametrize(
    "arguments",
    [
        ("report", "{}"),
        ("replay", "{}"),
        ("eval", "{}", "--sets", "x", "--out", "o"),
        ("diagnose", "{}", "--config", "tiny_cpu"),
    ],
)
def test_a_path_that_no_file_can_have(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([one.format("x" * 5000) for one in arguments])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1


def test_name_that_is_no_unicode(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xff"))
    write_run(folder, [metrics_row(1)])
    cli.main(["report", str(folder), "--html", str(tmp_path / "x.html"), "--plots", str(tmp_path / "plots")])
    assert "r\\udcff" in (tmp_path / "x.html").read_text()


def test_the_command_needs_neither_torch_nor_matplotlib(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [metrics_row(1)])
    program = (
        "import sys; from megatron_calclip import cli; cli.main(sys.argv[1:]);"
        "assert not {'torch', 'matplotlib'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", program, "report", str(tmp_path / "run"), "--html", str(tmp_path / "x.html")]
    subprocess.run(command, check=True)
