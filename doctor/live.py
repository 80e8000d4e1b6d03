"""Signals asked of a running Prometheus, through prometheus-api-client."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from doctor import catalog
from doctor.evaluators import Evaluator, Group, Numbers, group_of
from doctor.promql import PromQL, duration
from doctor.reading import Number
from doctor.signals import Node, Quantile

Ask = Callable[[str], list[Mapping[str, Any]]]
"""An instant query at the window's end: the ``result`` list of Prometheus's HTTP API."""

_NAMES = '__name__=~"(vllm|sglang)[:_].+",__name__!~".+_(bucket|created)"'


class PrometheusEvaluator(Evaluator):
    """Every signal is one query; its answer holds all engines."""

    def __init__(self, ask: Ask, promql: PromQL) -> None:
        self._ask = ask
        self._window = duration(promql.window_ms)
        self._matchers = ",".join(part for part in (promql.selector, _NAMES) if part)
        self._owner_cache: dict[str, frozenset[Group]] = {}
        self._bound_cache: dict[str, dict[Group, list[float]]] = {}
        super().__init__(replace(promql, available=self.available))

    @cached_property
    def available(self) -> frozenset[str]:
        answer = self._ask(f"count by (__name__) (last_over_time({{{self._matchers}}}[{self._window}]))")
        names = {str(element["metric"].get("__name__", "")) for element in answer}
        names |= self._exporters() if names else set()
        # Buckets were left out of the question: there are many, and they come with a _count.
        return frozenset(
            names | {f"{name[: -len('_count')]}_bucket" for name in names if name.endswith("_count")}
        )

    def _exporters(self) -> set[str]:
        """What other exporters tell; the user's selector is for the servers."""
        wanted = "|".join(name for key in catalog.ELSEWHERE for name in catalog.METRICS[key].names)
        answer = self._ask(f'count by (__name__) (last_over_time({{__name__=~"{wanted}"}}[{self._window}]))')
        return {str(element["metric"].get("__name__", "")) for element in answer}

    @cached_property
    def groups(self) -> Sequence[Group]:
        return sorted(set().union(*(self._owners(key) for key in catalog.ANCHORS)))

    def cache_config(self) -> list[Mapping[str, str]]:
        if not self._has("cache_config"):
            return []
        return [element["metric"] for element in self._ask(self.promql.labels("cache_config"))]

    def numbers(self, node: Node) -> Numbers:
        values: dict[Group, float] = {}
        for element in self._ask(self.promql.text(node)):
            value = float(element["value"][1])
            if math.isfinite(value):
                values[group_of(element["metric"])] = value
        if not isinstance(node, Quantile):
            return {group: Number.exactly(value) for group, value in values.items()}
        bounds = self._bounds(node.metric)
        return {group: _bounded(value, bounds.get(group, [])) for group, value in values.items()}

    def _owners(self, key: str) -> frozenset[Group]:
        if not self._has(key):
            return frozenset()
        if key not in self._owner_cache:
            answer = self._ask(self.promql.engines(key))
            self._owner_cache[key] = frozenset(group_of(element["metric"]) for element in answer)
        return self._owner_cache[key]

    def _bounds(self, key: str) -> dict[Group, list[float]]:
        """The finite bucket bounds of a histogram, ascending: its buckets depend on version and context."""
        if key not in self._bound_cache:
            bounds: dict[Group, list[float]] = {}
            for element in self._ask(self.promql.bucket_bounds(key)):
                bound = float(element["metric"]["le"])
                if math.isfinite(bound):
                    bounds.setdefault(group_of(element["metric"]), []).append(bound)
            self._bound_cache[key] = {group: sorted(own) for group, own in bounds.items()}
        return self._bound_cache[key]


def _bounded(value: float, bounds: Sequence[float]) -> Number:
    """A quantile in the first bucket, or at the last finite bound, is only a bound."""
    if bounds and value <= bounds[0]:
        return Number(value, 0.0, bounds[0])
    if bounds and value >= bounds[-1]:
        return Number(value, bounds[-1], math.inf)
    return Number.exactly(value)
