"""Whether the requests in flight pile up over a run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.record import Records, RequestRecord
from loadgen.measure.window import in_flight, overlapping

EXPLAINED = 0.6
"""A backlog is none where so much of its growth is the arrivals' own: more of them came, or longer ones."""
_BINS = 120


def backlog(records: Records, cls: str | None = None) -> float:
    """Requests by which the number in flight grew over the window, 0 where it is no trend. Open loop only.

    A trend: the last third of the window holds on average half as many again as the first, and the
    growth from the window's start to its end exceeds both 5 requests and a tenth of all arrivals. (At an
    offered load r times the capacity, 1 - 1/r of the arrivals pile up.) Recorded traffic rises within
    a window: what would have grown as well had every request been served at the first third's pace is
    no backlog.
    """
    if records.mode == "closed" or not records.steady:
        return 0.0
    low, high = records.window
    requests = [r for r in records.requests if cls is None or r.cls == cls]
    arrivals = sum(low <= r.intended / 1e9 <= high for r in requests)
    if not arrivals:
        return 0.0
    times = np.linspace(low, high, _BINS)
    level = in_flight(requests, times)
    first, last = _outer_thirds(level)
    growth = float(level[-1] - level[0])
    if last <= 1.5 * first or growth <= max(5.0, 0.1 * arrivals):
        return 0.0
    usual = _outer_thirds(_at_the_first_pace(requests, times))
    return growth if usual[1] - usual[0] < EXPLAINED * (last - first) else 0.0


def _outer_thirds(level: NDArray[np.int64]) -> tuple[float, float]:
    """Means of the first and of the last third."""
    third = len(level) // 3
    return float(level[:third].mean()), float(level[-third:].mean())


def _at_the_first_pace(requests: Sequence[RequestRecord], times: NDArray[np.float64]) -> NDArray[np.int64]:
    """Requests in flight at ``times``, had each taken as long per token as those of the first third."""
    begins = np.array([r.intended / 1e9 for r in requests])
    tokens = np.array([r.tokens if r.ok else r.max_tokens for r in requests])
    early = [r for r in requests if r.ok and times[0] <= r.intended / 1e9 <= times[len(times) // 3]]
    served = sum(r.tokens for r in early)
    pace = sum(r.end - r.intended for r in early) / 1e9 / served if served else 0.0
    return overlapping(begins, begins + pace * tokens, times)
