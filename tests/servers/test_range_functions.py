"""Prometheus's functions, by hand-computed figures."""

from __future__ import annotations

import math

import numpy as np
import pytest

from servers.metrics import range_functions


def times(*seconds: float) -> range_functions.Times:
    return np.array([round(second * 1000) for second in seconds], dtype=np.int64)


def values(*numbers: float) -> range_functions.Values:
    return np.array(numbers, dtype=float)


def test_increase_without_gaps_at_the_edges_is_the_difference() -> None:
    assert range_functions.increase(times(0, 10, 20), values(5, 7, 11), 0, 20_000) == 6


def test_increase_survives_a_counter_reset() -> None:
    # 5 -> 9, restart, 0 -> 2 -> 3: grown by 4 + 2 + 1
    assert range_functions.increase(times(0, 10, 20, 30), values(5, 9, 2, 3), 0, 30_000) == 7


def test_increase_is_extrapolated_to_the_window() -> None:
    # samples at 5..25 s of a 30 s window; both edges are within 1.1 intervals: 20 s become 30 s
    grown = range_functions.increase(times(5, 15, 25), values(100, 110, 120), 0, 30_000)
    assert grown == pytest.approx(30)


def test_extrapolation_stops_half_an_interval_before_a_gap() -> None:
    # the first sample lies 40 s into the window: only half an interval is granted before it
    grown = range_functions.increase(times(40, 50, 60), values(100, 110, 120), 0, 60_000)
    assert grown == pytest.approx(25)


def test_a_counter_is_not_extrapolated_below_zero() -> None:
    # grew by 20 in 20 s from 2: it was 0 two seconds earlier, not 9
    grown = range_functions.increase(times(9, 19, 29), values(2, 12, 22), 0, 29_000)
    assert grown == pytest.approx(22)


def test_one_sample_has_no_increase() -> None:
    assert range_functions.increase(times(1), values(3), 0, 2000) is None
    assert range_functions.delta(times(1), values(3), 0, 2000) is None
    assert range_functions.deriv(times(1), values(3)) is None


def test_deriv_is_the_regression_slope() -> None:
    assert range_functions.deriv(times(0, 1, 2, 3), values(1, 3, 5, 7)) == pytest.approx(2)


def test_resets_are_counted() -> None:
    assert range_functions.resets(values(1, 2, 0, 1, 0)) == 2


def test_a_subquery_grid_is_aligned_to_its_step() -> None:
    assert range_functions.grid(1_050, 3_000, 500).tolist() == [1500, 2000, 2500, 3000]


def test_instant_values_go_stale_after_five_minutes() -> None:
    at = np.array([500, 1000, 300_999, 301_000], dtype=np.int64)
    seen = range_functions.instant(times(1), values(7), at)
    assert seen[1:3].tolist() == [7, 7]
    assert math.isnan(seen[0])
    assert math.isnan(seen[3])


@pytest.mark.parametrize(
    ("q", "expected"),
    [
        (0.5, (0.15, 0.15, 0.15)),  # rank 5: the middle of the second bucket
        (0.1, (0.05, 0.0, 0.1)),  # in the first bucket: anything up to its bound
        (0.99, (0.2, 0.2, math.inf)),  # beyond the last finite bound: at least that
    ],
)
def test_quantiles_know_where_they_are_only_bounds(q: float, expected: tuple[float, float, float]) -> None:
    buckets = {0.1: 2.0, 0.2: 8.0, math.inf: 10.0}
    assert range_functions.quantile(q, buckets) == pytest.approx(expected)


def test_no_observation_no_quantile() -> None:
    assert range_functions.quantile(0.5, {0.1: 0.0, math.inf: 0.0}) is None
    assert range_functions.quantile(0.5, {0.1: 3.0, 0.2: 3.0}) is None
