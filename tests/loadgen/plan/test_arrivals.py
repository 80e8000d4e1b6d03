"""The acceptance rows for arrivals, on fixed seeds: at least 5,000 of them each."""

from typing import Any

import numpy as np
import pytest
from scipy import stats

from loadgen.plan.arrivals import Arrival, ArrivalError, ClosedLoop, Constant, Gamma, Poisson, Ramp

COUNT = 5000


def draw(arrival: Arrival, seed: int = 7, count: int = COUNT) -> np.ndarray:
    return arrival.times(np.random.default_rng(seed), num_requests=count)


def cv(gaps: np.ndarray) -> float:
    return float(gaps.std() / gaps.mean())


def dispersion(times: np.ndarray, window: float) -> float:
    """Variance over mean of the counts in windows; 1 for a Poisson process."""
    counts = np.histogram(times, np.arange(0.0, times[-1], window))[0]
    assert len(counts) >= 200
    return float(counts.var(ddof=1) / counts.mean())


@pytest.mark.parametrize("rate", [0.5, 7.0, 500.0])
def test_constant_gaps_are_constant(rate: float) -> None:
    times = draw(Constant(rate))
    assert cv(np.diff(times)) < 1e-6
    assert times[0] == 0
    assert np.diff(times).mean() == pytest.approx(1 / rate)


@pytest.mark.parametrize("seed", range(5))
def test_poisson_gaps_are_exponential_and_independent(seed: int) -> None:
    gaps = np.diff(draw(Poisson(10.0), seed), prepend=0.0)
    assert stats.kstest(gaps, "expon", args=(0, 0.1)).pvalue > 0.01
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.05


@pytest.mark.parametrize("seed", range(3))
def test_poisson_counts_are_not_overdispersed(seed: int) -> None:
    times = draw(Poisson(10.0), seed, 100_000)
    assert 0.8 < dispersion(times, 1.0) < 1.2
    assert 0.8 < dispersion(times, 10.0) < 1.2


@pytest.mark.parametrize("burstiness", [0.25, 0.5, 1.0, 2.0, 10.0])
def test_gamma_cv_follows_from_burstiness(burstiness: float) -> None:
    gaps = np.diff(draw(Gamma(10.0, burstiness), count=20_000), prepend=0.0)
    assert cv(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)


def test_ramp_reaches_its_rates() -> None:
    times = Ramp(10.0, 100.0, over=100.0).times(np.random.default_rng(3), duration=200.0)
    first, middle, after = (
        float(((times >= low) & (times < low + 10)).sum() / 10) for low in (0.0, 45.0, 150.0)
    )
    assert first == pytest.approx(14.5, rel=0.25)
    assert middle == pytest.approx(55.0, rel=0.15)
    assert after == pytest.approx(100.0, rel=0.1)


def test_a_flat_ramp_is_a_poisson_process() -> None:
    gaps = np.diff(draw(Ramp(10.0, 10.0, over=5.0)), prepend=0.0)
    assert stats.kstest(gaps, "expon", args=(0, 0.1)).pvalue > 0.01


def test_a_ramp_may_start_at_zero_or_fall() -> None:
    rising = Ramp(0.0, 10.0, over=10.0).times(np.random.default_rng(0), duration=10.0)
    falling = Ramp(10.0, 0.5, over=10.0).times(np.random.default_rng(0), duration=10.0)
    assert rising.mean() > 5.5
    assert falling.mean() < 4.5


def test_a_closed_loop_plans_no_times() -> None:
    times = ClosedLoop(4).times(np.random.default_rng(0), num_requests=10)
    assert times.tolist() == [0.0] * 10


@pytest.mark.parametrize("arrival", [Constant(9.0), Poisson(9.0), Gamma(9.0, 0.5), Ramp(1.0, 9.0, 5.0)])
def test_extent(arrival: Arrival) -> None:
    def times(**extent: Any) -> np.ndarray:
        return arrival.times(np.random.default_rng(1), **extent)

    within = times(duration=20.0)
    assert np.all(np.diff(within) >= 0)
    assert within[0] >= 0
    assert within[-1] < 20
    assert len(times(num_requests=17)) == 17
    assert len(times(num_requests=17, duration=20.0)) == 17
    few = times(num_requests=10_000, duration=20.0)
    assert len(few) < 10_000
    assert few[-1] < 20


def test_the_seed_decides_everything() -> None:
    assert np.array_equal(draw(Poisson(3.0), 1), draw(Poisson(3.0), 1))
    assert not np.array_equal(draw(Poisson(3.0), 1), draw(Poisson(3.0), 2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Constant(0.0),
        lambda: Poisson(-1.0),
        lambda: Poisson(float("nan")),
        lambda: Gamma(1.0, 0.0),
        lambda: Ramp(-1.0, 2.0, 3.0),
        lambda: Ramp(1.0, 2.0, 0.0),
        lambda: ClosedLoop(0),
        lambda: ClosedLoop(1).times(np.random.default_rng(0), duration=5.0),
        lambda: draw(Poisson(1.0), count=0),
        lambda: Poisson(1.0).times(np.random.default_rng(0)),
        lambda: Poisson(1.0).times(np.random.default_rng(0), duration=-5.0),
        lambda: draw(Poisson(1.0), count=10**12),
        lambda: Poisson(1e3).times(np.random.default_rng(0), duration=1e9),
        lambda: Constant(1e3).times(np.random.default_rng(0), duration=1e9),
        lambda: ClosedLoop(1).times(np.random.default_rng(0), num_requests=10**12),
    ],
)
def test_bad_parameters_are_named(make: object) -> None:
    assert callable(make)
    with pytest.raises(ArrivalError):
        make()
