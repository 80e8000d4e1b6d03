"""LLMPerf's ``…_summary.json``: one flat object, its keys joined by underscores."""

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

TOOL = "LLMPerf"
_LATENCIES = {
    "results_ttft_s": "ttft",
    "results_inter_token_latency_s": "e2e_per_token",
    "results_end_to_end_latency_s": "e2e",
}


class _Summary(msgspec.Struct):
    model: str | None = None
    num_concurrent_requests: int | None = None
    mean_input_tokens: float | None = None
    mean_output_tokens: float | None = None
    results_num_requests_started: int | None = None
    results_number_errors: int | None = None
    results_num_completed_requests: int | None = None
    results_num_completed_requests_per_min: float | None = None
    results_mean_output_throughput_token_per_s: float | None = None
    results_number_input_tokens_mean: float | None = None
    results_number_output_tokens_mean: float | None = None


def _fits(document: Mapping[str, Any]) -> bool:
    return any(name.startswith(key) for name in document for key in _LATENCIES)


def _read(document: Mapping[str, Any], origin: str) -> Sequence[StatedResult]:
    summary = converted(document, _Summary, TOOL, origin)
    rate = ratio(summary.results_num_completed_requests_per_min, 60)
    figures = only_numbers(throughput=summary.results_mean_output_throughput_token_per_s, request_rate=rate)
    for key, metric in _LATENCIES.items():
        stated = {
            name.removeprefix(f"{key}_").removeprefix("quantiles_"): value
            for name, value in document.items()
            if name.startswith(f"{key}_")
        }
        figures |= statistics(metric, stated)
    started, failed = summary.results_num_requests_started, summary.results_number_errors
    completed = summary.results_num_completed_requests
    if completed is None and started is not None and failed is not None:
        completed = started - failed
    return [
        StatedResult(
            tool=TOOL,
            origin=origin,
            figures=figures,
            asked=AskedLoad(
                None,
                summary.num_concurrent_requests,
                None,
                f"{summary.mean_input_tokens:g} prompt tokens" if summary.mean_input_tokens else "",
            ),
            model=summary.model or "",
            seconds=ratio(completed, rate),
            completed=completed,
            failed=failed,
            prompt_tokens=summary.results_number_input_tokens_mean or summary.mean_input_tokens,
            output_tokens=summary.results_number_output_tokens_mean or summary.mean_output_tokens,
            notes=("its ITL is E2E / output tokens, so with the first token's wait (E2E per token)",),
        )
    ]


READER = Reader(TOOL, _fits, _read)
