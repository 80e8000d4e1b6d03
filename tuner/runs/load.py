"""The load of a study: one workload and one way of arriving."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from loadgen.plan.arrivals import Arrival, ClosedLoop, PoissonWindow
from loadgen.plan.workload import Length, RequestClass, Schedule, Workload, schedule_hash
from tuner.runs.seeds import Seeds

DECK_REQUESTS = 20
"""Workloads deal their classes from decks of so many: whole decks hold every class in its exact share."""
SHORT_SHARE = 0.4
"""Of a run's requests, how many belong to the short rung."""
MIN_RUNG_SECONDS = 30.0
"""A run whose short rung would be shorter is not cut. Each part begins with an idle server and so sees less
of a queue than a whole run does: over parts of 12 s the baseline of ``make demo`` had an ITL ES99 of 245 ms,
over whole runs of 22 s one of 460 and 546 ms."""
WARMUP_REQUESTS = 2
"""Requests before a load, of the workload's first classes: a server's first steps are slow."""


class Traffic(Protocol):
    """What a study sends: the same to every config in trials, something new in a confirmation."""

    @property
    def run_seconds(self) -> float:
        """Length of a run, as expected before its arrivals are drawn."""

    @property
    def description(self) -> str: ...

    def rungs(self, request_set: int = 0) -> tuple[Schedule, ...]:
        """The schedules of a trial, which together are one run: a short rung and the rest, which finds the
        server warm, or all at once (see MIN_RUNG_SECONDS).

        Every config gets ``request_set`` 0; others are for trials that are repeated.
        """

    def confirmation_seeds(self, pairs: int) -> list[int]:
        """One for every pair of runs."""

    def confirmation(self, seed: int) -> Schedule:
        """A run that no trial has seen."""

    @property
    def unit(self) -> str:
        """What a level of load is counted in."""

    def levels(self) -> tuple[float, ...]:
        """Levels that the traffic itself goes through, rising; () where it has but one."""

    def at_level(self, level: float, repeat: int) -> Schedule:
        """A run at another level of load, the ``repeat``-th of its kind."""


@dataclass(frozen=True)
class GeneratedLoad:
    """What every trial is measured under. ``rate``: requests/s, open loop; ``concurrency``: closed loop.

    ``seconds`` is the least length of a run; in an open loop a run is extended to whole decks of requests.
    Trials share their seeds, so that configs are compared on the same requests; a confirmation has seeds that
    no trial has seen.
    """

    workload: Workload
    seed: int
    seconds: float
    rate: float | None = None
    concurrency: int | None = None
    most: int | None = None
    """Requests of a run in a closed loop at most; a faster server ends the run early."""

    @property
    def arrival(self) -> Arrival:
        if self.rate is not None:
            return PoissonWindow(self.rate)
        assert self.concurrency is not None, "a load has a rate or a concurrency"
        return ClosedLoop(self.concurrency)

    @property
    def run_seconds(self) -> float:
        """Length of a run, as expected before its arrivals are drawn."""
        return self.seconds if self.rate is None else self._count / self.rate

    @property
    def _count(self) -> int:
        assert self.rate is not None, "a closed loop has a duration, not a number of requests"
        return DECK_REQUESTS * math.ceil(self.rate * self.seconds / DECK_REQUESTS)

    def rungs(self, request_set: int = 0) -> tuple[Schedule, ...]:
        if request_set not in self._rungs:
            self._rungs[request_set] = self._drawn(*Seeds(self.seed).request_set(request_set, parts=2))
        return self._rungs[request_set]

    @cached_property
    def _rungs(self) -> dict[int, tuple[Schedule, ...]]:
        """Each made once: to draw prompts takes as long as to simulate a trial."""
        return {}

    def _drawn(self, first: int, second: int) -> tuple[Schedule, ...]:
        """An open loop is drawn whole, from the first seed."""
        if self.rate is not None:
            return in_rungs(self._open(first), self.run_seconds)
        if not is_cut(self.seconds):
            return (self.confirmation(first),)
        short = self._closed(first, SHORT_SHARE, WARMUP_REQUESTS)
        return short, self._closed(second, 1 - SHORT_SHARE, 0)

    def confirmation_seeds(self, pairs: int) -> list[int]:
        return Seeds(self.seed).confirmation(pairs)

    def confirmation(self, seed: int) -> Schedule:
        return self._open(seed) if self.rate is not None else self._closed(seed, 1.0, WARMUP_REQUESTS)

    @property
    def unit(self) -> str:
        return "requests in flight" if self.rate is None else "req/s"

    def levels(self) -> tuple[float, ...]:
        return ()

    def at_level(self, level: float, repeat: int) -> Schedule:
        closed = self.rate is None
        other = replace(self, concurrency=round(level)) if closed else replace(self, rate=level)
        return other.confirmation(Seeds(self.seed).level(repeat))

    def _open(self, seed: int) -> Schedule:
        return self.workload.schedule(
            seed=seed, arrival=self.arrival, num_requests=self._count, warmup=WARMUP_REQUESTS
        )

    def _closed(self, seed: int, share: float, warmup: int) -> Schedule:
        """``share`` of a run."""
        return self.workload.schedule(
            seed=seed,
            arrival=self.arrival,
            num_requests=None if self.most is None else max(1, round(share * self.most)),
            duration=share * self.seconds,
            warmup=warmup,
        )

    @property
    def description(self) -> str:
        return f"{self.workload.description}; {self.arrival.description}; runs of {self.run_seconds:.0f} s"


def load_seconds(schedule: Schedule) -> float:
    """Seconds during which the schedule's load is on: its duration, or until its last request is due."""
    return schedule.duration or schedule.requests[-1].intended


def in_rungs(schedule: Schedule, seconds: float) -> tuple[Schedule, ...]:
    """The schedule cut in two, or as it is where a run of ``seconds`` is too short for that."""
    return cut(schedule, round(SHORT_SHARE * len(schedule.requests))) if is_cut(seconds) else (schedule,)


def is_cut(seconds: float) -> bool:
    """Whether a run of this length has a short rung."""
    return SHORT_SHARE * seconds >= MIN_RUNG_SECONDS


def cut(schedule: Schedule, count: int) -> tuple[Schedule, Schedule]:
    """The first ``count`` requests, and the others as a load that begins with its first request."""
    begin = schedule.requests[count].intended
    late = tuple(replace(r, intended=r.intended - begin) for r in schedule.requests[count:])
    parts = ((schedule.requests[:count], schedule.warmup), (late, ()))
    first, second = (
        replace(
            schedule,
            requests=requests,
            warmup=warmup,
            duration=None,
            sha256=schedule_hash(requests, schedule.mode, schedule.concurrency, None),
            description=f"{schedule.description}, part {part} of 2",
        )
        for part, (requests, warmup) in enumerate(parts, start=1)
    )
    return first, second


def capacity_schedule(workload: Workload, seed: int, count: int, concurrency: int) -> Schedule:
    """A closed loop of ``count`` requests, to find out what the server can do."""
    return workload.schedule(
        seed=Seeds(seed).capacity(count),
        arrival=ClosedLoop(concurrency),
        num_requests=count,
        warmup=WARMUP_REQUESTS,
    )


def lone_schedule(vocab_size: int, tokens: int, output: int, seed: int, attempt: int = 0) -> Schedule:
    """Two prompts of ``tokens`` tokens, one after the other, ``output`` tokens each.

    No prompt is like one of another ``attempt``.
    """
    lone = Workload("lone", (RequestClass("lone", 1, Length(tokens), Length(output)),), vocab_size)
    return lone.schedule(seed=Seeds(seed).lone(attempt), arrival=ClosedLoop(1), num_requests=2, warmup=0)
