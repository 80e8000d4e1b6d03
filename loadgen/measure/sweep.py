"""Runs at several levels of load: the curve and its knee, and the highest level that still meets bounds.

A level is decided by an interval over repeated runs, not by one run: p99 of the same thing moves by 10 % and
more from run to run. Few runs say little about their own spread, so that all levels share one estimate of it
(of each bound, on the log scale), begun with a prior of :data:`PRIOR_RUNS` runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from scipy.special import stdtrit

from loadgen.measure.estimator import FLOOR_TAIL, floor_of
from loadgen.measure.record import Records
from loadgen.measure.stats import FigureError, Summary
from servers.errors import UserError
from servers.slo.bounds import Bound

Over = Literal["rate", "concurrency"]
Decision = Literal["met", "missed", "undecided"]
MeasureLevel = Callable[[float, int], Records]
"""(level, seed) -> one run."""

PRIOR_RUNS = 4
SPREAD, TAIL_SPREAD = 0.1, 0.2
"""Standard deviation of the log of a figure between runs of one thing, before anything was measured."""
LIMITED = frozenset({"client_limited"})
OVERLOADED = frozenset({"server_saturated", "server_failing"})
_FARTHEST = 12
"""Doublings or halvings in search of both sides of a bound."""


class SweepError(UserError):
    """A sweep cannot answer; the message says why and what to do."""


@dataclass(frozen=True)
class LevelEstimate:
    """A figure over the runs of a level: geometric mean and interval, in its unit."""

    bound: Bound
    value: float
    low: float
    high: float

    @property
    def decision(self) -> Decision:
        """On which side of the limit the whole interval lies."""
        worst, best = (self.high, self.low) if self.bound.op == "<=" else (self.low, self.high)
        if self.bound.violation(worst) <= 0:
            return "met"
        return "missed" if self.bound.violation(best) > 0 else "undecided"


@dataclass(frozen=True)
class Level:
    """The runs at one rate (requests/s) or concurrency, and what they say of the bounds."""

    value: float
    runs: tuple[Records, ...] = field(repr=False)
    estimates: tuple[LevelEstimate, ...]
    saturated: bool
    """Requests piled up, or failed, in most of the runs: no percentile of such a run means anything."""

    @property
    def decision(self) -> Decision:
        """The worst of the bounds'."""
        found = {estimate.decision for estimate in self.estimates}
        if self.saturated or "missed" in found:
            return "missed"
        return "undecided" if "undecided" in found else "met"

    def figure(self, name: str) -> float:
        """Median over the runs; NaN where one is missing."""
        return float(np.median([Summary(run).value(name) for run in self.runs]))

    @property
    def power(self) -> float:
        """Throughput over mean response time (Kleinrock): largest where adding load begins to cost more
        waiting than it brings work. 0 for a saturated level."""
        if self.saturated:
            return 0.0
        power = self.figure("throughput") / self.figure("e2e_mean")
        return power if math.isfinite(power) else 0.0


@dataclass(frozen=True)
class Capacity:
    """The answer of a search. ``levels`` in the order of their load."""

    over: Over
    levels: tuple[Level, ...]
    tolerance: float
    interrupted: bool = False

    @property
    def best(self) -> Level | None:
        """The highest level that is shown to meet the bounds."""
        met = [level for level in self.levels if level.decision == "met"]
        return met[-1] if met else None

    @property
    def limit(self) -> Level | None:
        """The lowest level beyond ``best`` that is not shown to meet them."""
        floor = self.best.value if self.best else 0.0
        return next((lv for lv in self.levels if lv.value > floor and lv.decision != "met"), None)

    @property
    def knee(self) -> Level | None:
        """The level of the greatest power, if there are at least three."""
        return max(self.levels, key=lambda level: level.power) if len(self.levels) >= 3 else None


class Sweep:
    """Measures levels as asked, each up to ``max_runs`` times; every run has a seed of its own.

    ``stop`` is asked before each run. ``told`` is called before a run with (level, which run of it).
    """

    def __init__(
        self,
        measure: MeasureLevel,
        bounds: Sequence[Bound] = (),
        *,
        over: Over = "rate",
        seed: int = 0,
        max_runs: int = 5,
        confidence: float = 0.95,
        stop: Callable[[], bool] = lambda: False,
        told: Callable[[float, int], None] = lambda level, run: None,
    ) -> None:
        if max_runs < 1:
            raise SweepError(f"{max_runs} runs per level: it must be at least 1")
        self._measure, self._bounds, self._over = measure, tuple(bounds), over
        self._seed, self._max_runs, self._confidence = seed, max_runs, confidence
        self._stop, self._told = stop, told
        self._runs: dict[float, list[Records]] = {}

    def curve(self, levels: Sequence[float], repeats: int = 1) -> Capacity:
        """Measure the levels given, ``repeats`` times each, in rounds so that a drift hits all alike."""
        for _ in range(repeats):
            for value in levels:
                if self._stop():
                    return self._capacity(0.0)
                self._run(value)
        return self._capacity(0.0)

    def highest(self, start: float, tolerance: float = 0.1) -> Capacity:
        """The highest level that meets the bounds, to ``tolerance`` (relative).

        Doubles or halves from ``start`` until both sides are known, then bisects on the log scale. A level
        is measured until the interval of every bound is on one side of it; one that ``max_runs`` leave
        undecided counts as not shown. Raises SweepError.
        """
        if not (start > 0 and tolerance > 0):
            raise SweepError(f"start {start:g} and tolerance {tolerance:g} must be positive")
        low, high = 0.0, math.inf
        value = self._rounded(start)
        for _ in range(4 * _FARTHEST):
            decision = self._decide(value)
            if decision is None:
                return self._capacity(tolerance)
            low, high = (value, high) if decision == "met" else (low, value)
            if high == math.inf:
                value = self._rounded(2 * low)
            elif low == 0.0:
                value = self._rounded(high / 2)
            else:
                value = self._rounded(math.sqrt(low * high))
            if low and high / low <= 1 + tolerance:
                break
            if value in (low, high) or value > start * 2**_FARTHEST or value < start / 2**_FARTHEST:
                break
        return self._capacity(tolerance)

    def _rounded(self, value: float) -> float:
        """Rates to three digits, concurrency to whole requests."""
        if self._over == "concurrency":
            return float(max(1, round(value)))
        return float(f"{value:.3g}")

    def _decide(self, value: float) -> Decision | None:
        """Run until decided; None when stopped before."""
        while True:
            if self._stop():
                return None
            self._run(value)
            if self._stop():
                return None
            level = self._level(value)
            if level.decision != "undecided" or len(level.runs) >= self._max_runs:
                return level.decision

    def _run(self, value: float) -> None:
        runs = self._runs.setdefault(value, [])
        self._told(value, len(runs) + 1)
        record = self._measure(value, self._seed + sum(map(len, self._runs.values())))
        if record.partial:
            if not runs:
                del self._runs[value]
            return
        if record.verdict in LIMITED:
            raise SweepError(
                f"at {self._over} {value:g} the client was the limit, not the server "
                f"({'; '.join(record.reasons)}); use --workers, or another machine"
            )
        runs.append(record)

    def _capacity(self, tolerance: float) -> Capacity:
        levels = tuple(self._level(value) for value in sorted(self._runs))
        return Capacity(self._over, levels, tolerance, self._stop())

    def _level(self, value: float) -> Level:
        runs = self._runs[value]
        over = sum(run.verdict in OVERLOADED for run in runs)
        estimates = tuple(self._estimate(bound, value) for bound in self._bounds)
        return Level(value, tuple(runs), estimates, 2 * over > len(runs))

    def _estimate(self, bound: Bound, value: float) -> LevelEstimate:
        figures = [self._figure(bound, run) for run in self._runs[value]]
        if not all(math.isfinite(figure) and figure > 0 for figure in figures):
            worst = math.inf if bound.op == "<=" else 0.0
            return LevelEstimate(bound, worst, worst, worst)
        logs = np.log(figures)
        deviation, freedom = self._spread(bound)
        half = float(stdtrit(freedom, (1 + self._confidence) / 2)) * deviation / math.sqrt(len(logs))
        middle = float(logs.mean())
        return LevelEstimate(bound, math.exp(middle), math.exp(middle - half), math.exp(middle + half))

    def _figure(self, bound: Bound, run: Records) -> float:
        """Raises SweepError where the run is too short for the bound's percentile."""
        summary: Summary = Summary(run)
        try:
            figure = summary.value(bound.metric, bound.cls)
        except FigureError as error:
            raise SweepError(f"{bound.name}: {error}") from None
        if math.isnan(figure):
            raise SweepError(
                f"{bound.name} cannot be told from {summary.count(bound.metric, bound.cls)} samples per run; "
                "make the runs longer (--duration, --num-requests) or bound a lower percentile"
            )
        return figure

    def _spread(self, bound: Bound) -> tuple[float, float]:
        """(standard deviation, degrees of freedom) of the log between runs of one level, pooled over all."""
        prior = TAIL_SPREAD if floor_of(bound.metric) == FLOOR_TAIL else SPREAD
        squares, freedom = PRIOR_RUNS * prior**2, float(PRIOR_RUNS)
        for runs in self._runs.values():
            figures = [self._figure(bound, run) for run in runs]
            if len(figures) > 1 and all(math.isfinite(f) and f > 0 for f in figures):
                logs = np.log(figures)
                squares += float(((logs - logs.mean()) ** 2).sum())
                freedom += len(logs) - 1
        return math.sqrt(squares / freedom), freedom
