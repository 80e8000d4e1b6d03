"""The confirmation: the best config against the baseline, in interleaved pairs on seeds new to both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from scipy.special import stdtrit

from loadgen.compare import Comparison
from servers.slo.bounds import COUNTS, LATENCIES, Bound, format_value, name_of
from servers.slo.objective import RelativeBound, Slo
from tuner.runs.measure import QUANTILES, Run, measure
from tuner.runs.resample import ratio_interval
from tuner.runs.result import Measurement, without_nan

MIN_GAIN = 0.05
"""The objective must improve by this much, beside an interval that excludes no improvement."""
GUARD = 0.4
"""So far towards the worse end of its 95 % interval (a chance of 80 % on one side) a bound must still
be held: what is only just held in these runs is missed in every other ones."""


@dataclass(frozen=True)
class Change:
    """One metric on fresh runs: pooled over all runs of each side, and the ratio B/A with its interval."""

    metric: str
    a: float
    b: float
    ratio: float
    low: float
    high: float
    n: int
    """Samples behind ``b``."""

    @property
    def applies(self) -> bool:
        """Whether a bound that is relative to ``a`` says anything: not where the load has no such figure."""
        return not math.isnan(self.a)

    @property
    def percent(self) -> str:
        """``-66 %, 95 % interval -72 … -58``."""
        if math.isnan(self.ratio):
            return "n/a"
        if math.isnan(self.low):
            return f"{100 * (self.ratio - 1):+.0f} %"
        low, high = (f"{100 * (edge - 1):+.0f}" if edge < 100 else "∞" for edge in (self.low, self.high))
        return f"{100 * (self.ratio - 1):+.0f} %, 95 % interval {low} … {high}"

    def __str__(self) -> str:
        return f"{format_value(self.metric, self.a)} -> {format_value(self.metric, self.b)} ({self.percent})"


_LOADED = "the fresh loads leave a backlog with both configs: offer less, to see them keep up"


@dataclass(frozen=True)
class Confirmation:
    """What fresh runs say. ``problems`` empty: the candidate is better, and holds every bound."""

    trial: int
    """The candidate's."""
    changes: tuple[Change, ...]
    problems: tuple[str, ...]
    pairs: int
    together: bool
    notes: tuple[str, ...]
    baseline: Measurement
    candidate: Measurement

    @property
    def confirmed(self) -> bool:
        return not self.problems

    def change(self, name: str) -> Change:
        return next(change for change in self.changes if change.metric == name)

    def surely_holds(self, bounds: Sequence[RelativeBound]) -> bool:
        """Whether the whole of each one's interval does."""
        changes = ((bound, self.change(bound.metric)) for bound in bounds)
        return all(holds(b.on_ratio, c.ratio, c.low, c.high, 1.0) for b, c in changes if c.applies)

    def files(self) -> dict[str, Path]:
        """Directory of each side's records, relative to the output directory."""
        return {side: record_directory(self.trial, side) for side in ("before", "after")}

    def to_json(self) -> dict[str, Any]:
        return dict(without_nan(asdict(self)))


def record_directory(trial: int, side: str) -> Path:
    """Where the runs of a confirmation of ``trial`` are kept; ``side``: before, after."""
    return Path("confirmation") / f"{trial:03d}-{side}"


def assess(
    comparison: Comparison, slo: Slo, seconds: Mapping[int, float], trial: int, baseline_feasible: bool
) -> Confirmation:
    """Judge the pairs of a comparison (A: baseline, B: trial ``trial``) by the SLO.

    ``seconds``: the length of each seed's load.

    Where the baseline itself misses the SLO, holding it is what counts, and no gain is asked of the
    objective.
    """
    a, b = (
        [Run(getattr(pair, side), seconds[pair.seed]) for pair in comparison.pairs] for side in ("a", "b")
    )
    judged = judge_runs(a, b, slo, trial, baseline_feasible)
    return replace(judged, together=comparison.together, notes=(*comparison.notes, *judged.notes))


def judge_runs(
    a: Sequence[Run], b: Sequence[Run], slo: Slo, trial: int, baseline_feasible: bool
) -> Confirmation:
    """As :func:`assess`, of runs that belong together two by two."""
    intervals = _percentile_intervals(slo, a, b)
    return judge(Pooled.of(a, slo), Pooled.of(b, slo), slo, trial, baseline_feasible, intervals)


def judge(
    a: Pooled,
    b: Pooled,
    slo: Slo,
    trial: int,
    baseline_feasible: bool,
    intervals: Mapping[str, tuple[float, float]] = MappingProxyType({}),
) -> Confirmation:
    """As :func:`assess`, of runs that are pooled already. ``intervals``: of the logarithm of the ratio, where
    the samples gave one; else the pools without each pair do.
    """
    changes = {name: _change(name, a, b, intervals.get(name)) for name in compared_metrics(slo)}
    left = _left_by_the_load(slo, a, b) if baseline_feasible else None
    problems = [_missed(bound, b) for bound in slo.bounds if bound is not left]
    problems += [
        _worse(bound, changes[bound.metric]) for bound in slo.relative if changes[bound.metric].applies
    ]
    if baseline_feasible:
        problems.append(_no_gain(slo, changes[slo.objective.name]))
    return Confirmation(
        trial=trial,
        changes=tuple(changes.values()),
        problems=tuple(problem for problem in problems if problem),
        pairs=max(1, len(a.without)),
        together=True,
        notes=(_LOADED,) if left else (),
        baseline=a.whole,
        candidate=b.whole,
    )


@dataclass(frozen=True)
class Pooled:
    """One side's runs measured together, and together without each of them in turn."""

    whole: Measurement
    without: tuple[Measurement, ...]

    @classmethod
    def of(cls, runs: Sequence[Run], slo: Slo) -> Pooled:
        left_out = (measure([*runs[:k], *runs[k + 1 :]], slo) for k in range(len(runs)))
        return cls(measure(runs, slo), tuple(left_out) if len(runs) > 1 else ())


def compared(slo: Slo) -> list[tuple[str, str | None]]:
    """(metric, class): the objective first, then what the SLO bounds, then what everybody asks about."""
    always = ("itl_p50", "itl_p99", "ttft_p50", "ttft_p95", "throughput")
    return list(dict.fromkeys([*slo.metrics, *((metric, None) for metric in always)]))


def compared_metrics(slo: Slo) -> list[str]:
    return [name_of(metric, cls) for metric, cls in compared(slo)]


def _percentile_intervals(slo: Slo, a: Sequence[Run], b: Sequence[Run]) -> dict[str, tuple[float, float]]:
    """By name, of every percentile that is compared."""
    summaries = [[run.summary(slo) for run in runs] for runs in (a, b)]
    found = {}
    for metric, cls in compared(slo):
        family, _, statistic = metric.rpartition("_")
        present = all(cls is None or cls in summary.classes for side in summaries for summary in side)
        if family in LATENCIES and statistic in QUANTILES and present:
            samples = ([summary.distribution(family, cls) for summary in side] for side in summaries)
            pairs = list(zip(*samples, strict=True))
            found[name_of(metric, cls)] = ratio_interval(pairs, QUANTILES[statistic])
    return found


def _change(name: str, a: Pooled, b: Pooled, interval: tuple[float, float] | None = None) -> Change:
    """Pooled values of both sides, and their ratio where there is one."""
    reading = b.whole.readings[name]
    values = (a.whole.readings[name].value, reading.value)
    pairs = [
        values,
        *(
            (x.readings[name].value, y.readings[name].value)
            for x, y in zip(a.without, b.without, strict=True)
        ),
    ]
    if name in COUNTS or not all(0 < value < math.inf for pair in pairs for value in pair):
        return Change(name, *values, math.nan, math.nan, math.nan, reading.n)
    whole, *left_out = (math.log(y / x) for x, y in pairs)
    low, high = interval or _jackknife(whole, left_out)
    return Change(name, *values, math.exp(whole), math.exp(low), math.exp(high), reading.n)


def _jackknife(whole: float, left_out: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Interval of a statistic from its values without each pair: Student's t on Tukey's pseudo-values.

    The unit is the pair of runs, as it must be. For rates and means, which change smoothly with each pair.
    """
    n = len(left_out)
    if n < 2:
        return -math.inf, math.inf
    pseudo = [n * whole - (n - 1) * value for value in left_out]
    mean = sum(pseudo) / n
    error = math.sqrt(sum((value - mean) ** 2 for value in pseudo) / (n - 1) / n)
    margin = float(stdtrit(n - 1, (1 + confidence) / 2)) * error
    return whole - margin, whole + margin


def _left_by_the_load(slo: Slo, a: Pooled, b: Pooled) -> Bound | None:
    """The bound on the backlog, where these loads, unlike the trials', leave the baseline as much of one:
    then arrivals are to blame, and not the candidate."""
    bound = next((bound for bound in slo.bounds if bound.metric == "backlog" and not bound.cls), None)
    if bound is None:
        return None
    own, theirs = (pooled.whole.value(bound.metric) for pooled in (a, b))
    return bound if bound.violation(own) > 0 and theirs <= own else None


def _missed(bound: Bound, b: Pooled) -> str:
    value, *others = (m.value(bound.metric, bound.cls) for m in (b.whole, *b.without))
    low = high = math.nan
    if bound.metric not in COUNTS and all(0 < each < math.inf for each in (value, *others)):
        low, high = map(math.exp, _jackknife(math.log(value), [math.log(other) for other in others]))
    doubt = _doubt(bound, value, low, high)
    return doubt and f"{bound.name} is {format_value(bound.metric, value)}, the SLO asks for {bound}{doubt}"


def _worse(bound: RelativeBound, change: Change) -> str:
    doubt = _doubt(bound.on_ratio, change.ratio, change.low, change.high)
    return doubt and f"{change.metric} {change}, the SLO asks for {bound.op} {bound.note}{doubt}"


def _doubt(bound: Bound, value: float, low: float, high: float) -> str:
    """Why it is not sure that ``bound`` is held by a value with a 95 % interval; "" where it is."""
    if bound.violation(value) > 0:
        return ": missed"
    return "" if holds(bound, value, low, high, GUARD) else ": held too closely to be sure of it"


def holds(bound: Bound, value: float, low: float, high: float, share: float) -> bool:
    """Whether ``bound`` is held ``share`` of the way, in logarithms, from a value to the worse end of its
    interval: by the value alone where there is no interval (NaN), by none whose worse end is open.
    """
    worse = high if bound.op == "<=" else low
    if value > 0 and not math.isnan(worse):
        value *= (worse / value) ** share
    return bound.violation(value) <= 0


def _no_gain(slo: Slo, change: Change) -> str:
    """Why the objective's gain is not proven; "" when it is."""
    lower = slo.objective.direction == "minimize"
    gain, worst = (1 - change.ratio, 1 - change.high) if lower else (change.ratio - 1, change.low - 1)
    if worst > 0 and gain >= MIN_GAIN:
        return ""
    return f"{change.metric} {change}: no proven gain of {100 * MIN_GAIN:g} % or more"
