"""genai-bench: one JSON file per traffic scenario and level of concurrency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from loadgen.foreign.result import (
    AskedLoad,
    ForeignError,
    Reader,
    StatedResult,
    converted,
    only_numbers,
    ratio,
    statistics,
)

TOOL = "genai-bench"
_SECONDS = {"s": 1.0, "ms": 1e-3}


class _Aggregated(msgspec.Struct):
    stats: dict[str, dict[str, float | None]]
    scenario: str | None = None
    num_concurrency: int | None = None
    run_duration: float | None = None
    mean_output_throughput_tokens_per_s: float | None = None
    requests_per_second: float | None = None
    requests_per_minute: float | None = None
    """What older versions state."""
    num_error_requests: int | None = None
    num_completed_requests: int | None = None


def _fits(document: Mapping[str, Any]) -> bool:
    return isinstance(document.get("aggregated_metrics"), dict)


def _read(document: Mapping[str, Any], origin: str) -> Sequence[StatedResult]:
    run = converted(document["aggregated_metrics"], _Aggregated, TOOL, origin)
    unit = document.get("_time_unit", "s")
    if unit not in _SECONDS:
        raise ForeignError(f"{origin}: a result of {TOOL} in {unit!r}; known units: {', '.join(_SECONDS)}")
    figures = only_numbers(
        throughput=run.mean_output_throughput_tokens_per_s,
        request_rate=run.requests_per_second or ratio(run.requests_per_minute, 60),
    )
    for name, metric in (("ttft", "ttft"), ("tpot", "tpot"), ("e2e_latency", "e2e")):
        figures |= statistics(metric, run.stats.get(name), _SECONDS[unit])
    return [
        StatedResult(
            tool=TOOL,
            origin=origin,
            figures=figures,
            asked=AskedLoad(None, run.num_concurrency, None, run.scenario or ""),
            seconds=run.run_duration or ratio(run.num_completed_requests, figures.get("request_rate")),
            completed=run.num_completed_requests,
            failed=run.num_error_requests,
            prompt_tokens=run.stats.get("num_input_tokens", {}).get("mean"),
            output_tokens=run.stats.get("num_output_tokens", {}).get("mean"),
        )
    ]


READER = Reader(TOOL, _fits, _read)
