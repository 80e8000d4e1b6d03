"""The confirmation: the best config against the baseline, in interleaved pairs on seeds new to both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from scipy.special import stdtrit

from loadgen.compare import Comparison, Pair
from loadgen.measure.estimator import Estimate, estimate, run_value
from loadgen.measure.stats import Summary
from servers.slo.bounds import COUNTS, Bound, format_value, metric_label, name_of
from servers.slo.objective import RelativeBound, Slo
from tuner.runs.measure import Run, measure
from tuner.runs.result import Measurement, without_nan

MIN_GAIN = 0.05
"""The objective must improve by this much, beside an interval that excludes no improvement."""
LOOKS = (4, 6, 8, 12)
"""Numbers of pairs after which a confirmation may end, beside the most that the time affords. The chance of a
false one is shared out among the looks (Bonferroni): each interval is wider, and all hold together."""
ERROR_RATE = 0.05
"""Chance that any interval of a confirmation does not hold the truth, over all its looks."""
GUARD_SHARE = 0.4
"""So far towards the worse end of its 95 % interval (a chance of 80 % on one side) a bound must still
be held: what is only just held in these runs is missed in every other ones."""


MOST_PAIRS = 64
"""More are never advised."""
_MISSED = ": missed"


@dataclass(frozen=True)
class Confirmation:
    """What fresh runs say. ``problems`` empty: the candidate is better, and holds every bound."""

    trial: int
    """The candidate's."""
    changes: tuple[Estimate, ...]
    problems: tuple[str, ...]
    pairs: int
    together: bool
    notes: tuple[str, ...]
    baseline: Measurement
    candidate: Measurement
    hopeless: bool = False
    """No number of further pairs is likely to prove it: a bound is surely missed, or a gain excluded."""
    missed: bool = False
    """A bound is missed by what the pairs measured, whatever their scatter."""
    pairs_needed: float = 0
    """Pairs that would prove all that these show, were they to scatter as these do; infinite beyond
    MOST_PAIRS."""

    @property
    def settled(self) -> bool:
        """Whether further pairs would change nothing."""
        return self.confirmed or self.hopeless

    @property
    def confirmed(self) -> bool:
        return not self.problems

    def change(self, name: str) -> Estimate:
        return next(change for change in self.changes if change.figure == name)

    def files(self) -> dict[str, Path]:
        """Directory of each side's records, relative to the output directory."""
        return {side: record_directory(self.trial, side) for side in ("before", "after")}

    def to_json(self) -> dict[str, Any]:
        return dict(without_nan(asdict(self)))


def record_directory(trial: int, side: str) -> Path:
    """Where the runs of a confirmation of ``trial`` are kept; ``side``: before, after."""
    return Path("confirmation") / f"{trial:03d}-{side}"


def assess(
    comparison: Comparison,
    slo: Slo,
    seconds: Mapping[int, float],
    trial: int,
    baseline_feasible: bool,
    confidence: float = 0.95,
) -> Confirmation:
    """Judge the pairs of a comparison (A: baseline, B: trial ``trial``) by the SLO.

    ``seconds``: the length of each seed's load. ``confidence``: of every interval.

    Where the baseline itself misses the SLO, in its trial and in these pairs, holding it is what counts, and
    no gain is asked of the objective.
    """
    judged = judge_pairs(comparison.pairs, slo, seconds, trial, baseline_feasible, confidence)
    return replace(judged, together=comparison.together, notes=comparison.notes)


def judge_pairs(
    pairs: Sequence[Pair],
    slo: Slo,
    seconds: Mapping[int, float],
    trial: int,
    baseline_feasible: bool,
    confidence: float = 0.95,
) -> Confirmation:
    """As :func:`assess`, of pairs that are done."""
    a, b = ([Run(getattr(pair, side), seconds[pair.seed]) for pair in pairs] for side in ("a", "b"))
    summaries = list(zip(*([run.summary(slo) for run in runs] for runs in (a, b)), strict=True))
    values = {
        name_of(metric, cls): (
            [_run_value(own, metric, cls) for own, _ in summaries],
            [_run_value(theirs, metric, cls) for _, theirs in summaries],
        )
        for metric, cls in compared(slo)
    }
    return assess_pooled(values, measure(a, slo), measure(b, slo), slo, trial, baseline_feasible, confidence)


Values = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""By figure: what the runs of each side measured, pair by pair."""


def assess_pooled(
    values: Values,
    baseline: Measurement,
    candidate: Measurement,
    slo: Slo,
    trial: int,
    baseline_feasible: bool,
    confidence: float = 0.95,
) -> Confirmation:
    """As :func:`assess`, of figures that are measured already. ``baseline`` and ``candidate``: of all runs of
    each side together."""
    changes = {
        name: Estimate(name, len(b), baseline.readings[name].value, candidate.readings[name].value)
        if name in COUNTS
        else estimate(name, a, b, confidence)
        for name, (a, b) in values.items()
    }
    # In its one trial it may have missed by the draw of the requests alone.
    baseline_feasible |= all(v <= 0 for v in baseline.violations(slo.bounds).values())
    problems = [_missed(bound, candidate, values[bound.name][1], confidence) for bound in slo.bounds]
    problems += [_worse(b, changes[b.metric]) for b in slo.relative if applies(changes[b.metric])]
    if baseline_feasible:
        problems.append(_no_gain(slo, changes[slo.objective.name]))
    return Confirmation(
        trial=trial,
        changes=tuple(changes.values()),
        problems=tuple(problem for problem in problems if problem),
        missed=any(problem.endswith(_MISSED) for problem in problems),
        pairs=max(len(b) for _, b in values.values()),
        together=True,
        notes=(),
        baseline=baseline,
        candidate=candidate,
        hopeless=_hopeless(slo, changes, candidate, baseline_feasible),
        pairs_needed=_pairs_needed(slo, changes, values, confidence, baseline_feasible),
    )


def looks(most: int) -> tuple[int, ...]:
    """After how many pairs a confirmation of at most so many is judged."""
    return (*(pairs for pairs in LOOKS if pairs < most), most)


def confidence_of(most: int) -> float:
    """Of each interval of a confirmation of at most so many pairs."""
    return 1 - ERROR_RATE / len(looks(most))


def _hopeless(
    slo: Slo,
    changes: Mapping[str, Estimate],
    candidate: Measurement,
    baseline_feasible: bool,
) -> bool:
    """Whether requests failed, a bound is missed by the whole of its interval, or a gain that counts is
    beyond the better end of its own."""
    failed = any(
        bound.violation(candidate.value(bound.metric)) > 0 for bound in slo.bounds if bound.metric in COUNTS
    )
    missed = any(
        change.has_ratio and bound.on_ratio.violation(change.low if bound.op == "<=" else change.high) > 0
        for bound in slo.relative
        for change in [changes[bound.metric]]
    )
    main = changes[slo.objective.name]
    none = baseline_feasible and main.has_ratio and _gain(slo, main.low, main.high) < MIN_GAIN
    return failed or missed or none


def _pairs_needed(
    slo: Slo, changes: Mapping[str, Estimate], values: Values, confidence: float, baseline_feasible: bool
) -> float:
    """The most that any bound which these pairs hold, or the gain, asks for."""
    main = changes[slo.objective.name]
    needed = [pairs_for_proof(main, 1.0, confidence)] if baseline_feasible else []
    held = [(changes[bound.metric], bound.on_ratio) for bound in slo.relative]
    for bound in slo.bounds:
        if bound.metric not in COUNTS:
            held.append((_level(bound, values[bound.name][1], confidence), bound))
    needed += [
        pairs_for_proof(change, bound.limit, confidence, GUARD_SHARE)
        for change, bound in held
        if change.has_ratio and bound.violation(change.ratio) <= 0
    ]
    return max(needed, default=0)


def pairs_for_proof(change: Estimate, limit: float, confidence: float, share: float = 1.0) -> float:
    """Pairs of which ``share`` of the interval's half, in logarithms, ends before ``limit``, were they to
    scatter as these do. Infinite beyond MOST_PAIRS, and where these say nothing of the scatter.

    ``confidence``: of the interval of ``change``.
    """
    n = change.pairs
    if n < 2 or not change.low > 0 or not change.high < math.inf:
        return math.inf
    margin = abs(math.log(limit / change.ratio))
    half = math.log(change.high / change.low) / 2
    edge = (1 + confidence) / 2
    spread = half * math.sqrt(n) / float(stdtrit(n - 1, edge))
    enough = (
        k
        for k in range(2, MOST_PAIRS + 1)
        if share * float(stdtrit(k - 1, edge)) * spread / math.sqrt(k) <= margin
    )
    return next(enough, math.inf)


def _gain(slo: Slo, low: float, high: float) -> float:
    """The larger gain of two ratios."""
    return 1 - low if slo.objective.direction == "minimize" else high - 1


def applies(change: Estimate) -> bool:
    """Whether a bound relative to the baseline says anything: not where the load has no such figure."""
    return not math.isnan(change.a)


def compared(slo: Slo) -> list[tuple[str, str | None]]:
    """(metric, class): the objective first, then what the SLO bounds, then what users ask about first."""
    always = ("itl_es99", "itl_p50", "itl_p99", "max_stall_mean", "ttft_p50", "ttft_p95", "throughput")
    return list(dict.fromkeys([*slo.metrics, *((metric, None) for metric in always)]))


def words(change: Estimate) -> str:
    """``412 ms -> 138 ms (-66 % [-72, -58])``."""
    metric = change.figure.partition("{")[0]
    percent = change.percent if change.has_ratio else "n/a"
    return f"{format_value(metric, change.a)} -> {format_value(metric, change.b)} ({percent})"


def _run_value(summary: Summary, metric: str, cls: str | None) -> float:
    """NaN for a class that the run does not have."""
    return run_value(summary, metric, cls) if cls is None or cls in summary.classes else math.nan


def _missed(bound: Bound, candidate: Measurement, values: Sequence[float], confidence: float) -> str:
    """Counts are held by all runs together, other figures by the middle of the runs and its interval."""
    value, low, high = candidate.value(bound.metric, bound.cls), math.nan, math.nan
    if bound.metric not in COUNTS:
        alone = _level(bound, values, confidence)
        if alone.has_ratio:
            value, low, high = alone.b, alone.low, alone.high
    doubt = _doubt(bound, value, low, high)
    seen = f"{metric_label(bound.name)} is {format_value(bound.metric, value)}"
    return doubt and f"{seen}, the SLO asks for {bound}{doubt}"


def _level(bound: Bound, values: Sequence[float], confidence: float) -> Estimate:
    """Of one side's runs alone: the ratio is the figure itself."""
    return estimate(bound.name, [1.0] * len(values), values, confidence)


def _worse(bound: RelativeBound, change: Estimate) -> str:
    doubt = _doubt(bound.on_ratio, change.ratio, change.low, change.high)
    seen = f"{metric_label(change.figure)} {words(change)}"
    return doubt and f"{seen}, the SLO asks for {bound.op} {bound.note}{doubt}"


def _doubt(bound: Bound, value: float, low: float, high: float) -> str:
    """Why it is not sure that ``bound`` is held by a value with a 95 % interval; "" where it is."""
    if bound.violation(value) > 0:
        return _MISSED
    held = holds(bound, value, low, high, GUARD_SHARE)
    return "" if held else ": held, but its interval reaches beyond the limit"


def holds(bound: Bound, value: float, low: float, high: float, share: float) -> bool:
    """Whether ``bound`` is held ``share`` of the way, in logarithms, from a value to the worse end of its
    interval: by the value alone where there is no interval (NaN), by none whose worse end is open.
    """
    worse = high if bound.op == "<=" else low
    if value > 0 and not math.isnan(worse):
        value *= (worse / value) ** share
    return bound.violation(value) <= 0


def _no_gain(slo: Slo, change: Estimate) -> str:
    """Why the objective's gain is not proven; "" when it is."""
    lower = slo.objective.direction == "minimize"
    gain, worst = (1 - change.ratio, 1 - change.high) if lower else (change.ratio - 1, change.low - 1)
    if worst > 0 and gain >= MIN_GAIN:
        return ""
    return f"no gain of {100 * MIN_GAIN:g} % or more is proven"
