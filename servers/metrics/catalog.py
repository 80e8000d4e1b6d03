"""The metrics that the doctor reads, under every name that a vLLM or SGLang version gave them.

Names are listed newest first; where a server exposes two at once (the deprecated one lives on for two
releases) the first counts. Some pipelines turn the colon into an underscore, so that spelling is known too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal

MetricKind = Literal["gauge", "counter", "histogram", "info"]


@dataclass(frozen=True)
class Metric:
    """One quantity. ``names`` are sample names (counters end in _total); a histogram's lack the suffix.

    ``combine`` says how several series of one engine add up: requests sum, a percentage must not.
    ``bounds`` are vLLM's bucket bounds where a rule needs one by value.
    """

    key: str
    kind: MetricKind
    names: tuple[str, ...]
    combine: Literal["sum", "max"] = "sum"
    bounds: tuple[float, ...] = ()


def _metric(key: str, kind: MetricKind, *names: str, combine: Literal["sum", "max"] = "sum") -> Metric:
    spelled = tuple(dict.fromkeys(v for name in names for v in (name, name.replace(":", "_", 1))))
    return Metric(key, kind, spelled, combine, _BOUNDS.get(key, ()))


_BOUNDS: dict[str, tuple[float, ...]] = {
    "ttft": (
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
        *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
    ),
    "itl": (
        *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
        *(20.0, 40.0, 80.0),
    ),
}

METRICS: dict[str, Metric] = {
    metric.key: metric
    for metric in (
        _metric("running", "gauge", "vllm:num_requests_running", "sglang:num_running_reqs"),
        _metric("waiting", "gauge", "vllm:num_requests_waiting", "sglang:num_queue_reqs"),
        _metric(
            "kv_usage",
            "gauge",
            "vllm:kv_cache_usage_perc",
            "vllm:gpu_cache_usage_perc",
            "sglang:token_usage",
            combine="max",
        ),
        _metric(
            "cache_hit_rate",
            "gauge",
            "vllm:gpu_prefix_cache_hit_rate",
            "sglang:cache_hit_rate",
            combine="max",
        ),
        _metric(
            "preemptions", "counter", "vllm:num_preemptions_total", "sglang:num_retracted_requests_total"
        ),
        _metric("prompt_tokens", "counter", "vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
        _metric(
            "generation_tokens", "counter", "vllm:generation_tokens_total", "sglang:generation_tokens_total"
        ),
        _metric(
            "prefix_queries",
            "counter",
            "vllm:prefix_cache_queries_total",
            "vllm:gpu_prefix_cache_queries_total",
            "sglang:prompt_tokens_total",
        ),
        _metric(
            "prefix_hits",
            "counter",
            "vllm:prefix_cache_hits_total",
            "vllm:gpu_prefix_cache_hits_total",
            "sglang:cached_tokens_total",
        ),
        _metric("finished", "counter", "vllm:request_success_total", "sglang:num_requests_total"),
        _metric("drafts", "counter", "vllm:spec_decode_num_drafts_total"),
        _metric("draft_tokens", "counter", "vllm:spec_decode_num_draft_tokens_total"),
        _metric("accepted_tokens", "counter", "vllm:spec_decode_num_accepted_tokens_total"),
        _metric("accept_length", "gauge", "sglang:spec_accept_length", combine="max"),
        _metric(
            "ttft", "histogram", "vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds"
        ),
        _metric(
            "itl",
            "histogram",
            "vllm:inter_token_latency_seconds",
            "vllm:time_per_output_token_seconds",
            "sglang:inter_token_latency_seconds",
            "sglang:time_per_output_token_seconds",
        ),
        _metric("tpot", "histogram", "vllm:request_time_per_output_token_seconds"),
        _metric("e2e", "histogram", "vllm:e2e_request_latency_seconds", "sglang:e2e_request_latency_seconds"),
        _metric(
            "queue_time",
            "histogram",
            "vllm:request_queue_time_seconds",
            "vllm:time_in_queue_requests",
            "sglang:queue_time_seconds",
        ),
        _metric("prefill_time", "histogram", "vllm:request_prefill_time_seconds"),
        _metric("decode_time", "histogram", "vllm:request_decode_time_seconds"),
        _metric("prompt_length", "histogram", "vllm:request_prompt_tokens", "sglang:prompt_tokens_histogram"),
        _metric(
            "generation_length",
            "histogram",
            "vllm:request_generation_tokens",
            "sglang:generation_tokens_histogram",
        ),
        _metric("prefill_length", "histogram", "vllm:request_prefill_kv_computed_tokens"),
        _metric("request_preemptions", "histogram", "vllm:request_num_preemptions"),
        _metric("iteration_tokens", "histogram", "vllm:iteration_tokens_total"),
        _metric("cache_config", "info", "vllm:cache_config_info"),
        _metric("gpu_busy", "gauge", "DCGM_FI_DEV_GPU_UTIL"),
        _metric("cpu_time", "counter", "node_cpu_seconds_total"),
    )
}

ANCHORS = ("running", "waiting", "kv_usage", "generation_tokens", "ttft")
"""Metrics that carry the labels of one engine; who has none of them is not a server we know."""

OPTIONAL = frozenset(
    {"drafts", "draft_tokens", "accepted_tokens", "accept_length", "cache_config", "cache_hit_rate"}
)
"""Metrics that a healthy server may lack: speculation's exist only while it is on."""

ELSEWHERE: dict[str, str] = {
    "gpu_busy": "DCGM exporter",
    "cpu_time": "node exporter",
}
"""Metrics of other exporters on the server's host, with the exporter's name."""

_INTRODUCED = {
    "vllm:kv_cache_usage_perc": (0, 9, 2),
    "vllm:prefix_cache_queries_total": (0, 9, 2),
    "vllm:prefix_cache_hits_total": (0, 9, 2),
    "vllm:inter_token_latency_seconds": (0, 10, 2),
}
_GONE = {
    "vllm:gpu_cache_usage_perc": (0, 12, 0),
    "vllm:gpu_prefix_cache_queries_total": (0, 12, 0),
    "vllm:gpu_prefix_cache_hits_total": (0, 12, 0),
    "vllm:time_per_output_token_seconds": (0, 14, 0),
    "vllm:time_in_queue_requests": (0, 10, 0),
    "vllm:gpu_prefix_cache_hit_rate": (0, 10, 0),
}
_NEVER = (999, 0, 0)

_SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "gauge": ("",), "counter": ("",), "info": ("",)}

_FAMILIES = (
    # Decisive names, newest family first: the first hit wins.
    ("vllm:inter_token_latency_seconds_count", "vLLM V1, 0.10.2 or later"),
    ("vllm:kv_cache_usage_perc", "vLLM V1, 0.9.2 or later"),
    ("vllm:num_requests_swapped", "vLLM V0 (0.6 to 0.9)"),
    ("vllm:cpu_cache_usage_perc", "vLLM V0 (0.6 to 0.9)"),
    ("vllm:gpu_cache_usage_perc", "vLLM V1, 0.8 to 0.9.1"),
    ("vllm:num_requests_running", "vLLM, version unknown"),
    ("sglang:num_running_reqs", "SGLang"),
    ("sglang:token_usage", "SGLang"),
)
MARKERS = frozenset(name.replace(":", mark, 1) for name, _ in _FAMILIES for mark in (":", "_"))


@cache
def sample_names() -> frozenset[str]:
    """Every sample name worth parsing."""
    wanted = {
        name + suffix
        for metric in METRICS.values()
        for name in metric.names
        for suffix in _SUFFIXES[metric.kind]
    }
    return frozenset(wanted | MARKERS)


def names_of(version: str) -> frozenset[str]:
    """The sample names of one vLLM version, such as "0.9.1". Raises ValueError."""
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version.strip())
    if match is None:
        raise ValueError(f"{version!r} is no vLLM version; write e.g. 0.10.1")
    number = (int(match[1]), int(match[2]), int(match[3] or 0))
    return frozenset(
        name + suffix
        for metric in METRICS.values()
        for name in metric.names
        if name.startswith("vllm:") and _INTRODUCED.get(name, (0, 0, 0)) <= number < _GONE.get(name, _NEVER)
        for suffix in _SUFFIXES[metric.kind]
    )


def family(names: Iterable[str]) -> str | None:
    """The engine and version range that exposes these sample names, or None for a stranger."""
    present = set(names)
    for marker, label in _FAMILIES:
        if marker in present or marker.replace(":", "_", 1) in present:
            return label
    return None
