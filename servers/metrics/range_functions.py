"""Prometheus's own functions over the samples of one series, so that a recording and a live server agree.

Semantics follow Prometheus 2.x (``promql/functions.go``, ``promql/quantile.go``): counter resets,
extrapolation to the window's edges, interpolation inside a bucket, subqueries on an aligned grid.
Times are int64 milliseconds, values float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]
Values = NDArray[np.float64]

LOOKBACK_MS = 5 * 60 * 1000
"""How long an instant query still sees a sample (Prometheus's default)."""


def increase(times: Times, values: Values, start: int, end: int) -> float | None:
    """``increase(m[w])``: growth of a counter, extrapolated to [start, end]; None below 2 samples."""
    if len(values) < 2:
        return None
    steps = np.diff(values)
    grown = float(values[-1] - values[0] + values[:-1][steps < 0].sum())
    return _extrapolate(times, grown, start, end, floor=float(values[0]))


def delta(times: Times, values: Values, start: int, end: int) -> float | None:
    """``delta(m[w])``: change of a gauge, extrapolated to [start, end]; None below 2 samples."""
    if len(values) < 2:
        return None
    return _extrapolate(times, float(values[-1] - values[0]), start, end, floor=None)


def _extrapolate(times: Times, change: float, start: int, end: int, floor: float | None) -> float | None:
    """``floor`` is a counter's first value: it cannot be extrapolated below 0."""
    covered = float(times[-1] - times[0])
    if covered <= 0:
        return None
    spacing = covered / (len(times) - 1)
    before, after = float(times[0] - start), float(end - times[-1])
    if floor is not None and change > 0 and floor >= 0:
        before = min(before, covered * floor / change)
    threshold = spacing * 1.1
    reach = covered
    reach += before if before < threshold else spacing / 2
    reach += after if after < threshold else spacing / 2
    return change * reach / covered


def deriv(times: Times, values: Values) -> float | None:
    """``deriv(m[w])``: slope per second of a least-squares line; None with fewer than 2 samples."""
    if len(values) < 2 or times[-1] == times[0]:
        return None
    seconds = (times - times[0]) / 1000.0
    centred = seconds - seconds.mean()
    return float((centred * values).sum() / (centred * centred).sum())


def resets(values: Values) -> float:
    """``resets(m[w])``: how often a counter fell."""
    return float((np.diff(values) < 0).sum())


def grid(start: int, end: int, step: int) -> Times:
    """The instants of a subquery ``[w:step]``: multiples of ``step`` in [start, end]."""
    first = -(-start // step) * step
    return np.arange(first, end + 1, step, dtype=np.int64)


def instant(times: Times, values: Values, at: Times) -> Values:
    """The newest sample at or before each instant, NaN where it is older than the look-back."""
    if len(times) == 0:
        return np.full(len(at), math.nan)
    index = np.searchsorted(times, at, side="right") - 1
    seen = np.maximum(index, 0)
    fresh = (index >= 0) & (at - times[seen] < LOOKBACK_MS)
    return np.where(fresh, values[seen], math.nan)


def quantile(q: float, buckets: Mapping[float, float]) -> tuple[float, float, float] | None:
    """``histogram_quantile``, with what it does not say: the range the true quantile must lie in.

    ``buckets`` maps upper bounds to cumulative counts. Returns (interpolated value, low, high): low and high
    differ from the value only in the first bucket (0 to its bound) and the last (its bound to infinity).
    None without observations, or without the +Inf bucket.
    """
    bounds = sorted(buckets)
    if len(bounds) < 2 or not math.isinf(bounds[-1]):
        return None
    counts = np.maximum.accumulate([buckets[bound] for bound in bounds])
    total = float(counts[-1])
    if not total > 0:
        return None
    rank = q * total
    found = int(np.searchsorted(counts[:-1], rank, side="left"))
    if found == len(bounds) - 1:
        return bounds[-2], bounds[-2], math.inf
    upper = bounds[found]
    if found == 0 and upper <= 0:
        return upper, -math.inf, upper
    lower = bounds[found - 1] if found else 0.0
    below = float(counts[found - 1]) if found else 0.0
    inside = float(counts[found]) - below
    value = lower + (upper - lower) * ((rank - below) / inside if inside else 0.0)
    return (value, 0.0, upper) if found == 0 else (value, value, value)
