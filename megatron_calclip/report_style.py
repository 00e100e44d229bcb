"""How runs are told apart: six colours, then the same six with dashes.

The colours were chosen by a search for the largest distance between any two, as seen with normal vision, deuteranopia,
protanopia and tritanopia (Machado et al. 2009, full severity), that keeps a contrast of 3 against the page (WCAG 2.2, 1.4.11);
a test measures both. Light and dark pages have a set each.
"""

from __future__ import annotations

LIGHT_CARD, DARK_CARD = "#ffffff", "#1c1c21"
"""What plots stand on."""
LIGHT = ("#2597ff", "#ea6b07", "#166c35", "#b876a8", "#0e2059", "#20000f")
DARK = ("#4476ed", "#c16310", "#45e38b", "#8c729c", "#d9f7ff", "#edd810")
DASHES = ((), (6, 3), (1.5, 3), (9, 3, 1.5, 3))
"""Lengths of stroke and gap, in pixels; the next one each time that the colours are used up."""


def dash(run: int) -> tuple[float, ...]:
    """The dashes of a run's lines."""
    return DASHES[run // len(LIGHT)]


def style() -> str:
    """CSS: `--c`, the colour of anything of class `r<index>`, for the reader's setting."""
    rounds = range(len(DASHES))
    rules = [
        f":root {{ {_colours(LIGHT)} }}",
        f"@media (prefers-color-scheme: dark) {{ :root {{ {_colours(DARK)} }} }}",
    ]
    for index in range(len(LIGHT)):
        names = ", ".join(f".r{index + number * len(LIGHT)}" for number in rounds)
        rules.append(f"{names} {{ --c: var(--run{index}); }}")
    return "\n".join(rules)


def _colours(colours: tuple[str, ...]) -> str:
    return " ".join(f"--run{index}: {colour};" for index, colour in enumerate(colours))
