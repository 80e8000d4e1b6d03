"""Samples, their percentiles and their intervals.

Percentiles are order statistics (nearest rank), never interpolated: failures count as infinity, and
there is nothing between a number and infinity. A percentile that the sample is too small for is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def min_samples(quantile: float) -> int:
    """Fewest samples of which the largest is above the ``quantile`` with 95 % confidence: 1 - q^n >= 0.95.

    p90: 29, p95: 59, p99: 299, p99.9: 2,995.
    """
    return math.ceil(math.log(0.05) / math.log(quantile)) if 0 < quantile < 1 else 1


def binomial_quantile(share: float, n: int, p: float) -> int:
    """The smallest k with P(X <= k) >= ``share`` for X binomial of ``n`` and ``p``.

    As ``scipy.stats.binom.ppf``, whose module takes a second to import: longer than most reports.
    """
    from scipy.special import bdtr, bdtrik

    k = math.ceil(bdtrik(share, n, p))
    return k - 1 if k >= 1 and bdtr(k - 1, n, p) >= share else k


def rank_test(a: Sequence[float], b: Sequence[float]) -> float:
    """The two-sided p of the Mann-Whitney U test: whether one of two samples tends to be larger.

    By the normal approximation, with corrections for ties and continuity: for 10 samples or more each. As
    ``scipy.stats.mannwhitneyu``, whose module takes half a second to import.
    """
    m, n = len(a), len(b)
    _, places, counts = np.unique(np.concatenate([a, b]), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]  # ties share the mean of their ranks
    u = float(ranks[:m].sum()) - m * (m + 1) / 2
    ties = float((counts.astype(float) ** 3 - counts).sum()) / ((m + n) * (m + n - 1))
    deviation = math.sqrt(m * n / 12 * (m + n + 1 - ties))
    if not deviation:
        return 1.0
    z = (max(u, m * n - u) - m * n / 2 - 0.5) / deviation
    return min(math.erfc(z / math.sqrt(2)), 1.0)


@dataclass(frozen=True)
class Distribution:
    """Samples in seconds, sorted. ``weights``: how many samples each stands for; ``groups``: the
    request each came from (gaps of one request are not independent of each other)."""

    values: Array
    weights: Array
    groups: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        values: Sequence[float] | Array,
        weights: Sequence[float] | Array | None = None,
        groups: Sequence[int] | NDArray[np.int64] | None = None,
    ) -> Distribution:
        """``groups`` None: every sample is its own."""
        array = np.asarray(values, dtype=np.float64)
        order = np.argsort(array, kind="stable")
        weight = np.ones(len(array)) if weights is None else np.asarray(weights, dtype=np.float64)
        group = np.arange(len(array)) if groups is None else np.asarray(groups, dtype=np.int64)
        return cls(array[order], weight[order], group[order])

    @cached_property
    def _cumulative(self) -> Array:
        return np.cumsum(self.weights)

    @cached_property
    def finite(self) -> Distribution:
        """Without failures."""
        known = np.isfinite(self.values)
        return Distribution(self.values[known], self.weights[known], self.groups[known])

    @property
    def count(self) -> int:
        """Samples, weights counted."""
        return round(float(self.weights.sum()))

    @cached_property
    def _group_weights(self) -> Array:
        """The weight of each request's samples, by request."""
        return np.bincount(self.groups, self.weights).astype(np.float64, copy=False)

    @cached_property
    def independent(self) -> bool:
        """One sample per request."""
        return len(self.groups) == 0 or int(np.bincount(self.groups).max()) == 1

    def rank(self, quantile: float) -> float:
        """The order statistic at ``quantile``, however few samples; NaN without any."""
        if not len(self.values):
            return math.nan
        target = quantile * self._cumulative[-1]
        index = int(np.searchsorted(self._cumulative, target * (1 - 1e-12), side="left"))
        return float(self.values[min(index, len(self.values) - 1)])

    def percentile(self, quantile: float) -> float:
        """NaN when there are fewer than :func:`min_samples` samples."""
        return self.rank(quantile) if self.count >= min_samples(quantile) else math.nan

    def shortfall(self, quantile: float) -> float:
        """Expected shortfall: the mean of the slowest 1 - ``quantile`` of the samples; NaN without any.

        Unlike the percentile it moves smoothly with every slow sample, however few there are (Rockafellar and
        Uryasev 2002, "Conditional value-at-risk for general loss distributions"; Acerbi and Tasche 2002).
        Infinite where a failed request is among them.
        """
        if not len(self.values):
            return math.nan
        beyond = np.clip(self._cumulative - quantile * self._cumulative[-1], 0.0, self.weights)
        slowest = beyond > 1e-12 * self._cumulative[-1]
        if not slowest.any():
            return float(self.values[-1])
        return float(self.values[slowest] @ beyond[slowest] / beyond[slowest].sum())

    def mean(self) -> float:
        """Over what did not fail."""
        finite = np.isfinite(self.values)
        weights = self.weights[finite]
        weight = weights.sum()
        # Not by BLAS: from 10,000 samples on its threads would keep every core busy.
        return float((self.values[finite] * weights).sum() / weight) if weight else math.nan

    def interval(self, quantile: float, confidence: float = 0.95) -> tuple[float, float]:
        """Confidence interval of the percentile; an end that the sample cannot give is 0 or infinity.

        Independent samples: the exact binomial order-statistic interval. Several samples per request:
        Woodruff's interval, with the variance of the share below the percentile taken between requests.
        """
        if not len(self.values) or self.count < min_samples(quantile):
            return math.nan, math.nan
        if self.independent:
            return self._binomial_interval(quantile, confidence)
        return self._woodruff_interval(quantile, confidence)

    def shortfall_interval(self, quantile: float, confidence: float = 0.95) -> tuple[float, float]:
        """Confidence interval of :meth:`shortfall`, from how much requests differ in what they add to it.

        Student's t on its influence function, requests as clusters, on the logarithm. An end that the sample
        cannot give is 0 or infinity; NaN where there are fewer than :func:`min_samples` samples.
        """
        from scipy.special import stdtrit

        if not len(self.values) or self.count < min_samples(quantile):
            return math.nan, math.nan
        middle, threshold = self.shortfall(quantile), self.rank(quantile)
        present = self._group_weights > 0
        clusters = int(present.sum())
        if clusters < 2 or not math.isfinite(middle):
            return (threshold if math.isinf(middle) else 0.0), math.inf
        finite = np.where(np.isfinite(self.values), self.values, threshold)
        excess = np.maximum(finite - threshold, 0.0) / (1 - quantile) + threshold - middle
        by_request = np.bincount(self.groups, excess * self.weights)[present]
        error = math.sqrt(clusters / (clusters - 1) * float(by_request @ by_request)) / self._cumulative[-1]
        factor = math.exp(min(float(stdtrit(clusters - 1, (1 + confidence) / 2)) * error / middle, 700.0))
        return middle / factor, middle * factor

    def _binomial_interval(self, quantile: float, confidence: float) -> tuple[float, float]:
        n, tail = len(self.values), (1 - confidence) / 2
        low = binomial_quantile(tail, n, quantile)  # 1-based rank; 0: below every sample
        high = binomial_quantile(1 - tail, n, quantile) + 1
        return (
            float(self.values[low - 1]) if low >= 1 else 0.0,
            float(self.values[high - 1]) if high <= n else math.inf,
        )

    def _woodruff_interval(self, quantile: float, confidence: float) -> tuple[float, float]:
        from scipy.special import stdtrit

        present = self._group_weights > 0
        clusters = int(present.sum())
        if clusters < 2:
            return 0.0, math.inf
        total = float(self.weights.sum())
        below = (self.values <= self.rank(quantile)) * self.weights
        share = below.sum() / total
        residual = (np.bincount(self.groups, below) - share * self._group_weights)[present]
        error = math.sqrt(clusters / (clusters - 1) * float(residual @ residual)) / total
        # Between requests that are all alike the estimate can vanish; it is never below independence.
        error = max(error, math.sqrt(quantile * (1 - quantile) / total))
        half = float(stdtrit(clusters - 1, (1 + confidence) / 2)) * error
        return (
            self.rank(quantile - half) if quantile > half else 0.0,
            self.rank(quantile + half) if quantile + half < 1 else math.inf,
        )
