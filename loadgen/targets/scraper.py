"""The server's metrics every second, beside a load."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from loadgen.measure.clock import UnixClock
from loadgen.targets.http import Http, NoAnswer

SCRAPE_SECONDS = 1.0
SCRAPE_TIMEOUT = 2.0
_TICK_SECONDS = 0.2


def scrape(http: Http) -> str:
    """The text of /metrics; "" where there is none."""
    try:
        answer = http.get("/metrics", SCRAPE_TIMEOUT)
    except NoAnswer:
        return ""
    return answer.body if answer.status == 200 else ""


class Scraper:
    """Collects ``scrape()`` at the beginning, every second, and at the end of its context.

    ``over`` is asked five times a second; once it is true, nothing more is done.
    """

    def __init__(self, scrape: Callable[[], str], over: Callable[[], bool] = lambda: False) -> None:
        self.scrapes: list[tuple[int, str]] = []
        """(unix ms, text)."""
        self._scrape, self._over = scrape, over
        self._clock = UnixClock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._work, name="scraper", daemon=True)

    def __enter__(self) -> Scraper:
        self._take()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        if self.scrapes and not self._over():
            self._take()

    def _work(self) -> None:
        due = time.monotonic() + SCRAPE_SECONDS
        while not self._done.wait(_TICK_SECONDS):
            if self._over():
                return
            if self.scrapes and time.monotonic() >= due:  # without a first one there are no metrics
                self._take()
                due = time.monotonic() + SCRAPE_SECONDS

    def _take(self) -> None:
        stamp = self._clock.ms()
        if text := self._scrape():
            self.scrapes.append((stamp, text))
