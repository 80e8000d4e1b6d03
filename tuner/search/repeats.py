"""Configs that were measured more than once: a trial is repeated under another set of requests where it is
close.

All trials share one set of requests, so that they differ by their configs alone; what is best under it need
not be under another. A repeat is compared with the baseline's repeat under the same requests, and counts for
nothing without it: another worker may measure that later, or it did not serve.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from servers.slo.bounds import COUNTS, RATES
from servers.slo.objective import RelativeBound
from tuner.runs.result import BASELINE, Measurement, Reading, TrialResult
from tuner.space.config import config_key


def judge_repeat(
    repeat: TrialResult, own: TrialResult | None, relative: Iterable[RelativeBound]
) -> TrialResult:
    """A repeat, held against the baseline's ``own`` under the same requests; None: not measured so far."""
    if repeat.measurement is None:
        return repeat
    if own is None or own.measurement is None:
        return replace(repeat, judged=False)
    resolved = (bound.resolve(own.measurement.value) for bound in relative)
    bounds = tuple(bound for bound in resolved if not math.isnan(bound.limit))
    violations = {**repeat.violations, **repeat.measurement.violations(bounds)}
    return replace(repeat, violations=violations, judged=True)


def merge_repeats(results: Iterable[TrialResult]) -> tuple[TrialResult, ...]:
    """One result for every config, in the order of the first ones; with repeats, of all measurements.

    Latencies and rates are geometric means, put as if each had been measured under the requests that all
    configs share: a set under which the baseline is slower by a tenth is taken to be harder by a tenth.
    Violations are means; counts are the largest.
    """
    told = tuple(results)
    groups: dict[str, list[TrialResult]] = {}
    for result in told:
        groups.setdefault(config_key(result.config), []).append(result)
    if all(len(group) == 1 for group in groups.values()):
        return told
    baseline = next((config_key(r.config) for r in told if r.origin == BASELINE), "")
    own = {r.request_set: r.measurement for r in groups.get(baseline, ()) if r.measurement}
    return tuple(_together(group, own) for group in groups.values())


def _together(group: list[TrialResult], own: Mapping[int, Measurement]) -> TrialResult:
    whole = [
        r
        for r in group
        if r.status == "measured" and r.measurement and (not r.request_set or r.request_set in own)
    ]
    if len(whole) < 2:
        return next((r for r in group if r.launched), group[0])
    first = whole[0]
    measurements = [_as_shared(r, own) for r in whole]
    assert first.measurement is not None, "only measurements are joined"
    readings = {
        name: _pooled(name, [m.reading(name) for m in measurements]) for name in first.measurement.readings
    }
    window = sum(m.window for m in measurements)
    violations = {
        name: (max if name in COUNTS else _mean)([r.violations[name] for r in whole if name in r.violations])
        for name in first.violations
    }
    return replace(
        first, measurement=replace(first.measurement, readings=readings, window=window), violations=violations
    )


def _as_shared(result: TrialResult, own: Mapping[int, Measurement]) -> Measurement:
    """As if it had been measured under set 0. ``own``: the baseline's measurements, by request set."""
    measured = result.measurement
    assert measured is not None, "only measurements are joined"
    if not result.request_set or 0 not in own:
        return measured
    here, shared = own[result.request_set], own[0]
    factors = {name: _factor(here.reading(name), shared.reading(name)) for name in measured.readings}
    return replace(measured, readings={n: _scaled(r, factors[n]) for n, r in measured.readings.items()})


def _factor(here: Reading, shared: Reading) -> float:
    there = 0 < here.value < math.inf and 0 < shared.value < math.inf
    return shared.value / here.value if there else 1.0


def _scaled(reading: Reading, factor: float) -> Reading:
    return replace(
        reading, value=reading.value * factor, low=reading.low * factor, high=reading.high * factor
    )


def _pooled(name: str, readings: list[Reading]) -> Reading:
    """Independent readings together: their logarithms' mean, whose interval is as much smaller; without one
    where any of them has none. What one of the runs could not measure the others say.
    """
    readings = [r for r in readings if not math.isnan(r.value)] or readings
    values, n = [r.value for r in readings], sum(r.n for r in readings)
    if name in COUNTS or not all(0 < value < math.inf for value in values):
        return Reading(min(values) if name in RATES else max(values), n)
    value = math.exp(_mean([math.log(v) for v in values]))
    low, high = (
        value * math.exp(sign * _width([_distance(end, v) for end, v in ends]))
        for sign, ends in (
            (-1, [(r.low, r.value) for r in readings]),
            (1, [(r.high, r.value) for r in readings]),
        )
    )
    return Reading(value, n, low, high)


def _distance(end: float, value: float) -> float:
    return math.inf if end <= 0 else abs(math.log(end / value))


def _width(widths: list[float]) -> float:
    return math.sqrt(sum(width**2 for width in widths)) / len(widths)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
