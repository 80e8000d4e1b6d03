"""A comparison as text and Markdown. The HTML page is in ``loadgen.output.comparison_page``."""

from __future__ import annotations

from typing import Any

from loadgen.compare import Comparison
from loadgen.output.escape import printable

_VERDICT_WORDS = {
    "pass": "No regression",
    "regress": "Regression",
    "improve": "Improvement",
    "inconclusive": "Inconclusive",
    "invalid": "Invalid",
}
"""Each verdict as a reader sees it."""


def comparison_text(comparison: Comparison) -> str:
    """For a terminal."""
    rows = [[printable(cell) for cell in row] for row in comparison.table()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, "", _conclusion(comparison), *map(printable, comparison.notes)])


def comparison_markdown(comparison: Comparison) -> str:
    """Fits a CI job's summary."""
    from loadgen.output.page import render

    values = comparison_values(comparison)
    servers = [(name, config["server"]) for name, config in values["sides"] if "server" in config]
    return render("comparison.md.j2", **{**values, "sides": servers}, conclusion=_conclusion(comparison))


def comparison_values(comparison: Comparison) -> dict[str, Any]:
    """What the templates of a comparison show."""
    heads, *rows = comparison.table()
    return {
        "verdict": _VERDICT_WORDS[comparison.verdict],
        "how": how(comparison),
        "notes": comparison.notes,
        "sides": [(name, config) for name, config in (("A", comparison.a), ("B", comparison.b)) if config],
        "heads": heads,
        "rows": rows,
    }


def how(comparison: Comparison) -> str:
    """Number of pairs, and how the servers were run."""
    if comparison.told:
        return comparison.told
    way = "both servers up, loaded in turn" if comparison.together else "servers restarted in turn"
    return f"{len(comparison.pairs)} pairs, {way}"


def _conclusion(comparison: Comparison) -> str:
    return f"{_VERDICT_WORDS[comparison.verdict]}: {how(comparison)}"
