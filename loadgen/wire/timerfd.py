"""Wake an event loop at a monotonic deadline, to the microsecond and never early.

Event loops count their timers in milliseconds and may fire up to one early, which would be most of
the send lag that a load generator is allowed. On Linux a timerfd in the same loop has no such
rounding; elsewhere the loop's timer is used and the deadline checked again.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable
from time import monotonic_ns

_CLOCK_MONOTONIC = 1
_ABSOLUTE = 1  # TFD_TIMER_ABSTIME


class _Itimerspec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Alarm:
    """Calls ``callback`` once for each :meth:`set`, at or after the deadline. Close it after use."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop, self.callback = loop, callback
        self._deadline_ns: int | None = None
        self._handle: asyncio.Handle | None = None
        self._libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
        self._fd = -1
        if self._libc is not None:
            self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
            if self._fd >= 0:
                loop.add_reader(self._fd, self._rang)

    def set(self, deadline_ns: int) -> None:
        """Ring at ``deadline_ns`` of ``time.monotonic_ns``; replaces an earlier deadline."""
        self._deadline_ns = deadline_ns
        if self._fd >= 0 and self._libc is not None:
            seconds, nanoseconds = divmod(max(1, deadline_ns), 1_000_000_000)
            spec = _Itimerspec(0, 0, seconds, nanoseconds)
            if self._libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(spec), None) == 0:
                return
        self._poll()

    def close(self) -> None:
        self._deadline_ns = None
        if self._handle is not None:
            self._handle.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _rang(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # set again since it rang
            return
        self._fire_if_due()

    def _poll(self) -> None:
        if self._deadline_ns is None or self._fire_if_due():
            return
        left = (self._deadline_ns - monotonic_ns()) / 1e9
        # Sleep to a millisecond before the deadline, then go round the loop until it is there.
        if self._handle is not None:
            self._handle.cancel()
        self._handle = (
            self._loop.call_later(left - 0.001, self._poll)
            if left > 0.0015
            else self._loop.call_soon(self._poll)
        )

    def _fire_if_due(self) -> bool:
        if self._deadline_ns is None or monotonic_ns() < self._deadline_ns:
            return False
        self._deadline_ns = None
        self.callback()
        return True
