"""A load on a server that is somebody else's ends when the server shows that it is too much."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from servers.metrics.page import Page, PageReader

POLL_SECONDS = 1.0
LASTING_POLLS = 2
"""Polls in a row at which more requests wait than before: for a moment every request waits."""
MOST_FAILED = 2
"""Requests that may fail: one or two may be the network's."""
_REASON_LABEL = "finished_reason"


@dataclass(frozen=True)
class ServerState:
    """What the server says of itself. None, 0: nothing."""

    waiting: float | None
    errors: float

    @classmethod
    def read(cls, page: Page) -> ServerState:
        ended = [value for (_, labels), value in page.samples.items() if (_REASON_LABEL, "error") in labels]
        return cls(page.figure("waiting"), sum(ended))


class LoadWatch:
    """Held against what was found before the first request, over all loads of a study."""

    def __init__(self, left: Callable[[], float] = lambda: math.inf) -> None:
        """``left``: seconds of the budget."""
        self.reason = ""
        """Why the load ended early; "" while it has not. What is sent afterwards is ended at once."""
        self._left = left
        self._reader = PageReader(("waiting", "finished"))
        self._before: ServerState | None = None
        self._above = 0

    @contextmanager
    def watching(self, scrape: Callable[[], str], stop: threading.Event) -> Iterator[None]:
        """Poll ``scrape`` every second, and set ``stop`` once there is a reason to."""
        before = self._before = self._before or ServerState.read(self._reader.read(scrape()))
        over = threading.Event()

        def work() -> None:
            while not self.reason and not over.wait(min(POLL_SECONDS, max(0.0, self._left()))):
                if self._left() <= 0:
                    self._end("the budget is spent", stop)
                else:
                    self._judge(before, ServerState.read(self._reader.read(scrape())), stop)

        thread = threading.Thread(target=work, name="load-watch", daemon=True)
        if self.reason:
            stop.set()
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def failed(self, count: int, stop: threading.Event) -> None:
        """``count`` requests of this load have failed so far."""
        if count > MOST_FAILED:
            self._end(f"{count} requests failed", stop)

    def _judge(self, before: ServerState, now: ServerState, stop: threading.Event) -> None:
        found = before.waiting or 0.0
        self._above = self._above + 1 if now.waiting is not None and now.waiting > found else 0
        if self._above >= LASTING_POLLS:
            self._end(
                f"{now.waiting:g} requests wait in the server's queue, {found:g} did before the load", stop
            )
        elif now.errors - before.errors > MOST_FAILED:
            self._end(f"the server ended {now.errors - before.errors:g} requests with an error", stop)

    def _end(self, reason: str, stop: threading.Event) -> None:
        self.reason = self.reason or reason
        stop.set()
