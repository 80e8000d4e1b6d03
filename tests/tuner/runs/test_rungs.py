import math
from typing import Any

import pytest

from servers.slo.bounds import Bound
from servers.slo.objective import NO_FAILURE, Objective
from tuner.runs.result import Measurement, Reading
from tuner.runs.rungs import reason_to_stop

ITL = Objective("itl_es99", "minimize")


def short(**readings: Any) -> Measurement:
    return Measurement({name: Reading(*values) for name, values in readings.items()}, window=8.0)


def test_a_bound_that_the_interval_excludes_ends_the_trial() -> None:
    measured = short(ttft_es95=(0.9, 100, 0.7, 1.2))
    reason = reason_to_stop(measured, (Bound("ttft_es95", "<=", 0.5),), ITL, None)
    assert reason == "SLO missed: ttft_es95 is at least 700 ms (95 %), the bound is 500 ms"


def test_a_bound_inside_the_interval_does_not() -> None:
    measured = short(ttft_es95=(0.9, 100, 0.4, 1.2))
    assert reason_to_stop(measured, (Bound("ttft_es95", "<=", 0.5),), ITL, None) == ""


def test_too_few_samples_for_an_interval_prove_nothing() -> None:
    measured = short(ttft_es95=(0.9, 5, math.nan, math.nan))
    assert reason_to_stop(measured, (Bound("ttft_es95", "<=", 0.5),), ITL, None) == ""


def test_a_failed_request_proves_a_miss() -> None:
    measured = short(failed=(1.0, 50))
    assert reason_to_stop(measured, (NO_FAILURE,), ITL, None) == "SLO missed: 1 requests failed"


def test_throughput_is_not_judged_early() -> None:
    measured = short(throughput=(10.0, 50, 9.0, 11.0))
    assert reason_to_stop(measured, (Bound("throughput", ">=", 100),), ITL, None) == ""
    rate = Objective("throughput", "maximize")
    assert reason_to_stop(measured, (), rate, short(throughput=(100.0, 50, 99.0, 101.0))) == ""


@pytest.mark.parametrize(("low", "stops"), [(0.14, True), (0.11, False)])
def test_out_of_reach_of_the_incumbent_needs_an_interval_and_a_margin(low: float, stops: bool) -> None:
    measured = short(itl_es99=(0.2, 1000, low, 0.3))
    reason = reason_to_stop(measured, (), ITL, short(itl_es99=(0.1, 1000, 0.09, 0.11)))
    assert bool(reason) == stops
    assert (
        not stops or reason == "out of reach: itl_es99 is at least 140 ms (95 %), the best so far has 100 ms"
    )


def test_an_incumbent_that_may_be_worse_than_it_looks_stops_nothing() -> None:
    measured = short(itl_es99=(0.2, 1000, 0.14, 0.3))
    assert reason_to_stop(measured, (), ITL, short(itl_es99=(0.1, 1000, 0.09, math.nan))) == ""
    assert reason_to_stop(measured, (), ITL, short(itl_es99=(0.1, 1000, 0.09, 0.15))) == ""


def test_a_short_rung_without_the_stalls_of_the_whole_stops_nothing() -> None:
    """The incumbent's short load met no stall and its whole measurement did: 24 ms, and 312."""
    measured, best = short(itl_es99=(0.05, 1000, 0.045, 0.06)), short(itl_es99=(0.024, 1000, 0.02, 0.03))
    assert reason_to_stop(measured, (), ITL, best).startswith("out of reach")
    assert reason_to_stop(measured, (), ITL, best, short(itl_es99=(0.312, 3000, 0.3, 0.33))) == ""
    assert reason_to_stop(measured, (), ITL, best, short(itl_es99=(0.025, 3000, 0.02, 0.03))) != ""


def test_exactly_the_margin_and_exactly_the_limit_stop_nothing() -> None:
    best = short(itl_es99=(1.0, 1000, 0.9, 1.1))
    assert reason_to_stop(short(itl_es99=(1.5, 1000, 1.15, 2.0)), (), ITL, best) == ""
    assert reason_to_stop(short(itl_es99=(1.5, 1000, 1.16, 2.0)), (), ITL, best) != ""
    measured = short(ttft_es95=(0.9, 100, 0.5, 1.2), failed=(2.0, 50))
    bounds = (Bound("ttft_es95", "<=", 0.5), Bound("failed", "<=", 2))
    assert reason_to_stop(measured, bounds, ITL, None) == ""
