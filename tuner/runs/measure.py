"""From the runs of one config to one measurement: samples of all rungs together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from loadgen.measure import stats
from loadgen.measure.record import Records
from loadgen.measure.stats import Summary
from servers.slo.bounds import LATENCIES, RATES, name_of
from servers.slo.objective import Slo
from tuner.runs.result import Measurement, Reading

REPORTED_LATENCIES = (
    "itl_p50",
    "itl_p99",
    "itl_es99",
    "inter_chunk_p99",
    "ttft_p50",
    "ttft_p95",
    "ttft_es95",
    "tpot_p50",
    "max_stall_mean",
    "max_stall_p99",
    "e2e_p95",
)
"""Latencies that every report shows, whatever the SLO."""
SHOWN_RATES = ("throughput", "request_rate", "goodput")
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
SHORTFALLS = {"es95": 0.95, "es99": 0.99}


@dataclass(frozen=True)
class Run:
    """One load of ``seconds`` and what it recorded."""

    records: Records
    seconds: float

    @property
    def whole(self) -> Records:
        """The records with the load's whole length as their window.

        A run on its own is best judged on the part in which the server was steady, which depends on the
        server. Configs that are compared on one schedule must answer for the same requests over the same
        time.
        """
        return replace(self.records, window=(0.0, self.seconds))

    def summary(self, slo: Slo) -> stats.Summary:
        """The figures of the whole, with what ``slo`` asks of each request as goodput.

        Made once for each such bounds: a confirmation measures its runs together, without each in turn, and
        their percentiles run by run.
        """
        bounds = goodput_bounds(slo)
        if bounds not in self._summaries:
            self._summaries[bounds] = Summary(self.whole, bounds)
        return self._summaries[bounds]

    @cached_property
    def _summaries(self) -> dict[tuple[stats.RequestBound, ...], stats.Summary]:
        return {}


def measure(runs: Sequence[Run], slo: Slo) -> Measurement:
    """The figures that ``slo`` and the report need, over all ``runs`` together.

    A percentile of fewer samples than its 95 % statement needs is still given, as an estimate without an
    interval: the search compares configs on equal schedules, and the confirmation pools more. The reading
    holds its n.
    """
    summaries = [run.summary(slo) for run in runs]
    wanted = [
        *slo.metrics,
        *((metric, None) for metric in (*REPORTED_LATENCIES, *SHOWN_RATES, "failed", "completed")),
    ]
    pools = _Pools(summaries)
    readings = {name_of(metric, cls): _reading(pools, metric, cls) for metric, cls in dict.fromkeys(wanted)}
    verdicts = dict.fromkeys(run.records.verdict for run in runs if run.records.verdict not in ("", "ok"))
    return Measurement(readings, sum(run.seconds for run in runs), ", ".join(verdicts) or "ok")


def goodput_bounds(slo: Slo) -> tuple[stats.RequestBound, ...]:
    """The SLO's latency bounds as what goodput asks of each request."""
    return tuple(stats.RequestBound(metric, limit, cls) for metric, cls, limit in slo.per_request)


def pooled(summaries: Sequence[stats.Summary], metric: str, cls: str | None = None) -> stats.Distribution:
    """All samples of several runs; requests of different runs stay apart."""
    parts = [s.distribution(metric, cls) for s in summaries if cls is None or cls in s.classes]
    if len(parts) == 1:
        return parts[0]
    offset, groups = 0, []
    for part in parts:
        groups.append(part.groups + offset)
        offset += int(part.groups.max()) + 1 if len(part.groups) else 0
    if not parts:
        return stats.Distribution.of([])
    return stats.Distribution.of(
        np.concatenate([p.values for p in parts]),
        np.concatenate([p.weights for p in parts]),
        np.concatenate(groups),
    )


class _Pools(dict[tuple[str, str | None], stats.Distribution]):
    """What :func:`pooled` gives, made once for all percentiles of a metric."""

    def __init__(self, summaries: Sequence[stats.Summary]) -> None:
        super().__init__()
        self.summaries = summaries

    def __missing__(self, key: tuple[str, str | None]) -> stats.Distribution:
        self[key] = pooled(self.summaries, *key)
        return self[key]


def _reading(pools: _Pools, metric: str, cls: str | None) -> Reading:
    family, _, statistic = metric.rpartition("_")
    if family not in LATENCIES:
        return _total(pools.summaries, metric, cls)
    samples = pools[family, cls]
    if statistic == "mean":
        return Reading(samples.mean(), samples.count)
    if statistic in SHORTFALLS:
        share = SHORTFALLS[statistic]
        return Reading(samples.shortfall(share), samples.count, *samples.shortfall_interval(share))
    quantile = QUANTILES[statistic]
    return Reading(samples.rank(quantile), samples.count, *samples.interval(quantile))


def _total(summaries: Sequence[stats.Summary], metric: str, cls: str | None) -> Reading:
    """Counts add up; rates are weighted by the seconds that they were measured over."""
    present = [s for s in summaries if cls is None or cls in s.classes]
    values = [s.value(metric, cls) for s in present]
    n = sum(s.count(metric, cls) for s in present)
    if metric not in RATES:
        return Reading(sum(values), n)
    seconds = sum(s.seconds for s in present)
    total = sum(value * s.seconds for value, s in zip(values, present, strict=True))
    return Reading(total / seconds if seconds > 0 else math.nan, n)
