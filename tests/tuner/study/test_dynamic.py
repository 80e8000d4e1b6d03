"""Where the best config changes with the load: the arithmetic alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.runs.result import Reading
from tuner.study.dynamic import Curve, advise, advised, crossing, regimes, regimes_json

LOADS = (1.0, 4.0, 16.0)
SPECULATION: dict[str, Any] = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}


def exact(*values: float) -> tuple[Reading, ...]:
    return tuple(Reading(value, 100) for value in values)


def about(spread: float, *values: float) -> tuple[Reading, ...]:
    """With intervals of a factor ``spread`` to either side."""
    return tuple(Reading(value, 100, value / spread, value * spread) for value in values)


def curve(readings: tuple[Reading, ...], holds: tuple[bool, ...] = (True,) * 3, **flags: object) -> Curve:
    return Curve(str(flags), flags, readings, holds)


def test_curves_cross_where_their_logarithms_do() -> None:
    """b / a is 2 at 1 and 1/2 at 4: equal in the middle, on logarithmic scales."""
    found = crossing((1.0, 4.0), exact(10, 10), exact(20, 5))
    assert found is not None
    assert found.at == pytest.approx(2.0)
    assert (found.low, found.high) == (pytest.approx(2.0), pytest.approx(2.0)), "exact readings"


def test_the_interval_is_where_the_intervals_of_the_ratio_meet_one() -> None:
    found = crossing((1.0, 4.0), about(1.2, 10, 10), about(1.2, 20, 5))
    assert found is not None
    margin = math.log(1.2) * math.sqrt(2)
    slope = math.log(4) / math.log(4)  # log ratio falls by log 4 over log 4 of load
    assert found.at == pytest.approx(2.0)
    assert found.low == pytest.approx(2.0 * math.exp(-margin / slope))
    assert found.high == pytest.approx(2.0 * math.exp(margin / slope))


def test_an_interval_that_leaves_the_loads_is_open() -> None:
    found = crossing(LOADS, about(3, 10, 10, 10), about(3, 11, 10.1, 9))
    assert found is not None
    assert (found.low, found.high) == (0.0, math.inf)


def test_curves_that_do_not_cross_have_no_crossing() -> None:
    assert crossing(LOADS, exact(1, 1, 1), exact(2, 2, 2)) is None
    assert crossing(LOADS, exact(2, 2, 2), exact(1, 1, 1)) is None
    assert crossing(LOADS, exact(2, 2, 1), exact(1, 1, 2)) is None, "b becomes worse, not better"


def test_more_can_be_better() -> None:
    found = crossing((1.0, 4.0), exact(20, 5), exact(10, 10), lower_is_better=False)
    assert found is not None
    assert found.at == pytest.approx(2.0)


def test_levels_without_a_reading_are_left_out() -> None:
    found = crossing(LOADS, exact(10, math.nan, 10), exact(40, 3, 2.5))
    assert found is not None
    assert found.at == pytest.approx(4.0)


def test_of_several_crossings_the_one_that_is_near() -> None:
    loads = (1.0, 2.0, 4.0, 8.0)
    a, b = exact(10, 10, 10, 10), exact(20, 5, 20, 5)
    near_first, near_last = (crossing(loads, a, b, near=near) for near in (1.0, 8.0))
    assert near_first is not None
    assert near_last is not None
    assert near_first.at < 2 < 4 < near_last.at


@given(st.floats(0.1, 50.0), st.floats(0.2, 3.0), st.floats(1.0, 1.5))
def test_a_crossing_lies_within_its_interval(at: float, slope: float, spread: float) -> None:
    loads = [at * factor for factor in (0.25, 0.5, 1.0, 2.0, 4.0)]
    a = about(spread, *[10.0] * 5)
    b = about(spread, *(10.0 * (load / at) ** -slope for load in loads))
    found = crossing(loads, a, b)
    assert found is not None
    assert found.at == pytest.approx(at)
    assert found.low <= found.at * (1 + 1e-9)
    assert found.high >= found.at * (1 - 1e-9)


# What is advised.


def test_speculation_at_a_low_rate_and_none_at_the_peak() -> None:
    on, off = curve(about(1.05, 10, 18, 60), **SPECULATION), curve(about(1.05, 20, 24, 30))
    found = regimes(LOADS, [off, on])
    assert [regime.best for regime in found] == [1, 0]
    assert 4 < found[0].end < 16
    assert found[0].crossing is not None
    assert found[0].crossing.low < found[0].end < found[0].crossing.high
    sentence = advise(LOADS, [off, on], found, "req/s", "ITL ES99")
    assert f"up to {found[0].end:.3g} req/s (95 % " in sentence
    assert "speculation ngram k=3" in sentence
    assert sentence.endswith("above it no speculation")
    assert [advised(found, load) for load in (0.1, 3.0, 16.0, 99.0)] == [1, 1, 0, 0]


def test_what_is_not_proven_changes_nothing() -> None:
    """15 % at one level, within the noise; and 3 % that is proven, but not worth a change."""
    noisy = [curve(about(1.3, 10, 10, 10)), curve(about(1.3, 8.7, 10, 11.5), a=1)]
    assert len(regimes(LOADS, noisy)) == 1
    small = [curve(exact(10, 10, 10)), curve(exact(9.7, 10, 10.3), a=1)]
    assert len(regimes(LOADS, small)) == 1


def test_one_config_for_every_load_is_said_so() -> None:
    curves = [curve(exact(10, 20, 30)), curve(exact(5, 6, 7), max_num_batched_tokens=256)]
    found = regimes(LOADS, curves)
    assert [regime.best for regime in found] == [1]
    assert advise(LOADS, curves, found, "req/s", "ITL ES99").startswith(
        "By ITL ES99, one config suits every load tried (1 to 16 req/s)"
    )


def test_the_slo_comes_before_the_objective() -> None:
    """The better one misses the SLO at the peak; where both miss it, the better one counts."""
    fast = curve(exact(5, 5, 5), (True, True, False), a=1)
    safe = curve(exact(10, 10, 10), (True, True, True), a=2)
    found = regimes(LOADS, [fast, safe])
    assert [regime.best for regime in found] == [0, 1]
    assert found[0].crossing is not None
    assert (found[0].crossing.low, found[0].crossing.high) == (4.0, 16.0), "somewhere between the levels"
    pressed = replace(fast, pressure=about(1.1, 0.25, 0.5, 2.0))
    edge = regimes(LOADS, [pressed, safe])[0].crossing
    assert edge is not None
    assert edge.at == pytest.approx(8.0), "where the bound is reached: 2x from 4 to 8, 2x from 8 to 16"
    assert edge.low < 8 < edge.high
    never = [curve(c.readings, (False,) * 3, **dict(c.flags)) for c in (fast, safe)]
    assert [regime.best for regime in regimes(LOADS, never)] == [0]


def test_three_regimes_have_two_crossings() -> None:
    loads = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
    curves = [
        curve(exact(1, 1, 9, 9, 9, 9), (True,) * 6, a=1),
        curve(exact(9, 9, 1, 1, 9, 9), (True,) * 6, a=2),
        curve(exact(9, 9, 9, 9, 1, 1), (True,) * 6, a=3),
    ]
    found = regimes(loads, curves)
    assert [regime.best for regime in found] == [0, 1, 2]
    assert [regime.end for regime in found] == [pytest.approx(8**0.5), pytest.approx(128**0.5), math.inf]
    rows = regimes_json(found, curves)
    assert [row["to"] for row in rows][-1] is None
    assert [row["flags"] for row in rows] == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert ", then up to" in advise(loads, curves, found, "req/s", "ITL ES99")


def test_a_config_that_was_not_measured_everywhere_is_advised_only_where_it_was() -> None:
    half = curve(exact(1, math.nan, math.nan), a=1)
    whole = curve(exact(10, 10, 10), a=2)
    assert [regime.best for regime in regimes(LOADS, [half, whole])] == [0, 1]
    with pytest.raises(ValueError, match="nothing was measured"):
        regimes(LOADS, [half])
