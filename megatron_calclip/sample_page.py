"""Completions of a run as one static HTML page: tokens coloured by importance ratio, clipped ones underlined.

Its frame is `html_page`'s: one file that loads nothing. Everything from the run is escaped: what a policy writes is not to be
trusted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from megatron_calclip.html_page import document, readable

Sample = Mapping[str, Any]

CLIP_NAMES = {"l": "clipped at the lower bound", "h": "clipped at the upper bound", "d": "clipped at the dual bound"}
# Shares of the way from 1 to the bound, in log r, at which the colour gets stronger.
_LEVELS = (0.1, 0.5, 1.0)

_STYLE = """
:root { --d1: #e3eefc; --d2: #b9d6fa; --d3: #7fb5f5; --u1: #fdecd8; --u2: #fbd0a0; --u3: #f6a55c; --mark: #b3123a; }
@media (prefers-color-scheme: dark) { :root { --d1: #1b2a3f; --d2: #1d4270; --d3: #1c5fae; --u1: #3a2a17; --u2: #6b4310;
  --u3: #a35c08; --mark: #ff7a98; } }
body { max-width: 60rem; }
.legend, .facts { color: var(--soft); font-size: .875rem; }
article { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .75rem 1rem; margin: 1rem 0; }
.facts { display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin: 0 0 .5rem; }
.facts b { color: var(--ink); font-weight: 600; }
pre { margin: .4rem 0 0; white-space: pre-wrap; overflow-wrap: anywhere; font: .875rem/1.7 ui-monospace, monospace; }
summary { cursor: pointer; color: var(--soft); font-size: .875rem; }
.d1 { background: var(--d1); } .d2 { background: var(--d2); } .d3 { background: var(--d3); }
.u1 { background: var(--u1); } .u2 { background: var(--u2); } .u3 { background: var(--u3); }
.l, .h, .d { text-decoration: underline 3px var(--mark); text-underline-offset: 3px; }
.h { text-decoration-style: double; } .d { text-decoration-style: dotted; }
""".strip()


def level(ratio: float, bounds: Sequence[float]) -> int:
    """How far a ratio is from 1 on the way to its bound: 0 (hardly) to 3 (at the bound or past it); negative below 1.

    Args:
        ratio: pi_theta / pi_old; 0 for a token that no update scored, NaN where it was not finite.
        bounds: [L, H].
    """
    if not 0 < ratio < math.inf or ratio == 1:
        return 0
    bound = bounds[0] if ratio < 1 else bounds[1]
    share = math.log(ratio) / math.log(bound)
    return sum(share >= threshold for threshold in _LEVELS) * (-1 if ratio < 1 else 1)


def page(title: str, samples: Sequence[Sample]) -> str:
    """The whole page.

    Args:
        title: names the run.
        samples: rows of `samples.jsonl`, in the order in which they are shown.
    """
    return document(title, style=_STYLE, body="\n".join([_legend(), *map(_article, samples)]))


def _legend() -> str:
    below = " ".join(f'<span class="d{n}">{word}</span>' for n, word in ((1, "r &lt; 1"), (2, "halfway"), (3, "at L")))
    above = " ".join(f'<span class="u{n}">{word}</span>' for n, word in ((1, "r &gt; 1"), (2, "halfway"), (3, "at H")))
    marks = ", ".join(f'<span class="{letter}">{name}</span>' for letter, name in CLIP_NAMES.items())
    return (
        '<p class="legend">Importance ratio of each token at its last update of the step, between the clip bounds L and '
        f"H: {below} &middot; {above}. No gradient: {marks}.</p>"
    )


def _article(sample: Sample) -> str:
    facts = "".join(
        f"<span>{escape(name)} <b>{escape(readable(value))}</b></span>" for name, value in facts_of(sample).items()
    )
    if "tokens" in sample:
        text = "".join(_token(sample, index) for index in range(len(sample["tokens"])))
    else:
        text = escape(readable(sample["completion"]))
    return (
        f'<article><p class="facts">{facts}</p>'
        f"<details><summary>Prompt</summary><pre>{escape(readable(sample['prompt']))}</pre></details>"
        f"<pre>{text}</pre></article>"
    )


def _token(sample: Sample, index: int) -> str:
    text, ratio, letter = sample["tokens"][index], sample["ratio"][index], sample["clipped"][index]
    shade = level(ratio, sample["bounds"])
    classes = [f"{'d' if shade < 0 else 'u'}{abs(shade)}"] if shade else []
    if letter in CLIP_NAMES:
        classes.append(letter)
    if not classes:
        return escape(readable(text))
    described = f"r {ratio:.4g}, log pi_old {sample['old_log_probs'][index]:.3g}"
    if letter in CLIP_NAMES:
        described += f", {CLIP_NAMES[letter]}"
    return f'<span class="{" ".join(classes)}" title="{escape(described)}">{escape(readable(text))}</span>'


def facts_of(sample: Sample) -> dict[str, str]:
    """What is known of a sample, by name, to be shown above its text."""
    facts = {
        "step": str(sample["step"]),
        "reward": f"{sample['reward']:.4g}",
        "reference": str(sample["answer"]),
        "ended": "yes" if sample["finished"] else "cut",
    }
    if "tokens" not in sample:
        return facts
    counts = {letter: sample["clipped"].count(letter) for letter in CLIP_NAMES}
    lower, upper = sample["bounds"]
    scored = [ratio for ratio in sample["ratio"] if ratio > 0] or [1.0]
    return facts | {
        "advantage": f"{sample['advantage']:+.3f}",
        "tokens": str(len(sample["tokens"])),
        "ratios": f"{min(scored):.3g} to {max(scored):.3g}",
        "bounds": f"[{lower:.4g}, {upper:.4g}]",
        "clipped": f"{counts['l']} at L, {counts['h']} at H" + (f", {counts['d']} dual" if counts["d"] else ""),
        "policy": str(sample["policy_version"]),
    }
