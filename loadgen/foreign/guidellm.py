"""GuideLLM's ``benchmarks.json`` (report version 1 and 2): a list of benchmarks, one per load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from loadgen.foreign.result import (
    AskedLoad,
    Reader,
    StatedResult,
    converted,
    numbered,
    only_numbers,
    statistics,
)

TOOL = "GuideLLM"
_MEANING = (
    "its ITL is a request's mean (TPOT here), and what it calls time per output token has the first token's "
    "wait in it (E2E per token)"
)


class _Distribution(msgspec.Struct):
    mean: float | None = None
    median: float | None = None
    percentiles: dict[str, float | None] = {}


class _ByStatus(msgspec.Struct):
    successful: _Distribution | None = None


class _Totals(msgspec.Struct):
    successful: int | None = None
    errored: int | None = None


class _Metrics(msgspec.Struct):
    request_totals: _Totals | None = None
    requests_per_second: _ByStatus | None = None
    request_latency: _ByStatus | None = None
    time_to_first_token_ms: _ByStatus | None = None
    time_per_output_token_ms: _ByStatus | None = None
    inter_token_latency_ms: _ByStatus | None = None
    output_tokens_per_second: _ByStatus | None = None
    prompt_token_count: _ByStatus | None = None
    output_token_count: _ByStatus | None = None


class _Strategy(msgspec.Struct):
    type_: str = ""
    rate: float | None = None
    streams: int | None = None
    max_concurrency: int | None = None


class _Config(msgspec.Struct):
    strategy: _Strategy = msgspec.field(default_factory=_Strategy)


class _Benchmark(msgspec.Struct):
    metrics: _Metrics
    config: _Config | None = None
    args: _Config | None = None
    """What version 1 calls the config."""
    request_totals: _Totals | None = None
    """Where version 1 has them."""
    duration: float | None = None


def _fits(document: Mapping[str, Any]) -> bool:
    benchmarks = document.get("benchmarks")
    first = benchmarks[0] if isinstance(benchmarks, list) and benchmarks else None
    return isinstance(first, dict) and isinstance(first.get("metrics"), dict)


def _read(document: Mapping[str, Any], origin: str) -> Sequence[StatedResult]:
    benchmarks = converted(document["benchmarks"], list[_Benchmark], TOOL, origin)
    return list(numbered([_result(benchmark, origin) for benchmark in benchmarks], origin))


READER = Reader(TOOL, _fits, _read)


def _result(benchmark: _Benchmark, origin: str) -> StatedResult:
    metrics = benchmark.metrics
    strategy = (benchmark.config or benchmark.args or _Config()).strategy
    totals = metrics.request_totals or benchmark.request_totals or _Totals()
    figures = (
        _latency("e2e", metrics.request_latency, 1.0)
        | _latency("ttft", metrics.time_to_first_token_ms, 1e-3)
        | _latency("tpot", metrics.inter_token_latency_ms, 1e-3)
        | _latency("e2e_per_token", metrics.time_per_output_token_ms, 1e-3)
        | only_numbers(
            throughput=_mean(metrics.output_tokens_per_second),
            request_rate=_mean(metrics.requests_per_second),
        )
    )
    return StatedResult(
        tool=TOOL,
        origin=origin,
        figures=figures,
        asked=AskedLoad(strategy.rate, strategy.streams or strategy.max_concurrency, workload=strategy.type_),
        seconds=benchmark.duration,
        completed=totals.successful,
        failed=totals.errored,
        prompt_tokens=_mean(metrics.prompt_token_count),
        output_tokens=_mean(metrics.output_token_count),
        notes=(_MEANING,),
    )


def _latency(metric: str, stated: _ByStatus | None, seconds: float) -> dict[str, float]:
    found = stated.successful if stated else None
    if found is None:
        return {}
    return statistics(metric, {"mean": found.mean, "median": found.median, **found.percentiles}, seconds)


def _mean(stated: _ByStatus | None) -> float | None:
    return stated.successful.mean if stated and stated.successful else None
