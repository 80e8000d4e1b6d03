"""How often the interval of a comparison holds the true change: pairs of runs drawn from known worlds.

    python -m benchmarks.loadgen.coverage [--draws 2000] [--pairs 3,4,8]

Both sides of a pair get the same requests; a run has luck of its own (``between``: the standard deviation of
its logarithm), and nothing differs between the sides, so that the true ratio is 1. Stalled gaps come
independently, or in bursts that a pair's requests share. The tail of the gaps jumps where about one in a
hundred stalls: then a P99 is that of a stall in some runs, and that of a step in others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from loadgen.measure.distribution import Distribution
from loadgen.measure.estimator import estimate

Draw = Callable[[np.random.Generator], tuple[Distribution, Distribution]]
STATISTICS: Mapping[str, Callable[[Distribution], float]] = {
    "p50": lambda samples: samples.rank(0.5),
    "p95": lambda samples: samples.rank(0.95),
    "p99": lambda samples: samples.rank(0.99),
    "es95": lambda samples: samples.shortfall(0.95),
    "es99": lambda samples: samples.shortfall(0.99),
    "mean": Distribution.mean,
}


@dataclass(frozen=True)
class Gaps:
    """Gaps of 10 ms, of which a share stalls for about 300 ms."""

    requests: int
    tokens: int
    share: float
    between: float
    bursts: bool = False

    def __call__(self, rng: np.random.Generator) -> tuple[Distribution, Distribution]:
        shape = (self.requests, 1)
        share = rng.gamma(0.5, 2 * self.share, shape) if self.bursts else np.full(shape, self.share)
        return self._side(rng, share), self._side(rng, share)

    def _side(self, rng: np.random.Generator, share: np.ndarray) -> Distribution:
        stalled = rng.random((self.requests, self.tokens)) < share
        gaps = np.where(stalled, rng.lognormal(np.log(0.3), 0.2, stalled.shape), 0.01)
        gaps = gaps * rng.uniform(0.9, 1.1, gaps.shape) * np.exp(rng.normal(0, self.between))
        return Distribution.of(gaps.ravel(), groups=np.repeat(np.arange(self.requests), self.tokens))


@dataclass(frozen=True)
class Waits:
    """One lognormal sample per request, most of it the request's own."""

    requests: int
    between: float

    def __call__(self, rng: np.random.Generator) -> tuple[Distribution, Distribution]:
        own = rng.lognormal(0, 0.5, self.requests)
        return self._side(rng, own), self._side(rng, own)

    def _side(self, rng: np.random.Generator, own: np.ndarray) -> Distribution:
        luck = rng.lognormal(0, 0.2, self.requests) * np.exp(rng.normal(0, self.between))
        return Distribution.of(own * luck)


WORLDS: Mapping[str, Draw] = {
    "gaps, 1 % stall, 20 requests": Gaps(20, 40, 0.01, 0.05),
    "gaps, 3 % stall, 40 requests": Gaps(40, 80, 0.03, 0.1),
    "gaps in bursts, 1 %, 30 requests": Gaps(30, 60, 0.01, 0.1, bursts=True),
    "gaps in bursts, 3 %, 30 requests": Gaps(30, 60, 0.03, 0.1, bursts=True),
    "waits, 40 requests": Waits(40, 0.1),
    "waits, 100 requests": Waits(100, 0.2),
}


def coverage(world: Draw, pairs: int, draws: int, seed: int = 0) -> dict[str, float]:
    """Share of 95 % intervals that hold the true ratio of 1, by statistic."""
    rng = np.random.default_rng(seed)
    held = dict.fromkeys(STATISTICS, 0)
    for _ in range(draws):
        drawn = [world(rng) for _ in range(pairs)]
        for name, statistic in STATISTICS.items():
            a, b = ([statistic(pair[side]) for pair in drawn] for side in (0, 1))
            seen = estimate(name, a, b)
            held[name] += seen.low <= 1 <= seen.high
    return {name: count / draws for name, count in held.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--pairs", default="3,4,8")
    options = parser.parse_args()
    print(f"{'95 % intervals that hold the truth':36}{'pairs':>6}" + "".join(f"{s:>7}" for s in STATISTICS))
    for pairs in map(int, options.pairs.split(",")):
        for name, world in WORLDS.items():
            shares = coverage(world, pairs, options.draws)
            print(f"{name:36}{pairs:>6}" + "".join(f"{100 * shares[s]:>7.1f}" for s in STATISTICS))


if __name__ == "__main__":
    main()
