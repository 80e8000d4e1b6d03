"""The few figures that a trial reads off the server's own metrics and log."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

_KV_LOG = re.compile(r"KV cache(?: size)?:?\s+([\d,]+) tokens", re.IGNORECASE)


_SGLANG = {
    "sglang:num_running_reqs": "num_requests_running",
    "sglang:max_total_num_tokens": "kv_tokens",
    "sglang:token_usage": "kv_cache_usage_perc",
}
ENOUGH = 10
"""Scrapes that a peak is read from, at least: the first and the last of each run see an empty server."""
_WANTED = {"num_preemptions", "cache_config_info", "prefix_cache_hits", *_SGLANG.values()}


@dataclass(frozen=True)
class ServerFigures:
    """None where the server does not say."""

    kv_tokens: int | None = None
    peak_running: int | None = None
    """Requests that ran at a scrape, at most; None also where too few scrapes looked."""
    preemptions: int | None = None
    """During the load."""
    peak_kv_usage: float | None = None
    """Share of the fullest engine's pool, at most, that requests held at a scrape; None as before."""
    prefix_hits: int | None = None
    """Tokens that were found in the prefix cache during the load."""


def read_figures(scrapes: Sequence[tuple[int, str]], log: str = "") -> ServerFigures:
    """From scrapes in order of time; the log's KV line stands in for a missing metric."""
    samples = [_samples(text) for _, text in scrapes]
    preempted, hits = (
        [s[name] for s in samples if name in s] for name in ("num_preemptions", "prefix_cache_hits")
    )
    running = [s["num_requests_running"] for s in samples if "num_requests_running" in s]
    pools = [s["kv_tokens"] for s in samples if "kv_tokens" in s]
    usage = [s["kv_cache_usage_perc"] for s in samples if "kv_cache_usage_perc" in s]
    logged = _KV_LOG.findall(log)
    pool = pools[-1] if pools else int(logged[-1].replace(",", "")) if logged else None
    return ServerFigures(
        kv_tokens=None if pool is None else int(pool),
        peak_running=int(max(running)) if len(running) >= ENOUGH else None,
        preemptions=int(preempted[-1] - preempted[0]) if preempted else None,
        peak_kv_usage=max(usage) if len(usage) >= ENOUGH else None,
        prefix_hits=int(hits[-1] - hits[0]) if hits else None,
    )


def _samples(text: str) -> dict[str, float]:
    """The wanted metrics of one scrape, summed over engines; of their pools' usage the largest."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        name = family.name.removeprefix("vllm:").removesuffix("_total")
        name = _SGLANG.get(name, name)
        if name not in _WANTED:
            continue
        for sample in family.samples:
            if name == "cache_config_info":
                blocks, size = (sample.labels.get(key, "") for key in ("num_gpu_blocks", "block_size"))
                if blocks.isdigit() and size.isdigit():
                    # One block is the null block, which never holds tokens.
                    found["kv_tokens"] = found.get("kv_tokens", 0) + (int(blocks) - 1) * int(size)
            elif name == "kv_cache_usage_perc":
                found[name] = max(found.get(name, 0.0), sample.value)
            elif not sample.name.endswith("_created"):
                found[name] = found.get(name, 0) + sample.value
    return found
