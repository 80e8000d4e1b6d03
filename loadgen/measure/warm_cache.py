"""Whether the server's prefix cache knew the prompts of a run before it began."""

from __future__ import annotations

from dataclasses import replace

from loadgen.measure.record import Records
from servers.metrics.page import PageReader

_TOLERATED = 0.1
"""Share of the prompts' tokens that may be found beyond what they share: blocks that are found are counted in
whole, texts in characters."""
_BEHIND = ("ok", "unsteady", "too_few_samples", "server_failing")
"""Verdicts that this one comes before."""


def judge_cache(records: Records, shared: float) -> Records:
    """``records`` of a run with its scrapes; with the verdict ``warm_cache`` where the cache found more of
    the prompts than they have in common, the share ``shared``. As they are where the server does not
    tell."""
    hits, queries = (_increase(records, name) for name in ("prefix_hits", "prefix_queries"))
    if not queries or hits is None:
        return records
    if hits / queries <= shared + _TOLERATED:
        return records
    reason = (
        f"{hits:,.0f} of {queries:,.0f} prompt tokens were found in the prefix cache, where the prompts of "
        f"this run share {shared:.0%}: an earlier run left them, and TTFT is shorter than for new prompts"
    )
    verdict = "warm_cache" if records.verdict in _BEHIND else records.verdict
    return replace(records, verdict=verdict, reasons=(reason, *records.reasons))


def _increase(records: Records, name: str) -> float | None:
    """Of a counter between the first and the last scrape; None where either lacks it."""
    if len(records.scrapes) < 2:
        return None
    reader = PageReader((name,))
    first, last = (reader.read(records.scrapes[at][1]).figure(name) for at in (0, -1))
    return None if first is None or last is None else max(0.0, last - first)
