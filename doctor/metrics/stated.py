"""Figures that a source states as they are, read as signals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from doctor.metrics.evaluators import Evaluator, Group, Numbers
from doctor.metrics.promql import PromQL
from doctor.metrics.signals import Node, Signal
from servers.metrics.identity import Sample
from servers.reading import Missing, Number, Reading


class StatedEvaluator(Evaluator):
    """Signals that were measured already, for one engine; ``lacking``: why it has no others."""

    def __init__(self, name: str, group: Group, lacking: str, values: Mapping[str, float]) -> None:
        self._name, self._group, self._lacking, self._values = name, group, lacking, values
        super().__init__(PromQL(1000, 1000))

    @property
    def available(self) -> Mapping[str, Sequence[str]]:
        return {}

    def of_fleet(self) -> StatedEvaluator:
        return self

    def samples(self, key: str) -> Sequence[Sample]:
        return []

    def numbers(self, node: Node) -> Numbers:
        return {}

    def bounds(self, key: str) -> Mapping[Group, Sequence[float]]:
        return {}

    def query(self, signal: Signal) -> str:
        return f"{self._name}: {signal.name}"

    def read(self, signal: Signal) -> dict[Group, Reading]:
        value = self._values.get(signal.name)
        if value is None:
            return {self._group: Missing(signal.name, "metric", self._lacking)}
        return {self._group: Number.exactly(value)}

    def _carriers(self, key: str) -> frozenset[Group]:
        return frozenset({self._group})
