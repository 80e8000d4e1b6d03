"""What a soak says: samples of a server at rest, and whether anything in them leaks or is stuck."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MIN_RESTS = 3
"""Fewer say nothing about a trend."""
GROWTH_MB = 32.0
"""More than that over a soak is a leak, if it is a trend and not noise."""
SIGNIFICANCE = 3.0
"""A trend is more than so many of its standard errors."""
SPARE_FILES = 4
"""Descriptors more than at the first rest that are none: a log, a connection that is just being closed."""
WARM_SHARE = 1 / 3
"""Of the soak's start, in which memory may grow: allocators, caches of bounded size."""


@dataclass(frozen=True)
class Rest:
    """The server when nothing had run for a moment. Memory in MB, ``at`` in seconds since the start."""

    at: float
    kv_usage: float
    unfinished: float
    """Requests that it says are running or waiting."""
    cache_reset: bool
    """Whether it could reset its prefix cache, for which every block must be free."""
    engine_mb: float
    api_mb: float
    engine_files: int
    api_files: int


@dataclass(frozen=True)
class Trend:
    """A straight line through samples: its slope a second, and the slope's standard error."""

    slope: float
    error: float

    @classmethod
    def of(cls, times: Sequence[float], values: Sequence[float]) -> Trend:
        """Least squares. With fewer than three samples there is none."""
        count = len(times)
        if count < 3:
            return cls(0.0, math.inf)
        middle, mean = sum(times) / count, sum(values) / count
        spread = sum((time - middle) ** 2 for time in times)
        slope = (
            sum((time - middle) * (value - mean) for time, value in zip(times, values, strict=True)) / spread
        )
        left = sum(
            (value - mean - slope * (time - middle)) ** 2 for time, value in zip(times, values, strict=True)
        )
        return cls(slope, math.sqrt(left / (count - 2) / spread))

    @property
    def rises(self) -> bool:
        return self.slope > SIGNIFICANCE * self.error


def steady(rests: Sequence[Rest]) -> Sequence[Rest]:
    """The rests after the warm-up."""
    if not rests:
        return rests
    begin, end = rests[0].at, rests[-1].at
    return [rest for rest in rests if rest.at >= begin + WARM_SHARE * (end - begin)]


def judge(rests: Sequence[Rest], faults: Sequence[str], stuck: int) -> list[str]:
    """Everything that is wrong, in words; nothing if the soak is passed.

    ``faults``: answers that should have been others; ``stuck``: requests that did not end.
    """
    if len(rests) < MIN_RESTS:
        return ["too short: fewer than three rests"]
    problems = [f"fault: {fault}" for fault in faults]
    if stuck:
        problems.append(f"{stuck} requests did not end")
    for rest in rests:
        if rest.kv_usage or not rest.cache_reset:
            problems.append(f"at {rest.at:.0f} s of rest, KV blocks were still held ({rest.kv_usage:.2%})")
        if rest.unfinished:
            problems.append(f"at {rest.at:.0f} s of rest, {rest.unfinished:.0f} requests were unfinished")
    return problems + _memory_leaks(rests) + _file_leaks(rests)


def _memory_leaks(rests: Sequence[Rest]) -> list[str]:
    kept = steady(rests)
    times = [rest.at for rest in kept]
    leaks = []
    for name, values in (
        ("engine", [rest.engine_mb for rest in kept]),
        ("HTTP", [rest.api_mb for rest in kept]),
    ):
        trend = Trend.of(times, values)
        growth = trend.slope * (rests[-1].at - rests[0].at)
        if trend.rises and growth > GROWTH_MB:
            leaks.append(f"memory of the {name} process grows: {growth:+.0f} MB over the soak")
    return leaks


def _file_leaks(rests: Sequence[Rest]) -> list[str]:
    first, last = rests[0], rests[-1]
    return [
        f"descriptors of the {name} process grow: {before} at first, {after} at last"
        for name, before, after in (
            ("engine", first.engine_files, last.engine_files),
            ("HTTP", first.api_files, last.api_files),
        )
        if after > before + SPARE_FILES
    ]
