"""The result of ``vllm bench serve`` (its JSON) as a source: latencies and rates, no gauges."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from doctor.metrics.evaluators import Evaluator, Group, Numbers
from doctor.metrics.promql import PromQL
from doctor.metrics.signals import Node, Signal
from doctor.metrics.sources import Observation, Source
from servers.errors import SourceError
from servers.input_file import read_input
from servers.kinds import VLLM
from servers.reading import Missing, Number, Reading

_SECONDS = {
    f"{signal}_{ours}": f"{theirs}_{name}_ms"
    for signal, name in (("ttft", "ttft"), ("itl", "itl"), ("tpot", "tpot"), ("e2e", "e2el"))
    for ours, theirs in (("mean", "mean"), ("p50", "median"), ("p90", "p90"), ("p95", "p95"), ("p99", "p99"))
}
"""Our signal, and the file's key in milliseconds."""


class BenchmarkResult(Source):
    """A result file. Its facts (requests, failures, rate reached) say whether it can be relied on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)

    def observe(self, window: float | None, slo: Mapping[str, float]) -> Observation:
        """Raises SourceError."""
        result = self._read()
        seconds, completed = float(result["duration"]), float(result["completed"])
        values = {name: result[key] / 1000 for name, key in _SECONDS.items() if _is_number(result.get(key))}
        values |= {"first_tokens": completed, "finished": completed, "served_total": completed}
        values["request_rate"] = completed / seconds
        for name, key in (("prompt", "total_input_tokens"), ("output", "total_output_tokens")):
            if _is_number(result.get(key)) and completed:
                values[f"{name}_tokens_mean"] = result[key] / completed
        if _is_number(result.get("output_throughput")):
            values["generation_rate"] = float(result["output_throughput"])
        group = Group.of(model_name=str(result.get("model_id", "")))
        evaluator = StatedEvaluator(self.name, group, values)
        facts = _facts(result, seconds, completed)
        return Observation(self.name, evaluator, "vllm bench serve", seconds, VLLM, (), None, facts)

    def _read(self) -> dict[str, Any]:
        try:
            result = json.loads(read_input(self.path))
        except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
            raise SourceError(f"--bench {self.path}: cannot be read ({error})") from None
        needed = ("duration", "completed")
        if not isinstance(result, dict) or not all(_is_number(result.get(key)) for key in needed):
            raise SourceError(
                f"--bench {self.path}: no result of vllm bench serve (it lacks duration, completed)"
            )
        if not result["duration"] > 0:
            raise SourceError(f"--bench {self.path}: duration is {result['duration']}; nothing was measured")
        return result


class StatedEvaluator(Evaluator):
    """Signals that were measured already, for one engine."""

    def __init__(self, name: str, group: Group, values: Mapping[str, float]) -> None:
        self._name, self._group, self._values = name, group, values
        super().__init__(PromQL(1000, 1000))

    @property
    def available(self) -> Mapping[str, Sequence[str]]:
        return {}

    def of_fleet(self) -> StatedEvaluator:
        return self

    def cache_config(self) -> list[Mapping[str, str]]:
        return []

    def numbers(self, node: Node) -> Numbers:
        return {}

    def bounds(self, key: str) -> Mapping[Group, Sequence[float]]:
        return {}

    def query(self, signal: Signal) -> str:
        return f"{self._name}: {_SECONDS.get(signal.name, signal.name)}"

    def read(self, signal: Signal) -> dict[Group, Reading]:
        value = self._values.get(signal.name)
        if value is None:
            return {self._group: Missing(signal.name, "metric", "a benchmark's result does not hold it")}
        return {self._group: Number.exactly(value)}

    def _carriers(self, key: str) -> frozenset[Group]:
        return frozenset({self._group})


def _facts(result: Mapping[str, Any], seconds: float, completed: float) -> dict[str, float]:
    failed = result.get("failed")
    if not _is_number(failed):
        asked = result.get("num_prompts")
        failed = max(0.0, asked - completed) if _is_number(asked) else 0.0
    facts = {"bench_requests": completed, "bench_failed": float(failed), "bench_seconds": seconds}
    try:
        rate = float(result.get("request_rate", math.inf))
    except (TypeError, ValueError):
        rate = math.inf
    facts["bench_rate_share"] = completed / seconds / rate if 0 < rate < math.inf else 1.0
    return facts


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
