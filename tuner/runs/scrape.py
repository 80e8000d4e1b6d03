"""The few figures that a trial reads off the server's own metrics and log."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_KV_LOG = re.compile(r"KV cache(?: size)?:?\s+(\d[\d,]{,20}) tokens", re.IGNORECASE)


_SGLANG = {
    "sglang:num_running_reqs": "num_requests_running",
    "sglang:max_total_num_tokens": "kv_tokens",
    "sglang:token_usage": "kv_cache_usage_perc",
}
ENOUGH = 10
"""Scrapes that a peak is read from, at least: the first and the last of each run see an empty server."""
MOST = 1e12
"""Requests, tokens and blocks that a server may have: what says more, less than none or NaN says nothing."""
_WANTED = {"num_preemptions", "cache_config_info", "prefix_cache_hits", *_SGLANG.values()}
_BEGINS = (*_SGLANG, *(f"vllm:{name}" for name in _WANTED))


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
        preemptions=_increase(preempted) if preempted else None,
        peak_kv_usage=max(usage) if len(usage) >= ENOUGH else None,
        prefix_hits=_increase(hits) if hits else None,
    )


def _increase(counts: Sequence[float]) -> int:
    """Of a counter, which begins anew where it falls."""
    return int(sum(b if b < a else b - a for a, b in pairwise(counts)))


def _samples(text: str) -> dict[str, float]:
    """The wanted metrics of one scrape, summed over engines; of their pools' usage the largest."""
    found: dict[str, float] = {}
    for sample in _told(text):
        name = _SGLANG.get(sample.name, sample.name.removeprefix("vllm:").removesuffix("_total"))
        if name not in _WANTED or not 0 <= sample.value <= MOST:
            continue
        if name == "cache_config_info":
            blocks, size = (sample.labels.get(key, "") for key in ("num_gpu_blocks", "block_size"))
            if all(word.isdecimal() and 0 < float(word) <= MOST for word in (blocks, size)):
                # One block is the null block, which never holds tokens.
                found["kv_tokens"] = found.get("kv_tokens", 0) + (int(blocks) - 1) * int(size)
        elif name == "kv_cache_usage_perc":
            found[name] = max(found.get(name, 0.0), sample.value)
        else:
            found[name] = found.get(name, 0) + sample.value
    return found


def _told(text: str) -> Iterator[Sample]:
    """What can be read of the wanted metrics' lines. The last one may have been cut off."""
    for line in text.split("\n")[:-1]:
        if line.startswith(_BEGINS):
            # What the parser raises on garbled lines.
            with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
                for family in text_string_to_metric_families(line):
                    yield from family.samples
