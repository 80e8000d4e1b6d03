"""The time of day for stamps whose differences are measured."""

from __future__ import annotations

import time


class UnixClock:
    """Unix milliseconds, read from the wall clock once; from then on the monotonic clock moves them.

    So an interval between two stamps is right also where the wall clock was set meanwhile.
    """

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def ms(self) -> int:
        return (time.monotonic_ns() + self._offset_ns) // 1_000_000
