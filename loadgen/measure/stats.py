"""From records to figures. :data:`DEFINITIONS` says what each is, and every report prints it."""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import sub
from typing import TYPE_CHECKING, Literal

import numpy as np

from loadgen.measure.backlog import backlog
from loadgen.measure.distribution import Distribution, min_samples
from loadgen.measure.record import Failure, Records, RequestRecord
from servers.errors import UserError

if TYPE_CHECKING:
    import pandas as pd


class FigureError(UserError):
    """A figure that does not exist, or of a request class that the run does not have."""


DEFINITIONS: Mapping[str, str] = {
    "ttft": "first token - intended time (the time at which the schedule wanted the request sent)",
    "tpot": "(last token - first token) / (output tokens - tokens in the first chunk), per request",
    "itl": "inter-token latency, token-weighted: a gap that delivers n tokens counts as n samples of gap/n",
    "inter_chunk": "gap between two chunks that carry tokens, one sample per gap (what vLLM calls ITL)",
    "max_stall": "longest gap inside a request",
    "e2e": "last byte - intended time",
    "service_ttft": "first token - the moment the request was written",
    "service_e2e": "last byte - the moment the request was written",
    "lateness": "the moment the request was written - intended time",
    "queue": "part of TTFT: from the engine's queue to its first step on the request, told by the server",
    "prefill": "part of TTFT: from that step to the first token, told by the server",
    "elsewhere": "the rest of the service TTFT: network, HTTP, tokenising, and sending the answer",
    "throughput": "output tokens that arrived in the measured window / window, counted by the server's usage",
    "request_rate": "requests that succeeded and ended in the window / window",
    "offered_rate": "requests intended in the window / window; in a closed loop those that ended in it",
    "goodput": "of the requests behind the offered rate those that met every bound / window",
    "backlog": "requests by which those in flight outgrew the window's beginning, where that is a trend",
    "es95": "expected shortfall: the mean of the slowest 5 % of the samples (Rockafellar and Uryasev 2000)",
    "es99": "expected shortfall: the mean of the slowest 1 % of the samples (Rockafellar and Uryasev 2000)",
}


def definitions_of(figures: Iterable[str]) -> dict[str, str]:
    """Of the figures' families and statistics (``itl_es99{class=c}``: ``itl``, ``es99``) that have one."""
    names = [figure.partition("{")[0] for figure in figures]
    parts = {part for name in names for part in (name, *name.rpartition("_")[::2])}
    return {name: text for name, text in DEFINITIONS.items() if name in parts}


METRICS = (
    "ttft",
    "tpot",
    "itl",
    "inter_chunk",
    "e2e",
    "max_stall",
    "service_ttft",
    "service_e2e",
    "lateness",
    "queue",
    "prefill",
    "elsewhere",
)
SHOWN_STATISTICS = ("mean", "p50", "p90", "p95", "p99", "es95", "es99")
"""The statistics of a metric in every table."""
_STATISTIC = re.compile(r"(p|es)([0-9]+)")
PARTS = ("lateness", "queue", "prefill", "elsewhere")
"""What a TTFT is made of, where the server tells its own share; they add up to it, request by request."""
RATES = ("throughput", "request_rate", "offered_rate", "goodput")
COUNTS = ("completed", "failed", "measured", "backlog")


@dataclass(frozen=True)
class RequestBound:
    """What goodput asks of a request: its ``metric`` at most ``limit`` seconds. ``cls`` None: every class.

    ``itl`` means the request's token-weighted mean (its TPOT) and ``max_stall`` its worst gap.
    """

    metric: str
    limit: float
    cls: str | None = None

    def __post_init__(self) -> None:
        if self.metric not in _PER_REQUEST:
            raise FigureError(f"no bound on {self.metric!r}: a request has {', '.join(sorted(_PER_REQUEST))}")

    def met_by(self, record: RequestRecord) -> bool:
        return (self.cls is not None and self.cls != record.cls) or _request_value(
            record, self.metric
        ) <= self.limit


def ttft(record: RequestRecord) -> float:
    return (record.chunk_at[0] - record.intended) / 1e9


def tpot(record: RequestRecord) -> float:
    """NaN for a request whose tokens all came in its first chunk."""
    after_first = record.tokens - record.chunk_tokens[0]
    span = (record.chunk_at[-1] - record.chunk_at[0]) / 1e9
    return span / after_first if after_first > 0 else math.nan


def e2e(record: RequestRecord) -> float:
    return (record.end - record.intended) / 1e9


def max_stall(record: RequestRecord) -> float:
    """NaN for a request with one chunk."""
    return max(map(sub, record.chunk_at[1:], record.chunk_at), default=math.nan) / 1e9


def lateness(record: RequestRecord) -> float:
    return math.nan if record.sent is None else (record.sent - record.intended) / 1e9


def queue(record: RequestRecord) -> float:
    """NaN where the server does not tell; so are prefill and elsewhere."""
    return math.nan if record.server_queue is None else record.server_queue


def prefill(record: RequestRecord) -> float:
    return math.nan if record.server_prefill is None else record.server_prefill


def elsewhere(record: RequestRecord) -> float:
    return ttft(record) - lateness(record) - queue(record) - prefill(record)


_PER_REQUEST = {
    "ttft": ttft,
    "tpot": tpot,
    "itl": tpot,
    "e2e": e2e,
    "max_stall": max_stall,
    "service_ttft": lambda r: ttft(r) - lateness(r),
    "service_e2e": lambda r: e2e(r) - lateness(r),
    "lateness": lateness,
    "queue": queue,
    "prefill": prefill,
    "elsewhere": elsewhere,
}
_TOLD = {"queue", "prefill", "elsewhere"}
"""A failed request has none of these, rather than an infinite one: no server told it."""
_CLIENTS_OWN = {"lateness"}
"""What the client did: a request that failed has it as well, unless it was never sent."""


def _request_value(record: RequestRecord, metric: str) -> float:
    """Infinity for a failed request; one that has no such gap (NaN) meets any bound on it."""
    if not record.ok:
        return math.inf
    value = _PER_REQUEST[metric](record)
    return -math.inf if math.isnan(value) else value


class Summary:
    """The figures of a run, overall (``cls=None``) and by request class.

    Names: a metric of :data:`METRICS` with ``_p50 _p90 _p95 _p99 _p999``, ``_es90 _es95 _es99`` (expected
    shortfall: the mean of the slowest 10, 5, 1 % of the samples) or ``_mean`` (seconds), a rate of
    :data:`RATES` (tokens/s, requests/s) or a count of :data:`COUNTS`.
    """

    def __init__(self, records: Records, bounds: Sequence[RequestBound] = ()) -> None:
        self.records, self.bounds = records, tuple(bounds)
        self._distributions: dict[tuple[str, str | None], Distribution] = {}

    @property
    def classes(self) -> tuple[str, ...]:
        return self.records.classes

    def value(self, name: str, cls: str | None = None) -> float:
        """Raises KeyError for an unknown name or class."""
        self._check_class(cls)
        if name in RATES or name in COUNTS:
            return float(getattr(self, f"_{name}")(cls))
        metric, _, _ = self._split(name)
        enough = self.distribution(metric, cls).count >= self.samples_needed(name)
        return self.statistic(name, cls) if enough else math.nan

    @classmethod
    def samples_needed(cls, name: str) -> int:
        """Fewest samples for a percentile or shortfall to be reported (:func:`min_samples`); 1 for a mean."""
        _, kind, quantile = cls._split(name)
        return 1 if kind == "mean" else min_samples(quantile)

    def statistic(self, name: str, cls: str | None = None) -> float:
        """A percentile, shortfall or mean, however few samples. Raises KeyError, also for a rate or count."""
        self._check_class(cls)
        metric, kind, quantile = self._split(name)
        samples = self.distribution(metric, cls)
        match kind:
            case "mean":
                return samples.mean()
            case "es":
                return samples.shortfall(quantile)
            case _:
                return samples.rank(quantile)

    def interval(self, name: str, cls: str | None = None, confidence: float = 0.95) -> tuple[float, float]:
        """Of a percentile or shortfall. Means, rates and counts of one run have none here: (NaN, NaN)."""
        self._check_class(cls)
        if name in RATES or name in COUNTS:
            return math.nan, math.nan
        metric, kind, quantile = self._split(name)
        samples = self.distribution(metric, cls)
        if kind == "mean":
            return math.nan, math.nan
        return (samples.shortfall_interval if kind == "es" else samples.interval)(quantile, confidence)

    def count(self, name: str, cls: str | None = None) -> int:
        """Samples behind a figure."""
        self._check_class(cls)
        if name in RATES or name in COUNTS:
            return len(self.records.in_window(cls))
        return self.distribution(self._split(name)[0], cls).count

    def distribution(self, metric: str, cls: str | None = None) -> Distribution:
        """All samples of the window; latencies of failed requests are infinite."""
        key = (metric, cls)
        if key not in self._distributions:
            build = _gaps if metric in ("itl", "inter_chunk") else _per_request
            self._distributions[key] = build(self.records.in_window(cls), metric)
        return self._distributions[key]

    def table(self) -> list[dict[str, float | str | int]]:
        """A row for all requests and one a class: plain numbers, NaN for "too few"."""
        groups: list[str | None] = [None, *self.classes] if len(self.classes) > 1 else [None]
        return [self._row(cls) for cls in groups]

    def _row(self, cls: str | None) -> dict[str, float | str | int]:
        row: dict[str, float | str | int] = {"class": "all" if cls is None else cls}
        row |= {name: int(self.value(name, cls)) for name in ("measured", "completed", "failed")}
        row |= {name: self.value(name, cls) for name in RATES}
        for metric in METRICS:
            row[f"{metric}_n"] = self.count(f"{metric}_p50", cls)
            for suffix in SHOWN_STATISTICS:
                row[f"{metric}_{suffix}"] = self.value(f"{metric}_{suffix}", cls)
        return row

    def _check_class(self, cls: str | None) -> None:
        if cls is not None and cls not in self.classes:
            raise FigureError(f"no class {cls!r} in this run; it has {', '.join(self.classes) or 'none'}")

    @staticmethod
    def _split(name: str) -> tuple[str, Literal["mean", "p", "es"], float]:
        """(metric, kind of statistic, quantile: NaN for a mean)."""
        metric, _, suffix = name.rpartition("_")
        if metric in METRICS and suffix == "mean":
            return metric, "mean", math.nan
        if metric in METRICS and (match := _STATISTIC.fullmatch(suffix)):
            digits = match[2]
            return metric, "es" if match[1] == "es" else "p", int(digits) / 10 ** max(2, len(digits))
        raise FigureError(
            f"unknown figure {name!r}: a metric ({', '.join(METRICS)}) with _p50, _p99 …, _es99 or _mean, "
            f"or one of {', '.join(RATES + COUNTS)}"
        )

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return self.records.window[1] - self.records.window[0]

    def _per_second(self, amount: float) -> float:
        return amount / self.seconds if self.seconds > 0 else math.nan

    def _throughput(self, cls: str | None) -> float:
        low, high = (round(edge * 1e9) for edge in self.records.window)
        return self._per_second(
            sum(
                sum(
                    record.chunk_tokens[
                        bisect_left(record.chunk_at, low) : bisect_right(record.chunk_at, high)
                    ]
                )
                for record in self.records.requests
                if (cls is None or record.cls == cls) and _delivers(record)
            )
        )

    def _request_rate(self, cls: str | None) -> float:
        low, high = (round(edge * 1e9) for edge in self.records.window)
        return self._per_second(
            sum(
                record.ok and low <= record.end <= high and (cls is None or record.cls == cls)
                for record in self.records.requests
            )
        )

    def _offered(self, cls: str | None) -> Sequence[RequestRecord]:
        """The requests that rates count. A closed loop sends one for each that ends: of those that begin in
        the window as many as it has clients end beyond it."""
        if self.records.mode != "closed":
            return self.records.in_window(cls)
        low, high = (round(edge * 1e9) for edge in self.records.window)
        return [
            record
            for record in self.records.requests
            if low <= record.end <= high
            and record.failure is not Failure.CANCELLED
            and (cls is None or record.cls == cls)
        ]

    def _offered_rate(self, cls: str | None) -> float:
        return self._per_second(len(self._offered(cls)))

    def _goodput(self, cls: str | None) -> float:
        return self._per_second(
            sum(
                record.ok and all(bound.met_by(record) for bound in self.bounds)
                for record in self._offered(cls)
            )
        )

    def _measured(self, cls: str | None) -> int:
        return len(self.records.in_window(cls))

    def _completed(self, cls: str | None) -> int:
        return sum(record.ok for record in self.records.in_window(cls))

    def _failed(self, cls: str | None) -> int:
        return sum(not record.ok for record in self.records.in_window(cls))

    def _backlog(self, cls: str | None) -> float:
        return backlog(self.records, cls)


def _delivers(record: RequestRecord) -> bool:
    """Tokens of requests that were only cut off by the end of the measurement were real work."""
    return record.failure in (None, Failure.CANCELLED, Failure.UNFINISHED)


def _per_request(records: Sequence[RequestRecord], metric: str) -> Distribution:
    """One sample per request. Raises KeyError for an unknown metric."""
    measure = _PER_REQUEST[metric]
    failed = math.nan if metric in _TOLD else math.inf
    whatever = metric in _CLIENTS_OWN
    values = np.array([measure(r) if r.ok or whatever else failed for r in records], dtype=np.float64)
    known = np.flatnonzero(~np.isnan(values))
    return Distribution.of(values[known], groups=known)


def _gaps(records: Sequence[RequestRecord], metric: str) -> Distribution:
    """Gaps inside requests. A failed request's missing tokens are infinite samples, at least one."""
    group = np.repeat(np.arange(len(records)), [len(r.chunk_at) for r in records])
    at = np.fromiter(chain.from_iterable(r.chunk_at for r in records), np.int64, len(group))
    inside = np.flatnonzero(group[1:] == group[:-1]) + 1
    groups, weights = group[inside], np.ones(len(inside))
    if metric == "itl":
        tokens = np.fromiter(chain.from_iterable(r.chunk_tokens for r in records), np.float64, len(group))
        weights = tokens[inside]
    values = (at[inside] - at[inside - 1]) / 1e9 / weights
    failed = [place for place, record in enumerate(records) if not record.ok]
    if failed:
        delivered = np.bincount(groups, weights, len(records))
        missing = [max(1.0, records[place].max_tokens - 1 - delivered[place]) for place in failed]
        values = np.concatenate([values, np.full(len(failed), math.inf)])
        weights, groups = np.concatenate([weights, missing]), np.concatenate([groups, failed])
    return Distribution.of(values, weights, groups)


def frame(records: Records) -> pd.DataFrame:
    """One row per request; see :meth:`Records.frame`."""
    import pandas as pd

    low, high = (round(edge * 1e9) for edge in records.window)
    rows = []
    for r in records.requests:
        row: dict[str, object] = {
            "index": r.index,
            "class": r.cls,
            "intended": r.intended / 1e9,
            "sent": math.nan if r.sent is None else r.sent / 1e9,
            "end": r.end / 1e9,
            "in_window": low <= r.intended <= high,
            "prompt_tokens": r.planned_prompt if r.prompt_tokens is None else r.prompt_tokens,
            "output_tokens": r.tokens,
            "chunks": len(r.chunk_at),
            "failure": None if r.failure is None else str(r.failure),
            "detail": r.detail,
            "lateness": lateness(r),
        }
        for metric in ("ttft", "service_ttft", "tpot", "e2e", "service_e2e", "max_stall"):
            row[metric] = _PER_REQUEST[metric](r) if r.ok else math.nan
        rows.append(row)
    return pd.DataFrame(rows).set_index("index") if rows else pd.DataFrame()
