"""Metric families that a step records into, and prometheus_client collects: counters, gauges, histograms.

prometheus_client's own metrics take a lock for every number, and a histogram observes one value at a time.
Here one thread records, and a simulation reads the numbers without collecting them.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Literal, TypeVar

from prometheus_client import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import INF, floatToGoString

Labels = Mapping[str, str]
Kind = Literal["counter", "gauge", "histogram"]


class Number:
    """The value of a counter or a gauge."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        self.value = value

    def inc(self, amount: float = 1) -> None:
        self.value += amount

    def lines(self) -> tuple[tuple[str, Labels], ...]:
        """Of each line in the exposition: what it adds to the family's name, and to the labels."""
        return (("", {}),)

    def read(self) -> Sequence[float]:
        """The number on each line."""
        return (self.value,)


class Histogram:
    """Counts of observed values by bucket, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = (*map(float, bounds), INF)
        """Upper bounds of the buckets, ascending."""
        self.counts = [0] * len(self.bounds)
        self.total = 0.0

    def observe(self, amount: float, times: int = 1) -> None:
        """Observe ``amount`` that many times."""
        self.total += amount * times
        self.counts[bisect_left(self.bounds, amount)] += times

    def lines(self) -> tuple[tuple[str, Labels], ...]:
        buckets = (("_bucket", {"le": floatToGoString(bound)}) for bound in self.bounds)
        return (*buckets, ("_count", {}), ("_sum", {}))

    def read(self) -> Sequence[float]:
        cumulative = list(accumulate(self.counts))
        return (*cumulative, cumulative[-1], self.total)


Child = TypeVar("Child", Number, Histogram)


class MetricFamily(Collector):
    """A metric of one name, with a child per set of label values. All children are there from the start."""

    def __init__(
        self,
        name: str,
        text: str,
        kind: Kind,
        children: Sequence[tuple[Labels, Number | Histogram]],
    ) -> None:
        self.name, self.text, self.kind, self.children = name, text, kind, children
        self._created = time.time()

    def collect(self) -> Iterator[Metric]:
        metric = Metric(self.name, self.text, self.kind)
        suffix = "_total" if self.kind == "counter" else ""
        for labels, child in self.children:
            for (added, more), number in zip(child.lines(), child.read(), strict=True):
                metric.add_sample(f"{self.name}{suffix}{added}", {**labels, **more}, number)
            if self.kind != "gauge":
                metric.add_sample(f"{self.name}_created", dict(labels), self._created)
        yield metric
