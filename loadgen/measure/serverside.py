"""What the server said of itself during a run: its gauges over time, from the scrapes in the records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

from loadgen.measure.record import Records

NAMES = {
    "vllm:num_requests_running": "running",
    "sglang:num_running_reqs": "running",
    "vllm:num_requests_waiting": "waiting",
    "sglang:num_queue_reqs": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:gpu_cache_usage_perc": "kv_usage",
    "sglang:token_usage": "kv_usage",
    "vllm:num_preemptions_total": "preemptions",
}
_LARGEST = ("kv_usage",)
"""Of several engines the largest counts; of everything else the sum."""


@dataclass(frozen=True)
class Timeline:
    """A value each scrape; NaN where one lacks it. ``at``: seconds after the start of the run."""

    at: tuple[float, ...]
    running: tuple[float, ...]
    waiting: tuple[float, ...]
    kv_usage: tuple[float, ...]
    """0..1."""
    preemptions: tuple[float, ...]
    """Since the scrape before; 0 for the first, and across a restart what was counted since."""

    def known(self, name: str) -> bool:
        """Whether the server told this at all."""
        return not all(math.isnan(value) for value in getattr(self, name))


def timeline(records: Records) -> Timeline | None:
    """None for a run without readable scrapes."""
    read = [(stamp, samples(text)) for stamp, text in records.scrapes]
    taken = [(stamp, found) for stamp, found in read if found]
    if not taken:
        return None
    series = {
        name: tuple(found.get(name, math.nan) for _, found in taken) for name in dict.fromkeys(NAMES.values())
    }
    return Timeline(
        at=tuple((stamp - records.start_unix_ms) / 1e3 for stamp, _ in taken),
        running=series["running"],
        waiting=series["waiting"],
        kv_usage=series["kv_usage"],
        preemptions=_increases(series["preemptions"]),
    )


def samples(text: str) -> dict[str, float]:
    """The figures of one scrape, over all engines; empty for what is no exposition."""
    found: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families("\n".join(_wanted(text.split("\n")))):
            for sample in family.samples:
                if (name := NAMES.get(sample.name)) is not None:
                    combine = max if name in _LARGEST else float.__add__
                    value = float(sample.value)
                    found[name] = combine(found[name], value) if name in found else value
    except ValueError:
        return {}
    return found


def _wanted(lines: Iterable[str]) -> Iterable[str]:
    """Histograms are most of an exposition and are not read here."""
    return (line for line in lines if line.startswith(tuple(NAMES)))


def _increases(values: Sequence[float]) -> tuple[float, ...]:
    if not values:
        return ()
    steps = [b if b < a else b - a for a, b in pairwise(values)]
    return (0.0 if not math.isnan(values[0]) else math.nan, *steps)
