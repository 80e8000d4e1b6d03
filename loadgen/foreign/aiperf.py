"""AIPerf's ``profile_export_aiperf.json``, and its forerunner GenAI-Perf's, which has the same entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from loadgen.foreign.result import (
    AskedLoad,
    Reader,
    StatedResult,
    converted,
    only_numbers,
    ratio,
    statistics,
)

TOOL = "AIPerf"
_SECONDS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "us": 1e-6, "ns": 1e-9}
_LATENCIES = {
    "time_to_first_token": "ttft",
    "inter_token_latency": "tpot",
    "inter_chunk_latency": "inter_chunk",
    "request_latency": "e2e",
}
"""Its inter-token latency is (latency - TTFT) / (tokens - 1) of each request."""


class _Metric(msgspec.Struct):
    unit: str = ""
    avg: float | None = None


class _Endpoint(msgspec.Struct):
    model_names: list[str] = []


class _LoadGenerator(msgspec.Struct):
    concurrency: int | list[int] | None = None
    request_rate: float | None = None
    request_count: int | None = None


class _Config(msgspec.Struct):
    endpoint: _Endpoint | None = None
    loadgen: _LoadGenerator | None = None


class _ErrorCount(msgspec.Struct):
    count: int = 0


class _Export(msgspec.Struct):
    request_count: _Metric | None = None
    error_request_count: _Metric | None = None
    benchmark_duration: _Metric | None = None
    request_throughput: _Metric | None = None
    output_token_throughput: _Metric | None = None
    goodput: _Metric | None = None
    input_sequence_length: _Metric | None = None
    output_sequence_length: _Metric | None = None
    input_config: _Config | None = None
    error_summary: list[_ErrorCount] | None = None
    was_cancelled: bool | None = None


def _fits(document: Mapping[str, Any]) -> bool:
    entries = [document.get(name) for name in ("request_throughput", *_LATENCIES)]
    return any(isinstance(entry, dict) and "unit" in entry for entry in entries)


def _read(document: Mapping[str, Any], origin: str) -> Sequence[StatedResult]:
    export = converted(document, _Export, TOOL, origin)
    figures = only_numbers(
        throughput=_value(export.output_token_throughput),
        request_rate=_value(export.request_throughput),
        goodput=_value(export.goodput),
    )
    for name, metric in _LATENCIES.items():
        entry = document.get(name)
        if isinstance(entry, dict) and entry.get("unit") in _SECONDS:
            figures |= statistics(metric, entry, _SECONDS[entry["unit"]])
    completed = _value(export.request_count)
    config = export.input_config or _Config()
    asked = config.loadgen or _LoadGenerator()
    notes = ["what it calls inter-token latency is a request's mean: TPOT here"]
    notes += ["it was cancelled before its end"] * bool(export.was_cancelled)
    return [
        StatedResult(
            tool=TOOL,
            origin=origin,
            figures=figures,
            asked=AskedLoad(
                asked.request_rate,
                asked.concurrency if isinstance(asked.concurrency, int) else None,
                asked.request_count,
            ),
            model=", ".join(config.endpoint.model_names) if config.endpoint else "",
            seconds=_value(export.benchmark_duration) or ratio(completed, figures.get("request_rate")),
            completed=completed,
            failed=_failed(export),
            prompt_tokens=_value(export.input_sequence_length),
            output_tokens=_value(export.output_sequence_length),
            notes=tuple(notes),
        )
    ]


READER = Reader(TOOL, _fits, _read)


def _value(metric: _Metric | None) -> float | None:
    return metric.avg if metric else None


def _failed(export: _Export) -> float | None:
    counted = _value(export.error_request_count)
    if counted is not None or export.error_summary is None:
        return counted
    return sum(error.count for error in export.error_summary)
