"""The frame of the HTML pages that runs leave behind: one file that needs nothing but itself.

No script, no font, no network: a content security policy forbids the browser to load anything, whatever a run's texts hold.
Pages follow the reader's light or dark setting and fit a phone. Everything from a run goes through `text`: what a policy
writes, and what a folder is called, is not to be trusted.
"""

from __future__ import annotations

from html import escape

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

_STYLE = """
:root { color-scheme: light dark; --page: #fdfdfc; --card: #fff; --ink: #1d1d1f; --soft: #62626a; --line: #dcdce0; }
@media (prefers-color-scheme: dark) { :root { --page: #131316; --card: #1c1c21; --ink: #e9e9ec; --soft: #a0a0aa;
  --line: #37373f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0 0 .5rem; overflow-wrap: anywhere; }
""".strip()


def document(title: str, *, style: str, body: str) -> str:
    """A whole page.

    Args:
        title: plain text.
        style: CSS after that of all pages.
        body: HTML.
    """
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{text(title)}</title>",
            f"<style>\n{_STYLE}\n{style}\n</style></head><body>",
            f"<h1>{text(title)}</h1>",
            body,
            "</body></html>\n",
        ]
    )


def text(value: str) -> str:
    """A text from outside as HTML: markup is shown, not obeyed, and characters that cannot be seen are spelled out."""
    return escape(visible(value))


def visible(value: str) -> str:
    """The text with what cannot be seen spelled out: control characters, changes of direction, half of a character."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in value)


def readable(value: str) -> str:
    """The same for a text of several lines, whose line ends and tabs stay."""
    return "".join(c if c in "\n\t" else visible(c) for c in value)
