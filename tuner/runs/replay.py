"""A recorded trace as the load of a study: it is cut into windows as long as a run, never compressed.

Trials are measured on one busy window, which all configs share. A confirmation runs on other windows, spread
over the whole trace, so that what is recommended holds for traffic that no trial has seen.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from loadgen.plan.traces import Trace, TraceError
from loadgen.plan.workload import Schedule
from tuner.job.options import Replay
from tuner.runs.load import WARMUP_REQUESTS, in_rungs
from tuner.runs.seeds import Seeds

BUSY_QUANTILE = 0.9
"""Trials get the window that is busier than this share of the others: an SLO binds where traffic is heavy,
but the one busiest window is an accident."""
_MISSING_SHARE = 0.1
"""A trace ends with its last arrival: a window that lacks so little of its length is whole."""
MIN_RATE_RATIO = 2.0
"""Times the quiet windows' rate: with less, one config is looked for, and no others by load."""
MIN_REQUESTS = 10
"""A window with fewer says nothing about a percentile."""


@dataclass(frozen=True)
class Window:
    """[start, end) seconds of a trace, how many requests begin in them, and the tokens of these: prompts and
    answers together."""

    start: float
    end: float
    requests: int
    tokens: int

    @property
    def rate(self) -> float:
        """Requests a second."""
        return self.requests / (self.end - self.start)

    def __str__(self) -> str:
        return f"{self.start:.0f}-{self.end:.0f} s"


@dataclass(frozen=True)
class ReplayLoad:
    """A trace that is ready to be sent: scaled, and every request within the context."""

    trace: Trace
    seed: int
    seconds: float
    """Length of a window as asked for; a trace that does not hold two of them is cut in the middle."""
    max_model_len: int
    concurrency: int | None = None
    """At most so many requests in flight."""

    @classmethod
    def of(
        cls,
        replay: Replay,
        trace: Trace,
        seed: int,
        seconds: float,
        max_model_len: int,
        concurrency: int | None = None,
    ) -> ReplayLoad:
        """``trace`` as :func:`read_replay` gives it. Raises TraceError."""
        ready = replay.ready(trace, seed).fitted(max_model_len, replay.oversized.value)
        return cls(ready, seed, seconds, max_model_len, concurrency)

    @cached_property
    def windows(self) -> tuple[Window, ...]:
        """In order of time, those that hold enough requests. Raises TraceError for fewer than two."""
        length = self.run_seconds
        members: dict[int, list[int]] = {}
        for row in self.trace.rows:
            members.setdefault(int(row.arrival / length), []).append(row.prompt_tokens + row.output_tokens)
        found = tuple(
            Window(k * length, (k + 1) * length, len(tokens), sum(tokens))
            for k, tokens in sorted(members.items())
            if len(tokens) >= MIN_REQUESTS and k < self._count
        )
        if len(found) < 2:
            short = self.trace.duration < 2 * self.seconds
            longer = "a longer trace or --trace-window" if short else "a longer --run-time"
            raise TraceError(
                f"{self.trace.name}: {len(found)} of {self._count} windows of {length:.0f} s hold "
                f"{MIN_REQUESTS} requests or more, and a study needs 2: one to search on, another to confirm "
                f"on. Give {longer}, or a --rate-scale above 1 to replay faster"
            )
        return found

    @property
    def run_seconds(self) -> float:
        """Length of a window."""
        return min(self.seconds, self.trace.duration / 2) if self.trace.duration else self.seconds

    @property
    def _count(self) -> int:
        return max(1, math.floor(self.trace.duration / self.run_seconds + _MISSING_SHARE))

    @cached_property
    def searched(self) -> Window:
        """The window that trials are measured on."""
        by_load = sorted(self.windows, key=lambda window: (window.tokens, window.start))
        return by_load[min(round(BUSY_QUANTILE * (len(by_load) - 1)), len(by_load) - 1)]

    @cached_property
    def fresh(self) -> tuple[Window, ...]:
        """The others, ordered so that the first few of them are spread over the trace."""
        others = [window for window in self.windows if window != self.searched]
        return tuple(others[k] for k in _spread(len(others)))

    def schedule(self, window: Window, seed: int) -> Schedule:
        """The requests of ``window``, their prompts drawn from ``seed``."""
        part = self.trace.window(window.start, window.end)
        return part.schedule(
            seed=seed,
            max_model_len=self.max_model_len,
            max_concurrency=self.concurrency,
            warmup=WARMUP_REQUESTS,
        )

    def rungs(self, request_set: int = 0) -> tuple[Schedule, ...]:
        """The schedules of a trial, which together are one window. Another ``request_set`` has other
        prompts at the same times: the other windows are the confirmation's.
        """
        (seed,) = Seeds(self.seed).request_set(request_set, parts=1)
        return in_rungs(self.schedule(self.searched, seed), self.run_seconds)

    def confirmation_seeds(self, pairs: int) -> list[int]:
        return Seeds(self.seed).confirmation(pairs)

    def confirmation(self, seed: int) -> Schedule:
        """A window of its own for every seed; with more seeds than windows at least the prompts differ."""
        return self.schedule(self.fresh[Seeds(self.seed).pair(seed) % len(self.fresh)], seed)

    @property
    def unit(self) -> str:
        return "req/s"

    def levels(self) -> tuple[float, ...]:
        """The rates of a quiet, a usual and a busy window, where busy is MIN_RATE_RATIO times quiet or
        more."""
        rates = sorted(window.rate for window in self.windows)
        chosen = [rates[round(share * (len(rates) - 1))] for share in (1 - BUSY_QUANTILE, 0.5, BUSY_QUANTILE)]
        return tuple(dict.fromkeys(chosen)) if chosen[-1] >= MIN_RATE_RATIO * chosen[0] else ()

    def at_level(self, level: float, repeat: int) -> Schedule:
        """The window whose rate is nearest; for further repeats the next nearest ones."""
        by_distance = sorted(self.windows, key=lambda window: abs(math.log(window.rate / level)))
        window = by_distance[repeat % len(by_distance)]
        return self.schedule(window, Seeds(self.seed).level(repeat))

    @property
    def description(self) -> str:
        rates = sorted(window.rate for window in self.windows)
        return (
            f"{self.trace.description}; {len(self.windows)} windows of {self.run_seconds:.0f} s with "
            f"{rates[0]:.2g} to {rates[-1]:.2g} req/s: trials on {self.searched} "
            f"({self.searched.rate:.2g} req/s), confirmation on others"
        )


def read_replay(data: Mapping[str, Any]) -> Trace:
    """A job's trace, as recorded. Raises TraceError, also for a file that changed since the job began."""
    replay = Replay.from_json(data)
    assert replay.replay is not None, "a job that replays names its file"
    trace = replay.read(replay.replay)
    if data.get("sha256") not in (None, digest(replay.replay)):
        raise TraceError(f"{replay.replay}: changed since the study began. Begin another study.")
    return trace


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _spread(count: int) -> list[int]:
    """0 … count - 1, so ordered that any first few lie evenly over the whole (van der Corput's sequence)."""
    bits = max(1, math.ceil(math.log2(max(count, 2))))
    halves = (int(f"{k:0{bits}b}"[::-1], 2) / (1 << bits) for k in range(1 << bits))
    return list(dict.fromkeys(int(share * count) for share in halves))
