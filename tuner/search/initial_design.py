"""Starting points: what practitioners begin with for each goal, carried over to the device at hand.

Two follow from how every server schedules, whatever the device: requests that wait for one of max_num_seqs
slots wait no longer with more of them; and a step takes as long as its tokens, so that the budget that holds
a bound on ITL is the one whose step ends within it (how Agrawal et al. 2024, "Taming throughput-latency
tradeoff in LLM inference with Sarathi-Serve", choose theirs).

The published values (2,048-4,096 tokens and 128-256 sequences where ITL comes first; 8,192-16,384 where TTFT
does; 16,384-32,768 and 512 or more for throughput alone) are for GPUs that prefill some 40,000 tokens/s of an
8B model: 8,192 tokens take about 200 ms there. What carries over to another device is the time of a step, so
budgets are scaled by the prefill speed that was measured on this one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from servers.slo.bounds import family_of
from servers.slo.objective import Slo
from tuner.space.space import Config

REFERENCE_PREFILL_SPEED = 40_000.0
"""Prefill tokens/s of the device that the published values are for."""
REFERENCE_TOKENS = 8192
"""The default budget there."""


STEP_TO_BOUND = 0.8
"""Of a bound on ITL, what a step should take: prompts that have a context already take longer."""
SEQS_FACTOR = 4
"""Factor on max_num_seqs where all slots are taken."""


@dataclass(frozen=True)
class StartingPoint:
    """A published starting point. ``seqs`` is a multiple of the concurrency that the baseline ran at."""

    tokens: int
    seqs: float | None = None
    gpu_memory_utilization: float | None = None

    def on(self, prefill_speed: float, concurrency: float, baseline: Config) -> dict[str, int | float]:
        """The flags it changes, on a device of ``prefill_speed`` tokens/s."""
        seqs = baseline["max_num_seqs"] if self.seqs is None else max(4, round(self.seqs * concurrency))
        tokens = max(round(self.tokens * prefill_speed / REFERENCE_PREFILL_SPEED), seqs, 32)
        flags: dict[str, int | float] = {"max_num_batched_tokens": tokens}
        if self.seqs is not None:
            flags["max_num_seqs"] = seqs
        if self.gpu_memory_utilization is not None:
            flags["gpu_memory_utilization"] = self.gpu_memory_utilization
        return flags


STARTING_POINTS: Mapping[str, tuple[StartingPoint, ...]] = {
    "itl": (
        StartingPoint(4096, 2.0),
        StartingPoint(2048, 2.0),
        StartingPoint(8192, 2.0),
        StartingPoint(4096, 1.0),
    ),
    "ttft": (StartingPoint(8192), StartingPoint(16384), StartingPoint(8192, 2.0)),
    "throughput": (
        StartingPoint(16384, 4.0, 0.95),
        StartingPoint(32768, 4.0, 0.95),
        StartingPoint(16384, 2.0, 0.95),
    ),
}


def starting_points(
    slo: Slo,
    baseline: Config,
    prefill_speed: float,
    concurrency: float,
    pace: float = math.nan,
    offered: int | None = None,
) -> Iterator[tuple[dict[str, int | float], str]]:
    """(flags to change, why), in the order to try them.

    ``concurrency``: requests in service at the baseline, at most. ``pace``: its median ITL, in seconds.
    ``offered``: requests of a closed loop, None for an open one.
    """
    limits = [bound.limit for bound in slo.bounds if bound.metric in ("itl_p99", "itl_es99")]
    if limits and (left := STEP_TO_BOUND * min(limits) - pace) > 0:
        tokens = max(round(left * prefill_speed), baseline["max_num_seqs"], 32)
        yield {"max_num_batched_tokens": tokens}, f"start: a step of {tokens} tokens is within the ITL bound"
    if min(concurrency, (offered or math.inf) - 1) >= baseline["max_num_seqs"]:
        seqs = SEQS_FACTOR * baseline["max_num_seqs"]
        tokens = max(baseline["max_num_batched_tokens"], seqs)
        flags = {"max_num_batched_tokens": tokens, "max_num_seqs": seqs}
        yield flags, "start: every max_num_seqs slot is taken"
    family = family_of(slo.objective.metric)
    if family == "max_stall":  # what smooths the one shortens the other
        family = "itl"
    if family == "goodput":
        bounded = {bound.metric.partition("_")[0] for bound in slo.bounds}
        family = "ttft" if "ttft" in bounded and "itl" not in bounded else "itl"
    for start in STARTING_POINTS[family]:
        yield (
            start.on(prefill_speed, concurrency, baseline),
            f"start: {family} first, {start.tokens} tokens on a GPU",
        )
