"""Signals asked of a running Prometheus, through prometheus-api-client."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from doctor.metrics.evaluators import COUNTS, Evaluator, Group, Numbers
from doctor.metrics.promql import PromQL, promql_duration
from doctor.metrics.signals import SHARED_OUT, Node, Quantile, Ratio, Signal, metrics_of
from servers.kinds import PREFIXES, plain
from servers.metrics import catalog
from servers.metrics.identity import PEERS, Sample, identity_of
from servers.reading import Number, Reading

Element = Mapping[str, Any]
"""``{"metric": labels, "value": [unix s, text]}``."""
Ask = Callable[[str], list[Element]]
"""An instant query at the window's end: the ``result`` list of Prometheus's HTTP API."""

_OF_ANSWERS = ("__name__", "signal", "le")
LONGEST_QUERY = 12_000
"""Characters of a query that asks for several signals at once."""


@dataclass(frozen=True)
class Seen:
    """``names``: as of :attr:`Evaluator.available`; ``samples``: by key of the catalogue."""

    names: Mapping[str, Sequence[str]]
    samples: Mapping[str, Sequence[Sample]]


class PrometheusEvaluator(Evaluator):
    """Every answer holds all engines, and one query asks for many signals: a fleet costs no more questions
    than a server does."""

    def __init__(self, ask: Ask, promql: PromQL, seen: Seen | None = None) -> None:
        self._ask = _remembered(ask) if seen is None else ask
        self._answers: dict[Node, list[Element]] = {}
        self._bound_cache: dict[str, dict[Group, list[float]]] = {}
        asked = seen is None
        if seen is None:
            seen = self._what_there_is(promql)
            promql = replace(promql, identity=identity_of(seen.samples))
        self._seen = seen
        super().__init__(replace(promql, available=seen.names))
        if asked:
            self.promql = replace(self.promql, bounds={key: self._common(key) for key in SHARED_OUT})

    def _what_there_is(self, promql: PromQL) -> Seen:
        """Every series of a server, but for buckets and sums: these come with a count, and are many."""
        samples: dict[str, list[Sample]] = {}
        wanted = catalog.sample_names()
        for element in self._ask(promql.present(PREFIXES)):
            name = str(element["metric"].get("__name__", ""))
            if plain(name) in wanted:
                own = (element["metric"], float(element["value"][1]))
                samples.setdefault(name, []).append(own)
        histograms = [name.removesuffix("_count") for name in samples if name.endswith("_count")]
        implied = [name + suffix for name in histograms for suffix in ("_bucket", "_sum")]
        exporters = self._exporters(promql) if samples else []
        names = catalog.spellings([*samples, *implied, *exporters])
        return Seen(
            names,
            {
                key: [
                    (labels, value)
                    for name in metric.names
                    for spelled in names.get(name + COUNTS[metric.kind], ())
                    for own, value in samples.get(spelled, ())
                    if (labels := metric.labels(name, own)) is not None
                ]
                for key, metric in catalog.METRICS.items()
            },
        )

    def _exporters(self, promql: PromQL) -> list[str]:
        """What other exporters tell; the user's selector is for the servers."""
        wanted = "|".join(name for key in catalog.ELSEWHERE for name in catalog.METRICS[key].names)
        window = promql_duration(promql.window_ms)
        answer = self._ask(f'count by (__name__) (last_over_time({{__name__=~"{wanted}"}}[{window}]))')
        return [str(element["metric"].get("__name__", "")) for element in answer]

    @property
    def available(self) -> Mapping[str, Sequence[str]]:
        return self._seen.names

    def of_fleet(self) -> PrometheusEvaluator:
        return PrometheusEvaluator(self._ask, replace(self.promql, by=PEERS), self._seen)

    def samples(self, key: str) -> Sequence[Sample]:
        return self._seen.samples[key]

    def read_all(self, signals: Sequence[Signal]) -> dict[str, dict[Group, Reading]]:
        sources = [self._source(signal) for signal in signals]
        self._ask_for(node for node in sources if all(map(self._has, metrics_of(node))))
        return super().read_all(signals)

    def _ask_for(self, nodes: Iterable[Node]) -> None:
        """All of them, in a few queries."""
        batch: dict[str, Node] = {}
        size = 0
        for number, node in enumerate(dict.fromkeys(nodes)):
            length = len(self.promql.text(node))
            if batch and size + length > LONGEST_QUERY:
                self._fetch(batch)
                batch, size = {}, 0
            batch[str(number)] = node
            size += length
        if batch:
            self._fetch(batch)

    def _fetch(self, nodes: Mapping[str, Node]) -> None:
        for node in nodes.values():
            self._answers[node] = []
        for element in self._ask(self.promql.together(nodes)):
            if (name := element["metric"].get("signal", "")) in nodes:
                self._answers[nodes[name]].append(element)

    def numbers(self, node: Node) -> Numbers:
        answer = self._answers[node] if node in self._answers else self._ask(self.promql.text(node))
        values: dict[Group, float] = {}
        for element in answer:
            value = float(element["value"][1])
            endless = isinstance(node, Ratio) and node.unbounded and value == math.inf
            if math.isfinite(value) or endless:
                values[_group(element["metric"])] = value
        if not isinstance(node, Quantile):
            return {group: Number.exactly(value) for group, value in values.items()}
        bounds = self.bounds(node.metric) if values else {}
        return {group: _bounded(value, bounds.get(group, [])) for group, value in values.items()}

    def _carriers(self, key: str) -> frozenset[Group]:
        roles, by = self.promql.identity.of(key), self.promql.by
        groups = (Group(roles.engine(labels)) for labels, _ in self._seen.samples[key] if roles.count(labels))
        return frozenset(groups if by is None else (group.only(by) for group in groups))

    def bounds(self, key: str) -> Mapping[Group, Sequence[float]]:
        """Buckets depend on version and context: asked for all peers at first, and engine by engine where
        those of some peers differ."""
        if key not in self._bound_cache and not self._has(key):
            self._bound_cache[key] = {}
        if key not in self._bound_cache:
            owners, within = self._owners(key), self.promql.identity.within
            of_peers, alike = self._bounds_by(key, PEERS)
            if alike:
                found = {owner: of_peers.get(owner.peers, []) for owner in owners}
            else:
                own, _ = self._bounds_by(key, self.promql.by)
                found = {owner: own.get(owner) or own.get(owner.without(within), []) for owner in owners}
            self._bound_cache[key] = found
        return self._bound_cache[key]

    def _common(self, key: str) -> list[float]:
        """The bounds that all engines have."""
        own = [set(bounds) for bounds in self.bounds(key).values()] if self._has(key) else []
        return sorted(set.intersection(*own)) if own else []

    def _bounds_by(self, key: str, by: tuple[str, ...] | None) -> tuple[dict[Group, list[float]], bool]:
        """The bounds, and whether each group has all of its bounds equally often."""
        bounds: dict[Group, dict[float, float]] = {}
        for element in self._ask(replace(self.promql, by=by).bucket_bounds(key)):
            bound = float(element["metric"]["le"])
            bounds.setdefault(_group(element["metric"]), {})[bound] = float(element["value"][1])
        alike = all(len(set(counts.values())) == 1 for counts in bounds.values())
        return {group: sorted(filter(math.isfinite, counts)) for group, counts in bounds.items()}, alike


def _group(labels: Mapping[str, str]) -> Group:
    """Whose an element of an answer is: its query has dropped the labels that tell no engines apart."""
    return Group.of(**{name: value for name, value in labels.items() if name not in _OF_ANSWERS})


def _remembered(ask: Ask) -> Ask:
    """Asks nothing twice: one moment is looked at, and a fleet has its engines' bucket bounds."""
    known: dict[str, list[Element]] = {}

    def ask_once(query: str) -> list[Element]:
        if query not in known:
            known[query] = ask(query)
        return known[query]

    return ask_once


def _bounded(value: float, bounds: Sequence[float]) -> Number:
    """A quantile in the first bucket, or at the last finite bound, is only a bound."""
    if bounds and value <= bounds[0]:
        return Number(value, 0.0, bounds[0])
    if bounds and value >= bounds[-1]:
        return Number(value, bounds[-1], math.inf)
    return Number.exactly(value)
