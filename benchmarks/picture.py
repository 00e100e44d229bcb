"""The README's picture: importance ratios in BF16 and in FP8, what the fixed lower bound cuts, and where calibration puts it.

Drawn from `docs/measured/regime.json`, the tokens with A < 0 of one calibrated run of the noisy regime, by
`tools/make_results.py`; so it can show nothing that was not measured. An SVG without scripts or other files, as GitHub wants it,
on a ground of its own that follows the reader's light or dark setting.

Left out on purpose: A > 0 and the upper bound, which calibration hardly moves in this regime.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from benchmarks.tables import Report

WIDTH, HEIGHT = 860, 400
LEFT, RIGHT, TOP, BOTTOM = 62, 838, 92, 348
"""The plot's frame in the picture."""
LOW, HIGH = 0.2, 2.6
"""Ratios that are drawn."""
TICKS = (0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0)
STYLE = """\
svg { font: 14px system-ui, 'Segoe UI', Helvetica, Arial, sans-serif; }
.ground { fill: #ffffff; stroke: #d0d7de; } .text { fill: #1f2328; } .weak { fill: #59636e; }
.title { font-size: 17px; font-weight: 600; } .small { font-size: 12.5px; } .strong { font-weight: 600; }
.axis { stroke: #59636e; } .grid { stroke: #d0d7de; stroke-opacity: .6; }
.lost { fill: #cf222e; fill-opacity: .07; } .bf16 { fill: #54708c; fill-opacity: .45; }
.fp8 { fill: none; stroke: #c2570c; stroke-width: 2; } .fp8text { fill: #b04c06; } .bf16text { fill: #45617d; }
.fixed { stroke: #cf222e; stroke-width: 2; } .fixedtext { fill: #b81f2a; }
.fitted { stroke: #1a7f37; stroke-width: 2; stroke-dasharray: 6 4; } .fittedtext { fill: #1a7f37; }
.arrow { stroke: #1a7f37; stroke-width: 2; fill: none; }
@media (prefers-color-scheme: dark) {
.ground { fill: #0d1117; stroke: #3d444d; } .text { fill: #f0f6fc; } .weak { fill: #9198a1; }
.axis { stroke: #9198a1; } .grid { stroke: #3d444d; }
.lost { fill: #ff7b72; fill-opacity: .10; } .bf16 { fill: #8fb0d1; fill-opacity: .45; }
.fp8 { stroke: #f0883e; } .fp8text { fill: #f0883e; } .bf16text { fill: #9dbbd8; }
.fixed { stroke: #ff7b72; } .fixedtext { fill: #ff9a92; }
.fitted, .arrow { stroke: #3fb950; } .fittedtext { fill: #3fb950; }
}"""


def place_x(ratio: float) -> float:
    """Pixels from the left; ratios are on a log scale."""
    return LEFT + (RIGHT - LEFT) * math.log(ratio / LOW) / math.log(HIGH / LOW)


def place_y(count: float, largest: float) -> float:
    """Pixels from the top; counts are on a log scale that begins below 1."""
    return BOTTOM - (BOTTOM - TOP) * math.log(max(count, 0.5) / 0.5) / math.log(largest / 0.5)


def steps(edges: Sequence[float], counts: Sequence[int], largest: float) -> str:
    """The outline of a histogram as the points of an SVG path, from the ground and back to it."""
    points: list[tuple[float, float]] = [(place_x(LOW), BOTTOM)]
    for left, right, count in zip(edges, edges[1:], counts, strict=False):
        if right > LOW and left < HIGH:
            height = place_y(count, largest)
            points += [(place_x(max(left, LOW)), height), (place_x(min(right, HIGH)), height)]
    points.append((place_x(HIGH), BOTTOM))
    return "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def text(x: float, y: float, words: str, classes: str, anchor: str = "start") -> str:
    """One line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}" text-anchor="{anchor}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, name: str) -> str:
    """One straight line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{name}"/>'


def axes(largest: float) -> list[str]:
    """Ticks, their numbers and what they count."""
    drawn = [line(LEFT, BOTTOM, RIGHT, BOTTOM, "axis")]
    for ratio in TICKS:
        drawn += [
            line(place_x(ratio), BOTTOM, place_x(ratio), BOTTOM + 5, "axis"),
            text(place_x(ratio), BOTTOM + 20, f"{ratio:g}", "weak small", "middle"),
        ]
    for power in range(int(math.log10(largest)) + 1):
        height = place_y(10**power, largest)
        drawn += [
            line(LEFT, height, RIGHT, height, "grid"),
            text(LEFT - 8, height + 4, f"{10**power:,}", "weak small", "end"),
        ]
    drawn.append(
        text((LEFT + RIGHT) / 2, BOTTOM + 40, "importance ratio r = pi / pi_old, log scale", "weak small", "middle")
    )
    return drawn


def ratios(report: Report) -> str:
    """The picture."""
    found: dict[str, Any] = report["arms"]["calibrated"]["ratios of A < 0"]
    fixed, fitted = found["reference"][0], found["bounds"][0]
    largest = 1.6 * max(*found["fp8"], *found["bf16"])
    fp8, bf16, fp8_fitted = (
        found[name] for name in ("fp8 under the reference", "bf16 under the reference", "fp8 under the bound")
    )
    begin, end = place_x(fixed), place_x(fitted)
    drawn = [
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8" class="ground"/>',
        text(
            LEFT - 40,
            30,
            "The clip takes the penalty of bad tokens, and FP8 noise pushes tokens under it",
            "text title",
        ),
        text(LEFT - 40, 52, "Tokens with A < 0 of one run of the noisy regime, counted by ratio (log scale)", "weak"),
        f'<rect x="{LEFT}" y="{TOP}" width="{begin - LEFT:.1f}" height="{BOTTOM - TOP}" class="lost"/>',
        *axes(largest),
        f'<path d="{steps(found["edges"], found["bf16"], largest)} Z" class="bf16"/>',
        f'<path d="{steps(found["edges"], found["fp8"], largest)}" class="fp8"/>',
        line(begin, TOP - 22, begin, BOTTOM, "fixed"),
        line(end, TOP - 22, end, BOTTOM, "fitted"),
        f'<path d="M{begin - 6:.1f} {TOP - 14} H{end + 8:.1f} m7 -5 l-7 5 l7 5" class="arrow"/>',
        text(begin + 8, TOP - 10, f"fixed L = {fixed:g}", "fixedtext strong"),
        text(begin + 8, TOP + 10, f"FP8 clips {fp8}, BF16 {bf16}", "fixedtext"),
        text(end + 8, TOP + 12, f"calibrated L = {fitted:.2g}", "fittedtext strong"),
        text(end + 8, TOP + 32, f"FP8 clips {fp8_fitted}", "fittedtext"),
        text(RIGHT - 6, TOP + 34, "FP8, the ratio that is clipped", "fp8text strong", "end"),
        text(RIGHT - 6, TOP + 54, "BF16, the same tokens", "bf16text strong", "end"),
    ]
    label = f"Histogram of importance ratios: under {fixed:g} FP8 has {fp8} tokens and BF16 {bf16}; FP8 has {fp8_fitted} under {fitted:.2g}."
    body = "\n".join(drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'aria-label="{escape(label)}">\n<style>\n{STYLE}\n</style>\n{body}\n</svg>\n'
    )
