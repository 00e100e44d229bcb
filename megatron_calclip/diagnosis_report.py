"""How a diagnosis is shown: two tables and a picture.

What: the numbers of `diagnosis.Report`, in the order in which one reads them: noise of the weights as they are, then
what an update's ratios make of it. Left out on purpose: files and options (`commands/diagnose`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from megatron_calclip.diagnosis import ClipShares, RecipeReport, Report


def as_json(report: Report) -> dict[str, Any]:
    """All numbers; shares without tokens become null, because JSON has no NaN."""
    values: dict[str, Any] = _finite(dataclasses.asdict(report))
    return values


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def tables(report: Report) -> list[Table]:
    """What is printed: noise at unmoved weights, ratios of an update, and where the noise comes from."""
    found = [_unmoved(report), _moved(report)]
    if any(recipe.layers for recipe in report.recipes):
        found.append(_layers(report))
    return found


def _table(title: str, columns: Sequence[str], caption: str) -> Table:
    table = Table(
        title=title,
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in columns:
        table.add_column(name, justify="left" if name in ("recipe", "most alone") else "right", no_wrap=True)
    return table


def _unmoved(report: Report) -> Table:
    low, high = report.bounds
    table = _table(
        f"FP8 against BF16 at the same weights: {report.num_tokens} tokens, NLL {report.bf16_nll:.3f}",
        ("recipe", "|dlogp|", "p95", "NMAE p", "floor", "other", "s/pass"),
        f"floor: ratios outside [{low:g}, {high:g}] at learning rate 0;\n"
        "other: with micro-batches of half the size in the second pass",
    )
    table.add_row("bf16", "", "", "", "", f"{report.bf16_floor.outside:.2%}", f"{report.bf16_seconds:.1f}")
    for recipe in report.recipes:
        noise = recipe.unmoved
        table.add_row(
            _label(recipe),
            f"{noise.mean_abs_dlogp:.4f}",
            f"{noise.p95_abs_dlogp:.3f}",
            f"{noise.nmae_p:.2%}",
            f"{recipe.repeated.outside:.2%}",
            f"{recipe.floor.outside:.2%}",
            f"{recipe.seconds:.1f}",
        )
    return table


def _moved(report: Report) -> Table:
    low, high = report.bounds
    table = _table(
        f"Importance ratios of an update, clip range [{low:g}, {high:g}]",
        ("lr", "recipe", "p", "r", "ampl.", "out", "clip", "low", "high"),
        "p, r: their NMAE; ampl.: of r by that of p; out: ratios outside the range; clip: gradients cut;\n"
        "low: penalties (A<0) that the lower bound takes; high: rewards (A>0) that the upper does",
    )
    for index, bf16 in enumerate(report.recipes[0].updates):
        table.add_row(f"{bf16.lr:.2g}", "bf16", "", "", "", *_clip_cells(bf16.bf16))
        for recipe in report.recipes:
            update = recipe.updates[index]
            errors = (f"{update.nmae_p:.1%}", f"{update.nmae_r:.1%}", f"{update.amplification:.2f}")
            table.add_row("", _label(recipe), *errors, *_clip_cells(update.fp8))
    return table


def _layers(report: Report) -> Table:
    table = _table(
        "Where the noise comes from: |dlogp| with some layers in FP8",
        ("recipe", "all", "without edges", "gain", "most alone"),
        "without edges: first and last layer in BF16; most alone: layers\n"
        "that add most when they alone are in FP8, with their |dlogp|",
    )
    for recipe in report.recipes:
        if (layers := recipe.layers) is not None:
            gain = 1 - layers.edges_bf16 / layers.mean_abs_dlogp
            values = (f"{layers.mean_abs_dlogp:.4f}", f"{layers.edges_bf16:.4f}", f"{gain:.0%}")
            table.add_row(_label(recipe), *values, _most_alone(layers.one_layer))
    return table


def _label(recipe: RecipeReport) -> str:
    """Its name in a narrow column."""
    return recipe.recipe.replace(":", "\n").replace("=", "\n  = ")


def _clip_cells(shares: ClipShares) -> list[str]:
    values = (shares.outside, shares.clipped, shares.low_negative, shares.high_positive)
    return ["-" if math.isnan(value) else f"{value:.1%}" for value in values]


def _most_alone(noise: Sequence[float], count: int = 3) -> str:
    """The noisiest layers, from 1."""
    worst = sorted(range(len(noise)), key=lambda index: -noise[index])[:count]
    return " ".join(f"{index + 1}:{noise[index]:.3f}" for index in worst)


def plot(report: Report, path: Path) -> None:
    """Errors of p and r by recipe, tokens outside the clip range over the update's size, and noise by layer.

    Args:
        report: what was measured.
        path: of the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 9), layout="constrained")
    errors, outside, layers = figure.subplots(3, 1)
    names = [_label(recipe) for recipe in report.recipes]
    places = range(len(names))
    largest = [recipe.updates[-1] for recipe in report.recipes]
    errors.bar([place - 0.2 for place in places], [update.nmae_p for update in largest], 0.4, label="p")
    errors.bar([place + 0.2 for place in places], [update.nmae_r for update in largest], 0.4, label="r")
    errors.set_xticks(list(places), names, fontsize="small")
    errors.set_ylabel(f"NMAE after an update at lr {largest[0].lr:g}")
    errors.legend()
    lrs = [update.lr for update in report.recipes[0].updates]
    outside.plot(lrs, [update.bf16.outside for update in report.recipes[0].updates], "o--", color="black", label="bf16")
    for recipe in report.recipes:
        outside.plot(lrs, [update.fp8.outside for update in recipe.updates], "o-", label=recipe.recipe)
        if recipe.layers is not None:
            noise = recipe.layers.one_layer
            layers.plot(range(1, len(noise) + 1), noise, ".-", label=recipe.recipe)
    outside.set_xscale("log")
    outside.set_xlabel("learning rate of the update")
    outside.set_ylabel(f"share of r outside [{report.bounds[0]:g}, {report.bounds[1]:g}]")
    outside.legend(fontsize="small")
    layers.set_xlabel("the only layer in FP8")
    layers.set_ylabel("mean |dlogp|, nats")
    figure.savefig(path)
