"""``vllm bench serve`` and SGLang's ``bench_serving``, which descends from it: JSON and the printed table."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from loadgen.foreign.result import (
    AskedLoad,
    Reader,
    StatedResult,
    converted,
    is_number,
    only_numbers,
    ratio,
    statistics,
)

VLLM, SGLANG = "vllm bench serve", "SGLang's bench_serving"
TABLE = re.compile(
    r"^[^\w=\n]*=+ Serving Benchmark Result =+\s*$(.*?)(?:^[^\w=\n]*={20,}\s*$|\Z)", re.M | re.S
)
"""One printed result, also behind a log's or a script's comment signs."""
_LATENCY = re.compile(r"(mean|median|p[\d.]+)_(ttft|tpot|itl|e2el|e2e_latency)_ms")
_ROW = re.compile(r"^[^\w\n]*(Mean|Median|P[\d.]+) (TTFT|TPOT|ITL|E2EL|E2E Latency) \(ms\):\s+(\S+)", re.M)
_METRICS = {"ttft": "ttft", "tpot": "tpot", "itl": "inter_chunk", "e2el": "e2e", "e2e_latency": "e2e"}
_PERCENTILES = (50, 90, 95, 99)
_COUNTS = {
    "Successful requests": "completed",
    "Failed requests": "failed",
    "Benchmark duration (s)": "duration",
    "Total input tokens": "total_input_tokens",
    "Total generated tokens": "total_output_tokens",
    "Request throughput (req/s)": "request_throughput",
    "Request goodput (req/s)": "request_goodput",
    "Output token throughput (tok/s)": "output_throughput",
    "Request rate configured (RPS)": "request_rate",
    "Traffic request rate": "request_rate",
    "Maximum request concurrency": "max_concurrency",
    "Max request concurrency": "max_concurrency",
    "Backend": "backend",
}
"""Rows of the table (vLLM's, then SGLang's wording) by the JSON's keys."""


class _Result(msgspec.Struct):
    duration: float
    completed: int
    failed: int | None = None
    num_prompts: int | None = None
    request_rate: float | str | None = None
    max_concurrency: int | None = None
    backend: str | None = None
    model_id: str | None = None
    dataset_name: str | None = None
    total_input_tokens: float | None = None
    total_output_tokens: float | None = None
    request_throughput: float | None = None
    request_goodput: float | None = None
    output_throughput: float | None = None


def _fits_vllm(document: Mapping[str, Any]) -> bool:
    return {"duration", "completed"} <= set(document) and not _fits_sglang(document)


def _fits_sglang(document: Mapping[str, Any]) -> bool:
    return {"duration", "completed"} <= set(document) and (
        "mean_e2e_latency_ms" in document or "total_output_tokens_retokenized" in document
    )


def _read_vllm(document: Mapping[str, Any], origin: str) -> Sequence[StatedResult]:
    return [_result(document, VLLM, origin)]


def _read_sglang(document: Mapping[str, Any], origin: str) -> Sequence[StatedResult]:
    return [_result(document, SGLANG, origin)]


VLLM_READER = Reader(VLLM, _fits_vllm, _read_vllm)
SGLANG_READER = Reader(SGLANG, _fits_sglang, _read_sglang)


def _result(document: Mapping[str, Any], tool: str, origin: str) -> StatedResult:
    stated = converted(document, _Result, tool, origin)
    figures = dict(_sampled(document))
    for key, value in document.items():
        if (match := _LATENCY.fullmatch(key)) and is_number(value):
            figures |= statistics(_METRICS[match[2]], {match[1]: value}, 1e-3)
    figures |= only_numbers(
        throughput=stated.output_throughput,
        request_rate=ratio(stated.completed, stated.duration),
        goodput=stated.request_goodput,
    )
    backend = stated.backend or ""
    return StatedResult(
        tool=tool,
        origin=origin,
        figures=figures,
        asked=AskedLoad(
            _rate(stated.request_rate), stated.max_concurrency, stated.num_prompts, stated.dataset_name or ""
        ),
        model=stated.model_id or "",
        server="sglang" if backend.startswith("sglang") else "vllm" if tool == VLLM else "",
        seconds=stated.duration,
        completed=stated.completed,
        failed=_failed(stated),
        prompt_tokens=ratio(stated.total_input_tokens, stated.completed),
        output_tokens=ratio(stated.total_output_tokens, stated.completed),
        notes=("its ITL is the gap between two chunks (ITL per chunk), whatever tokens these carry",)
        if any(name.startswith("inter_chunk") and value > 0 for name, value in figures.items())
        else (),
    )


def _rate(value: float | str | None) -> float | None:
    try:
        rate = float(value) if value is not None else math.nan
    except ValueError:
        rate = math.nan
    return rate if rate > 0 else None


def _failed(stated: _Result) -> float | None:
    if stated.failed is not None:
        return stated.failed
    return None if stated.num_prompts is None else max(0, stated.num_prompts - stated.completed)


def _sampled(document: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Percentiles of the requests themselves, where ``--save-detailed`` kept all of them."""
    ttfts, itls = document.get("ttfts"), document.get("itls")
    errors = document.get("errors") or []
    if not isinstance(ttfts, list) or not isinstance(itls, list) or len(ttfts) != len(itls):
        return
    good = [at for at in range(len(ttfts)) if at >= len(errors) or not errors[at]]
    if len(good) != document["completed"] or not good:
        return
    gaps = [itls[at] for at in good]
    if not all(isinstance(some, list) and all(map(is_number, some)) for some in gaps):
        return
    if not all(is_number(ttfts[at]) for at in good):
        return
    samples = {
        "ttft": [ttfts[at] for at in good],
        "inter_chunk": list(chain.from_iterable(gaps)),
        "e2e": [ttfts[at] + sum(some) for at, some in zip(good, gaps, strict=True)],
    }
    for metric, values in samples.items():
        if values:
            for percent, value in zip(_PERCENTILES, np.percentile(values, _PERCENTILES), strict=True):
                yield f"{metric}_p{percent}", float(value)


def printed_results(text: str) -> list[tuple[Mapping[str, Any], Reader]]:
    """The tables in a log or a pasted terminal, as the documents that the tools would have saved."""
    found: list[tuple[Mapping[str, Any], Reader]] = []
    for table in TABLE.finditer(text):
        document: dict[str, Any] = {}
        for line in table[1].splitlines():
            name, colon, value = line.strip(" \t#|>│").partition(":")
            if colon and name in _COUNTS and value.strip():
                document[_COUNTS[name]] = _cell(_COUNTS[name], value.split()[0])
        for statistic, metric, value in _ROW.findall(table[1]):
            key = f"{statistic.lower()}_{metric.lower().replace(' ', '_')}_ms"
            document[key] = _cell(key, value)
        if "failed" in document and "completed" in document:
            document["num_prompts"] = document["completed"] + document["failed"]
        reader = SGLANG_READER if "mean_e2e_latency_ms" in document or "backend" in document else VLLM_READER
        found.append((document, reader))
    return found


def _cell(key: str, text: str) -> Any:
    if key == "backend":
        return text
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return text
    return int(value) if value.is_integer() and key in ("completed", "failed", "max_concurrency") else value
