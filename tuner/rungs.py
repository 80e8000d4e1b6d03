"""When a short measurement is enough: it proves that a bound is missed, or that the incumbent is out of
reach.

A trial is measured in two rungs, a short load and a longer one, on the same schedules for every config. After
the short rung a trial ends if a 95 % interval lies wholly on the wrong side of a bound, or of the incumbent
by more than MARGIN. Bounds that are multiples of the baseline's are taken on the baseline's short rung, so
that like is compared with like. Rates are not judged early: a short load consists of ramp-up for a good part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tuner.result import Measurement
from tuner.slo import COUNTS, RATES, Bound, Objective, format_value

SHORT_SHARE = 0.4
MARGIN = 0.15
"""Gaps between tokens of one stall are not independent, so an interval is narrower than it should be."""


@dataclass(frozen=True)
class Rungs:
    """Seconds of load of the two rungs; together they are one measurement."""

    short: float
    rest: float

    @classmethod
    def of(cls, seconds: float) -> Rungs:
        return cls(SHORT_SHARE * seconds, (1 - SHORT_SHARE) * seconds)

    @property
    def seconds(self) -> float:
        return self.short + self.rest


def reason_to_stop(
    short: Measurement, bounds: tuple[Bound, ...], objective: Objective, incumbent: Measurement | None
) -> str:
    """Why the longer rung is not worth its time; "" when it is. ``incumbent``: the best config's short
    rung.
    """
    for bound in bounds:
        if proof := _missed(short, bound):
            return proof
    if incumbent is None or objective.metric in RATES:
        return ""
    reading, best = (
        short.reading(objective.metric, objective.cls),
        incumbent.value(objective.metric, objective.cls),
    )
    worst_hope, needed = _hope(reading.low, reading.high, objective), best
    if math.isnan(worst_hope) or math.isnan(needed):
        return ""
    out = (
        worst_hope > needed * (1 + MARGIN)
        if objective.direction == "minimize"
        else worst_hope < needed / (1 + MARGIN)
    )
    if not out:
        return ""
    metric = objective.metric
    return (
        f"out of reach: {objective.name} is {_side(objective)} {format_value(metric, worst_hope)} (95 %), "
        f"the best so far has {format_value(metric, best)}"
    )


def _missed(short: Measurement, bound: Bound) -> str:
    reading = short.reading(bound.metric, bound.cls)
    if bound.metric in COUNTS:
        if bound.metric == "failed" and reading.value > bound.limit:
            return f"SLO missed: {reading.value:g} requests failed"
        return ""
    if bound.metric in RATES or not reading.low > bound.limit:
        return ""
    at_least = format_value(bound.metric, reading.low)
    return f"SLO missed: {bound.name} is at least {at_least} (95 %), the bound is {format_value(bound.metric, bound.limit)}"


def _hope(low: float, high: float, objective: Objective) -> float:
    return low if objective.direction == "minimize" else high


def _side(objective: Objective) -> str:
    return "at least" if objective.direction == "minimize" else "at most"
