"""From the runs of one config to one measurement: samples of all rungs together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from loadgen import stats
from loadgen.record import Records
from tuner.result import Measurement, Reading
from tuner.slo import COUNTS, LATENCIES, RATES, Slo, name_of

ALWAYS = (
    "itl_p50",
    "itl_p99",
    "inter_chunk_p99",
    "ttft_p50",
    "ttft_p95",
    "tpot_p50",
    "max_stall_p99",
    "e2e_p95",
)
"""Latencies that every report shows, whatever the SLO."""
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


def measure(runs: Sequence[Records], slo: Slo) -> Measurement:
    """The figures that ``slo`` and the report need, over all ``runs`` together.

    A percentile of fewer samples than its 95 % statement needs is still given, as an estimate without an
    interval: the search compares configs on equal schedules, and the confirmation pools more. The reading
    holds its n.
    """
    summaries = [run.summary(goodput_bounds(slo)) for run in runs]
    wanted = [*slo.metrics, *((metric, None) for metric in (*ALWAYS, *RATES, *COUNTS, "completed"))]
    readings = {
        name_of(metric, cls): _reading(summaries, metric, cls) for metric, cls in dict.fromkeys(wanted)
    }
    verdicts = dict.fromkeys(run.verdict for run in runs if run.verdict not in ("", "ok"))
    return Measurement(readings, sum(s.seconds for s in summaries), ", ".join(verdicts) or "ok")


def goodput_bounds(slo: Slo) -> tuple[stats.Bound, ...]:
    """The SLO's latency bounds as what goodput asks of each request."""
    return tuple(stats.Bound(metric, limit, cls) for metric, cls, limit in slo.per_request)


def pooled(summaries: Sequence[stats.Summary], metric: str, cls: str | None = None) -> stats.Distribution:
    """All samples of several runs; requests of different runs stay apart."""
    parts = [s.distribution(metric, cls) for s in summaries if cls is None or cls in s.classes]
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


def _reading(summaries: Sequence[stats.Summary], metric: str, cls: str | None) -> Reading:
    family, _, statistic = metric.rpartition("_")
    if family not in LATENCIES:
        return _total(summaries, metric, cls)
    samples = pooled(summaries, family, cls)
    if statistic == "mean":
        return Reading(samples.mean(), samples.count)
    quantile = _QUANTILES[statistic]
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
