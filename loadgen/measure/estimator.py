"""The one estimate of what a change does, behind every comparison, proof and confirmation.

The unit is the pair: one run of each config on the same schedule. Requests of one run share its luck (one
cache, one clock frequency, one neighbour on the machine), so an interval over requests is far too narrow. A
figure of a run is taken over its whole schedule, so that both configs answer for the same requests, and the
change is the mean of the pairs' log ratios with Student's interval. ``python -m benchmarks.loadgen.coverage``
counts how often that interval holds the true change: of four pairs, 92 to 98 % for percentiles, means and
tails alike, where drawing pairs and requests again held it in 80 to 99 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy.special import stdtr, stdtrit

from loadgen.measure.record import Records
from loadgen.measure.rounding import significant
from loadgen.measure.stats import COUNTS, RATES, Summary

Verdict = Literal["pass", "regress", "improve", "inconclusive", "invalid"]
TOTALS = ("failed", "backlog")
"""Figures that are compared as totals over the runs: a ratio of zeros says nothing."""
FLOOR_MIDDLE, FLOOR_TAIL = 0.05, 0.15
"""The smallest effect that counts: 5 % for medians, means and rates, 15 % for tails."""
_TAILS = ("_p90", "_p95", "_p99", "_p999", "_es90", "_es95", "_es99", "max_stall")
_MOST = 700.0
"""The largest logarithm of a ratio whose exponential is a number."""


@dataclass(frozen=True)
class Estimate:
    """One figure over pairs of runs: ``a`` and ``b`` are geometric means in the figure's own unit.

    ``ratio`` is B/A with its interval, ``p`` the two-sided chance of such a ratio where nothing differs.

    Where a value is 0, ``a`` and ``b`` are means, and the ratio is 1 + the mean difference / ``a``. Ratio,
    interval and ``p`` are NaN where there is no ratio: totals, failed requests, a figure that no run has.
    """

    figure: str
    pairs: int
    a: float
    b: float
    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan

    @property
    def has_ratio(self) -> bool:
        return not math.isnan(self.ratio)

    @property
    def percent(self) -> str:
        """``-66 % [-72, -58]``, ``12.3 times [1000, 1400]``; both values where there is no ratio."""
        if not self.has_ratio:
            missing = math.isnan(self.a) and math.isnan(self.b)
            return "n/a" if missing else f"{significant(self.a, 3)} -> {significant(self.b, 3)}"
        low, high = (f"{100 * (edge - 1):+.0f}" if edge < 100 else "∞" for edge in (self.low, self.high))
        size = f"{100 * (self.ratio - 1):+.0f} %" if self.ratio < 10 else f"{self.ratio:.1f} times"
        return f"{size} [{low}, {high}]"


def whole(records: Records) -> Records:
    """The run with its whole schedule as the window: a window that begins when the server has filled up
    depends on the server, and the two sides of a pair must answer for the same requests."""
    return replace(records, window=(0.0, records.window[1]))


def estimate_runs(
    figure: str,
    cls: str | None,
    pairs: Sequence[tuple[Summary, Summary]],
    confidence: float = 0.95,
) -> Estimate:
    """What B changes of ``figure`` (see :class:`Summary`), of one class or of all requests.

    The summaries must be of :func:`whole` runs. Raises KeyError for an unknown figure or class.
    """
    name = figure if cls is None else f"{figure}{{class={cls}}}"
    a, b = ([run_value(pair[side], figure, cls) for pair in pairs] for side in (0, 1))
    if figure in TOTALS:
        return Estimate(name, len(pairs), float(sum(a)), float(sum(b)))
    return estimate(name, a, b, confidence)


def run_value(summary: Summary, figure: str, cls: str | None = None) -> float:
    """The figure of one run, however few samples a percentile has: the run is the unit, and both sides have
    as many. Raises KeyError."""
    if figure in (*RATES, *COUNTS):
        return summary.value(figure, cls)
    return summary.statistic(figure, cls)


def samples_needed(figure: str) -> int:
    """Fewest samples per run of which a percentile or shortfall says something beyond the largest of them."""
    return Summary.samples_needed(figure) if figure not in (*RATES, *COUNTS) else 1


def estimate(figure: str, a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> Estimate:
    """Of paired values, one of each side for a pair. One pair gives no interval: 0 to infinity, p = 1.

    Raises ValueError where the sides differ in length.
    """
    values = np.array([a, b], dtype=float)
    pairs = values.shape[1]
    if pairs == 0 or not np.isfinite(values).all():
        return Estimate(figure, pairs, _mean(values[0]), _mean(values[1]))
    if (values > 0).all():
        logs = np.log(values)
        middle_a, middle_b = (float(math.exp(side.mean())) for side in logs)
        mean, low, high, p = _student(logs[1] - logs[0], confidence)
        ratio, low, high = map(_exp, (mean, low, high))
        return Estimate(figure, pairs, middle_a, middle_b, ratio, low, high, p)
    mean_a, mean_b = map(_mean, values)
    if mean_a <= 0:
        return Estimate(figure, pairs, mean_a, mean_b)
    mean, low, high, p = _student((values[1] - values[0]) / mean_a, confidence)
    return Estimate(figure, pairs, mean_a, mean_b, 1 + mean, max(0.0, 1 + low), 1 + high, p)


def estimate_unpaired(
    figure: str, a: Sequence[float], b: Sequence[float], confidence: float = 0.95
) -> Estimate:
    """Of runs that are in no pairs: the difference of the mean logarithms with Welch's interval (Welch 1947).

    One run of a side gives no interval: 0 to infinity, p = 1. Totals have no ratio.
    """
    sides = [np.array(side, dtype=float) for side in (a, b)]
    if figure.partition("{")[0] in TOTALS or not all(len(side) and (side > 0).all() for side in sides):
        return Estimate(figure, min(map(len, sides)), _mean(sides[0]), _mean(sides[1]))
    logs = [np.log(side) for side in sides]
    middle = [float(math.exp(side.mean())) for side in logs]
    mean, low, high, p = _welch(logs[0], logs[1], confidence)
    return Estimate(figure, min(map(len, sides)), middle[0], middle[1], _exp(mean), _exp(low), _exp(high), p)


def _welch(a: np.ndarray, b: np.ndarray, confidence: float) -> tuple[float, float, float, float]:
    """(B's mean - A's, its interval, the two-sided p of "no difference")."""
    mean = float(b.mean() - a.mean())
    if min(len(a), len(b)) < 2:
        return mean, -math.inf, math.inf, 1.0
    parts = [float(side.var(ddof=1)) / len(side) for side in (a, b)]
    error = math.sqrt(sum(parts))
    if error == 0:
        return mean, mean, mean, 1.0 if mean == 0 else 0.0
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(side) - 1) for part, side in zip(parts, (a, b), strict=True)
    )
    margin = float(stdtrit(freedom, (1 + confidence) / 2)) * error
    return mean, mean - margin, mean + margin, 2 * float(stdtr(freedom, -abs(mean) / error))


def _student(differences: np.ndarray, confidence: float) -> tuple[float, float, float, float]:
    """(mean, its interval, the two-sided p of "no difference")."""
    n, mean = len(differences), float(differences.mean())
    if n == 1:
        return mean, -math.inf, math.inf, 1.0
    error = float(differences.std(ddof=1)) / math.sqrt(n)
    margin = float(stdtrit(n - 1, (1 + confidence) / 2)) * error
    t = abs(mean) / error if error > 0 else 0.0 if mean == 0 else math.inf
    return mean, mean - margin, mean + margin, 2 * float(stdtr(n - 1, -t))


def _exp(logarithm: float) -> float:
    return math.inf if logarithm == math.inf else math.exp(min(logarithm, _MOST))


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment: results below alpha contain a false alarm with chance alpha at most."""
    adjusted = [1.0] * len(p_values)
    floor = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        floor = max(floor, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = floor
    return adjusted


def judge_estimate(seen: Estimate, p_adjusted: float, *, alpha: float = 0.05) -> Verdict:
    """A difference counts if it is proven and its size exceeds the figure's floor.

    pass: the interval excludes a worsening beyond the floor. inconclusive: neither is shown.
    """
    worse = -1.0 if rises(seen.figure) else 1.0
    limit = math.log1p(floor_of(seen.figure))
    size = worse * math.log(seen.ratio)
    if p_adjusted < alpha and abs(size) > limit:
        return "regress" if size > 0 else "improve"
    worst = seen.low if rises(seen.figure) else seen.high
    within = worst > 0 and worse * math.log(worst) <= limit
    return "pass" if within else "inconclusive"


def rises(figure: str) -> bool:
    """True for a figure of which more is better."""
    return figure.partition("{")[0] in RATES


def floor_of(figure: str) -> float:
    """The smallest relative change of this figure that counts."""
    return FLOOR_TAIL if any(tail in figure.partition("{")[0] for tail in _TAILS) else FLOOR_MIDDLE


def overall(verdicts: Sequence[Verdict]) -> Verdict:
    """One word for all figures; the worst decides, and nothing measured is invalid."""
    ranking: tuple[Verdict, ...] = ("invalid", "regress", "inconclusive", "improve", "pass")
    return next((verdict for verdict in ranking if verdict in verdicts), "invalid")
