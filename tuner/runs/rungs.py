"""When a short measurement is enough: it proves a bound missed, or the incumbent out of reach.

A trial whose run is long enough is measured in two rungs, a short load and a longer one, on the same
schedules for every config. After the short rung a trial ends if a 95 % interval lies wholly on the wrong side
of a bound, or of the incumbent by more than STOP_MARGIN. Bounds that are multiples of the baseline's are
taken on the worse of its short rung and its whole measurement, as either may lack the rare stalls. Rates are
not judged early: a short load consists of ramp-up for a good part.
"""

from __future__ import annotations

import math

from servers.slo.bounds import COUNTS, RATES, Bound, format_value
from servers.slo.objective import Objective
from tuner.runs.result import Measurement

STOP_MARGIN = 0.15
"""Gaps between tokens of one stall are not independent, so an interval is narrower than it should be."""


def reason_to_stop(
    short: Measurement,
    bounds: tuple[Bound, ...],
    objective: Objective,
    incumbent: Measurement | None,
    whole: Measurement | None = None,
) -> str:
    """Why the longer rung is not worth its time; "" when it is.

    ``incumbent``: the best config's short rung; ``whole``: all of its measurement. About one gap in a hundred
    stalls, so that a P99 is either that of stalls or that of steps: a short rung may show the one and the
    whole the other, and then the short one puts nothing out of reach.
    """
    for bound in bounds:
        if proof := _missed(short, bound):
            return proof
    if incumbent is None or objective.metric in RATES:
        return ""
    low = short.reading(objective.metric, objective.cls).low
    best = incumbent.reading(objective.metric, objective.cls)
    known = best.value if whole is None else whole.reading(objective.metric, objective.cls).value
    if math.isnan(best.high) or not low > max(best.value * (1 + STOP_MARGIN), best.high, known):
        return ""  # a best without an upper end of its interval may be worse than it looks
    at_least, has = (format_value(objective.metric, value) for value in (low, best.value))
    return f"out of reach: {objective.name} is at least {at_least} (95 %), the best so far has {has}"


def _missed(short: Measurement, bound: Bound) -> str:
    """A proof that ``bound`` is missed; "" where there is none."""
    reading = short.reading(bound.metric, bound.cls)
    if bound.metric == "failed" and reading.value > bound.limit:
        return f"SLO missed: {reading.value:g} requests failed"
    if bound.metric in RATES + COUNTS or not reading.low > bound.limit:
        return ""
    at_least, limit = (format_value(bound.metric, value) for value in (reading.low, bound.limit))
    return f"SLO missed: {bound.name} is at least {at_least} (95 %), the bound is {limit}"
