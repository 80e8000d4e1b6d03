"""Intervals of percentiles over few pairs of runs, by sampling pairs and requests again.

A tail percentile of a short run has two modes where the stalls make up about its share of the gaps: it falls
among them or not. Leaving out one run at a time says nothing of such a figure (the jackknife is inconsistent
for quantiles: Efron 1982, "The Jackknife, the Bootstrap and Other Resampling Plans", section 3.4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logit, ndtr, ndtri

from loadgen.measure.distribution import Distribution

Array = NDArray[np.float64]
RESAMPLES = 1000
GRID, REACH = 256, 5.0
"""Values at which shares are counted: so many, evenly over the log odds around the percentile's."""
SEED = 20_260_101


def ratio_interval(
    pairs: Sequence[tuple[Distribution, Distribution]], quantile: float, confidence: float = 0.95
) -> tuple[float, float]:
    """Interval of log(percentile of all B / percentile of all A), of one (A, B) for every pair of runs.

    A resample takes as many pairs as there are, with replacement, and of each run as many requests as it has:
    what varies between runs (how many long prompts there were) and within one. The ends are those percentiles
    of the resamples that make up for the spread between so few pairs, which is short by (n - 1) / n
    (Hesterberg 2015, "What Teachers Should Know About the Bootstrap", section 3.3). Tried on runs of 20
    requests: of 95 % intervals 90 to 100 % hold the true ratio with three pairs, 94 to 99 % with four, 97 to
    100 % with eight.
    """
    n = len(pairs)
    if n < 2 or not all(len(side.values) for pair in pairs for side in pair):
        return -math.inf, math.inf
    rng = np.random.default_rng(SEED)
    chosen = rng.multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    again = [_requests_again(pair, times, rng) for pair, times in zip(pairs, chosen.T, strict=True)]
    a, b = (_percentiles([pair[side] for pair in pairs], again, quantile) for side in (0, 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.log(b) - np.log(a)
    if np.isnan(ratios).any():  # both sides failed, or neither took any time
        return -math.inf, math.inf
    tail = ndtr(math.sqrt(n / (n - 1)) * ndtri((1 - confidence) / 2))
    low, high = np.quantile(ratios, [tail, 1 - tail], method="nearest")
    return float(low), float(high)


def _requests_again(
    pair: tuple[Distribution, Distribution], times: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.int64]:
    """How often each request is in a resample that has the pair so many ``times``: [resamples, requests].

    The same on both sides, which got the same requests: what they differ in by themselves cancels.
    """
    requests = 1 + max(int(side.groups.max()) for side in pair)
    return rng.multinomial(times * requests, np.full(requests, 1 / requests))


def _percentiles(runs: Sequence[Distribution], again: Sequence[NDArray[np.int64]], quantile: float) -> Array:
    """The percentile over all runs, in every resample."""
    values = np.concatenate([run.values for run in runs])
    whole = Distribution.of(values, np.concatenate([run.weights for run in runs]))
    odds = logit(quantile) + np.linspace(-REACH, REACH, GRID)
    grid = np.unique([*(whole.rank(share) for share in expit(odds)), whole.values[-1]])
    below = np.zeros((RESAMPLES, len(grid)))
    for run, times in zip(runs, again, strict=True):
        cell = np.searchsorted(grid, run.values)  # the first value of the grid that is not smaller
        counts = np.zeros((times.shape[1], len(grid)))
        np.add.at(counts, (run.groups, cell), run.weights)
        below += times @ counts.cumsum(axis=1)
    return np.asarray(grid[np.argmax(below >= quantile * below[:, -1:] * (1 - 1e-12), axis=1)])
