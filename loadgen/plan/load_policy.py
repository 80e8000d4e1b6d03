"""When the requests of a plan are sent, and when the client gives up on one: decisions, without I/O.

A transport (``loadgen.wire.driver`` on sockets, ``loadgen.sim.virtual_client`` in virtual time) carries them
out. It calls :meth:`LoadPolicy.begin`, rings the timers when they are due, and says which request has ended,
until the policy is ``over``. Moments are of the transport's clock and unit.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Generic, Protocol, TypeAlias, TypeVar

Moment = TypeVar("Moment", int, float)
_Told = TypeVar("_Told", int, float, contravariant=True)


class GivenUp(StrEnum):
    """Why a request ended without an answer, where the client is at the root of it."""

    TIMEOUT = "timeout"
    UNFINISHED = "unfinished"
    """Still going when the time for the drain was over."""
    CANCELLED = "cancelled"
    """Still going when the run was interrupted."""
    SKIPPED = "skipped"
    """Never sent: the turn before it failed."""


@dataclass(frozen=True, slots=True)
class LoadPlan(Generic[Moment]):
    """What is sent. Requests go by their index; spans of time are of the transport's unit."""

    firsts: Sequence[tuple[int, Moment]]
    """(request, when it is intended after the start), in order of time. In a closed loop the time is not
    heeded: a request is sent when a slot is free."""
    turns: Mapping[int, tuple[int, Moment]]
    """Later turns of conversations, by the request that each follows: (request, pause after that answer). A
    closed loop's slot stays with its conversation; with a duration, turns due after it are not sent."""
    closed: bool
    concurrency: int | None
    """No more are in flight; what is due beyond that waits for a slot."""
    duration: Moment | None
    """Closed loop: no new request after this."""
    timeout: Moment
    """For one request, from sending to its last byte."""
    drain: Moment
    """How long to wait for answers after the last request was due (or the duration ended)."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Counts so far. ``planned`` is what the schedule holds; a closed loop with a duration sends fewer."""

    elapsed: float
    """Seconds."""
    sent: int
    finished: int
    failed: int
    planned: int

    @property
    def in_flight(self) -> int:
        return self.sent - self.finished


_Timer: TypeAlias = tuple[Moment, int, Callable[[Moment], None]]


class Transport(Protocol[_Told]):
    """What carries the decisions out. It does not call the policy from within these methods."""

    def send(self, index: int, intended: _Told, now: _Told) -> None: ...

    def give_up(self, index: int, why: GivenUp, detail: str, now: _Told) -> None:
        """Hang up: a request in flight has ended, of which the policy wants to hear no more."""

    def never_sent(self, index: int, intended: _Told, why: GivenUp, detail: str, now: _Told) -> None:
        """A request has ended that was due, but was not sent."""


class Timers(Generic[Moment]):
    """What happens when. Of what is set for one moment, the first to be set comes first."""

    def __init__(self) -> None:
        self.next: Moment | None = None
        """When the next one is due."""
        self._heap: list[_Timer[Moment]] = []
        self._sorted: deque[_Timer[Moment]] = deque()
        """Those that were set in the order of their time, as time-outs are: they would make the heap deep."""
        self._order = itertools.count()

    def set(self, moment: Moment, event: Callable[[Moment], None]) -> None:
        """Have ``event`` called with the time that it is then."""
        timer = (moment, next(self._order), event)
        if not self._sorted or moment >= self._sorted[-1][0]:
            self._sorted.append(timer)
        else:
            heapq.heappush(self._heap, timer)
        if self.next is None or moment < self.next:
            self.next = moment

    def ring(self, now: Moment) -> None:
        """Call the next one."""
        heap, in_order = self._heap, self._sorted
        from_heap = heap and (not in_order or heap[0] < in_order[0])
        _, _, event = heapq.heappop(heap) if from_heap else in_order.popleft()
        if heap and (not in_order or heap[0] < in_order[0]):
            self.next = heap[0][0]
        else:
            self.next = in_order[0][0] if in_order else None
        event(now)


class LoadPolicy(Generic[Moment]):
    """Carries a plan through one run."""

    def __init__(self, plan: LoadPlan[Moment], start: Moment, transport: Transport[Moment]) -> None:
        self.timers: Timers[Moment] = Timers()
        """Those of the policy; the transport may set some of its own."""
        self.last_due: Moment = start
        """When the last request was due so far."""
        self.dispatched = 0
        """How many of the plan's ``firsts`` have been due so far."""
        self.interrupted = False
        self.exhausted = False
        """A closed loop ran out of requests before its duration ended."""
        self._plan: LoadPlan[Moment] = plan
        self._start: Moment = start
        self._transport: Transport[Moment] = transport
        self._turns: dict[int, tuple[int, Moment]] = dict(plan.turns)
        self._coming = len(plan.firsts)
        """How many requests are still to be due, as far as is known: firsts, and turns that pause."""
        self._finished = self._failed = 0
        self._held: deque[tuple[int, Moment]] = deque()
        self._in_flight: dict[int, None] = {}
        """In the order of sending."""
        self._draining = False

    # What the transport says.

    def begin(self) -> None:
        """It is the start."""
        plan = self._plan
        if not plan.closed:
            self._await_first()
            return
        for _ in range(min(plan.concurrency or 1, len(plan.firsts) - self.dispatched)):
            self._dispatch_first(self._start, self._start)
        if plan.duration is not None:
            self._await_drain()

    def ended(self, index: int, now: Moment, *, failed: bool) -> None:
        """A request in flight has been answered, or cannot be."""
        del self._in_flight[index]
        self._finished += 1
        self._failed += failed
        turn = self._turns.pop(index, None)
        goes_on = False
        if turn is not None and failed:
            self._skip(turn, f"turn {index} of its conversation failed", now)
        elif turn is not None:
            goes_on = self._pause(turn, now)
        if self._held:
            self._send(*self._held.popleft(), now)
        elif self._plan.closed and not goes_on:
            self._continue_closed(now)

    def interrupt(self, now: Moment) -> None:
        """The user wants no more."""
        self.interrupted = True
        self._cut(GivenUp.CANCELLED, "the run was interrupted", now)

    # What it may ask.

    @property
    def over(self) -> bool:
        """Nothing is in flight, and nothing is to come."""
        return not (self._in_flight or self._held or self._coming)

    @property
    def in_flight(self) -> int:
        """How many requests are."""
        return len(self._in_flight)

    def progress(self, elapsed: float) -> Progress:
        """``elapsed``: seconds since the start."""
        return Progress(
            elapsed=elapsed,
            sent=self._finished + len(self._in_flight),
            finished=self._finished,
            failed=self._failed,
            planned=len(self._plan.firsts) + len(self._plan.turns),
        )

    # Sending.

    def _await_first(self) -> None:
        """The next request of an open loop comes when it is intended."""
        if self.dispatched < len(self._plan.firsts):
            self.timers.set(self._start + self._plan.firsts[self.dispatched][1], self._first_due)

    def _first_due(self, now: Moment) -> None:
        if self.dispatched < len(self._plan.firsts):  # the run may have been cut since
            self._dispatch_first(self._start + self._plan.firsts[self.dispatched][1], now)
            self._await_first()

    def _dispatch_first(self, intended: Moment, now: Moment) -> None:
        index, _ = self._plan.firsts[self.dispatched]
        self.dispatched += 1
        self._dispatch(index, intended, now)

    def _dispatch(self, index: int, intended: Moment, now: Moment) -> None:
        """A request is due: send it, or hold it until a slot is free."""
        self._coming -= 1
        if intended > self.last_due:
            self.last_due = intended
        cap = self._plan.concurrency
        if cap is not None and len(self._in_flight) >= cap:
            self._held.append((index, intended))
        else:
            self._send(index, intended, now)
        if not self._coming:
            self._await_drain()

    def _send(self, index: int, intended: Moment, now: Moment) -> None:
        self._in_flight[index] = None
        self.timers.set(now + self._plan.timeout, partial(self._expire, index))
        self._transport.send(index, intended, now)

    def _continue_closed(self, now: Moment) -> None:
        """A slot is free."""
        plan = self._plan
        if plan.duration is not None and now >= self._start + plan.duration:
            self._coming -= len(plan.firsts) - self.dispatched
            self.dispatched = len(plan.firsts)
        elif self.dispatched < len(plan.firsts):
            self._dispatch_first(now, now)
        elif plan.duration is not None:
            self.exhausted = True

    # Conversations.

    def _pause(self, turn: tuple[int, Moment], now: Moment) -> bool:
        """Let a turn wait for its time; False if the run will be over by then."""
        index, think = turn
        due, duration = now + think, self._plan.duration
        if duration is not None and due >= self._start + duration:
            return False
        self._coming += 1
        self.timers.set(due, partial(self._turn_due, index, due))
        return True

    def _turn_due(self, index: int, due: Moment, now: Moment) -> None:
        if self._coming:  # the run may have been cut since
            self._dispatch(index, due, now)

    def _skip(self, turn: tuple[int, Moment] | None, detail: str, now: Moment) -> None:
        """The rest of a conversation of which a turn failed."""
        while turn is not None:
            self._finished += 1
            self._failed += 1
            self._transport.never_sent(turn[0], now, GivenUp.SKIPPED, detail, now)
            turn = self._turns.pop(turn[0], None)

    # Ends.

    def _expire(self, index: int, now: Moment) -> None:
        if index in self._in_flight:
            detail = "no complete answer within the time allowed"
            self._transport.give_up(index, GivenUp.TIMEOUT, detail, now)
            self.ended(index, now, failed=True)

    def _await_drain(self) -> None:
        if not self._draining:
            self._draining = True
            self.timers.set(self._drained_at, self._end_drain)

    @property
    def _drained_at(self) -> Moment:
        """As far as is known: a turn that is due meanwhile puts it off."""
        plan = self._plan
        return max(self.last_due, self._start + (plan.duration or 0)) + plan.drain

    def _end_drain(self, now: Moment) -> None:
        self._draining = False
        if self._coming and not (self._plan.closed and self._plan.duration is not None):
            return  # the last of what is to come begins a drain again
        if now < self._drained_at:
            self._await_drain()
        else:
            self._cut(GivenUp.UNFINISHED, "not finished when the time for the drain was over", now)

    def _cut(self, why: GivenUp, detail: str, now: Moment) -> None:
        """End the run: what is in flight is given up, nothing more is sent."""
        self.dispatched, self._coming = len(self._plan.firsts), 0
        self._finished += len(self._in_flight) + len(self._held)
        self._failed += len(self._in_flight) + len(self._held)
        for index in self._in_flight:
            self._transport.give_up(index, why, detail, now)
        for index, intended in self._held:
            self._transport.never_sent(index, intended, why, detail, now)
        self._in_flight.clear()
        self._held.clear()
