"""Intervals of percentiles over few pairs of runs."""

import math

import numpy as np
import pytest

from loadgen.measure.distribution import Distribution
from tuner.runs.resample import ratio_interval

REQUESTS, TOKENS = 20, 40


def run(rng: np.random.Generator, stall: float, share: float = 0.01) -> Distribution:
    """Gaps of 10 ms, and of ``stall`` seconds for a share of them that chance decides."""
    stalls = rng.random((REQUESTS, TOKENS)) < share
    gaps = np.where(stalls, stall, 0.010) * rng.uniform(0.95, 1.05, stalls.shape)
    return Distribution.of(gaps.ravel(), groups=np.repeat(np.arange(REQUESTS), TOKENS))


def pairs(
    seed: int, n: int, a: float, b: float, share: float = 0.01
) -> list[tuple[Distribution, Distribution]]:
    rng = np.random.default_rng(seed)
    return [(run(rng, a, share), run(rng, b, share)) for _ in range(n)]


def test_a_side_is_as_quick_as_itself() -> None:
    same = [(a, a) for a, _ in pairs(0, 4, 0.5, 0.5)]
    assert ratio_interval(same, 0.99) == (0.0, 0.0)


def test_stalls_that_fall_in_and_out_of_the_percentile_give_a_finite_interval() -> None:
    """A percentile of either side is 10 or some 300 ms, as chance will: no ratio is beyond those."""
    for seed in range(5):
        low, high = ratio_interval(pairs(seed, 4, 0.3, 0.3), 0.99)
        assert -math.log(33) < low <= 0 <= high < math.log(33)


def test_a_stall_that_is_a_third_is_seen_to_be() -> None:
    low, high = ratio_interval(pairs(1, 4, 0.3, 0.1, share=0.05), 0.99)
    assert low < math.log(1 / 3) < high < math.log(0.5)


@pytest.mark.parametrize(("quantile", "n"), [(0.5, 3), (0.5, 8), (0.95, 4)])
def test_the_interval_covers(quantile: float, n: int) -> None:
    """Runs that differ by chance in how slow they are: 95 % of the intervals hold the ratio of 1."""
    rng = np.random.default_rng(7)

    def slow_or_not() -> Distribution:
        return Distribution.of(rng.lognormal(rng.normal(0, 0.2), 0.5, REQUESTS))

    held = 0
    for _ in range(60):
        low, high = ratio_interval([(slow_or_not(), slow_or_not()) for _ in range(n)], quantile)
        held += low <= 0 <= high
    assert held >= 54


def test_one_pair_says_nothing() -> None:
    assert ratio_interval(pairs(0, 1, 0.3, 0.1), 0.99) == (-math.inf, math.inf)
    empty = Distribution.of([])
    assert ratio_interval([(empty, empty)] * 3, 0.5) == (-math.inf, math.inf)


def test_failures_are_infinite() -> None:
    failing = Distribution.of([0.1] * 5 + [math.inf] * 15)
    served = Distribution.of([0.1] * 20)
    assert ratio_interval([(served, failing)] * 4, 0.95) == (math.inf, math.inf)
    assert ratio_interval([(failing, failing)] * 4, 0.95) == (-math.inf, math.inf)
