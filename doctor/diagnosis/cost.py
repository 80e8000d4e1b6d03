"""What a finding costs the users: seconds that they wait, or tokens that are not made.

Both come down to requests held up at any time, so that findings can be ranked. By Little's law that many
requests, over the rate at which they come, are the seconds that each of them loses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from loadgen.measure.rounding import significant
from servers.expression import Expression, Lookup
from servers.reading import Number

CostUnit = Literal["delay", "tokens", "misplaced"]
NEGLIGIBLE = 0.05
"""Requests held up, below which nothing is said."""
_PACE = ("tpot_mean", "itl_mean")
"""Seconds per token of one stream: what turns tokens lost into requests held up."""


@dataclass(frozen=True)
class Toll:
    """``delay``: request-seconds per second, which are the requests held up at any time. ``rate``: requests
    per second among which these are shared; ``tokens``: output tokens lost per second. None: not known.
    ``misplaced``: the requests are on another engine than they should be, their delay is unknown."""

    delay: float | None
    rate: float | None = None
    tokens: float | None = None
    misplaced: bool = False

    @property
    def per_request(self) -> float | None:
        """Seconds that a request loses."""
        return self.delay / self.rate if self.delay is not None and self.rate else None

    def words(self) -> str | None:
        """For people; None where it is next to nothing."""
        if self.tokens is not None and self.tokens >= 0.5:
            return f"Impact: about {self.tokens:,.0f} output tokens per second lost"
        if self.delay is None or self.delay < NEGLIGIBLE:
            return None
        if self.misplaced:
            return f"Impact: at least {significant(self.delay, 2)} requests on the wrong instance on average"
        plural = "" if 0.95 <= self.delay < 1.05 else "s"
        requests = f"{significant(self.delay, 2)} request{plural} delayed on average"
        if self.per_request is None:
            return f"Impact: about {requests}"
        return f"Impact: about {significant(self.per_request, 2)} s extra latency per request ({requests})"


@dataclass(frozen=True)
class Cost:
    """A playbook's ``cost:``, in requests held up (``delay``), in output tokens per second (``tokens``), or
    in requests that should be elsewhere, or here (``misplaced``)."""

    expression: Expression
    unit: CostUnit = "delay"

    def of(self, lookup: Lookup) -> Toll | None:
        """None where the expression cannot be evaluated."""
        amount = _point(self.expression.value(lookup))
        if amount is None:
            return None
        if self.unit == "misplaced":
            return Toll(amount, misplaced=True)
        rate = _point(lookup("request_rate"))
        if self.unit == "delay":
            return Toll(amount, rate)
        pace = next((seconds for name in _PACE if (seconds := _point(lookup(name)))), None)
        return Toll(None if pace is None else amount * pace, rate, amount)


def total(tolls: Iterable[Toll | None]) -> Toll | None:
    """Of several engines."""
    known = [toll for toll in tolls if toll is not None]
    if not known:
        return None
    return Toll(
        delay=_added(toll.delay for toll in known),
        rate=_added(toll.rate for toll in known),
        tokens=_added(toll.tokens for toll in known),
        misplaced=any(toll.misplaced for toll in known),
    )


def _added(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _point(value: object) -> float | None:
    """The best figure, at least 0; None for what is missing or not finite."""
    if not isinstance(value, Number) or not math.isfinite(value.point):
        return None
    return max(value.point, 0.0)
