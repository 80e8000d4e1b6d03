"""Every objective, held against what the server's own metrics measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from doctor.diagnosis.judged_objectives import MISSED, JudgedObjectives
from doctor.metrics.signals import SIGNALS, Mean, OverTime, Quantile, Signal
from servers.reading import Missing, Number, Reading
from servers.slo.bounds import Bound, family_of, format_value

_QUANTILES: Mapping[str, float] = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_HISTOGRAMS = ("ttft", "itl", "tpot", "e2e")
_RATES: Mapping[str, Signal] = {
    "throughput": SIGNALS["generation_rate"],
    "request_rate": Signal(
        "finished_rate", "1/s", "requests finished per second", (OverTime("finished", "rate"),)
    ),
}
_OF_CLIENTS = "only a client can measure it; see vtune bench run --slo"


@dataclass(frozen=True)
class ObjectiveJudgement:
    """One objective on one engine; ``held`` is None where it cannot be judged."""

    bound: Bound
    origin: str
    """As the user wrote it, or "default"."""
    instance: str
    signal: str
    """The figure that decides: another one of the latency where its own is not known."""
    reading: Reading
    """Seconds, or per second."""
    query: str
    held: bool | None
    excused: bool = False
    """Nothing was asked of the server that it did not give: where it cannot be judged, that is no fault."""
    bucket: tuple[float, float] | None = None
    """The bounds between which a histogram has the figure."""

    @property
    def is_own(self) -> bool:
        """Whether the figure is the one that the objective bounds."""
        figure = figure_of(self.bound.metric)
        return figure is None or figure.name == self.signal

    @property
    def excess(self) -> float:
        """How far the figure is from the limit, on the wrong side; -inf where there is none."""
        return self.bound.violation(self.reading.point) if isinstance(self.reading, Number) else -math.inf

    @property
    def remark(self) -> str:
        """Why it cannot be judged, or with what reservation it is."""
        if isinstance(self.reading, Missing):
            return self.reading.why
        if self.bucket is None:
            return "" if self.held is not None else "no request waited: no more may have been asked for"
        low, high = self.bucket
        if not low < self.bound.limit < high:
            return ""
        shown = [format_value(self.bound.metric, bound) for bound in (low, high)]
        return f"its bucket is {shown[0]} to {shown[1]}"


def any_missed(name: str, judged: Iterable[ObjectiveJudgement]) -> Reading:
    """1 or 0 for a name of :data:`MISSED`; what is missing where an objective cannot be judged."""
    own = [one for one in judged if family_of(one.bound.metric) in MISSED[name]]
    if any(one.held is False for one in own):
        return Number.exactly(1.0)
    for one in own:
        if one.held is None and not one.excused:
            kind = one.reading.kind if isinstance(one.reading, Missing) else "bound"
            return Missing(one.bound.metric, kind, one.remark)
    return Number.exactly(0.0)


def signals_of(objectives: JudgedObjectives) -> list[Signal]:
    """The figures that the objectives are held against."""
    found = (figure_of(bound.metric) for bound in objectives.bounds)
    return [signal for signal in found if signal is not None]


def histograms_of(objectives: JudgedObjectives) -> list[str]:
    """The catalog's keys of the histograms that these figures come from."""
    families = dict.fromkeys(family_of(bound.metric) for bound in objectives.bounds)
    return [family for family in families if family in _HISTOGRAMS]


def figure_of(metric: str) -> Signal | None:
    """None for what no server measures."""
    if metric in _RATES:
        return _RATES[metric]
    if metric in SIGNALS:
        return SIGNALS[metric]
    family, _, statistic = metric.rpartition("_")
    if family not in _HISTOGRAMS or (statistic != "mean" and statistic not in _QUANTILES):
        return None
    node = Mean(family) if statistic == "mean" else Quantile(_QUANTILES[statistic], family)
    return Signal(metric, "s", f"{statistic} of {family}", (node,))


@dataclass(frozen=True)
class Measured:
    """What one engine's metrics say: readings and queries by signal, finite bucket bounds by histogram."""

    instance: str
    readings: Mapping[str, Reading]
    queries: Mapping[str, str]
    buckets: Mapping[str, Sequence[float]]

    def point(self, name: str) -> float | None:
        reading = self.readings[name]
        return reading.point if isinstance(reading, Number) else None

    def bucket(self, signal: str, number: Number) -> tuple[float, float] | None:
        """Between which bounds a histogram has a quantile; None for what is no quantile of one."""
        bounds = self.buckets.get(family_of(signal), ())
        if not _rank(signal) or not bounds:
            return None
        if not number.exact:
            return number.low, number.high
        below = max((bound for bound in bounds if bound < number.point), default=0.0)
        return below, min(bound for bound in bounds if bound >= number.point)

    def within(self, signal: str, number: Number, limit: float) -> bool | None:
        """Whether a figure is at most ``limit``.

        Where the limit lies inside the figure's bucket, the interpolated value counts if within: most of
        a tail lies at the beginning of a bucket. Beyond the limit, nothing is said.
        """
        low, high = self.bucket(signal, number) or (number.point, number.point)
        if high <= limit or (number.point <= limit and math.isfinite(high)):
            return True
        return False if low >= limit else None

    @property
    def idle(self) -> bool:
        return self.point("running_max") == 0 and self.point("waiting_max") == 0

    def served(self, family: str) -> bool:
        """Whether a latency was not observed because none was due: tokens come, and nothing waits."""
        due = family in ("ttft", "itl") and self.point("waiting_max") == 0
        return due and bool(self.point("generated"))


def judgements(objectives: JudgedObjectives, measured: Measured) -> tuple[ObjectiveJudgement, ...]:
    """Every objective on one engine."""
    return tuple(_judge(bound, objectives.origin(bound), measured) for bound in objectives.bounds)


def _judge(bound: Bound, origin: str, measured: Measured) -> ObjectiveJudgement:
    signal = figure_of(bound.metric)
    if signal is None:
        missing = Missing(bound.metric, "elsewhere", _OF_CLIENTS)
        return ObjectiveJudgement(bound, origin, measured.instance, bound.metric, missing, "", None)
    judge = _judged_rate if bound.op == ">=" else _judged_latency
    name, held, excused = judge(bound, signal.name, measured)
    reading = measured.readings[name]
    bucket = measured.bucket(name, reading) if isinstance(reading, Number) else None
    return ObjectiveJudgement(
        bound, origin, measured.instance, name, reading, measured.queries[name], held, excused, bucket
    )


def _judged_rate(bound: Bound, signal: str, measured: Measured) -> tuple[str, bool | None, bool]:
    """A rate may be low because little is asked for: it is missed only while requests wait."""
    value, waiting = measured.point(signal), measured.point("waiting_mean")
    if value is None:
        return signal, None, measured.idle
    if value >= bound.limit:
        return signal, True, False
    short = waiting is not None and waiting >= 1
    return signal, False if short else None, waiting is not None


def _judged_latency(bound: Bound, signal: str, measured: Measured) -> tuple[str, bool | None, bool]:
    """By its own figure. Without one, by a higher quantile that is within, or a lower one or the
    mean that is beyond."""
    own, family = measured.readings[signal], family_of(signal)
    if isinstance(own, Number):
        return signal, measured.within(signal, own, bound.limit), False
    rank = _rank(signal)
    for name in [*(f"{family}_{statistic}" for statistic in _QUANTILES), f"{family}_mean"]:
        other = measured.readings.get(name)
        if isinstance(other, Number) and rank:
            within = measured.within(name, other, bound.limit)
            if (within is True and _rank(name) > rank) or (within is False and _rank(name) < rank):
                return name, within, False
    return signal, None, measured.idle or (own.kind == "empty" and measured.served(family))


def _rank(signal: str) -> float:
    """Of a quantile; 0 for the mean, which half of the observations may exceed."""
    return _QUANTILES.get(signal.rpartition("_")[2], 0.0)
