"""The few figures that a trial reads off the server's own metrics and log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from servers.metrics.page import PageReader
from servers.server_log import parse_log

MIN_SCRAPES = 10
"""Scrapes that a peak is read from, at least: the first and the last of each run see an empty server."""
_FIGURES = ("running", "kv_usage", "preemptions", "prefix_hits")


@dataclass(frozen=True)
class ServerFigures:
    """None where the server does not say."""

    kv_tokens: int | None = None
    peak_running: int | None = None
    """Requests that ran at a scrape, at most; None also where too few scrapes looked."""
    preemptions: int | None = None
    """During the load."""
    peak_kv_usage: float | None = None
    """Share of the fullest engine's pool, at most, that requests held at a scrape; None as before."""
    prefix_hits: int | None = None
    """Tokens that were found in the prefix cache during the load."""


def read_figures(scrapes: Sequence[tuple[int, str]], log: str = "") -> ServerFigures:
    """From scrapes in order of time; the log's KV line stands in for a missing metric."""
    reader = PageReader((*_FIGURES, "cache_config", "kv_tokens"))
    pages = [reader.read(text) for _, text in scrapes]
    running, usage, preempted, hits = (
        [figure for page in pages if (figure := page.figure(key)) is not None] for key in _FIGURES
    )
    pools = [pool for page in pages if (pool := page.kv_tokens) is not None]
    pool = pools[-1] if pools else parse_log(log).kv_cache_tokens
    return ServerFigures(
        kv_tokens=pool,
        peak_running=int(max(running)) if len(running) >= MIN_SCRAPES else None,
        preemptions=_increase(preempted) if preempted else None,
        peak_kv_usage=max(usage) if len(usage) >= MIN_SCRAPES else None,
        prefix_hits=_increase(hits) if hits else None,
    )


def _increase(counts: Sequence[float]) -> int:
    """Of a counter, which begins anew where it falls."""
    return int(sum(b if b < a else b - a for a, b in pairwise(counts)))
