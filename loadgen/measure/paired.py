"""Statistics of paired runs: the unit is the run, never the request.

Requests of one run share its luck (one cache, one clock frequency, one neighbour on the machine), so an
interval over them is far too narrow. A pair is one run of each side on the same schedule, and its log
ratio one sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import stdtr, stdtrit

Verdict = Literal["pass", "regress", "improve", "inconclusive", "invalid"]

FLOOR_MIDDLE, FLOOR_TAIL = 0.05, 0.15
"""The smallest effect that counts: 5 % for medians, means and rates, 15 % for tails."""
_TAILS = ("_p90", "_p95", "_p99", "_p999", "max_stall")
_RATES = ("throughput", "request_rate", "goodput")


@dataclass(frozen=True)
class Effect:
    """The ratio B/A over pairs, with its interval and the two-sided p-value of "no difference"."""

    pairs: int
    a: float
    b: float
    ratio: float
    low: float
    high: float
    p: float


def paired_effect(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> Effect:
    """Student's t on the log ratios of the pairs. All values must be positive and finite.

    ``a`` and ``b`` of the result are geometric means, so that their quotient is the ratio. One pair gives no
    interval: 0 to infinity, p = 1. Raises ValueError on values that have no logarithm or on unequal lengths.
    """
    values = np.array([a, b], dtype=float)
    if values.shape[1] == 0 or not (np.isfinite(values).all() and (values > 0).all()):
        raise ValueError(f"ratios need positive, finite values, got {list(a)} and {list(b)}")
    logs = np.log(values)
    differences = logs[1] - logs[0]
    n, mean = len(differences), float(differences.mean())
    middle_a, middle_b = (float(math.exp(side.mean())) for side in logs)
    if n == 1:
        return Effect(1, middle_a, middle_b, math.exp(mean), 0.0, math.inf, 1.0)
    error = float(differences.std(ddof=1)) / math.sqrt(n)
    margin = float(stdtrit(n - 1, (1 + confidence) / 2)) * error
    t = abs(mean) / error if error > 0 else 0.0 if mean == 0 else math.inf
    p = 2 * float(stdtr(n - 1, -t))
    low, high = math.exp(mean - margin), math.exp(min(mean + margin, 700.0))
    return Effect(n, middle_a, middle_b, math.exp(mean), low, high, p)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment: results below alpha contain a false alarm with chance alpha at most."""
    adjusted = [1.0] * len(p_values)
    floor = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        floor = max(floor, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = floor
    return adjusted


def judge(effect: Effect, p_adjusted: float, *, floor: float, rises: bool, alpha: float = 0.05) -> Verdict:
    """``rises``: larger is better. A difference counts if it is proven and its size exceeds ``floor``.

    pass: the interval excludes a worsening beyond the floor. inconclusive: neither is shown.
    """
    worse = -1.0 if rises else 1.0
    limit = math.log1p(floor)
    size = worse * math.log(effect.ratio)
    if p_adjusted < alpha and abs(size) > limit:
        return "regress" if size > 0 else "improve"
    worst = effect.low if rises else effect.high
    within = worst > 0 and worse * math.log(worst) <= limit
    return "pass" if within else "inconclusive"


def rises(metric: str) -> bool:
    """True for a metric of which more is better."""
    return metric.partition("{")[0] in _RATES


def floor_of(metric: str) -> float:
    """The smallest relative change of this metric that counts."""
    return FLOOR_TAIL if any(tail in metric.partition("{")[0] for tail in _TAILS) else FLOOR_MIDDLE


def overall(verdicts: Sequence[Verdict]) -> Verdict:
    """One word for all metrics; the worst decides, and nothing measured is invalid."""
    ranking: tuple[Verdict, ...] = ("invalid", "regress", "inconclusive", "improve", "pass")
    return next((verdict for verdict in ranking if verdict in verdicts), "invalid")
