"""How long a load may go on before its server counts as stuck."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self


class Watchdog:
    """Sets ``stop`` after ``seconds``: since the last answer where ``renewed``, else since the beginning.

    A load of so many requests takes as long as the server needs for them: a slow one is not stuck while it
    answers. A load of so many seconds has no such excuse.
    """

    def __init__(self, seconds: float, stop: threading.Event, *, renewed: bool) -> None:
        self.exhausted = False
        self._seconds, self._stop, self._renewed = seconds, stop, renewed
        self._answered = 0
        self._timer = self._started()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()

    def answered(self, count: int) -> None:
        """``count`` requests have been answered so far."""
        if self._renewed and count > self._answered:
            self._answered = count
            self._timer.cancel()
            self._timer = self._started()

    def _started(self) -> threading.Timer:
        timer = threading.Timer(self._seconds, self._exhaust)
        timer.daemon = True
        timer.start()
        return timer

    def _exhaust(self) -> None:
        self.exhausted = True
        self._stop.set()
