"""`megatron-calclip report`: runs as one HTML page, and as pictures.

    megatron-calclip report runs/tiny_cpu
    megatron-calclip report runs/vanilla runs/calibrated --html both.html --plots figures

What: reads the folders of runs, also of one that is still going, and writes a page that needs nothing else: curves overlaid,
what the clip did, settings and versions (docs/report.md). Left out on purpose: a server that follows a run; call it again, or
use TensorBoard.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from megatron_calclip.commands.output import writing
from megatron_calclip.errors import UserError
from megatron_calclip.report_data import load_runs
from megatron_calclip.report_page import page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN", help="folders of runs, overlaid in this order")
    parser.add_argument(
        "--html", type=Path, default=Path("report.html"), metavar="FILE", help="the page (default report.html)"
    )
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="also each plot, as PNG and SVG")


def run(arguments: argparse.Namespace) -> None:
    """Write the page and the pictures.

    Raises:
        UserError: when the runs cannot be read, or something cannot be written.
    """
    if arguments.plots is not None and importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plots", "needs matplotlib: pip install 'megatron-calclip[plot]', or leave --plots out")
    runs = load_runs(arguments.run_dirs)
    with writing(arguments.html, "--html"):
        arguments.html.write_text(page(runs), encoding="utf-8")
    print(f"report: {arguments.html}")
    if arguments.plots is not None:
        from megatron_calclip.report_plots import save_plots

        with writing(arguments.plots, "--plots"):
            num_plots = save_plots(runs, arguments.plots)
        print(f"plots: {num_plots} in {arguments.plots}, each as PNG and SVG")
