"""Signals asked of a running Prometheus, through prometheus-api-client."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from doctor.metrics.evaluators import Evaluator, Group, Numbers, group_of
from doctor.metrics.promql import PromQL, promql_duration
from doctor.metrics.signals import Node, Quantile, Signal, metrics_of
from servers.metrics import catalog
from servers.reading import Number, Reading

Element = Mapping[str, Any]
"""``{"metric": labels, "value": [unix s, text]}``."""
Ask = Callable[[str], list[Element]]
"""An instant query at the window's end: the ``result`` list of Prometheus's HTTP API."""

LONGEST_QUERY = 12_000
"""Characters of a query that asks for several signals at once."""


class PrometheusEvaluator(Evaluator):
    """Every answer holds all engines, and one query asks for many signals: a fleet costs no more questions
    than a server does."""

    def __init__(
        self, ask: Ask, promql: PromQL, owners: Mapping[str, frozenset[Group]] | None = None
    ) -> None:
        self._ask = _remembered(ask) if owners is None else ask
        self._answers: dict[Node, list[Element]] = {}
        self._bound_cache: dict[str, dict[Group, list[float]]] = {}
        self._owned = self._who_has_what(promql) if owners is None else owners
        super().__init__(replace(promql, available=self.available))

    def _who_has_what(self, promql: PromQL) -> dict[str, frozenset[Group]]:
        """The engines by sample name. Buckets and sums come with a count, and are many."""
        wanted = [name for name in catalog.sample_names() if not name.endswith(("_bucket", "_sum"))]
        owned: dict[str, set[Group]] = {}
        for element in self._ask(promql.owners(wanted)):
            name = str(element["metric"].get("__name__", ""))
            owned.setdefault(name, set()).add(group_of(element["metric"]))
        for name in self._exporters(promql) if owned else ():
            owned.setdefault(name, set())
        return {name: frozenset(groups) for name, groups in owned.items()}

    def _exporters(self, promql: PromQL) -> list[str]:
        """What other exporters tell; the user's selector is for the servers."""
        wanted = "|".join(name for key in catalog.ELSEWHERE for name in catalog.METRICS[key].names)
        window = promql_duration(promql.window_ms)
        answer = self._ask(f'count by (__name__) (last_over_time({{__name__=~"{wanted}"}}[{window}]))')
        return [str(element["metric"].get("__name__", "")) for element in answer]

    @cached_property
    def available(self) -> frozenset[str]:
        with_buckets = (name for name in self._owned if name.endswith("_count"))
        return frozenset(self._owned) | {f"{name[: -len('_count')]}_bucket" for name in with_buckets}

    @cached_property
    def groups(self) -> Sequence[Group]:
        return sorted(set().union(*(self._owners(key) for key in catalog.ANCHORS)))

    def of_fleet(self) -> PrometheusEvaluator:
        by = ("model_name",)
        owners = {
            name: frozenset(Group("", group.model_name, "") for group in groups)
            for name, groups in self._owned.items()
        }
        return PrometheusEvaluator(self._ask, replace(self.promql, by=by), owners)

    def cache_config(self) -> list[Mapping[str, str]]:
        if not self._has("cache_config"):
            return []
        return [element["metric"] for element in self._ask(self.promql.labels("cache_config"))]

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
            if math.isfinite(value):
                values[group_of(element["metric"])] = value
        if not isinstance(node, Quantile):
            return {group: Number.exactly(value) for group, value in values.items()}
        bounds = self._bounds(node.metric) if values else {}
        return {group: _bounded(value, bounds.get(group, [])) for group, value in values.items()}

    def _owners(self, key: str) -> frozenset[Group]:
        metric = catalog.METRICS[key]
        suffix = "_count" if metric.kind == "histogram" else ""
        own = (self._owned.get(name + suffix, frozenset()) for name in metric.names)
        return frozenset().union(*own)

    def _bounds(self, key: str) -> dict[Group, list[float]]:
        """The finite bucket bounds of a histogram, ascending: its buckets depend on version and context.

        Asked for a model at first; engine by engine where those of a model differ.
        """
        if key not in self._bound_cache:
            owners = self._owners(key)
            of_model, alike = self._bounds_by(key, ("model_name",))
            if alike:
                found = {owner: of_model.get(Group("", owner.model_name, ""), []) for owner in owners}
            else:
                found, _ = self._bounds_by(key, self.promql.by)
            self._bound_cache[key] = found
        return self._bound_cache[key]

    def _bounds_by(self, key: str, by: tuple[str, ...]) -> tuple[dict[Group, list[float]], bool]:
        """The bounds, and whether each group has all of its bounds equally often."""
        bounds: dict[Group, dict[float, float]] = {}
        for element in self._ask(replace(self.promql, by=by).bucket_bounds(key)):
            bound = float(element["metric"]["le"])
            bounds.setdefault(group_of(element["metric"]), {})[bound] = float(element["value"][1])
        alike = all(len(set(counts.values())) == 1 for counts in bounds.values())
        return {group: sorted(filter(math.isfinite, counts)) for group, counts in bounds.items()}, alike


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
