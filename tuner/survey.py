"""What must be known before a search: the model's context, the device's speed, and the load to offer.

Taken on the first server that comes up, which is the baseline's unless that does not start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from loadgen.record import Records
from loadgen.target import OpenTarget
from loadgen.workload import Schedule, Workload
from tuner.load import capacity_schedule, mean_output, prefill_schedule
from tuner.result import without_nan

OFFERED_SHARE = 0.7
"""Of the capacity found. Above it queues grow without a bound at the least disturbance; far below nothing
binds.
"""
FIRST_CONCURRENCY = 8
MIN_GAIN = 1.15
"""Doubling the concurrency must raise the throughput by this factor for a further doubling to be tried."""
MAX_CONCURRENCY = 1024

RunLoad = Callable[[OpenTarget, Schedule], Records]
"""Runs a schedule on an open target, showing progress."""


@dataclass(frozen=True)
class Survey:
    """``rate`` (requests/s) or ``concurrency`` is the load that every trial gets."""

    max_model_len: int
    start_seconds: float
    prefill_speed: float
    """Prompt tokens/s of a lone prompt; NaN where it could not be measured."""
    capacity: tuple[tuple[int, float], ...] = ()
    """(concurrency, requests/s) of the closed loops that were run to find the capacity."""
    rate: float | None = None
    concurrency: int | None = None

    @property
    def best_capacity(self) -> float:
        return max((rate for _, rate in self.capacity), default=math.nan)

    def describe(self) -> str:
        steps = ", ".join(f"{rate:.2f} req/s at concurrency {n}" for n, rate in self.capacity)
        if self.rate is None:
            return f"closed loop: {steps}; measured at {self.concurrency}"
        return f"capacity: {steps}; offered: {self.rate:.2f} req/s ({OFFERED_SHARE:.0%})"

    def to_json(self) -> dict[str, Any]:
        return dict(without_nan(asdict(self)))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        values: dict[str, Any] = dict(data)
        values |= {key: math.nan for key in ("start_seconds", "prefill_speed") if data[key] is None}
        return cls(**{**values, "capacity": tuple((n, rate) for n, rate in data["capacity"])})


def find_capacity(
    server: OpenTarget, workload: Workload, seed: int, seconds: float, run: RunLoad, max_seqs: int
) -> tuple[tuple[int, float], ...]:
    """Closed loops of doubling concurrency until the throughput stops rising: (concurrency, requests/s) of
    each.

    A short closed loop ends with many requests half done, so requests/s are output tokens/s over the mean
    output length, and not completions. Stops at ``max_seqs``, beyond which requests only queue.
    """
    found: list[tuple[int, float]] = []
    concurrency = min(FIRST_CONCURRENCY, max_seqs)
    while True:
        schedule = capacity_schedule(workload, seed, concurrency, seconds)
        throughput = run(server, schedule).summary().value("throughput")
        found.append((concurrency, throughput / mean_output(schedule)))
        rising = len(found) == 1 or found[-1][1] > MIN_GAIN * found[-2][1]
        if not rising or math.isnan(throughput) or 2 * concurrency > min(max_seqs, MAX_CONCURRENCY):
            return tuple(found)
        concurrency *= 2


def prefill_speed(server: OpenTarget, workload: Workload, tokens: int, seed: int, run: RunLoad) -> float:
    """Prompt tokens/s of prompts of ``tokens`` tokens that have the server for themselves."""
    records = run(server, prefill_schedule(workload.vocab_size, tokens, seed))
    times = [(r.chunk_at[0] - r.intended) / 1e9 for r in records.requests if r.ok and r.chunk_at]
    return tokens / min(times) if times else math.nan
