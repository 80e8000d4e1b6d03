"""Configs compared at several levels of load, once the study knows a best one (see ``dynamic.py``).

Simulation, where there is one, says first which configs could be best at some level; those are measured as
far as the budget goes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loadgen.target import Target, TargetFailed
from servers.slo.bounds import Bound, metric_label
from servers.slo.objective import Slo
from tuner.runs.load import load_seconds
from tuner.runs.measure import Run, measure
from tuner.runs.replay import ReplayLoad
from tuner.runs.result import Measurement, Reading, TrialResult, without_nan
from tuner.space.space import DRAFTS, Config, Space, config_key, describe_changes
from tuner.study.budget import LOADS_CONFIGS, PAUSE_SECONDS
from tuner.study.dynamic import Curve, Regime, advise, advised, regimes, regimes_json
from tuner.study.optimize import Optimizer
from tuner.study.outcome import Outcome
from tuner.study.trial import ServerFailed, SetupFailed

LOAD_SENSITIVE_KNOBS = (DRAFTS, "max_num_batched_tokens", "max_num_seqs")
"""Knobs whose best value is known to depend on the load, the most sensitive first."""
MAX_CANDIDATES = 7
RUNS_PER_LEVEL = 2
"""Runs of a config at a level, where the budget has time for more than one."""
MAX_TRACE_PARTS = 24
"""Most parts that a trace is divided into."""


@dataclass(frozen=True)
class TracePart:
    """A part of a trace, and which curve is advised for it. Seconds, requests/s."""

    begin: float
    end: float
    rate: float
    best: int


@dataclass(frozen=True)
class Advice:
    """Which config for which load."""

    loads: tuple[float, ...]
    unit: str
    metric: str
    """What is compared."""
    curves: tuple[Curve, ...]
    regimes: tuple[Regime, ...]
    sentence: str
    hours: tuple[TracePart, ...] = ()
    note: str = ""
    """What is predicted only, and why."""

    def to_json(self) -> dict[str, Any]:
        data = {**asdict(self), "regimes": regimes_json(self.regimes, self.curves)}
        return dict(without_nan(data))


def compare_loads(optimizer: Optimizer, outcome: Outcome) -> Advice | None:
    """Advice by load for a study that came to a config; None where no loads are asked for, or none was
    measured. Ctrl-C ends it and keeps what there is. Raises nothing of a server's."""
    levels = optimizer.load_selection.levels(optimizer.profile)
    if len(levels) < 2 or outcome.kind not in ("better", "baseline"):
        return None
    work = _Comparison(optimizer, levels)
    optimizer.observer.phase("other loads")
    candidates = work.candidates(outcome.best)
    with optimizer.spending("simulation"):
        work.simulate(candidates)
    try:
        with optimizer.spending("other loads"):
            work.measure(work.finalists(candidates))
    except KeyboardInterrupt:
        optimizer.observer.note("other loads: interrupted; what was measured counts")
    except SetupFailed as failure:
        optimizer.observer.note(f"other loads: {failure}")
    advice = work.advice()
    if advice is not None:
        optimizer.observer.note(advice.sentence)
    return advice


class _Comparison:
    """What is known of each config at each level, and how to get to know more."""

    def __init__(self, optimizer: Optimizer, levels: Sequence[float]) -> None:
        self.optimizer, self.levels, self.load = optimizer, tuple(levels), optimizer.load
        self.space: Space = optimizer.study.space
        self.metric = optimizer.slo.compared
        self.configs: dict[str, Config] = {}
        self.simulated: dict[str, list[Measurement | None]] = {}
        self.measured: dict[str, list[Measurement | None]] = {}
        self.source = ""

    # Which configs.

    def candidates(self, best: TrialResult | None) -> list[Config]:
        """The recommended one and the baseline first, then the search's next best, and what differs from the
        recommended one in a sensitive knob."""
        baseline = self.space.baseline
        middle = baseline if best is None else best.config
        others = [result.config for result in self.optimizer.study.candidates()[:2]]
        wanted = [middle, baseline, *self._variants(middle), *others]
        unique = {config_key(config): config for config in wanted if not self._refused(config)}
        return list(unique.values())[:MAX_CANDIDATES]

    def _refused(self, config: Config) -> bool:
        return config != self.space.baseline and bool(self.space.refusals(config))

    def _variants(self, middle: Config) -> Iterator[Config]:
        """One sensitive knob moved to the ends and the middle of its ladder."""
        for name in LOAD_SENSITIVE_KNOBS:
            for axis in self.space.axes:
                if axis.name == name:
                    places = dict.fromkeys((0, len(axis.values) // 2, len(axis.values) - 1))
                    for place in places:
                        yield self.space.moved(middle, axis, axis.values[place])

    # What they do.

    def simulate(self, candidates: Sequence[Config]) -> None:
        """Every candidate at every level, where there is a simulator that is not the target itself."""
        if self.optimizer.job.simulated or (simulator := self.optimizer.simulator()) is None:
            return
        self.source = simulator.name
        self.optimizer.observer.step(f"simulating {len(candidates)} configs at {len(self.levels)} loads")
        for config in candidates:
            self.simulated[self._known(config)] = self._simulated(simulator, config)

    def _simulated(self, simulator: Target, config: Config) -> list[Measurement | None]:
        found: list[Measurement | None] = []
        for level in self.levels:
            schedule = self.load.at_level(level, 0)
            try:
                with simulator.open(self.optimizer.flags(config)) as server:
                    run = Run(server.run(schedule), load_seconds(schedule))
            except TargetFailed:
                found.append(None)
                continue
            found.append(measure([run], self.optimizer.slo))
        return found

    def finalists(self, candidates: Sequence[Config]) -> list[Config]:
        """The recommended config, and those that the simulation advises at some level; without one, as many
        as are measured anyway. On a simulated target all, for they cost nothing but patience."""
        if self.optimizer.job.simulated:
            return list(candidates)
        if not self.simulated:
            return list(candidates[:LOADS_CONFIGS])
        curves = self._curves(self.simulated, predicted=True)
        try:
            found = regimes(self.levels, curves, self.metric.direction == "minimize")
        except ValueError:  # nothing of it comes up in the simulation
            return list(candidates[:LOADS_CONFIGS])
        advised_ = [list(self.simulated)[regime.best] for regime in found]
        keys = dict.fromkeys(
            [config_key(candidates[0]), *advised_, config_key(candidates[1 % len(candidates)])]
        )
        return [self.configs[key] for key in keys][:LOADS_CONFIGS]

    def measure(self, configs: Sequence[Config]) -> None:
        """All levels of each config on one server, while the budget lasts; then once more."""
        runs: dict[str, list[list[Run]]] = {}
        for repeat in range(RUNS_PER_LEVEL):
            for config in configs:
                if not self._affords(repeat):
                    return
                key = self._known(config)
                so_far = runs.setdefault(key, [[] for _ in self.levels])
                self._run(config, repeat, so_far)
                slo = self.optimizer.slo
                self.measured[key] = [measure(level, slo) if level else None for level in so_far]

    def _affords(self, repeat: int) -> bool:
        plan, budget = self.optimizer.plan, self.optimizer.job.budget
        if budget is None:
            return repeat == 0
        assert plan is not None, "a study that came to a config had a plan"
        runs = sum(load_seconds(self.load.at_level(level, repeat)) + PAUSE_SECONDS for level in self.levels)
        return self.optimizer.clock.spent + plan.start_seconds + runs <= budget

    def _run(self, config: Config, repeat: int, so_far: list[list[Run]]) -> None:
        optimizer = self.optimizer
        changes = describe_changes(self.space.changes(config)) or "your config"
        try:
            with optimizer.bench.open(optimizer.flags(config)) as server:
                for level, runs in zip(self.levels, so_far, strict=True):
                    schedule = self.load.at_level(level, repeat)
                    optimizer.observer.budget(optimizer.clock.spent, optimizer.job.budget)
                    optimizer.observer.step(
                        f"{changes}: {level:.3g} {self.load.unit}", load_seconds(schedule)
                    )
                    records = optimizer.bench.run(server, schedule)
                    runs.append(Run(records, load_seconds(schedule)))
        except ServerFailed as failure:
            optimizer.observer.note(f"{changes}: {failure}")

    def _known(self, config: Config) -> str:
        key = config_key(config)
        self.configs[key] = config
        return key

    # What comes of it.

    def advice(self) -> Advice | None:
        """From what was measured of two configs or more; else from the simulation, and said to be so."""
        served = {key: found for key, found in self.measured.items() if any(found)}
        predicted = len(served) < 2 and not self.optimizer.job.simulated
        known = self.simulated if predicted else served
        if len(known) < 2:
            return None
        curves = self._curves(known, predicted)
        lower = self.metric.direction == "minimize"
        try:
            found = regimes(self.levels, curves, lower)
        except ValueError:
            return None
        sentence = advise(self.levels, curves, found, self.load.unit, metric_label(self.metric.name))
        note = ""
        if predicted:
            note = f"predicted by {self.source}, not measured: the budget had no time left for it"
            sentence = f"PREDICTED by {self.source}, not measured: {sentence}"
        elif self.simulated:
            curves += self._curves({k: v for k, v in self.simulated.items() if k not in served}, True)
            note = f"dashed: predicted by {self.source}, and advised nowhere, so not measured"
        hours = tuple(_hours(self.load, found)) if isinstance(self.load, ReplayLoad) else ()
        name = self.metric.name
        return Advice(self.levels, self.load.unit, name, tuple(curves), tuple(found), sentence, hours, note)

    def _curves(self, known: Mapping[str, Sequence[Measurement | None]], predicted: bool) -> list[Curve]:
        base = known.get(config_key(self.space.baseline), [None] * len(self.levels))
        curves = []
        for key, measured in known.items():
            config = self.configs[key]
            pairs = list(zip(measured, base, strict=True))
            curves.append(
                Curve(
                    name=describe_changes(self.space.changes(config)) or "your config",
                    flags=self.optimizer.flags(config),
                    readings=tuple(self._reading(one) for one in measured),
                    holds=tuple(_holds(self.optimizer.slo, one, other) for one, other in pairs),
                    predicted=predicted,
                    pressure=tuple(_pressure(self.optimizer.slo, one, other) for one, other in pairs),
                )
            )
        return curves

    def _reading(self, measured: Measurement | None) -> Reading:
        return measured.reading(self.metric.metric, self.metric.cls) if measured else Reading(math.nan)


def _holds(slo: Slo, measured: Measurement | None, baseline: Measurement | None) -> bool:
    if measured is None:
        return False
    return all(violation <= 0 for violation in measured.violations(_bounds(slo, baseline)).values())


def _pressure(slo: Slo, measured: Measurement | None, baseline: Measurement | None) -> Reading:
    """Value over limit of the bound that is nearest to being missed, or missed by most; NaN without one."""
    found = [Reading(math.nan)]
    for bound in _bounds(slo, baseline) if measured else ():
        if bound.limit > 0:
            one = measured.reading(bound.metric, bound.cls) if measured else found[0]
            ends = [edge / bound.limit for edge in (one.value, one.low, one.high)]
            if bound.op == ">=":
                ends = [1 / end if end > 0 else math.nan for end in (ends[0], ends[2], ends[1])]
            found.append(Reading(ends[0], one.n, ends[1], ends[2]))
    return max(found, key=lambda one: -math.inf if math.isnan(one.value) else one.value)


def _bounds(slo: Slo, baseline: Measurement | None) -> tuple[Bound, ...]:
    """Relative ones as what the baseline has at the same load."""
    return slo.bounds if baseline is None else slo.resolve(baseline.value)


def _hours(load: ReplayLoad, found: Sequence[Regime]) -> Iterator[TracePart]:
    """The trace in parts of an hour, or shorter ones where it is short; those in which nothing comes are left
    out."""
    duration = load.trace.duration
    length = max(min(3600.0, duration / 6), duration / MAX_TRACE_PARTS)
    counts: dict[int, int] = {}
    for row in load.trace.rows:
        place = min(int(row.arrival / length), math.ceil(duration / length) - 1)
        counts[place] = counts.get(place, 0) + 1
    for place, count in sorted(counts.items()):
        end = min((place + 1) * length, duration)
        rate = count / (end - place * length)
        yield TracePart(place * length, end, rate, advised(found, rate))
