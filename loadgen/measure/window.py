"""The measured window: from when the server has filled up to when no more requests are due."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.record import RequestRecord

_BINS = 200
_MAX_FILL = 0.25
"""At most this share of the run is given to filling up."""


def in_flight(requests: Sequence[RequestRecord], at: NDArray[np.float64]) -> NDArray[np.int64]:
    """Requests intended at or before each time of ``at`` (seconds, any order) and not yet ended."""
    begins = np.array([r.intended / 1e9 for r in requests])
    ends = np.array([r.end / 1e9 for r in requests])
    return overlapping(begins, ends, at)


def overlapping(
    begins: NDArray[np.float64], ends: NDArray[np.float64], at: NDArray[np.float64]
) -> NDArray[np.int64]:
    """How many of the spans [begin, end) hold each time of ``at``."""
    return np.searchsorted(np.sort(begins), at, side="right") - np.searchsorted(
        np.sort(ends), at, side="right"
    )


def measured_window(
    requests: Sequence[RequestRecord],
    mode: str,
    duration: float | None,
    last_due: float,
    interrupted: bool,
) -> tuple[tuple[float, float], bool]:
    """(start, end) in seconds after the start, and whether that is a steady part of the run.

    It ends when the schedule does: what follows is the drain, whose idle server would flatter the
    figures. It starts when the number of requests in flight first reaches the median of the second half,
    which is how long the server takes to fill; no later than a quarter of the run. If the schedule
    is shorter than two typical requests there is no steady part, and the whole run counts.
    """
    if not requests:
        return (0.0, max(last_due, duration or 0.0)), False
    whole = (0.0, max(r.end for r in requests) / 1e9)
    end = last_due if interrupted or duration is None or mode == "closed" else max(duration, last_due)
    typical = float(np.median([(r.end - r.intended) / 1e9 for r in requests]))
    if end < 2 * typical or end <= 0:
        return whole, False
    start = _filled_at(requests, end)
    inside = sum(start <= r.intended / 1e9 <= end for r in requests)
    return ((start, end), True) if 2 * inside >= len(requests) else (whole, False)


def _filled_at(requests: Sequence[RequestRecord], end: float) -> float:
    grid = np.linspace(0.0, end, _BINS, endpoint=False)
    level = in_flight(requests, grid)
    reached = np.flatnonzero(level >= np.median(level[_BINS // 2 :]))
    first = float(grid[reached[0]]) if len(reached) else 0.0
    return min(first, _MAX_FILL * end)
