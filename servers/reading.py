"""What a signal, a flag or an expression is worth: a number, a range, or the reason it has none.

A quantile inside a histogram's first or last bucket is only a bound, and a flag that is not known is only a
guess. Both are kept as intervals, so that a comparison comes out true or false where the interval decides
it, and "cannot tell" where it does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

MissingKind = Literal["metric", "never", "empty", "flag", "assumption", "peers", "elsewhere", "bound"]


@dataclass(frozen=True)
class Missing:
    """A name without a value, and why.

    ``metric``: the server does not expose it; ``never``: nor does any other of its version; ``empty``: it
    does, but nothing was observed in the window;
    ``flag``, ``assumption``: not told; ``peers``: there is no second instance to compare with;
    ``elsewhere``: another exporter, a log, a baseline or a benchmark would say, and none was given;
    ``bound``: the value is known only as a range, and the range does not decide the question.
    """

    name: str
    kind: MissingKind
    why: str


@dataclass(frozen=True)
class Number:
    """``point`` is the best single figure; the truth lies in [low, high]; ``vague`` says why."""

    point: float
    low: float
    high: float
    vague: MissingKind = "bound"

    @classmethod
    def exactly(cls, value: float) -> Number:
        return cls(value, value, value)

    @property
    def exact(self) -> bool:
        return self.low == self.high

    def __add__(self, other: Number) -> Number:
        return Number(self.point + other.point, self.low + other.low, self.high + other.high)

    def __sub__(self, other: Number) -> Number:
        return self + -other

    def __neg__(self) -> Number:
        return Number(-self.point, -self.high, -self.low)

    def __mul__(self, other: Number) -> Number:
        return _corners(self, other, _times)

    def __truediv__(self, other: Number) -> Number:
        """Raises ZeroDivisionError where the divisor's range holds 0."""
        if other.low <= 0 <= other.high:
            raise ZeroDivisionError
        return _corners(self, other, _over)

    def minimum(self, other: Number) -> Number:
        return Number(min(self.point, other.point), min(self.low, other.low), min(self.high, other.high))

    def maximum(self, other: Number) -> Number:
        return Number(max(self.point, other.point), max(self.low, other.low), max(self.high, other.high))

    def exceeds(self, other: Number) -> bool | None:
        """self > other; None where the ranges overlap."""
        if self.low > other.high:
            return True
        return False if self.high <= other.low else None


Reading = Number | Missing


def _corners(a: Number, b: Number, operation: Callable[[float, float], float]) -> Number:
    corners = [operation(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    return Number(operation(a.point, b.point), min(corners), max(corners))


def _times(a: float, b: float) -> float:
    return 0.0 if a == 0 or b == 0 else a * b  # 0 * inf is 0 here: the end points are limits


def _over(a: float, b: float) -> float:
    return 0.0 if math.isinf(b) else a / b
