"""The load of a study: one workload, one way of arriving, and which seed belongs to which measurement."""

from __future__ import annotations

from dataclasses import dataclass

from loadgen.arrivals import Arrival, ClosedLoop, Poisson
from loadgen.workload import Length, RequestClass, Schedule, Workload

_SEEDS = 10_000
_CONFIRM, _CAPACITY, _PROBE = 1_000, 2_000, 3_000


@dataclass(frozen=True)
class Load:
    """What every trial is measured under. ``rate``: requests/s, open loop; ``concurrency``: closed loop.

    Trials share their seeds, so that configs are compared on the same requests; a confirmation has seeds that
    no trial has seen.
    """

    workload: Workload
    seed: int
    rate: float | None = None
    concurrency: int | None = None

    @property
    def arrival(self) -> Arrival:
        if self.rate is not None:
            return Poisson(self.rate)
        assert self.concurrency is not None, "a load has a rate or a concurrency"
        return ClosedLoop(self.concurrency)

    def rung(self, index: int, seconds: float) -> Schedule:
        """The schedule of a trial's rung ``index`` (0: short, 1: the rest)."""
        return self._schedule(self.seed * _SEEDS + index, seconds)

    def confirmation_seeds(self, pairs: int) -> list[int]:
        return [self.seed * _SEEDS + _CONFIRM + pair for pair in range(pairs)]

    def confirmation(self, seed: int, seconds: float) -> Schedule:
        return self._schedule(seed, seconds)

    def _schedule(self, seed: int, seconds: float) -> Schedule:
        return self.workload.schedule(seed=seed, arrival=self.arrival, duration=seconds)

    @property
    def description(self) -> str:
        return f"{self.workload.description}; {self.arrival.description}"


def capacity_schedule(workload: Workload, seed: int, concurrency: int, seconds: float) -> Schedule:
    """A closed loop to find out what the server can do."""
    return workload.schedule(
        seed=seed * _SEEDS + _CAPACITY + concurrency, arrival=ClosedLoop(concurrency), duration=seconds
    )


def prefill_schedule(vocab_size: int, tokens: int, seed: int) -> Schedule:
    """Three prompts of ``tokens`` tokens, one after the other, one output token each."""
    lone = Workload("prefill", (RequestClass("prefill", 1, Length(tokens), Length(1)),), vocab_size)
    return lone.schedule(seed=seed * _SEEDS + _PROBE, arrival=ClosedLoop(1), num_requests=3, warmup=1)


def mean_output(schedule: Schedule) -> float:
    """Output tokens a request, on average."""
    return sum(request.max_tokens for request in schedule.requests) / len(schedule.requests)
