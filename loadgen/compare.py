"""Two configs compared by paired, interleaved runs: for the tuner's confirmation, the doctor, the gate."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from loadgen.measure.estimator import (
    TOTALS,
    Estimate,
    Verdict,
    estimate_runs,
    floor_of,
    holm,
    judge_estimate,
    overall,
    run_value,
    samples_needed,
    whole,
)
from loadgen.measure.record import Records
from loadgen.measure.rounding import significant
from loadgen.measure.stats import RATES, FigureError, RequestBound, Summary
from loadgen.plan.workload import Schedule
from loadgen.target import OpenTarget, Target, TargetFailed
from servers.errors import UserError

SCHEMA = "vtune.comparison/1"
Side = Literal["a", "b"]
_ABBA: tuple[tuple[Side, Side], ...] = (("a", "b"), ("b", "a"))
"""Order of the sides in even and odd pairs: a drift of the machine hits both alike."""
_MAY_DIFFER = {"url", "estimate"}
"""What a simulation assumes depends on the config: two devices have a link between them."""
_NO_ROOM = ("out_of_memory", "kv_cache_too_small", "killed")


class Incomparable(UserError):
    """The runs did not do the same thing on the same machine; the message names what differs."""


@dataclass(frozen=True)
class Pair:
    """One run of each side on the schedule of ``seed``."""

    seed: int
    a: Records
    b: Records


@dataclass(frozen=True)
class ComparedMetric:
    """One metric. ``a`` and ``b``: geometric means over the runs (totals for counts), in the metric's unit.

    ``ratio`` is B/A, ``low`` and ``high`` its interval at the comparison's confidence; all three are nan
    where there is no ratio. ``p`` is adjusted over the rows after Holm. ``floor`` is the smallest effect
    that counts.
    """

    metric: str
    a: float
    b: float
    ratio: float
    low: float
    high: float
    p: float
    floor: float
    verdict: Verdict
    note: str = ""

    @property
    def change(self) -> str:
        """As people say it: ``-66 % [-72, -58]``."""
        if math.isnan(self.ratio):
            return "n/a"
        return Estimate(self.metric, 0, self.a, self.b, self.ratio, self.low, self.high).percent


@dataclass(frozen=True)
class Comparison:
    """The answer. ``together``: both servers were up all the time; else they were restarted in turn."""

    verdict: Verdict
    rows: tuple[ComparedMetric, ...]
    pairs: tuple[Pair, ...] = field(repr=False)
    confidence: float = 0.95
    a: Mapping[str, Any] = field(default_factory=dict)
    b: Mapping[str, Any] = field(default_factory=dict)
    together: bool = True
    notes: tuple[str, ...] = ()
    told: str = ""
    """How the runs came about, where not this program made them."""

    def row(self, metric: str) -> ComparedMetric:
        """Raises FigureError for a metric that was not compared."""
        for row in self.rows:
            if row.metric == metric:
                return row
        raise FigureError(f"{metric} was not compared; there is {', '.join(row.metric for row in self.rows)}")

    def to_json(self) -> dict[str, Any]:
        """Plain values, without the runs themselves; nan and infinity become None."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "confidence": self.confidence,
            "together": self.together,
            "a": dict(self.a),
            "b": dict(self.b),
            "seeds": [pair.seed for pair in self.pairs],
            "schedules": [pair.a.schedule_sha256 for pair in self.pairs],
            "rows": [
                {
                    name: None if isinstance(value, float) and not math.isfinite(value) else value
                    for name, value in asdict(row).items()
                }
                for row in self.rows
            ],
            "notes": list(self.notes),
        }

    def table(self) -> list[tuple[str, str, str, str, str]]:
        """Rows of (metric, A, B, change with interval, verdict), the first one the headings."""
        head = ("metric", "A", "B", f"change ({self.confidence:.0%} interval)", "verdict")
        body = [
            (row.metric, _number(row.metric, row.a), _number(row.metric, row.b), row.change, row.verdict)
            for row in self.rows
        ]
        return [head, *body]


def compare(
    target: Target,
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    schedule_for: Callable[[int], Schedule],
    *,
    seeds: Sequence[int],
    metrics: Sequence[str],
    bounds: Sequence[RequestBound] = (),
    confidence: float = 0.95,
    together: bool | None = None,
    time_limit: float | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    stop: threading.Event | None = None,
    b_schedule_for: Callable[[int], Schedule] | None = None,
    restart: bool = False,
    enough: Callable[[Sequence[Pair]], bool] = lambda pairs: False,
) -> Comparison:
    """Run configs ``a`` and ``b`` in pairs, one pair per seed, in the order AB BA AB …, and compare them.

    ``b_schedule_for``: another load for side B, where the load itself is what is compared (half the rate, the
    shared part of prompts first). ``restart``: a server of its own for every run.

    ``together``: both servers stay up and are loaded in turn. None: if the target allows it and both fit;
    else they are restarted in turn: one start per pair. ``time_limit`` in seconds: no pair is begun
    that would probably exceed it (two are made in any case). ``progress`` is called before each run with
    (runs done, runs planned, what comes). ``stop`` ends early; the pair in progress is dropped.
    ``enough`` is asked after every pair whether those so far will do; the caller holds the error of looking
    several times.
    ``bounds`` are those of goodput. A metric may name a class: ``ttft_p95{class=short}``.

    Raises TargetFailed, whose ``side`` says which config, and KeyError for an unknown metric or class.
    """
    figures = [split_metric(metric) for metric in metrics]
    stop = stop or threading.Event()
    began = time.monotonic()
    pairs: list[Pair] = []

    def run(sides: _Sides, side: Side, schedule: Schedule, number: int) -> Records:
        if progress:
            progress(number, 2 * len(seeds), f"pair {number // 2 + 1}, {side.upper()}")
        records = sides.run(side, schedule, stop)
        if number < 2:  # an unknown name should not cost more than a run
            for name, cls in figures:
                run_value(Summary(records, bounds), name, cls)
        return records

    with _Sides(target, {"a": a, "b": b}, together, restart) as sides:
        for index, seed in enumerate(seeds):
            elapsed = time.monotonic() - began
            if index >= 2 and time_limit is not None and elapsed * (index + 1) / index > time_limit:
                break
            first, second = _ABBA[index % 2]
            schedule = schedule_for(seed)
            loads = {"a": schedule, "b": b_schedule_for(seed) if b_schedule_for else schedule}
            runs = {first: run(sides, first, loads[first], 2 * index)}
            if not stop.is_set():
                runs[second] = run(sides, second, loads[second], 2 * index + 1)
            if stop.is_set():
                break
            pairs.append(Pair(seed, runs["a"], runs["b"]))
            if enough(pairs):
                break
    notes = [sides.note] if sides.note else []
    if len(pairs) < len(seeds) and not (pairs and enough(pairs)):
        why = "interrupted" if stop.is_set() else "out of time"
        notes.append(f"{why} after {len(pairs)} of {len(seeds)} pairs")
    result = compare_runs(
        pairs, metrics, bounds=bounds, confidence=confidence, one_load=b_schedule_for is None
    )
    return replace(result, a=dict(a), b=dict(b), together=sides.together, notes=(*notes, *result.notes))


def compare_runs(
    pairs: Sequence[Pair],
    metrics: Sequence[str],
    *,
    bounds: Sequence[RequestBound] = (),
    confidence: float = 0.95,
    one_load: bool = True,
) -> Comparison:
    """Compare runs that exist, e.g. saved ones. ``one_load``: both sides must have sent the same.

    Raises Incomparable, and FigureError for an unknown metric.
    """
    for pair in pairs:
        _check(pair, pairs[0], one_load)
    notes = _invalidating(pairs)
    summaries = [(Summary(whole(pair.a), bounds), Summary(whole(pair.b), bounds)) for pair in pairs]
    rows = _rows(summaries, metrics, confidence) if pairs else ()
    verdict: Verdict = "invalid" if notes else overall([row.verdict for row in rows])
    return Comparison(verdict, rows, tuple(pairs), confidence, notes=tuple(notes))


def _rows(
    summaries: Sequence[tuple[Summary, Summary]], metrics: Sequence[str], confidence: float
) -> tuple[ComparedMetric, ...]:
    """Holm's adjustment is over the metrics that have a p-value."""
    seen = [estimate_runs(*split_metric(metric), summaries, confidence) for metric in metrics]
    adjusted = iter(holm([found.p for found in seen if found.has_ratio]))
    return tuple(
        _row(metric, found, next(adjusted), confidence, summaries)
        if found.has_ratio
        else _row_without_ratio(metric, found, summaries)
        for metric, found in zip(metrics, seen, strict=True)
    )


def _row(
    metric: str,
    seen: Estimate,
    p: float,
    confidence: float,
    summaries: Sequence[tuple[Summary, Summary]],
) -> ComparedMetric:
    verdict = judge_estimate(seen, p, alpha=1 - confidence)
    name, cls = split_metric(metric)
    fewest = min(side.count(name, cls) for pair in summaries for side in pair)
    note = f"of {fewest} samples per run" if fewest < samples_needed(name) else ""
    return ComparedMetric(
        metric, seen.a, seen.b, seen.ratio, seen.low, seen.high, p, floor_of(metric), verdict, note
    )


def _row_without_ratio(
    metric: str, seen: Estimate, summaries: Sequence[tuple[Summary, Summary]]
) -> ComparedMetric:
    name, cls = split_metric(metric)
    if name in TOTALS:
        return _count_row(metric, summaries, seen.a, seen.b)
    missing = [
        f"no figure in {bad} of {len(summaries)} runs of {side}"
        for at, side in enumerate("AB")
        if (bad := sum(not math.isfinite(run_value(pair[at], name, cls)) for pair in summaries))
    ]
    note = "; ".join(missing) + ": failed requests or no samples"
    nan = math.nan
    return ComparedMetric(metric, seen.a, seen.b, nan, nan, nan, nan, floor_of(metric), "inconclusive", note)


def _count_row(
    metric: str, summaries: Sequence[tuple[Summary, Summary]], a: float, b: float
) -> ComparedMetric:
    """Totals: none on side B passes; more than on side A by more than chance is a regression."""
    name, cls = split_metric(metric)
    if name == "failed":
        measured = (
            sum(side.value("measured", cls) for side in sides) for sides in zip(*summaries, strict=True)
        )
        total_a, total_b = measured
        return failures_row(metric, a, total_a, b, total_b)
    nan = math.nan
    verdict: Verdict = "pass" if b <= a else "regress"
    return ComparedMetric(metric, a, b, nan, nan, nan, nan, 0.0, verdict)


def failures_row(metric: str, a: float, total_a: float, b: float, total_b: float) -> ComparedMetric:
    """``a`` failures of ``total_a`` requests against those of B."""
    nan = math.nan
    if b <= a:
        return ComparedMetric(metric, a, b, nan, nan, nan, nan, 0.0, "pass")
    p = _more_failures(int(a), int(total_a), int(b), int(total_b))
    verdict: Verdict = "regress" if p < 0.05 else "inconclusive"
    note = f"of {total_a:.0f} and {total_b:.0f} requests"
    return ComparedMetric(metric, a, b, nan, nan, nan, p, 0.0, verdict, note)


def _more_failures(failed_a: int, total_a: int, failed_b: int, total_b: int) -> float:
    """Fisher's exact test, one-sided: the chance of so many failures on side B if both fail alike."""
    from scipy.stats import hypergeom

    return float(hypergeom.sf(failed_b - 1, total_a + total_b, failed_a + failed_b, total_b))


def split_metric(metric: str) -> tuple[str, str | None]:
    """``ttft_p95{class=short}`` -> ("ttft_p95", "short"). Raises FigureError for another form."""
    match = re.fullmatch(r"(\w+)(?:\{class=([^}]+)\})?", metric)
    if match is None:
        raise FigureError(f"{metric!r} is no metric: write e.g. itl_p99 or ttft_p95{{class=short}}")
    return match[1], match[2]


class _Sides:
    """The two configs, both open at once or one after the other."""

    def __init__(
        self,
        target: Target,
        configs: Mapping[Side, Mapping[str, Any]],
        together: bool | None,
        restart: bool,
    ) -> None:
        self.together = not restart and (not target.exclusive if together is None else together)
        self._restart = restart
        self.note = ""
        self._target, self._configs = target, configs
        self._open: dict[Side, tuple[ExitStack, OpenTarget]] = {}

    def __enter__(self) -> _Sides:
        if self.together:
            try:
                for side in self._configs:
                    self._start(side)
            except TargetFailed as failure:
                self._close()
                if failure.reason not in _NO_ROOM or failure.side == "a":
                    raise
                self.together = False
                self.note = f"both servers at once did not fit ({failure.reason}): restarted in turn"
            except BaseException:
                self._close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def run(self, side: Side, schedule: Schedule, stop: threading.Event) -> Records:
        if self._restart or side not in self._open:
            self._close()
            self._start(side)
        try:
            return self._open[side][1].run(schedule, stop=stop)
        except TargetFailed as failure:
            failure.side = side
            raise

    def _start(self, side: Side) -> None:
        stack = ExitStack()
        try:
            server = stack.enter_context(self._target.open(self._configs[side]))
        except TargetFailed as failure:
            failure.side = side
            raise
        self._open[side] = (stack, server)

    def _close(self) -> None:
        """End every open server, even if ending one of them fails."""
        with ExitStack() as all_of_them:
            while self._open:
                all_of_them.push(self._open.popitem()[1][0])


def _check(pair: Pair, first: Pair, one_load: bool) -> None:
    """Raise Incomparable unless all runs were of one kind."""
    where = f"the runs of seed {pair.seed}"
    if one_load and pair.a.schedule_sha256 != pair.b.schedule_sha256:
        raise Incomparable(
            f"{where} sent different schedules: A {pair.a.schedule} ({pair.a.schedule_sha256[:12]}), "
            f"B {pair.b.schedule} ({pair.b.schedule_sha256[:12]}). Measure both with one workload and seed"
        )
    for run in (pair.a, pair.b):
        reference = first.a.environment
        differing = [
            f"{key} ({reference.get(key)!r} and {run.environment.get(key)!r})"
            for key in sorted({*reference, *run.environment} - _MAY_DIFFER)
            if reference.get(key) != run.environment.get(key)
        ]
        if differing:
            raise Incomparable(f"{where} come from different environments: {', '.join(differing)}")


def _invalidating(pairs: Sequence[Pair]) -> list[str]:
    """Why no verdict may be given at all; empty if it may."""
    if not pairs:
        return ["no pair of runs was completed"]
    return [
        f"seed {pair.seed}, {side}: {'interrupted' if run.partial else '; '.join(run.reasons)}"
        for pair in pairs
        for side, run in (("A", pair.a), ("B", pair.b))
        if run.partial or run.verdict == "client_limited"
    ]


def _number(metric: str, value: float) -> str:
    """Seconds as milliseconds, rates and counts as they are."""
    if math.isnan(value):
        return "n/a"
    if split_metric(metric)[0] in (*TOTALS, *RATES):
        return significant(value)
    return f"{significant(1e3 * value)} ms"
