"""Sends a fixed plan of requests and stamps what comes back. Nothing is parsed while the load runs.

One event loop, one clock (``monotonic_ns``). Connections are kept alive and reused, and new ones are
dialled ahead of the requests that will need them, so that neither a handshake nor a connection that
the server has just given up shows up as latency: a client that knows its schedule can do that, and a
real client's pool mostly does. A reused connection that turns out closed before any byte of the answer
is replaced once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import monotonic_ns

from loadgen.plan.load_policy import GivenUp, LoadPlan, LoadPolicy, Progress
from loadgen.wire.connection import Connection, Pool
from loadgen.wire.messages import End, Exchange, WireLog, WirePlan
from loadgen.wire.timerfd import Alarm

BEAT_NS = 10_000_000
LEAD_NS = 100_000_000
"""Between "all is ready" and the start: room to open the first connections."""
_DIAL_AHEAD_NS = 500_000_000
_SPARE = 32
"""Connections that are kept open for requests to come, at least. …"""
_AT_START = 128
"""Before the start there is time for this many; …"""
_BURST_NS = 50_000_000
"""… and as many as are ever due within this time. Where the server falls behind, they grow with what is in
flight: an unused connection costs a fifth of a millisecond to open, again and again as it ages."""
_PROGRESS_EVERY = 25  # beats


class Driver:
    """Carries out a plan. ``stop`` is asked at every heartbeat, ``progress`` told four times a second."""

    def __init__(
        self,
        plan: WirePlan,
        start_ns: int,
        *,
        stop: Callable[[], bool] = lambda: False,
        progress: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self._plan, self._stop, self._progress = plan, stop, progress
        loop = asyncio.get_running_loop()
        self._log = WireLog(start_ns, loop=type(loop).__module__.split(".")[0])
        self._policy: LoadPolicy[int] = LoadPolicy(_load_plan(plan), start_ns, self)
        self._payloads = {r.index: r.payload for r in (*plan.requests, *plan.turns)}
        self._pool = Pool(plan.endpoint, plan.connect_timeout_ns, loop, self)
        self._ahead = 0
        """How many requests of an open loop are due within the time that connections are dialled ahead."""
        self._begun = False
        self._spare = max(_SPARE, busiest([r.offset_ns for r in plan.requests], _BURST_NS))
        self._busy: dict[int, Connection] = {}
        self._waiting: deque[Exchange] = deque()
        """For a connection."""
        self._beats = self._beat_due_ns = 0
        self._cpu_at_start = time.process_time()
        self._done: asyncio.Future[None] = loop.create_future()
        self._alarm = Alarm(loop, self._ring)
        self._alarm_ns: int | None = None

    async def run(self) -> WireLog:
        self._beat_due_ns = monotonic_ns() + BEAT_NS
        self._policy.timers.set(self._beat_due_ns, self._beat)
        self._policy.timers.set(self._log.start_ns, self._begin)
        try:
            self._dial_ahead()
            self._decided()
            await self._done
        finally:
            self._alarm.close()
            for connection in self._busy.values():
                connection.drop()
            await self._pool.close()
        self._log.stop_ns = monotonic_ns()
        self._log.cpu_s = time.process_time() - self._cpu_at_start
        self._log.last_due_ns = self._policy.last_due
        self._log.interrupted, self._log.exhausted = self._policy.interrupted, self._policy.exhausted
        return self._log

    # -- time -----------------------------------------------------------------------------------

    def _ring(self) -> None:
        """Do what is due: requests, turns, time-outs, the heartbeat."""
        policy, before = self._policy, self._policy.dispatched
        while (due := policy.timers.next) is not None and due <= (now := monotonic_ns()):
            policy.timers.ring(now)
        if not self._plan.closed and policy.dispatched > before:
            self._dial_ahead(at_once=2 * (policy.dispatched - before))
        self._alarm_ns = None
        self._decided()

    def _decided(self) -> None:
        """The policy has heard something: go on, or end the run."""
        due = self._policy.timers.next
        if self._policy.over:
            if not self._done.done():
                self._done.set_result(None)
        elif due is not None and due != self._alarm_ns:
            self._alarm_ns = due
            self._alarm.set(due)

    def _begin(self, now: int) -> None:
        self._begun = True
        self._cpu_at_start = time.process_time()  # opening the first connections is not the load
        self._policy.begin()

    def _beat(self, now: int) -> None:
        self._log.lags_ns.append(now - self._beat_due_ns)
        self._log.lag_at_ns.append(self._beat_due_ns)
        self._beats += 1
        if self._beats % _PROGRESS_EVERY == 0:
            self._dial_ahead(at_once=2)
            self._progress(self._policy.progress((now - self._log.start_ns) / 1e9))
        if self._stop():
            self._policy.interrupt(now)
        self._beat_due_ns = max(self._beat_due_ns + BEAT_NS, now)
        self._policy.timers.set(self._beat_due_ns, self._beat)

    # -- what the policy decides ----------------------------------------------------------------

    def send(self, index: int, intended: int, now: int) -> None:
        exchange = Exchange(index, intended)
        connection = self._pool.take()
        if connection is None:
            self._waiting.append(exchange)
            self._pool.dial()
        else:
            self._send(connection, exchange)

    def give_up(self, index: int, why: GivenUp, detail: str, now: int) -> None:
        connection = self._busy.get(index)
        if connection is not None and connection.exchange is not None:
            exchange = connection.exchange
            connection.drop()
        else:
            exchange = next(exchange for exchange in self._waiting if exchange.index == index)
            self._waiting.remove(exchange)
        self._close(exchange, End(why), detail, now)

    def never_sent(self, index: int, intended: int, why: GivenUp, detail: str, now: int) -> None:
        self._log.exchanges.append(Exchange(index, intended, end=End(why), detail=detail, ended_ns=now))

    def _send(self, connection: Connection, exchange: Exchange) -> None:
        self._busy[exchange.index] = connection
        connection.send(exchange, self._payloads[exchange.index])

    def _dial_ahead(self, at_once: int | None = None) -> None:
        """Have connections ready for the requests of the next half second.

        While the load runs only two are opened for each request sent: dozens at once would hold up what is
        due meanwhile by milliseconds.
        """
        plan, in_flight = self._plan, self._policy.in_flight
        if plan.closed:
            wanted = len(plan.requests)
        else:
            horizon = monotonic_ns() + _DIAL_AHEAD_NS - self._log.start_ns
            while self._ahead < len(plan.requests) and plan.requests[self._ahead].offset_ns < horizon:
                self._ahead += 1
            more = in_flight if self._begun else _AT_START
            wanted = min(self._ahead - self._policy.dispatched, max(self._spare, more))
        if plan.concurrency is not None:
            wanted = min(wanted, plan.concurrency - in_flight)
        self._pool.prepare(wanted, _DIAL_AHEAD_NS, at_once)

    # -- what comes back (the pool's owner) -----------------------------------------------------

    def connected(self, connection: Connection) -> None:
        if self._done.done():
            connection.abort()
        elif self._waiting:
            self._send(connection, self._waiting.popleft())
        else:
            self._pool.keep(connection)
            if not self._begun:
                self._dial_ahead()

    def dial_failed(self, end: End, detail: str) -> None:
        if self._waiting:
            self._finish(self._waiting.popleft(), end, detail)

    def answered(self, exchange: Exchange, status: int) -> None:
        self._finish(exchange, End.COMPLETE, failed=status != 200)

    def broken(self, exchange: Exchange, end: End, detail: str) -> None:
        self._finish(exchange, end, detail)

    def unsent(self, exchange: Exchange) -> None:
        del self._busy[exchange.index]
        self._waiting.append(exchange)
        self._pool.dial()

    def _finish(self, exchange: Exchange, end: End, detail: str = "", *, failed: bool = True) -> None:
        now = exchange.stamps[-1] if end is End.COMPLETE else monotonic_ns()
        self._close(exchange, end, detail, now)
        self._policy.ended(exchange.index, now, failed=failed)
        self._decided()

    def _close(self, exchange: Exchange, end: End, detail: str, now: int) -> None:
        exchange.end, exchange.detail, exchange.ended_ns = end, detail, now
        self._busy.pop(exchange.index, None)
        self._log.exchanges.append(exchange)


def _load_plan(plan: WirePlan) -> LoadPlan[int]:
    return LoadPlan(
        firsts=[(request.index, request.offset_ns) for request in plan.requests],
        turns={turn.follows: (turn.index, turn.offset_ns) for turn in plan.turns if turn.follows is not None},
        closed=plan.closed,
        concurrency=plan.concurrency,
        duration=plan.duration_ns,
        timeout=plan.timeout_ns,
        drain=plan.drain_ns,
    )


def busiest(offsets_ns: Sequence[int], width_ns: int) -> int:
    """The most of these rising times that lie within ``width_ns`` of each other."""
    most = first = 0
    for last, offset in enumerate(offsets_ns):
        while offset - offsets_ns[first] >= width_ns:
            first += 1
        most = max(most, last - first + 1)
    return most


@contextlib.contextmanager
def _quiet_gc() -> Iterator[None]:
    """No garbage collection while the load runs: a full collection stops the loop for tens of ms."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def event_loop() -> asyncio.AbstractEventLoop:
    """uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def drive(
    plan: WirePlan,
    start_ns: int | None = None,
    *,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[Progress], None] = lambda _: None,
) -> WireLog:
    """Carry out ``plan`` in this thread, starting at ``start_ns`` (of ``monotonic_ns``; None: soon)."""

    logs: list[WireLog] = []

    async def main() -> None:
        begin = monotonic_ns() + LEAD_NS if start_ns is None else start_ns
        logs.append(await Driver(plan, begin, stop=stop, progress=progress).run())

    with _quiet_gc(), asyncio.Runner(loop_factory=event_loop) as runner:
        runner.run(
            main()
        )  # without a result: restoring SIGINT's handler prints the task, all its bytes with it
    return logs[0]
