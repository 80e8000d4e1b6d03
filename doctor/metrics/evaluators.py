"""Two ways to the same figures: computed from recorded scrapes, or asked of a Prometheus."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from doctor.metrics.promql import PromQL
from doctor.metrics.signals import (
    SHARED_OUT,
    Above,
    AgainstPeers,
    Constant,
    Count,
    EnginesOnHost,
    GaugeCondition,
    Half,
    HistogramSum,
    Least,
    Mean,
    MeanWhile,
    Node,
    OfPeers,
    OnHost,
    OverTime,
    Product,
    Quantile,
    Ratio,
    Share,
    Signal,
    Sum,
    counted,
    metrics_of,
)
from servers.kinds import find_family
from servers.metrics import catalog, range_functions
from servers.metrics.catalog import METRICS
from servers.metrics.exposition import Recording, Series
from servers.metrics.identity import PEERS, Sample, identity_of
from servers.metrics.range_functions import Times, Values
from servers.reading import Missing, Number, Reading


@dataclass(frozen=True, order=True)
class Group:
    """One engine: the labels that tell it from others, sorted; one that is absent has the value ""."""

    labels: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, **labels: str) -> Group:
        return cls(tuple(sorted((name, value) for name, value in labels.items() if value)))

    def get(self, label: str) -> str:
        return next((value for name, value in self.labels if name == label), "")

    def only(self, labels: Sequence[str]) -> Group:
        return Group(tuple((name, value) for name, value in self.labels if name in labels))

    def without(self, labels: Sequence[str]) -> Group:
        return Group(tuple((name, value) for name, value in self.labels if name not in labels))

    @property
    def instance(self) -> str:
        return self.get("instance")

    @property
    def model_name(self) -> str:
        return self.get("model_name")

    @property
    def peers(self) -> Group:
        """What it has in common with those that it shares its load with."""
        return self.only(PEERS)


Numbers = dict[Group, Number]
Column = tuple[Group, object, Series]
"""A series with whose it is, and what its copies agree in (None: there are none)."""
COUNTS = {"histogram": "_count", "gauge": "", "counter": "", "info": ""}
MOST_SILENT = 0.2
"""Share of a model's engines that may lack a metric by which they are compared."""


def by_peers(groups: Iterable[Group]) -> dict[Group, list[Group]]:
    """Engines by what they have in common with those that they share their load with."""
    found: dict[Group, list[Group]] = {}
    for group in groups:
        found.setdefault(group.peers, []).append(group)
    return found


def host_of(instance: str) -> str:
    """An instance without its port."""
    return instance.split(":", 1)[0]


def _host_figure(values: Sequence[float], how: str) -> float:
    if how == "count":
        return float(len(values))
    mean = sum(values) / len(values)
    return 1 - mean if how == "busy" else mean / 100


class Evaluator(ABC):
    """Gives every signal's value for every engine of one window."""

    def __init__(self, promql: PromQL) -> None:
        self.promql = promql
        self._owned: dict[str, frozenset[Group]] = {}

    @property
    @abstractmethod
    def available(self) -> Mapping[str, Sequence[str]]:
        """Sample names with data in the window, by the server's own."""

    @abstractmethod
    def samples(self, key: str) -> Sequence[Sample]:
        """The series of a metric with their last values; of a histogram those of its counts."""

    @abstractmethod
    def numbers(self, node: Node) -> Numbers:
        """``node`` for the engines that have it. Engines without observations are absent."""

    @abstractmethod
    def bounds(self, key: str) -> Mapping[Group, Sequence[float]]:
        """The finite bucket bounds of a histogram, ascending, for the engines that have it."""

    @abstractmethod
    def of_fleet(self) -> Evaluator:
        """The same window, with engines that are peers added up: one group for each :attr:`Group.peers`."""

    def read_all(self, signals: Sequence[Signal]) -> dict[str, dict[Group, Reading]]:
        """Every signal by its name, as :meth:`read` gives it."""
        return {signal.name: self.read(signal) for signal in signals}

    def query(self, signal: Signal) -> str:
        """The PromQL behind a signal's value."""
        return self.promql.text(self._source(signal))

    def read(self, signal: Signal) -> dict[Group, Reading]:
        """A signal's value for every engine, or why there is none."""
        node = self._source(signal)
        absent = [key for key in sorted(metrics_of(node)) if not self._has(key)]
        if absent:
            names = ", ".join(self._called(key) for key in absent)
            missing = Missing(signal.name, "metric", f"{names} is missing")
            if exporters := [catalog.ELSEWHERE[key] for key in absent if key in catalog.ELSEWHERE]:
                missing = Missing(signal.name, "elsewhere", f"no {exporters[0]} beside the server")
            return dict.fromkeys(self.groups, missing)
        numbers = self.numbers(node)
        compared = self._compared(signal.name, node) if isinstance(node, AgainstPeers | OfPeers) else {}
        return {
            group: compared.get(group.peers)
            or numbers.get(group)
            or self._unobserved(signal.name, node, group)
            for group in self.groups
        }

    def _source(self, signal: Signal) -> Node:
        """The first source whose metrics are exposed, or the first."""
        usable = (source for source in signal.sources if all(map(self._has, metrics_of(source))))
        return next(usable, signal.sources[0])

    @property
    def keys(self) -> frozenset[str]:
        """Keys of the catalogue's metrics with data in the window."""
        return frozenset(filter(self._has, METRICS))

    def _has(self, key: str) -> bool:
        metric = METRICS[key]
        return any(name + COUNTS[metric.kind] in self.available for name in metric.names)

    def _called(self, key: str) -> str:
        """A metric's name, as a server of this kind would have it."""
        names = METRICS[key].names
        found = find_family(self.available)
        if found is None:
            return names[0]
        kind, _ = found
        return next(iter(kind.metrics.get(key, ())), f"{kind.label}'s counterpart of {names[0]}")

    def _compared(self, name: str, node: Node) -> dict[Group, Missing]:
        """The peers that cannot be compared with each other, and why: there is one, or too few of them say
        how they are."""
        saying = frozenset.intersection(*(self._owners(key) for key in metrics_of(node)))
        found = {}
        for peers, engines in by_peers(self.groups).items():
            silent = sum(group not in saying for group in engines)
            if len(engines) < 2:
                found[peers] = Missing(name, "peers", "no second instance of this model")
            elif silent > MOST_SILENT * len(engines):
                found[peers] = Missing(name, "metric", f"not known of {silent} of {len(engines)} instances")
        return found

    def _unobserved(self, name: str, node: Node, group: Group) -> Missing:
        if isinstance(node, OnHost):
            exporter = catalog.ELSEWHERE[node.metric]
            return Missing(
                name, "elsewhere", f"no {exporter} on the host of {group.instance or 'this engine'}"
            )
        if isinstance(node, AgainstPeers | OfPeers) and self.promql.identity.spread(metrics_of(node)):
            return Missing(name, "peers", "its server tells this of all of its engines together")
        for key in sorted(metrics_of(node)):
            if group not in self._owners(key):
                return Missing(
                    name, "metric", f"{self._called(key)} is missing on {group.instance or 'this engine'}"
                )
        return Missing(name, "empty", "nothing was observed in the window")

    @cached_property
    def groups(self) -> Sequence[Group]:
        """The engines seen in the window, sorted."""
        seen = frozenset[Group]().union(*map(self._carriers, catalog.ANCHORS))
        within, needed, by = self.promql.identity.within, self.promql.identity.needed, self.promql.by
        needed = needed if by is None else needed.intersection(by)
        seen = frozenset(group for group in seen if needed <= {name for name, _ in group.labels})
        servers = {group.without(within) for group in seen if group.without(within) != group}
        return sorted(seen - servers)

    def _owners(self, key: str) -> frozenset[Group]:
        """The engines that expose a metric, or whose server does."""
        if key not in self._owned:
            carriers, within = self._carriers(key), self.promql.identity.within
            of_servers = (group for group in self.groups if within and group.without(within) in carriers)
            self._owned[key] = carriers.union(of_servers)
        return self._owned[key]

    @abstractmethod
    def _carriers(self, key: str) -> frozenset[Group]:
        """By whose labels a metric is exposed: engines, or servers of several."""


_OVER_SECONDS = ("rate", "delta", "deriv")
"""What a single scrape cannot tell."""


@dataclass(frozen=True)
class Span:
    """The window [start, end] in unix ms, and the step of its subqueries."""

    start: int
    end: int
    step: int
    since_start: bool = False
    """See ``Recording``."""


class ScrapeEvaluator(Evaluator):
    """Computes signals from recorded scrapes, with Prometheus's semantics."""

    def __init__(self, series: Mapping[str, Sequence[Series]], span: Span, promql: PromQL) -> None:
        """``series``: by sample name, none of them with samples outside of ``span``."""
        self._series = series
        self._span = span
        self._instants: dict[str, dict[Group, Values]] = {}
        self._found: dict[tuple[str, str], list[Column]] = {}
        super().__init__(replace(promql, available=self.available))

    @cached_property
    def available(self) -> Mapping[str, Sequence[str]]:
        return catalog.spellings(self._series)

    @classmethod
    def over(cls, recording: Recording, span: Span, slo: Mapping[str, float]) -> ScrapeEvaluator:
        """``slo``: as of :class:`PromQL`."""
        promql = PromQL(span.end - span.start, span.step, slo=slo)
        seen = cls(_cut(recording.series, span), span, promql)
        identity = identity_of({key: seen.samples(key) for key in METRICS})
        return seen._as(identity=identity, bounds={key: seen._bounds(key) for key in SHARED_OUT})

    def _as(self, **changes: Any) -> ScrapeEvaluator:
        """The same series, read otherwise."""
        return ScrapeEvaluator(self._series, self._span, replace(self.promql, **changes))

    def of_fleet(self) -> ScrapeEvaluator:
        return self._as(by=PEERS)

    @cached_property
    def _of_servers(self) -> ScrapeEvaluator:
        return self._as(identity=self.promql.identity.of_servers())

    def numbers(self, node: Node) -> Numbers:
        identity = self.promql.identity
        if self.promql.by is None and identity.spread(metrics_of(node)):
            whole = self._of_servers.numbers(node)
            servers = {group: group.without(identity.within) for group in self.groups}
            engines = Counter(servers.values()) if counted(node) else {}
            return {
                group: whole[server] / Number.exactly(engines.get(server, 1))
                for group, server in servers.items()
                if server in whole
            }
        match node:
            case OverTime(key, how):
                combine = "max" if how == "resets" else METRICS[key].combine
                return _numbers(self._reduced(key, "", how, combine))
            case HistogramSum(key, how):
                return _numbers(self._reduced(key, "_sum", how))
            case Count(key, how):
                return _numbers(self._reduced(key, "_count", how))
            case Mean(key):
                return self.numbers(Ratio(HistogramSum(key), Count(key)))
            case Ratio(top, bottom, unbounded):
                return _divide(self.numbers(top), self.numbers(bottom), unbounded)
            case Sum(terms):
                return _add([self.numbers(term) for term in terms])
            case Constant(value):
                return dict.fromkeys(self.groups, Number.exactly(value))
            case Product(left, right):
                return _multiply(self.numbers(left), self.numbers(right))
            case Least(left, right):
                return _least(self.numbers(left), self.numbers(right))
            case AgainstPeers(of):
                return _against_peers(self.numbers(of))
            case OfPeers(of):
                return _of_peers(self.numbers(of))
            case Half(of, which):
                return self._half(which == "first").numbers(of)
            case OnHost(key, how):
                return self._on_host(key, how)
            case EnginesOnHost():
                hosts = [host_of(group.instance) for group in self._owners("running")]
                return {g: Number.exactly(hosts.count(host_of(g.instance))) for g in self._owners("running")}
            case Quantile(q, key):
                found = {g: range_functions.quantile(q, b) for g, b in self._buckets(key).items()}
                return {group: Number(*value) for group, value in found.items() if value is not None}
            case Above():
                return self._above(node)
            case Share(conditions):
                return _mean_over_time(self._hold_all(conditions))
            case MeanWhile(key, conditions):
                values, held = self._instant(key), self._hold_all(conditions)
                return _mean_over_time({g: values[g][held[g] == 1] for g in values.keys() & held.keys()})

    def bounds(self, key: str) -> Mapping[Group, Sequence[float]]:
        if self.promql.by is None and self.promql.identity.spread({key}):
            of_server, within = self._of_servers.bounds(key), self.promql.identity.within
            return {group: of_server.get(group.without(within), []) for group in self.groups}
        return {group: sorted(filter(math.isfinite, own)) for group, own in self._buckets(key).items()}

    def _half(self, first: bool) -> ScrapeEvaluator:
        middle = (self._span.start + self._span.end) // 2
        bounds = (self._span.start, middle) if first else (middle, self._span.end)
        span = Span(*bounds, self._span.step)
        return ScrapeEvaluator(_cut(self._series, span), span, self.promql)

    def _on_host(self, key: str, how: str) -> Numbers:
        seen: dict[str, list[float]] = {}
        for _, _, series in self._columns(key, ""):
            if how == "busy" and series.labels.get("mode") != "idle":
                continue
            value = self._over_time(series, "rate" if how == "busy" else "avg")
            if value is not None:
                seen.setdefault(host_of(series.labels.get("instance", "")), []).append(value)
        figures = {host: _host_figure(values, how) for host, values in seen.items()}
        owners = {group: host_of(group.instance) for group in self._owners("running")}
        return {g: Number.exactly(figures[host]) for g, host in owners.items() if host in figures}

    def _unobserved(self, name: str, node: Node, group: Group) -> Missing:
        missing = super()._unobserved(name, node, group)
        if missing.kind == "empty" and self._span.since_start:
            return replace(missing, kind="metric", why="one scrape does not tell: record two or more")
        return missing

    def _carriers(self, key: str) -> frozenset[Group]:
        return frozenset(group for group, _, _ in self._columns(key, COUNTS[METRICS[key].kind]))

    def samples(self, key: str) -> list[Sample]:
        columns = self._columns(key, COUNTS[METRICS[key].kind])
        return [(series.labels, float(series.values[-1])) for _, _, series in columns]

    def _bounds(self, key: str) -> tuple[float, ...]:
        """The finite bucket bounds that every histogram of a metric has."""
        own: dict[tuple[tuple[str, str], ...], set[float]] = {}
        for _, _, series in self._columns(key, "_bucket"):
            bound = _bound(series.labels.get("le", ""))
            if bound is not None and math.isfinite(bound):
                labels = tuple(sorted((n, v) for n, v in series.labels.items() if n != "le"))
                own.setdefault(labels, set()).add(bound)
        common = set.intersection(*own.values()) if own else set()
        return tuple(sorted(common))

    def _columns(self, key: str, suffix: str) -> list[Column]:
        """A metric's series; of two names for one series, the newer (PromQL's ``or``)."""
        if (key, suffix) not in self._found:
            roles, by = self.promql.identity.of(key), self.promql.by
            found: dict[tuple[tuple[str, str], ...], Column] = {}
            for name in METRICS[key].names:
                for spelled in self.available.get(name + suffix, ()):
                    for series in self._series[spelled]:
                        labels = METRICS[key].labels(name, series.labels)
                        if labels is not None and roles.count(labels):
                            group = Group(roles.engine(labels))
                            once = roles.once(labels) if roles.copies else None
                            own = replace(series, labels=labels)
                            column = (group if by is None else group.only(by), once, own)
                            found.setdefault(tuple(sorted(labels.items())), column)
            self._found[key, suffix] = list(found.values())
        return self._found[key, suffix]

    def _reduced(self, key: str, suffix: str, how: str, combine: str = "sum") -> dict[Group, float]:
        once: dict[object, tuple[Group, float]] = {}
        for number, (group, copies_of, series) in enumerate(self._columns(key, suffix)):
            value = self._over_time(series, how)
            if value is not None:
                one = number if copies_of is None else copies_of
                once[one] = (group, max(value, once[one][1]) if one in once else value)
        reduced: dict[Group, float] = {}
        for group, value in once.values():
            if group not in reduced:
                reduced[group] = value
            else:
                reduced[group] = max(reduced[group], value) if combine == "max" else reduced[group] + value
        return reduced

    def _over_time(self, series: Series, how: str) -> float | None:
        times, values, span = series.times, series.values, self._span
        if span.since_start and how in _OVER_SECONDS:
            return None
        match how:
            case "increase":
                return range_functions.increase(times, values, span.start, span.end)
            case "rate":
                grown = range_functions.increase(times, values, span.start, span.end)
                return None if grown is None else grown / (span.end - span.start) * 1000
            case "delta":
                return range_functions.delta(times, values, span.start, span.end)
            case "deriv":
                return range_functions.deriv(times, values)
            case "resets":
                return range_functions.resets(values)
            case "last":
                return float(values[-1])
            case "count":
                return float(len(values))
            case "min":
                return float(values.min())
            case "max":
                return float(values.max())
        return float(values.mean())

    def _buckets(self, key: str) -> dict[Group, dict[float, float]]:
        once: dict[object, tuple[Group, float, float]] = {}
        for number, (group, copies_of, series) in enumerate(self._columns(key, "_bucket")):
            bound = _bound(series.labels.get("le", ""))
            grown = self._over_time(series, "increase")
            if bound is not None and grown is not None:
                one = number if copies_of is None else copies_of
                once[one] = (group, bound, max(grown, once[one][2]) if one in once else grown)
        buckets: dict[Group, dict[float, float]] = {}
        for group, bound, grown in once.values():
            own = buckets.setdefault(group, {})
            own[bound] = own.get(bound, 0.0) + grown
        return buckets

    def _above(self, node: Above) -> Numbers:
        bound = self.promql.bound_of(node)
        counts = self._reduced(node.metric, "_count", "increase")
        below = {group: own.get(bound) for group, own in self._buckets(node.metric).items()}
        return {
            group: Number.exactly(1 - inside / counts[group])
            for group, inside in below.items()
            if inside is not None and counts.get(group, 0) > 0
        }

    def _grid(self) -> Times:
        return range_functions.grid(self._span.start, self._span.end, self._span.step)

    def _instant(self, key: str) -> dict[Group, Values]:
        """A gauge at every instant of the grid, NaN where it has no sample."""
        if key not in self._instants:
            at, combine = self._grid(), METRICS[key].combine
            once: dict[object, tuple[Group, Values]] = {}
            for number, (group, copies_of, series) in enumerate(self._columns(key, "")):
                values = range_functions.instant(series.times, series.values, at)
                one = number if copies_of is None else copies_of
                once[one] = (group, np.fmax(once[one][1], values) if one in once else values)
            seen: dict[Group, Values] = {}
            for group, values in once.values():
                if group not in seen:
                    seen[group] = values
                elif combine == "max":
                    seen[group] = np.fmax(seen[group], values)
                else:
                    both = np.nan_to_num(seen[group]) + np.nan_to_num(values)
                    seen[group] = np.where(np.isnan(seen[group]) & np.isnan(values), math.nan, both)
            self._instants[key] = seen
        return self._instants[key]

    def _added(self, gauges: Sequence[str]) -> dict[Group, Values]:
        parts = [self._instant(gauge) for gauge in gauges]
        common = set(parts[0]).intersection(*parts[1:])
        return {group: sum((part[group] for part in parts), np.zeros(1)) for group in common}

    def _hold_all(self, conditions: Sequence[GaugeCondition]) -> dict[Group, Values]:
        """1 where all conditions hold, 0 where one does not, NaN where a gauge has no sample."""
        held: dict[Group, Values] = {}
        for number, condition in enumerate(conditions):
            added = self._added(condition.gauges)
            own = {
                g: np.where(np.isnan(v), math.nan, (v > condition.above).astype(float))
                for g, v in added.items()
            }
            held = own if number == 0 else {g: held[g] * own[g] for g in held.keys() & own.keys()}
        return held


def _cut(series: Mapping[str, Sequence[Series]], span: Span) -> dict[str, list[Series]]:
    """The samples inside the window, as a range selector picks them."""
    cut: dict[str, list[Series]] = {}
    for name, columns in series.items():
        for column in columns:
            inside = (column.times >= span.start) & (column.times <= span.end)
            if inside.any():
                own = Series(column.labels, column.times[inside], column.values[inside])
                cut.setdefault(name, []).append(own)
    return cut


def _bound(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _numbers(values: Mapping[Group, float]) -> Numbers:
    return {group: Number.exactly(value) for group, value in values.items()}


def _mean_over_time(values: Mapping[Group, Values]) -> Numbers:
    kept = {group: own[~np.isnan(own)] for group, own in values.items()}
    return {group: Number.exactly(float(own.mean())) for group, own in kept.items() if len(own)}


def _divide(top: Numbers, bottom: Numbers, unbounded: bool) -> Numbers:
    """``unbounded``: as of :class:`Ratio`."""
    both = top.keys() & bottom.keys()
    found = {g: Number.exactly(top[g].point / bottom[g].point) for g in both if bottom[g].point}
    endless = {g: Number.exactly(math.inf) for g in both - found.keys() if unbounded and top[g].point > 0}
    return found | endless


def _add(parts: Sequence[Numbers]) -> Numbers:
    common = set(parts[0]).intersection(*parts[1:])
    return {group: Number.exactly(sum(part[group].point for part in parts)) for group in common}


def _multiply(left: Numbers, right: Numbers) -> Numbers:
    return {g: Number.exactly(left[g].point * right[g].point) for g in left.keys() & right.keys()}


def _least(left: Numbers, right: Numbers) -> Numbers:
    both = {g: Number.exactly(min(left[g].point, right[g].point)) for g in left.keys() & right.keys()}
    return {**left, **right, **both}


def _against_peers(own: Numbers) -> Numbers:
    means = {
        peers: sum(own[group].point for group in groups) / len(groups)
        for peers, groups in by_peers(own).items()
    }
    return {g: Number.exactly(n.point / means[g.peers]) for g, n in own.items() if means[g.peers]}


def _of_peers(own: Numbers) -> Numbers:
    """The mean of all others."""
    beside = {
        peers: (sum(own[group].point for group in groups), len(groups) - 1)
        for peers, groups in by_peers(own).items()
    }
    return {
        group: Number.exactly((total - number.point) / others)
        for group, number in own.items()
        for total, others in [beside[group.peers]]
        if others
    }
