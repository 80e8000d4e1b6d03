"""A live view: the diagnosis again and again, on a terminal in place, elsewhere one line each time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import datetime

from doctor.diagnosis.finding import Diagnosis
from doctor.metrics.sources import MetricsUrl, Observation, Scrapes, Source
from doctor.output.report import as_text, verdict
from loadgen.output.escape import printable
from servers.errors import SourceError

CLEAR = "\x1b[H\x1b[2J"
"""Cursor home, erase the screen."""


class RollingMetrics(Source):
    """A /metrics page over the last ``window`` seconds (60 unless said): every look takes one more scrape."""

    DEFAULT_WINDOW_S = 60.0

    def __init__(self, page: MetricsUrl) -> None:
        self.page = page
        self.name = page.name
        self._scrapes: deque[tuple[int, str]] = deque()

    def observe(self, window: float | None, slo: Mapping[str, float]) -> Observation:
        """Raises SourceError; what was scraped until then is kept."""
        while True:
            self._scrapes.append(self.page.scrape())
            if len(self._scrapes) > 1:
                break
            self.page.sleep(self.page.interval)
        oldest = self._scrapes[-1][0] - (window or self.DEFAULT_WINDOW_S) * 1000
        while len(self._scrapes) > 2 and self._scrapes[0][0] < oldest:
            self._scrapes.popleft()
        return Scrapes(self._scrapes, self.name).observe(None, slo)


def watch(
    judge: Callable[[], Diagnosis],
    show: Callable[[Diagnosis | SourceError], None],
    interval: float,
    sleep: Callable[[float], None] = time.sleep,
) -> Diagnosis | None:
    """Judge and show every ``interval`` seconds until Ctrl-C; gives the last diagnosis.

    A server that stops answering is shown and asked again. Raises SourceError where it never answered.
    """
    last: Diagnosis | None = None
    try:
        while True:
            try:
                last = judge()
                show(last)
            except SourceError as error:
                if last is None:
                    raise
                show(error)
            sleep(interval)
    except KeyboardInterrupt:
        return last


def screen(seen: Diagnosis | SourceError, at: datetime) -> str:
    """What a terminal shows: the report in place of the last one."""
    if isinstance(seen, SourceError):
        text = f"cannot look: {printable(str(seen))}\n"
    else:
        text = as_text(seen, queries=False)
    return f"{CLEAR}{at:%H:%M:%S}  (Ctrl-C ends)\n{text}"


def line(seen: Diagnosis | SourceError, at: datetime) -> str:
    """What a log gets: the time, and what is found now."""
    return f"{at:%H:%M:%S} {printable(_summary(seen))}"


def _summary(seen: Diagnosis | SourceError) -> str:
    if isinstance(seen, SourceError):
        return f"cannot look: {seen}"
    found = [finding for finding in seen.findings if finding.suppressed_by is None]
    if not found:
        return verdict(seen) or "nothing found"
    return "; ".join(f"{finding.severity} {finding.id} on {finding.instance}" for finding in found)
