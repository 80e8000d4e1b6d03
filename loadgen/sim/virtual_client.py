"""The client in virtual time: what ``loadgen.wire.driver`` does on sockets, done to simulated servers.

A request has the same life as on the wire: intended, sent (at once, or when a slot of a cap is free), stamped
chunk by chunk, ended; with timeouts, drain, closed loops and the turns of conversations. Nobody waits.
"""

from __future__ import annotations

import heapq
import itertools
import math
import platform
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from loadgen.measure.record import ClientStats, Failure, Records, RequestRecord
from loadgen.measure.run_validity import judge
from loadgen.measure.window import measured_window
from loadgen.plan.workload import PlannedRequest, Schedule
from loadgen.sim.routing import Route, make_route, tokens_of
from loadgen.sim.virtual_server import ONE_TOKEN, ONLY_STREAMS, Answer, Answers, VirtualServer
from loadgen.wire.messages import Progress

START_UNIX_MS = 1_767_225_600_000
"""When virtual time begins, as a label: the start of 2026. Runs are the same whenever they are run."""
CONNECT_TIMEOUT = 10.0
"""As the real client's, by which its drain is longer than its timeout."""
_PROGRESS_EVERY = 1000  # events


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
    last: Answer | None = None

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
        self._schedule, self._servers, self._route, self._name = schedule, servers, route, name
        self._timeout = timeout
        self._drain = timeout + CONNECT_TIMEOUT if drain is None else drain
        self._progress, self._stop = progress, stop or threading.Event()
        self.start = max(server.now for server in servers)
        """On the servers' clock."""
        self.interrupted = self.exhausted = False
        self._logs: list[list[int]] = [[] for _ in servers]
        """When each server's steps ended, as far as their answers have come."""
        self._last_due = self.start
        self._firsts = deque(r for r in schedule.requests if r.follows is None)
        self._turns = {r.follows: r for r in schedule.requests if r.follows is not None}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._held: deque[_Flight] = deque()
        self._flying: dict[str, _Flight] = {}
        self._done: list[_Flight] = []
        self._failed = self._pausing = 0

    def run(self) -> None:
        """Everything, up to the last answer or the end of the drain."""
        for server in self._servers:
            server.idle_until(self.start)
        self._begin()
        for count in itertools.count():
            if self._stop.is_set():
                self.interrupted = True
                self._cut(self._now(), Failure.CANCELLED, "the run was interrupted")
            if not self._flying and not self._held and not self._coming:
                return
            self._advance()
            if self._progress and count % _PROGRESS_EVERY == 0:
                self._progress(self._counts())

    def flights(self) -> Iterable[_Flight]:
        """Those that ended, in order of their intended time."""
        return sorted(self._done, key=lambda flight: (flight.intended, flight.planned.index))

    @property
    def last_due(self) -> float:
        """When the last request was due, in seconds after the start."""
        return self._last_due - self.start

    @property
    def _coming(self) -> bool:
        """Whether anything is still to be sent."""
        return bool(self._firsts) or bool(self._pausing)

    # Time.

    def _begin(self) -> None:
        if self._schedule.mode == "closed":
            for _ in range(min(self._schedule.concurrency or 1, len(self._firsts))):
                self._dispatch(self._firsts.popleft(), self.start)
            if self._schedule.duration is not None:
                self._at(self.start + self._schedule.duration + self._drain, self._end_drain)
        else:
            self._await_first()

    def _advance(self) -> None:
        """The next event, or the next step of the server that is furthest behind."""
        busy = [(server.now, number) for number, server in enumerate(self._servers) if server.busy]
        busy.sort()
        if self._events and (not busy or self._events[0][0] <= busy[0][0]):
            _, _, event = heapq.heappop(self._events)
            event()
            return
        assert busy, "requests in flight are with a server, or will time out"
        _, number = busy[0]
        server = self._servers[number]
        ends = server.stream(self._horizon(busy))
        answers = ONLY_STREAMS if ends else server.step()
        *stamps, last = map(server.arrival, ends or (server.now,))
        self._logs[number] += map(self._nanoseconds, stamps)
        self._at(server.now, partial(self._receive, number, answers, last))

    def _horizon(self, busy: Sequence[tuple[float, int]]) -> float:
        """When something happens that is not the first server's doing, at the earliest."""
        event = self._events[0][0] if self._events else math.inf
        return min(event, busy[1][0]) if len(busy) > 1 else event

    def _nanoseconds(self, moment: float) -> int:
        """After the start."""
        return round((moment - self.start) * 1e9)

    def _at(self, moment: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._order), event))

    def _now(self) -> float:
        """For what happens at no moment of its own."""
        return min((server.now for server in self._servers if server.busy), default=self._last_due)

    # Sending.

    def _await_first(self) -> None:
        """The next request of an open loop comes when it is intended."""
        if self._firsts:
            due = self.start + self._firsts[0].intended
            self._at(due, lambda: self._send_first(due))
        else:
            end = max(self._last_due, self.start + (self._schedule.duration or 0.0))
            self._at(end + self._drain, self._end_drain)

    def _send_first(self, due: float) -> None:
        if self._firsts:
            self._dispatch(self._firsts.popleft(), due)
            self._await_first()

    def _dispatch(self, planned: PlannedRequest, intended: float) -> None:
        self._last_due = max(self._last_due, intended)
        flight = _Flight(planned, intended)
        cap = self._schedule.concurrency
        if cap is not None and len(self._flying) >= cap:
            self._held.append(flight)
        else:
            self._send(flight, intended)

    def _send(self, flight: _Flight, now: float) -> None:
        token_ids = tokens_of(flight.planned)
        flight.request_id = f"{self._name}{flight.planned.index}"
        flight.sent, flight.prompt_tokens = now, len(token_ids)
        flight.server = self._route.choose(flight.planned, token_ids)
        self._flying[flight.request_id] = flight
        self._at(now + self._timeout, lambda: self._expire(flight, now + self._timeout))
        if delay := self._servers[flight.server].entry(len(token_ids)):
            self._at(now + delay, lambda: self._submit(flight, token_ids, now + delay))
        else:
            self._submit(flight, token_ids, now)

    def _submit(self, flight: _Flight, token_ids: Sequence[int], now: float) -> None:
        if flight.ended is not None:  # the client has hung up
            return
        try:
            self._servers[flight.server].submit(flight.request_id, token_ids, flight.planned, now)
        except ValueError as error:
            # As an event, or a closed loop of refused requests would recurse.
            self._at(now, partial(self._refuse, flight, now, str(error)))

    def _refuse(self, flight: _Flight, now: float, detail: str) -> None:
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
        flight.ended, flight.failure, flight.detail = now, failure, detail
        flight.land(self._logs[flight.server])
        del self._flying[flight.request_id]
        self._route.ended(flight.planned, flight.server)
        self._done.append(flight)
        turn = self._turns.pop(flight.planned.index, None)
        goes_on = False
        if failure is not None:
            self._failed += 1
            self._skip(turn, flight, now)
        elif turn is not None:
            goes_on = self._pause(turn, now)
        if self._held:
            self._send(self._held.popleft(), now)
        elif self._schedule.mode == "closed" and not goes_on:
            self._continue_closed(now)

    def _continue_closed(self, now: float) -> None:
        duration = self._schedule.duration
        if duration is not None and now >= self.start + duration:
            self._firsts.clear()
        elif self._firsts:
            self._dispatch(self._firsts.popleft(), now)
        elif duration is not None:
            self.exhausted = True

    def _pause(self, turn: PlannedRequest, now: float) -> bool:
        """Let a turn wait for its time; False if the run will be over by then."""
        due, duration = now + turn.think, self._schedule.duration
        if duration is not None and due >= self.start + duration:
            return False
        self._pausing += 1
        self._at(due, lambda: self._end_pause(turn, due))
        return True

    def _end_pause(self, turn: PlannedRequest, due: float) -> None:
        if self._pausing:
            self._pausing -= 1
            self._dispatch(turn, due)

    def _skip(self, turn: PlannedRequest | None, failed: _Flight, now: float) -> None:
        """The rest of a conversation of which a turn failed."""
        detail = f"turn {failed.planned.index} of its conversation failed"
        while turn is not None:
            skipped = _Flight(turn, now, ended=now, failure=Failure.SKIPPED, detail=detail)
            self._done.append(skipped)
            self._failed += 1
            turn = self._turns.pop(turn.index, None)

    def _expire(self, flight: _Flight, now: float) -> None:
        if flight.ended is None:
            self._servers[flight.server].abort(flight.request_id)
            flight.land(self._logs[flight.server])
            failure = Failure.STALLED if flight.stamps else Failure.NO_ANSWER
            self._finish(flight, now, failure, "no complete answer within the time allowed")

    def _end_drain(self) -> None:
        if self._schedule.mode != "closed" and self._coming:
            return
        at = max(self._last_due, self.start + (self._schedule.duration or 0.0)) + self._drain
        self._cut(at, Failure.UNFINISHED, "not finished when the time for the drain was over")

    def _cut(self, now: float, failure: Failure, detail: str) -> None:
        """End the run: nothing more is sent, what is under way is dropped."""
        self._firsts.clear()
        self._turns.clear()
        self._pausing = 0
        held, self._held = list(self._held), deque()
        for flight in list(self._flying.values()):
            self._servers[flight.server].abort(flight.request_id)
            self._finish(flight, now, failure, detail)
        for flight in held:
            flight.ended, flight.failure, flight.detail = now, failure, detail
            self._done.append(flight)

    def _counts(self) -> Progress:
        return Progress(
            elapsed=self._now() - self.start,
            sent=len(self._done) + len(self._flying),
            finished=len(self._done),
            failed=self._failed,
            planned=len(self._schedule.requests),
        )


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
        requests, schedule.mode, schedule.duration, client.last_due, client.interrupted
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
        partial=client.interrupted,
        warmup_failures=warmup_failures,
        steady=steady,
        scrapes=scrapes,
    )
    verdict, reasons = judge(records)
    if client.exhausted:
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
