"""Text from servers and files, made harmless for where it is shown. Light to import."""

from __future__ import annotations

import re

BLOCK = "\n\t"
"""What may stay in a text of several lines."""
_MARKDOWN = str.maketrans({char: f"\\{char}" for char in "\\|[`"})
_HTML = re.compile(r"<(?=[a-z/!?])|&(?=[a-z#])", re.IGNORECASE)
"""Where a tag or an entity may begin."""


def printable(text: str, keep: str = "") -> str:
    """``text`` with control characters, terminal codes and invisible ones as escapes (``\\x1b``), except for
    those in ``keep``."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )


def markdown_text(text: str) -> str:
    """For a paragraph or a table's cell in Markdown: no HTML, no link, no further column, one line."""
    shown = printable(text.replace("\n", " ")).translate(_MARKDOWN)
    return _HTML.sub(lambda found: "&lt;" if found[0] == "<" else "&amp;", shown)


def code(text: str, cell: bool = False) -> str:
    """A code span in Markdown; in a table's cell, pipes are escaped as well."""
    fence = "`" * (_longest_run(text) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    shown = printable(text.replace("\n", " ")).replace("|", "\\|" if cell else "|")
    return f"{fence}{pad}{shown}{pad}{fence}"


def code_block(text: str, language: str = "") -> str:
    """A fenced block in Markdown."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}{language}\n{printable(text, BLOCK)}\n{fence}"


def _longest_run(text: str) -> int:
    """Of backticks."""
    return max(map(len, "".join(c if c == "`" else " " for c in text).split()), default=0)
