"""The Pareto front: the feasible trials that no other beats in ITL, TTFT and throughput together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tuner.runs.result import TrialResult

AXES: Mapping[str, int] = {"itl_es99": 1, "ttft_es95": 1, "throughput": -1}
"""Metric -> 1 where less is better, -1 where more is."""


@dataclass(frozen=True)
class Front:
    """Non-dominated trials, by the first metric; ``knee``: the number of the best compromise."""

    metrics: tuple[str, ...]
    trials: tuple[TrialResult, ...]
    knee: int | None
    """None for an empty front."""

    def values(self, trial: TrialResult) -> tuple[float, ...]:
        assert trial.measurement is not None, "a trial on the front was measured"
        return tuple(trial.measurement.value(metric) for metric in self.metrics)


def pareto_front(results: Iterable[TrialResult], axes: Mapping[str, int] = AXES) -> Front:
    """The front of the feasible trials that have all figures; of two with equal figures the first stays.

    The knee is the point nearest to the ideal one (the best of every figure), in logarithms that are scaled
    to the front's extent (Branke et al. 2004 discuss this and other definitions).
    """
    costs = {r.number: (r, cost) for r in results if r.feasible and (cost := _cost(r, axes)) is not None}
    kept = [
        (result, cost)
        for result, cost in costs.values()
        if not any(_dominates(other, cost, n < result.number) for n, (_, other) in costs.items())
    ]
    kept.sort(key=lambda pair: (pair[1], pair[0].number))
    return Front(tuple(axes), tuple(result for result, _ in kept), _knee(kept))


def _cost(result: TrialResult, axes: Mapping[str, int]) -> tuple[float, ...] | None:
    """Every figure's logarithm, less being better; None where one is missing."""
    assert result.measurement is not None, "a feasible trial was measured"
    values = [result.measurement.value(metric) for metric in axes]
    if not all(0 < value < math.inf for value in values):
        return None
    return tuple(sign * math.log(value) for value, sign in zip(values, axes.values(), strict=True))


def _dominates(a: tuple[float, ...], b: tuple[float, ...], earlier: bool) -> bool:
    """Nowhere worse, and somewhere better; equal ones are dominated by the ``earlier``."""
    return all(x <= y for x, y in zip(a, b, strict=True)) and (a != b or earlier)


def _knee(front: list[tuple[TrialResult, tuple[float, ...]]]) -> int | None:
    if not front:
        return None
    columns = list(zip(*(cost for _, cost in front), strict=True))
    low = [min(column) for column in columns]
    width = [max(column) - min(column) or 1.0 for column in columns]

    def distance(cost: tuple[float, ...]) -> float:
        return math.hypot(*((x - least) / w for x, least, w in zip(cost, low, width, strict=True)))

    return min(front, key=lambda pair: (distance(pair[1]), pair[0].number))[0].number
