"""What the server said of itself during a run: its gauges over time, from the scrapes in the records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from loadgen.measure.record import Records
from servers.metrics.page import Page, PageReader

_FIGURES = ("running", "waiting", "kv_usage", "preemptions")
"""Of ``servers.metrics.catalog``: of several engines' KV usage the largest counts, else the sum."""


@dataclass(frozen=True)
class Timeline:
    """A value each scrape; NaN where one lacks it. ``at``: seconds after the start of the run."""

    at: tuple[float, ...]
    running: tuple[float, ...]
    waiting: tuple[float, ...]
    kv_usage: tuple[float, ...]
    """0..1."""
    preemptions: tuple[float, ...]
    """Since the scrape before; 0 for the first, and across a restart what was counted since."""

    def known(self, name: str) -> bool:
        """Whether the server told this at all."""
        return not all(math.isnan(value) for value in getattr(self, name))


def timeline(records: Records) -> Timeline | None:
    """None for a run without readable scrapes."""
    reader = PageReader(_FIGURES)
    pages = [(stamp, reader.read(text)) for stamp, text in records.scrapes]
    taken = [(stamp, page) for stamp, page in pages if page.samples]
    if not taken:
        return None
    series = {name: tuple(_figure(page, name) for _, page in taken) for name in _FIGURES}
    return Timeline(
        at=tuple((stamp - records.start_unix_ms) / 1e3 for stamp, _ in taken),
        running=series["running"],
        waiting=series["waiting"],
        kv_usage=series["kv_usage"],
        preemptions=_increases(series["preemptions"]),
    )


def _figure(page: Page, name: str) -> float:
    value = page.figure(name)
    return math.nan if value is None else value


def _increases(values: Sequence[float]) -> tuple[float, ...]:
    if not values:
        return ()
    steps = [b if b < a else b - a for a, b in pairwise(values)]
    return (0.0 if not math.isnan(values[0]) else math.nan, *steps)
