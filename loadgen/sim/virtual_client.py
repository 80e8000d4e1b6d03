"""The client in virtual time: what ``loadgen.wire.driver`` does on sockets, done to simulated servers.

A request has the same life as on the wire: intended, sent (at once, or when a slot of a cap is free), stamped
chunk by chunk, ended; with timeouts, drain, closed loops and the turns of conversations. It never waits.
"""

from __future__ import annotations

import itertools
import math
import platform
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from loadgen.measure.record import ClientStats, Failure, Records, RequestRecord
from loadgen.measure.run_validity import judge_run
from loadgen.measure.window import measured_window
from loadgen.plan.load_policy import GivenUp, LoadPlan, LoadPolicy, Progress
from loadgen.plan.workload import PlannedRequest, Schedule
from loadgen.sim.routing import Route, make_route, tokens_of
from loadgen.sim.virtual_server import ONE_TOKEN, ONLY_STREAMS, Answers, StepAnswer, VirtualServer

START_UNIX_MS = 1_767_225_600_000
"""When virtual time begins, as a label: the start of 2026. Runs are the same whenever they are run."""
CONNECT_TIMEOUT = 10.0
"""As the real client's, by which its drain is longer than its timeout."""
_PROGRESS_EVERY = 1000  # events
FAILURES = {
    GivenUp.TIMEOUT: Failure.NO_ANSWER,
    GivenUp.UNFINISHED: Failure.UNFINISHED,
    GivenUp.CANCELLED: Failure.CANCELLED,
    GivenUp.SKIPPED: Failure.SKIPPED,
}


@dataclass(slots=True, eq=False)
class _Flight:
    """One request on its way."""

    planned: PlannedRequest
    intended: float
    request_id: str = ""
    server: int = -1
    sent: float | None = None
    ended: float | None = None
    stamps: list[int] = field(default_factory=list)
    """When its tokens came, in nanoseconds after the start; but for those since ``streams``."""
    tokens: list[float] = field(default_factory=list)
    streams: int | None = None
    """It gets a token in each step of its server from this one on, by the server's log."""
    prompt_tokens: int | None = None
    failure: Failure | None = None
    detail: str = ""
    last: StepAnswer | None = None

    def land(self, log: Sequence[int]) -> None:
        """It streams no more: these are the ends of its server's steps up to now."""
        if self.streams is not None:
            stamps = log[self.streams :]
            self.stamps += stamps
            self.tokens += [1.0] * len(stamps)
            self.streams = None


class VirtualClient:
    """Sends one schedule to servers that it routes between. Use once."""

    def __init__(
        self,
        schedule: Schedule,
        servers: Sequence[VirtualServer],
        route: Route,
        *,
        name: str = "",
        timeout: float = 600.0,
        drain: float | None = None,
        progress: Callable[[Progress], None] | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self._servers, self._route, self._name = servers, route, name
        self._progress, self._stop = progress, stop or threading.Event()
        self._planned = {request.index: request for request in schedule.requests}
        self.start = max(server.now for server in servers)
        """On the servers' clock."""
        drain = timeout + CONNECT_TIMEOUT if drain is None else drain
        self.policy: LoadPolicy[float] = LoadPolicy(_plan(schedule, timeout, drain), self.start, self)
        self._timers = self.policy.timers
        self._logs: list[list[int]] = [[] for _ in servers]
        """When each server's steps ended, as far as their answers have come."""
        self._flying: dict[str, _Flight] = {}
        self._done: list[_Flight] = []

    def run(self) -> None:
        """Everything, up to the last answer or the end of the drain."""
        for server in self._servers:
            server.idle_until(self.start)
        self.policy.begin()
        for count in itertools.count():
            if self._stop.is_set():
                self.policy.interrupt(self._now())
            if self.policy.over:
                return
            self._advance()
            if self._progress and count % _PROGRESS_EVERY == 0:
                self._progress(self.policy.progress(self._now() - self.start))

    def flights(self) -> Iterable[_Flight]:
        """Those that ended, in order of their intended time."""
        return sorted(self._done, key=lambda flight: (flight.intended, flight.planned.index))

    # Time.

    def _advance(self) -> None:
        """The next event, or the next step of the server that is furthest behind."""
        busy = [(server.now, number) for number, server in enumerate(self._servers) if server.busy]
        busy.sort()
        due = self._timers.next
        if due is not None and (not busy or due <= busy[0][0]):
            self._timers.ring(due)
            return
        assert busy, "requests in flight are with a server, or will time out"
        _, number = busy[0]
        server = self._servers[number]
        ends = server.stream(_horizon(due, busy))
        answers = ONLY_STREAMS if ends else server.step()
        *stamps, last = map(server.arrival, ends or (server.now,))
        self._logs[number] += map(self._nanoseconds, stamps)
        self._timers.set(server.now, lambda _: self._receive(number, answers, last))

    def _nanoseconds(self, moment: float) -> int:
        """After the start."""
        return round((moment - self.start) * 1e9)

    def _now(self) -> float:
        """For what happens at no moment of its own."""
        return min((server.now for server in self._servers if server.busy), default=self.policy.last_due)

    # What the policy decides.

    def send(self, index: int, intended: float, now: float) -> None:
        planned = self._planned[index]
        token_ids = tokens_of(planned)
        flight = _Flight(planned, intended, self._request_id(index), sent=now, prompt_tokens=len(token_ids))
        flight.server = self._route.choose(planned, token_ids)
        self._flying[flight.request_id] = flight
        if delay := self._servers[flight.server].entry(len(token_ids)):
            self._timers.set(now + delay, partial(self._submit, flight, token_ids))
        else:
            self._submit(flight, token_ids, now)

    def give_up(self, index: int, why: GivenUp, detail: str, now: float) -> None:
        flight = self._flying[self._request_id(index)]
        self._servers[flight.server].abort(flight.request_id)
        flight.land(self._logs[flight.server])
        stalled = why is GivenUp.TIMEOUT and flight.stamps
        self._close(flight, now, Failure.STALLED if stalled else FAILURES[why], detail)

    def never_sent(self, index: int, intended: float, why: GivenUp, detail: str, now: float) -> None:
        planned = self._planned[index]
        self._done.append(_Flight(planned, intended, ended=now, failure=FAILURES[why], detail=detail))

    def _request_id(self, index: int) -> str:
        return f"{self._name}{index}"

    def _submit(self, flight: _Flight, token_ids: Sequence[int], now: float) -> None:
        if flight.ended is not None:  # the client has hung up
            return
        try:
            self._servers[flight.server].submit(flight.request_id, token_ids, flight.planned, now)
        except ValueError as error:
            # Not at once: the policy is told between its decisions.
            self._timers.set(now, partial(self._refuse, flight, str(error)))

    def _refuse(self, flight: _Flight, detail: str, now: float) -> None:
        if flight.ended is None:
            self._finish(flight, now, Failure.HTTP_ERROR, detail)

    # What comes back.

    def _receive(self, number: int, answers: Answers, moment: float) -> None:
        flying, others, log = self._flying, answers.others, self._logs[number]
        now = self._nanoseconds(moment)
        for request_id in answers.left:
            if flight := flying.get(request_id):
                flight.land(log)
        log.append(now)
        for row, request_id in enumerate(answers.request_ids):
            flight = flying.get(request_id)
            if flight is None:  # the client has hung up
                continue
            answer = others.get(row, ONE_TOKEN) if others else ONE_TOKEN
            if answer.tokens:
                flight.stamps.append(now)
                flight.tokens.append(float(answer.tokens))
            if answer.finish_reason is not None:
                flight.last = answer
                self._finish(flight, moment)
        for request_id in answers.joined:
            if flight := flying.get(request_id):
                flight.streams = len(log)

    def _finish(self, flight: _Flight, now: float, failure: Failure | None = None, detail: str = "") -> None:
        self._close(flight, now, failure, detail)
        self.policy.ended(flight.planned.index, now, failed=failure is not None)

    def _close(self, flight: _Flight, now: float, failure: Failure | None, detail: str) -> None:
        flight.ended, flight.failure, flight.detail = now, failure, detail
        flight.land(self._logs[flight.server])
        del self._flying[flight.request_id]
        self._route.ended(flight.planned, flight.server)
        self._done.append(flight)


def _plan(schedule: Schedule, timeout: float, drain: float) -> LoadPlan[float]:
    return LoadPlan(
        firsts=[(r.index, r.intended) for r in schedule.requests if r.follows is None],
        turns={r.follows: (r.index, r.think) for r in schedule.requests if r.follows is not None},
        closed=schedule.mode == "closed",
        concurrency=schedule.concurrency,
        duration=schedule.duration,
        timeout=timeout,
        drain=drain,
    )


def _horizon(due: float | None, busy: Sequence[tuple[float, int]]) -> float:
    """When something happens that is not the first server's doing, at the earliest."""
    timer = math.inf if due is None else due
    return min(timer, busy[1][0]) if len(busy) > 1 else timer


def warm_up(schedule: Schedule, servers: Sequence[VirtualServer], name: str) -> tuple[str, ...]:
    """Send the warm-up to every server, four at a time; returns what failed."""
    failures: list[str] = []
    if not schedule.warmup:
        return ()
    load = replace(schedule, requests=schedule.warmup, mode="closed", concurrency=4, duration=None)
    for number, server in enumerate(servers):
        client = VirtualClient(load, [server], make_route("random", 1, load), name=f"{name}{number}w")
        client.run()
        failures += [f"{f.failure}: {f.detail}" for f in client.flights() if f.failure is not None]
    return tuple(failures)


def records_of(
    client: VirtualClient,
    schedule: Schedule,
    *,
    environment: Mapping[str, Any],
    warmup_failures: tuple[str, ...] = (),
    scrapes: tuple[tuple[int, str], ...] = (),
    server: int | None = None,
) -> Records:
    """What a run measured; with ``server`` the part of it that this one served."""
    flights = [f for f in client.flights() if server is None or f.server == server]
    requests = tuple(_record(flight, client.start) for flight in flights)
    window, steady = measured_window(
        requests,
        schedule.mode,
        schedule.duration,
        client.policy.last_due - client.start,
        client.policy.interrupted,
    )
    records = Records(
        schedule_sha256=schedule.sha256,
        schedule=schedule.description,
        mode=schedule.mode,
        concurrency=schedule.concurrency,
        planned=len(schedule.requests) if server is None else len(requests),
        requests=requests,
        window=window,
        client=ClientStats(
            loop="virtual time",
            workers=1,
            cpu=0.0,
            wall=max((r.end for r in requests), default=0) / 1e9,
            reads=sum(len(r.chunk_at) for r in requests),
            lag_p50=0.0,
            lag_p99=0.0,
            lag_max=0.0,
        ),
        environment={**environment, "python": platform.python_version(), "machine": "virtual"},
        start_unix_ms=START_UNIX_MS + round(client.start * 1e3),
        seed=schedule.seed,
        partial=client.policy.interrupted,
        warmup_failures=warmup_failures,
        steady=steady,
        scrapes=scrapes,
    )
    verdict, reasons = judge_run(records)
    if client.policy.exhausted:
        reasons += (
            f"all {len(schedule.requests)} planned requests were used up before the duration ended; "
            "plan more with num_requests",
        )
    return replace(records, verdict=verdict, reasons=reasons)


def _record(flight: _Flight, start: float) -> RequestRecord:
    def ns(moment: float) -> int:
        return round((moment - start) * 1e9)

    assert flight.ended is not None, "a run is over when every request has ended"
    last = flight.last
    return RequestRecord(
        index=flight.planned.index,
        cls=flight.planned.cls,
        intended=ns(flight.intended),
        sent=None if flight.sent is None else ns(flight.sent),
        end=ns(flight.ended),
        chunk_at=tuple(flight.stamps),
        chunk_tokens=tuple(flight.tokens),
        failure=flight.failure,
        detail=flight.detail,
        status=None if flight.sent is None else 400 if flight.failure is Failure.HTTP_ERROR else 200,
        finish_reason=last.finish_reason if last else None,
        prompt_tokens=flight.prompt_tokens,
        completion_tokens=round(sum(flight.tokens)) if last else None,
        cached_tokens=last.cached_tokens if last else None,
        planned_prompt=flight.prompt_tokens,
        max_tokens=flight.planned.max_tokens,
        server_queue=last.queue if last else None,
        server_prefill=last.prefill if last else None,
    )
