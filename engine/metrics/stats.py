"""What one step adds to the metrics, observed where the scheduler runs.

The moments of observation are vLLM's, and a reader of the numbers has to know them:

* A prompt is booked whole on the step that emits its first token; steps without any output are no iteration.
* One inter-token latency per step output of a request, whatever number of tokens that output brought.
* Queue time ends at the first admission; what follows a preemption is prefill or decode time.
* A request is not finished when its client hangs up; first tokens without finishes show it.

One difference, on purpose: a preemption counts when the victim is preempted, not when it emits again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.request import Request, RequestStatus
from engine.step import Outputs, StepOutput, StepPlan


@dataclass(frozen=True, slots=True)
class FinishedStats:
    """One finished request. Times in seconds; ``max_tokens`` is the limit it ran under."""

    request_id: str
    reason: str
    e2e: float
    queue: float
    prefill: float
    decode: float
    inference: float
    time_per_output_token: float
    prompt_tokens: int
    generation_tokens: int
    cached_tokens: int
    preemptions: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one step adds to the metrics. Gauges are values, everything else is what was new in this step."""

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0
    """How many of these wait for something other than room."""
    kv_usage: float = 0.0
    adapters: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """Names of the LoRA adapters of requests that run, and of those that wait, in the order of arrival."""
    prefix_queries: int = 0
    external_queries: int = 0
    external_hits: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    """How many of ``prompt_tokens`` came from the prefix cache."""
    prompt_tokens_external: int = 0
    """How many of these a KV connector had loaded."""
    generation_tokens: int = 0
    had_output: bool = False
    first_token_latencies: tuple[float, ...] = ()
    inter_token_latencies: tuple[tuple[float, int], ...] = ()
    """Pairs of (seconds, number of requests): requests with outputs in the same two steps share one."""
    finished: tuple[FinishedStats, ...] = ()
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()


@dataclass
class SchedulerStats:
    """Counts since the start."""

    prefix_queries: int = 0
    """Tokens of requests at their first admission; those resumed after a preemption do not count."""
    prefix_hits: int = 0
    """How many of these were found in the prefix cache."""
    external_queries: int = 0
    """Tokens of those requests that were not, and so were asked of the KV connector."""
    external_hits: int = 0
    """How many of these it has loaded."""
    num_preemptions: int = 0


class ObservedScheduler(Protocol):
    """What the metrics read from a scheduler after each step."""

    @property
    def stats(self) -> SchedulerStats: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def kv_usage(self) -> float: ...


@dataclass(slots=True)
class _Timeline:
    """Moments in the life of one request, in seconds of the observer's clock."""

    request: Request
    queued: float
    scheduled: float | None = None
    first_token: float | None = None


class StepObserver:
    """Watches the steps of one engine. ``clock`` must be the one that stamps ``Request.arrival_time``;
    ``adapters``: whether requests may have LoRA adapters."""

    def __init__(
        self,
        scheduler: ObservedScheduler,
        clock: Callable[[], float] = time.monotonic,
        adapters: bool = False,
    ) -> None:
        self._scheduler, self._clock, self._adapters = scheduler, clock, adapters
        self._timelines: dict[str, _Timeline] = {}
        self._last_token: dict[str, float] = {}
        """When each request emitted its last token; kept beside the timelines so that one call updates
        all."""
        self._ended = 0.0
        """When the last step ended, and with it every request in fast decode emitted a token."""
        self._seen = _counts(scheduler.stats)
        self._num_deferred = 0

    def queued(self, request: Request) -> None:
        """``request`` has just entered the scheduler."""
        self._timelines[request.request_id] = _Timeline(request, queued=self._clock())

    def observe(self, plan: StepPlan, output: StepOutput, started_at: float) -> StepStats:
        """The figures of one step, at its end. ``started_at`` is when it was scheduled, on the same clock."""
        now = self._clock()
        self._num_deferred = plan.num_deferred
        for request_id in plan.admitted_with_computed:
            timeline = self._timelines.get(request_id)
            if timeline is not None and timeline.scheduled is None:
                timeline.scheduled = started_at
        outputs, decodes = Outputs.of(output.outputs), plan.fast_decodes
        request_ids = outputs.with_tokens()
        self._last_token.update(dict.fromkeys(decodes.left, self._ended))
        # One pass in C over the requests of a step: most emitted their last token at the same moment.
        before: Counter[float | None] = Counter({self._ended: decodes.count} if decodes.count else ())
        before.update(map(self._last_token.get, request_ids))
        begun = self._begin(request_ids, now) if before.pop(None, 0) else []
        self._last_token.update(dict.fromkeys(request_ids, now))
        self._ended = now
        finished = tuple(
            self._finish(request.request_id, request.status, now)
            for request in output.finished
            if request.request_id in self._timelines
        )
        return self._stats(
            prompt_tokens=sum(request.num_prompt_tokens for request in begun),
            prompt_tokens_cached=sum(request.num_cached_tokens for request in begun),
            prompt_tokens_external=sum(request.num_external_tokens for request in begun),
            generation_tokens=outputs.num_tokens + decodes.count,
            had_output=bool(outputs) or decodes.count > 0,
            first_token_latencies=tuple(now - request.arrival_time for request in begun),
            inter_token_latencies=tuple(
                (now - last, count) for last, count in before.items() if last is not None
            ),
            finished=finished,
            num_drafts=output.num_drafts,
            num_draft_tokens=output.num_draft_tokens,
            num_accepted_tokens=output.num_accepted_tokens,
            accepted_per_position=output.accepted_per_position,
        )

    def observe_fast_decodes(self) -> float:
        """A step has ended in which all requests were in fast decode. Returns the latency of its tokens, in
        seconds."""
        before, self._ended = self._ended, self._clock()
        return self._ended - before

    def finished_outside(self, requests: Sequence[Request], status: RequestStatus) -> StepStats:
        """Requests left before the engine was done: at a stop string, or because the client hung up.

        As in vLLM the first is an ordinary finish, and the second leaves no trace in ``request_*``.
        """
        now = self._clock()
        finished = [
            self._finish(request.request_id, status, now)
            for request in requests
            if request.request_id in self._timelines
        ]
        return self._stats(finished=() if status is RequestStatus.FINISHED_ABORTED else tuple(finished))

    def idle(self) -> StepStats:
        """Only the gauges, for a change after which no step follows."""
        return self._stats()

    def _begin(self, request_ids: Sequence[str], now: float) -> list[Request]:
        """Latencies of the first tokens among them."""
        begun = [self._timelines[name] for name in request_ids if name not in self._last_token]
        for timeline in begun:
            timeline.first_token = now
        return [timeline.request for timeline in begun]

    def _finish(self, request_id: str, status: RequestStatus, now: float) -> FinishedStats:
        timeline = self._timelines.pop(request_id)
        request = timeline.request
        scheduled = now if timeline.scheduled is None else timeline.scheduled
        first = scheduled if timeline.first_token is None else timeline.first_token
        last = self._last_token.pop(request_id, first)
        generated = request.num_output_tokens
        return FinishedStats(
            request_id=request_id,
            reason=status.value,
            e2e=now - request.arrival_time,
            queue=scheduled - timeline.queued,
            prefill=first - scheduled,
            decode=last - first,
            inference=last - scheduled,
            time_per_output_token=(last - first) / (generated - 1) if generated > 1 else 0.0,
            prompt_tokens=request.num_prompt_tokens,
            generation_tokens=generated,
            cached_tokens=request.num_cached_tokens,
            preemptions=request.num_preemptions,
            max_tokens=request.sampling.max_tokens,
        )

    def _stats(self, **figures: Any) -> StepStats:
        """``figures``, with the scheduler's gauges and what its counters gained since the last call."""
        scheduler = self._scheduler
        seen, self._seen = self._seen, _counts(scheduler.stats)
        gained: dict[str, Any] = {name: count - seen[name] for name, count in self._seen.items()}
        if self._adapters:
            figures["adapters"] = self._adapters_in_use()
        return StepStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_deferred=min(self._num_deferred, scheduler.num_waiting),
            kv_usage=scheduler.kv_usage,
            **gained,
            **figures,
        )

    def _adapters_in_use(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        running: dict[str, None] = {}
        waiting: dict[str, None] = {}
        for timeline in self._timelines.values():
            request = timeline.request
            if request.lora_name:
                (running if request.status is RequestStatus.RUNNING else waiting)[request.lora_name] = None
        return tuple(running), tuple(waiting)


def _counts(stats: SchedulerStats) -> dict[str, Any]:
    """A scheduler's counts, under the names they have in StepStats."""
    return {
        "prefix_queries": stats.prefix_queries,
        "prefix_hits": stats.prefix_hits,
        "external_queries": stats.external_queries,
        "external_hits": stats.external_hits,
        "preemptions": stats.num_preemptions,
    }
