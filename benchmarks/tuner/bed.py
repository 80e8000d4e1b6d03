"""A table as something to be searched: launches that cost seconds, figures that scatter, bounds to hold."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.tuner.noise import Noise, Offsets
from benchmarks.tuner.tables import Entry, Table
from servers.slo.bounds import COUNTS, Bound
from tuner.runs.load import SHORT_SHARE
from tuner.runs.result import Measurement, Reading

FRESH_RUNS = 8
"""On which a recommendation is judged in the end; those of a confirmation are others."""
START_SPREAD = 0.1
"""Starts take this much more or less than usual."""


class BudgetSpent(Exception):
    """There is no time for another launch."""


class World:
    """The table behind a clock and behind noise. ``seed`` decides on all chance in it."""

    def __init__(self, table: Table, noise: Noise, seed: int) -> None:
        self.table, self.problem = table, table.problem
        self.seconds = 0.0
        self._noise, self._rng = noise, random.Random(f"{table.problem.name}/{seed}")
        self._closed = self.problem.concurrency is not None

    def start(self) -> float:
        """The seconds of a start, which pass."""
        seconds = self.problem.start_seconds * self._rng.uniform(1 - START_SPREAD, 1 + START_SPREAD)
        self.seconds += seconds
        return seconds

    def load(self, entry: Entry, share: float = 1.0) -> None:
        """A load of a run's ``share``, up to its last answer."""
        drain = min(entry.figures.get("e2e_p95", 0.0), self.problem.run_seconds)
        self.seconds += share * self.problem.run_seconds + drain

    def measurements(self, entry: Entry) -> tuple[Measurement, Measurement]:
        """Of one trial: the short rung, and both rungs together."""
        sample = self._noise.sample(self._rng, self._closed)
        seconds, shrink = self.problem.run_seconds, sample.shrink(self._requests(entry))
        return (
            self._measurement(entry, sample.short, shrink, SHORT_SHARE * seconds),
            self._measurement(entry, sample.whole, shrink, seconds),
        )

    def _requests(self, entry: Entry) -> float:
        """Of a run."""
        if self.problem.rate is not None:
            return self.problem.rate * self.problem.run_seconds
        return entry.figures.get("completed", 0.0)

    def _measurement(self, entry: Entry, offsets: Offsets, shrink: float, window: float) -> Measurement:
        readings = {
            name: offsets[name].of(value, shrink) if name in offsets else Reading(value)
            for name, value in entry.figures.items()
        }
        return Measurement(readings, window)

    def fresh(self, flags: Mapping[str, Any], runs: int) -> list[Measurement]:
        """``runs`` new runs of a config, which cost nothing here."""
        entry = self.table.entry(flags)
        return [self._fresh_run(entry) for _ in range(runs)]

    def _fresh_run(self, entry: Entry) -> Measurement:
        sample = self._noise.sample(self._rng, self._closed)
        shrink = sample.shrink(self._requests(entry))
        return self._measurement(entry, sample.whole, shrink, self.problem.run_seconds)

    def misses(self, flags: Mapping[str, Any]) -> bool:
        """Whether a config misses its SLO on fresh runs, of it and of the baseline."""
        if self.table.entry(flags).crash:
            return True
        baseline, candidate = (
            together(self.fresh(config, FRESH_RUNS)) for config in (self.problem.baseline, flags)
        )
        bounds = self.problem.slo.resolve(baseline.value)
        return any(v > 0 for v in candidate.violations(bounds).values())


def together(runs: Sequence[Measurement]) -> Measurement:
    """The geometric mean of every figure, and the sum of counts."""
    readings = {}
    for name in runs[0].readings:
        values = [run.readings[name].value for run in runs]
        positive = name not in COUNTS and all(value > 0 for value in values)
        value = math.exp(sum(map(math.log, values)) / len(values)) if positive else sum(values)
        readings[name] = Reading(value, sum(run.readings[name].n for run in runs))
    return Measurement(readings, sum(run.window for run in runs))


@dataclass(frozen=True)
class Mark:
    """From then on the method would have recommended ``flags``."""

    seconds: float
    launches: int
    flags: Mapping[str, Any]


@dataclass(frozen=True)
class Observation:
    """What a method sees of a launch. ``violations``: by bound, > 0 misses it; empty where nothing serves."""

    flags: Mapping[str, Any]
    crash: str = ""
    value: float = math.nan
    violations: Mapping[str, float] = field(default_factory=dict)

    @property
    def feasible(self) -> bool:
        return not self.crash and all(v <= 0 for v in self.violations.values())


@dataclass
class Ledger:
    """What a search did: every method's is kept alike."""

    seconds: float = 0.0
    launches: int = 0
    crashes: int = 0
    infeasible: int = 0
    """Launches that crashed, or whose config does not truly hold the SLO."""
    marks: list[Mark] = field(default_factory=list)
    recommended: Mapping[str, Any] | None = None


class Bed:
    """What a rival's search works with: single measurements of whole length, the baseline's before all."""

    def __init__(self, world: World) -> None:
        self.world, self.table, self.problem = world, world.table, world.problem
        self.objective = self.problem.slo.objective
        self.ledger = Ledger()
        self.seen: list[Observation] = []
        self.bounds: tuple[Bound, ...] = self.problem.slo.resolve(lambda metric, cls: math.nan)
        self.baseline = self.measure(self.problem.baseline)

    @property
    def best(self) -> Observation | None:
        """The best of those that held the SLO when they were measured."""
        best = None
        for seen in self.seen:
            if seen.feasible and (best is None or self.objective.better(seen.value, best.value)):
                best = seen
        return best

    def loss(self, seen: Observation) -> float:
        """Smaller is better."""
        return seen.value if self.objective.direction == "minimize" else -seen.value

    def start_only(self, flags: Mapping[str, Any]) -> bool:
        """Start a server and stop it; whether it came up."""
        self._afford(self.problem.start_seconds)
        return self._launch(flags) == ""

    def measure(self, flags: Mapping[str, Any]) -> Observation:
        """Start, one run, stop. Raises BudgetSpent where there is no time for that."""
        self._afford(self.problem.start_seconds + self.problem.run_seconds)
        crash = self._launch(flags)
        seen = Observation(flags, crash) if crash else self._observe(flags)
        self.seen.append(seen)
        self._mark()
        return seen

    def again(self, flags: Mapping[str, Any], runs: int) -> list[Observation]:
        """A start and several runs, of a config that was tried before."""
        self._afford(self.problem.start_seconds + runs * self.problem.run_seconds)
        self._launch(flags)
        return [self._observe(flags) for _ in range(runs)]

    def _observe(self, flags: Mapping[str, Any]) -> Observation:
        entry = self.table.entry(flags)
        self.world.load(entry)
        _, whole = self.world.measurements(entry)
        if not self.seen:  # the baseline, which relative bounds are relative to
            self.bounds = self.problem.slo.resolve(whole.value)
        value = whole.value(self.objective.metric, self.objective.cls)
        return Observation(flags, "", value, whole.violations(self.bounds))

    def _afford(self, seconds: float) -> None:
        if self.world.seconds + seconds > self.problem.budget:
            raise BudgetSpent

    def _launch(self, flags: Mapping[str, Any]) -> str:
        self.world.start()
        self.ledger.launches += 1
        crash = self.table.entry(flags).crash
        self.ledger.crashes += bool(crash)
        self.ledger.infeasible += not self.table.feasible(flags)
        return crash

    def _mark(self) -> None:
        best, marks = self.best, self.ledger.marks
        if best is not None and (not marks or marks[-1].flags != best.flags):
            marks.append(Mark(self.world.seconds, self.ledger.launches, best.flags))
