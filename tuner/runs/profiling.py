"""What must be known before a search: the model's context, the device's speed, and the load to offer.

Taken on the first server that comes up, which is the baseline's unless that does not start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from loadgen.measure.record import Records
from loadgen.plan.workload import DEFAULT_VOCAB_SIZE, REFERENCE_CONTEXT, Schedule, Workload, preset
from loadgen.plan.workload_file import is_file
from loadgen.target import OpenTarget
from tuner.job.job import DEFAULT_RUN_SECONDS
from tuner.runs.load import capacity_schedule, lone_schedule
from tuner.runs.result import without_nan

OFFERED_SHARE = 0.7
"""Of the capacity found. Above it queues grow at the least disturbance; far below it nothing binds."""
LONGEST_PREFILL_SECONDS = 2.0
"""Seconds that the longest prompt of a workload may take to prefill, about what 20,000 tokens take on a
data-centre GPU: on a slow device prompts are scaled down to it, so that the load keeps its proportions and a
run holds enough requests to say something. With 4, runs held 20 requests and between 0 and 10 % stalled gaps:
four pairs of them proved a P99 that fell to a third in half of all cases, and prove it in all with 2.
"""
LONE_PROMPT_TOKENS, LONE_OUTPUT_TOKENS = 1024, 16
"""Tokens of the requests that are timed alone."""
MAX_LONE_PAIRS, AGREEING_RATIO = 4, 1.1
"""Pairs of lone requests at most, and how far the two fastest may be apart to be believed."""
FIRST_LOOP_REQUESTS, MAX_LOOP_REQUESTS = 40, 5120
"""Requests of the first and the largest closed loop."""

RunLoad = Callable[[OpenTarget, Schedule], Records]
"""Runs a schedule on an open target, showing progress."""


@dataclass(frozen=True)
class Profile:
    """``rate`` (requests/s) or ``concurrency`` is the load that every trial gets."""

    max_model_len: int
    start_seconds: float
    prefill_speed: float
    """Prompt tokens/s of a lone prompt; NaN where it could not be measured."""
    capacity: tuple[tuple[int, int, float], ...] = ()
    """(requests, concurrency, requests/s) of the closed loops that were run to find the capacity."""
    rate: float | None = None
    concurrency: int | None = None
    scale: float | None = None
    """Factor on the workload's prompt lengths; None: the context's."""
    version: str = ""
    """The server's; "" where it does not say."""
    known: Mapping[str, Any] = field(default_factory=dict)
    """Flags that the server chose by itself, as its start tells them."""
    run_seconds: float = DEFAULT_RUN_SECONDS
    """Length of a run."""
    memory: Mapping[str, Any] | None = None
    """Its memory plan (``servers.memory_plan.MemoryPlan``), where its log tells one."""
    lone_itl: float = math.nan
    """Seconds between the tokens of a lone request; NaN as above."""

    def describe(self) -> str:
        count, concurrency, rate = self.capacity[-1]
        found = f"capacity {rate:.2f} req/s ({count} requests in a closed loop of {concurrency})"
        if self.rate is None:
            return f"{found}; measured in a closed loop of {self.concurrency}"
        return f"{found}; offered: {self.rate:.2f} req/s ({OFFERED_SHARE:.0%})"

    def to_json(self) -> dict[str, Any]:
        return dict(without_nan(asdict(self)))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        values: dict[str, Any] = dict(data)
        timed = ("start_seconds", "prefill_speed", "lone_itl")
        values |= {key: math.nan for key in timed if data.get(key) is None}
        return cls(**{**values, "capacity": tuple((n, c, rate) for n, c, rate in data["capacity"])})


def find_capacity(
    server: OpenTarget, workload: Workload, seed: int, seconds: float, run: RunLoad, max_seqs: int
) -> tuple[tuple[int, int, float], ...]:
    """Closed loops of more and more requests, until one takes ``seconds``: (requests, concurrency,
    requests/s).

    All requests of a loop are served to their end, so that prefill and decoding are there in their true
    proportion; that the last ones run with fewer beside them makes the figure a little low. More than
    ``max_seqs`` at a time would only queue.
    """
    found: list[tuple[int, int, float]] = []
    count = FIRST_LOOP_REQUESTS
    while True:
        concurrency = min(count, max_seqs)
        records = run(server, capacity_schedule(workload, seed, count, concurrency))
        served = [r for r in records.requests if r.ok]
        took = max((r.end for r in served), default=0) / 1e9
        found.append((count, concurrency, len(served) / took if took else math.nan))
        if took >= seconds or not served or 2 * count > MAX_LOOP_REQUESTS:
            return tuple(found)
        count *= 2


def fitting_scale(name: str, max_model_len: int, speed: float) -> float:
    """The factor on prompt lengths at which the workload's longest prompt fits the context, and takes no
    longer than LONGEST_PREFILL_SECONDS at ``speed`` prompt tokens/s (NaN: unknown, and no bound). A workload
    of the user's own is taken as it stands: 1.
    """
    if is_file(name):
        return 1.0
    by_context = min(1.0, max_model_len / REFERENCE_CONTEXT)
    longest = max(cls.prompt.high for cls in preset(name, max_model_len=max_model_len).classes)
    seconds = longest / speed
    return by_context * LONGEST_PREFILL_SECONDS / seconds if seconds > LONGEST_PREFILL_SECONDS else by_context


@dataclass(frozen=True)
class LoneTiming:
    """The fastest of the requests that had the server for themselves; NaN where none was answered."""

    prefill_speed: float
    """Prompt tokens/s."""
    itl: float
    """Seconds between tokens."""
    steady: bool
    """Whether the next fastest took about as long to its first token."""


def time_alone(server: OpenTarget, max_model_len: int, seed: int, run: RunLoad) -> LoneTiming:
    """Time lone requests until the two fastest agree: what else the machine does only ever adds to them.

    Prompts have LONE_PROMPT_TOKENS tokens, or half the context.
    """
    tokens = min(LONE_PROMPT_TOKENS, max_model_len // 2)
    firsts: list[float] = []
    decoding: list[float] = []
    steady = False
    for attempt in range(MAX_LONE_PAIRS):
        records = run(server, lone_schedule(DEFAULT_VOCAB_SIZE, tokens, LONE_OUTPUT_TOKENS, seed, attempt))
        served = [r for r in records.requests if r.ok and r.chunk_at]
        firsts = sorted([*firsts, *((r.chunk_at[0] - r.intended) / 1e9 for r in served)])
        decoding += [(r.chunk_at[-1] - r.chunk_at[0]) / 1e9 for r in served]
        steady = len(firsts) > 1 and firsts[1] <= AGREEING_RATIO * firsts[0]
        if steady or not firsts:
            break
    if not firsts:
        return LoneTiming(math.nan, math.nan, steady=False)
    return LoneTiming(tokens / firsts[0], min(decoding) / (LONE_OUTPUT_TOKENS - 1), steady)
