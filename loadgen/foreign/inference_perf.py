"""inference-perf's ``stage_N_lifecycle_metrics.json`` and ``summary_lifecycle_metrics.json``."""

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

TOOL = "inference-perf"
_LATENCIES = {
    "time_to_first_token": "ttft",
    "time_per_output_token": "tpot",
    "inter_token_latency": "inter_chunk",
    "request_latency": "e2e",
    "normalized_time_per_output_token": "e2e_per_token",
}
_Statistics = dict[str, float | None] | None


class _Load(msgspec.Struct):
    schedule_delay: _Statistics = None
    requested_rate: float | None = None
    concurrency: int | None = None


class _Throughput(msgspec.Struct):
    output_tokens_per_sec: float | None = None
    requests_per_sec: float | None = None


class _Goodput(msgspec.Struct):
    request_goodput: float | None = None


class _Successes(msgspec.Struct):
    count: int
    latency: dict[str, _Statistics]
    throughput: _Throughput = msgspec.field(default_factory=_Throughput)
    prompt_len: _Statistics = None
    output_len: _Statistics = None
    goodput_metrics: _Goodput | None = None


class _Failures(msgspec.Struct):
    count: int | None = None


class _Report(msgspec.Struct):
    successes: _Successes
    load_summary: _Load = msgspec.field(default_factory=_Load)
    failures: _Failures = msgspec.field(default_factory=_Failures)


def _fits(document: Mapping[str, Any]) -> bool:
    successes = document.get("successes")
    return isinstance(successes, dict) and {"count", "latency"} <= set(successes)


def _read(document: Mapping[str, Any], origin: str) -> Sequence[StatedResult]:
    report = converted(document, _Report, TOOL, origin)
    load, done = report.load_summary, report.successes
    figures = statistics("lateness", load.schedule_delay) | only_numbers(
        throughput=done.throughput.output_tokens_per_sec,
        request_rate=done.throughput.requests_per_sec,
        goodput=done.goodput_metrics.request_goodput if done.goodput_metrics else None,
    )
    for name, metric in _LATENCIES.items():
        figures |= statistics(metric, done.latency.get(name))
    return [
        StatedResult(
            tool=TOOL,
            origin=origin,
            figures=figures,
            asked=AskedLoad(load.requested_rate, load.concurrency),
            seconds=ratio(done.count, figures.get("request_rate")),
            completed=done.count,
            failed=report.failures.count,
            prompt_tokens=(done.prompt_len or {}).get("mean"),
            output_tokens=(done.output_len or {}).get("mean"),
            notes=("its ITL is the gap between two chunks (ITL per chunk)",)
            if "inter_token_latency" in done.latency
            else (),
        )
    ]


READER = Reader(TOOL, _fits, _read)
