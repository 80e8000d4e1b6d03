"""Ctrl-C while servers run: once ends the work cleanly, twice at once, and neither leaves a server."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from loadgen.target import AtOnce

AGAIN_SECONDS = 0.02
"""Until an interrupt that was lost is sent again: by then the place that lost it is left."""


class Interrupts:
    """Turns SIGINT and SIGTERM into a stopped load, or KeyboardInterrupt where none runs.

    The first one during a load only sets the load's stop event, so that the client ends its connections and
    the load returns; the one who asked for the load raises KeyboardInterrupt then (see :meth:`load`). Any
    further one raises AtOnce, with which targets end their servers without grace. One that came where nothing
    can be raised, such as in a callback of a weak reference, comes once more.
    """

    def __init__(self) -> None:
        self._seen = False
        self._load: threading.Event | None = None
        self._previous: dict[int, Any] = {}
        self._tell = sys.unraisablehook

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._on_signal)
            self._tell, sys.unraisablehook = sys.unraisablehook, self._on_lost
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._previous:
            sys.unraisablehook = self._tell

    @property
    def seen(self) -> bool:
        """Whether the user wants an end."""
        return self._seen

    @contextmanager
    def load(self) -> Iterator[threading.Event]:
        """The stop event for a load. Raises KeyboardInterrupt at the end if one came meanwhile."""
        self._load = stop = threading.Event()
        try:
            yield stop
        finally:
            self._load = None
            if self._seen and not isinstance(sys.exception(), AtOnce):
                raise KeyboardInterrupt

    def _on_lost(self, lost: sys.UnraisableHookArgs) -> None:
        """An exception that no code can catch: reported as usual, but an interrupt is sent again."""
        if isinstance(lost.exc_value, KeyboardInterrupt):
            threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            self._tell(lost)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again, self._seen = self._seen, True
        if self._load is not None and not again:
            self._load.set()
            return
        raise AtOnce if again else KeyboardInterrupt
