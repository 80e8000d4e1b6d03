"""When requests are sent: arrival processes. Times are seconds after the start, fixed before it.

Every process draws from one ``numpy.random.Generator``; nothing is re-anchored, skipped or
recomputed while the load runs, so a schedule is the same for one client process or several.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from servers.errors import UserError

Times = NDArray[np.float64]
MAX_REQUESTS = 10_000_000
"""Planned ahead, every one of them."""


class ArrivalError(UserError):
    """A parameter of an arrival process breaks a rule; the message names it and the fix."""


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ArrivalError(f"{name} is {value}: it must be a positive number")


class Arrival(ABC):
    """A rule for intended send times.

    Contract of :meth:`times`: non-decreasing, >= 0, float64 seconds; with ``num_requests`` exactly
    that many, with ``duration`` all that fall in [0, duration), with both whichever ends first.
    """

    concurrency: int | None = None
    """Requests in flight at most; None is a true open loop."""

    @abstractmethod
    def times(
        self, rng: np.random.Generator, *, num_requests: int | None = None, duration: float | None = None
    ) -> Times: ...

    @property
    @abstractmethod
    def description(self) -> str:
        """One line for the report."""


def _check_extent(num_requests: int | None, duration: float | None, rate: float = 0.0) -> None:
    if num_requests is None and duration is None:
        raise ArrivalError("neither a number of requests nor a duration is given: give one of them")
    if num_requests is not None and num_requests < 1:
        raise ArrivalError(f"the number of requests is {num_requests}: it must be at least 1")
    if duration is not None:
        _positive("the duration", duration)
    expected = num_requests if num_requests is not None else rate * (duration or 0.0)
    if expected > MAX_REQUESTS:
        raise ArrivalError(
            f"{expected:,.0f} requests are more than can be planned ahead ({MAX_REQUESTS:,}): lower the "
            "rate, the duration or the number of requests"
        )


def _renewal(
    gaps: Callable[[int], Times], rate: float, num_requests: int | None, duration: float | None
) -> Times:
    """Cumulative sum of ``gaps(n)``, drawn in blocks until the extent is covered."""
    _check_extent(num_requests, duration, rate)
    if num_requests is not None:
        times = np.cumsum(gaps(num_requests))
        return times if duration is None else times[times < duration]
    assert duration is not None
    block = max(16, int(rate * duration * 1.1))
    times = np.cumsum(gaps(block))
    while times[-1] < duration:
        times = np.concatenate([times, times[-1] + np.cumsum(gaps(block))])
    return times[times < duration]


@dataclass(frozen=True)
class Constant(Arrival):
    """One request every 1/rate seconds, the first at 0."""

    rate: float

    def __post_init__(self) -> None:
        _positive("the rate", self.rate)

    def times(
        self, rng: np.random.Generator, *, num_requests: int | None = None, duration: float | None = None
    ) -> Times:
        _check_extent(num_requests, duration, self.rate)
        within = math.inf if duration is None else math.ceil(duration * self.rate)
        count = int(min(within, math.inf if num_requests is None else num_requests))
        return np.arange(count, dtype=np.float64) / self.rate

    @property
    def description(self) -> str:
        return f"open loop, constant {self.rate:g} req/s"


@dataclass(frozen=True)
class Gamma(Arrival):
    """Gamma-distributed gaps with mean 1/rate and shape ``burstiness``, as ``vllm bench serve`` has it.

    The coefficient of variation of the gaps is 1/sqrt(burstiness): 1 is Poisson, below 1 comes in
    bursts, above 1 is more even.
    """

    rate: float
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        _positive("the rate", self.rate)
        _positive("burstiness", self.burstiness)

    def times(
        self, rng: np.random.Generator, *, num_requests: int | None = None, duration: float | None = None
    ) -> Times:
        scale = 1.0 / (self.rate * self.burstiness)
        return _renewal(
            lambda n: rng.gamma(self.burstiness, scale, size=n), self.rate, num_requests, duration
        )

    @property
    def description(self) -> str:
        return f"open loop, gamma {self.rate:g} req/s, burstiness {self.burstiness:g}"


@dataclass(frozen=True)
class Poisson(Arrival):
    """Independent exponential gaps with mean 1/rate."""

    rate: float

    def __post_init__(self) -> None:
        _positive("the rate", self.rate)

    def times(
        self, rng: np.random.Generator, *, num_requests: int | None = None, duration: float | None = None
    ) -> Times:
        return _renewal(lambda n: rng.exponential(1.0 / self.rate, size=n), self.rate, num_requests, duration)

    @property
    def description(self) -> str:
        return f"open loop, Poisson {self.rate:g} req/s"


@dataclass(frozen=True)
class PoissonWindow(Arrival):
    """A Poisson process of ``rate`` that is known to bring N requests in N/rate seconds.

    Given their number, the times of a Poisson process are N independent uniform ones in order (Ross,
    "Introduction to Probability Models", theorem 5.2). Forty gaps that are drawn one after the other last 16
    to 34 s where 24 are expected: the load that is offered differs as much from run to run.
    """

    rate: float

    def __post_init__(self) -> None:
        _positive("the rate", self.rate)

    def times(
        self, rng: np.random.Generator, *, num_requests: int | None = None, duration: float | None = None
    ) -> Times:
        _check_extent(num_requests, duration, self.rate)
        count = num_requests if num_requests is not None else round(self.rate * (duration or 0.0))
        times = np.sort(rng.uniform(0.0, count / self.rate, size=count))
        return times if duration is None else times[times < duration]

    @property
    def description(self) -> str:
        return f"open loop, Poisson {self.rate:g} req/s, as many in every run"


@dataclass(frozen=True)
class Ramp(Arrival):
    """A Poisson process whose rate goes linearly from ``start`` to ``end`` over ``over`` seconds, then stays.

    Drawn by inverting the cumulative intensity L(t) = start t + (end - start) t^2 / (2 over).
    """

    start: float
    end: float
    over: float

    def __post_init__(self) -> None:
        _positive("the end rate", self.end)
        _positive("the length of the ramp", self.over)
        if not (math.isfinite(self.start) and self.start >= 0):
            raise ArrivalError(f"the start rate is {self.start}: it must not be negative")

    def times(
        self, rng: np.random.Generator, *, num_requests: int | None = None, duration: float | None = None
    ) -> Times:
        _check_extent(num_requests, duration)
        horizon = None if duration is None else self._cumulative(duration)
        unit = _renewal(lambda n: rng.exponential(1.0, size=n), 1.0, num_requests, horizon)
        return self._inverse(unit)

    def _cumulative(self, t: float) -> float:
        ramp = min(t, self.over)
        return self.start * ramp + (self.end - self.start) * ramp**2 / (2 * self.over) + self.end * (t - ramp)

    def _inverse(self, cumulative: Times) -> Times:
        slope, full = (self.end - self.start) / self.over, self._cumulative(self.over)
        inside = np.minimum(cumulative, full)
        # The root of slope/2 t^2 + start t = L in the form that stays exact for slope -> 0.
        denominator = self.start + np.sqrt(np.maximum(self.start**2 + 2 * slope * inside, 0.0))
        ramp = np.divide(2 * inside, denominator, out=np.zeros_like(inside), where=denominator > 0)
        return ramp + np.maximum(cumulative - full, 0.0) / self.end

    @property
    def description(self) -> str:
        return f"open loop, Poisson ramp {self.start:g} to {self.end:g} req/s over {self.over:g} s"


@dataclass(frozen=True)
class ClosedLoop(Arrival):
    """``concurrency`` slots; each sends its next request when its last one has ended.

    All planned times are 0: the client takes the moment a slot became free as the intended time.
    """

    concurrency: int = 1

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ArrivalError(f"the concurrency is {self.concurrency}: it must be at least 1")

    def times(
        self, rng: np.random.Generator, *, num_requests: int | None = None, duration: float | None = None
    ) -> Times:
        """All at once, one per request. Raises ArrivalError without a number of requests."""
        if num_requests is None:
            raise ArrivalError(
                "a closed loop has no rate: give a number of requests, the duration may end it"
            )
        _check_extent(num_requests, duration)
        return np.zeros(num_requests, dtype=np.float64)

    @property
    def description(self) -> str:
        return f"closed loop, concurrency {self.concurrency}"
