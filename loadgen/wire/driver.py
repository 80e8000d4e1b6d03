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
import heapq
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import monotonic_ns

from loadgen.wire.connection import Connection, Pool
from loadgen.wire.messages import End, Exchange, Progress, WireLog, WirePlan, WireRequest
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
flight: a connection that nobody needs costs a fifth of a millisecond to open, again and again as it ages."""
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
        self._log = WireLog(start_ns, last_due_ns=start_ns, loop=type(loop).__module__.split(".")[0])
        self._payloads = {r.index: r.payload for r in (*plan.requests, *plan.turns)}
        self._turns = {turn.follows: turn for turn in plan.turns}
        self._pausing: list[tuple[int, int]] = []
        """A heap of (when due, index) of turns whose pause has begun."""
        self._pool = Pool(plan.endpoint, plan.connect_timeout_ns, loop, self)
        self._next = self._ahead = 0
        self._begun = False
        self._spare = max(_SPARE, busiest([r.offset_ns for r in plan.requests], _BURST_NS))
        self._busy: dict[int, Connection] = {}
        self._held: deque[Exchange] = deque()
        self._waiting: deque[Exchange] = deque()
        self._deadlines: deque[tuple[int, Exchange]] = deque()
        self._in_flight = self._failed = self._beats = 0
        self._beat_due_ns = 0
        self._cpu_at_start = time.process_time()
        self._done: asyncio.Future[None] = loop.create_future()
        self._send_alarm = Alarm(loop, self._begin)
        self._turn_alarm = Alarm(loop, self._turns_due)
        self._beat_alarm = Alarm(loop, self._beat)

    async def run(self) -> WireLog:
        self._beat_due_ns = monotonic_ns() + BEAT_NS
        self._beat_alarm.set(self._beat_due_ns)
        try:
            self._dial_ahead()
            self._send_alarm.set(self._log.start_ns)
            await self._done
        finally:
            self._send_alarm.close()
            self._turn_alarm.close()
            self._beat_alarm.close()
            for connection in self._busy.values():
                connection.drop()
            await self._pool.close()
        self._log.stop_ns = monotonic_ns()
        self._log.cpu_s = time.process_time() - self._cpu_at_start
        return self._log

    # -- sending --------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._begun = True
        self._cpu_at_start = time.process_time()  # opening the first connections is not the load
        self._send_alarm.callback = self._send_due
        self._send_due()

    def _send_due(self) -> None:
        plan, start = self._plan, self._log.start_ns
        if plan.closed:
            for _ in range(min(plan.concurrency or 1, len(plan.requests))):
                self._dispatch_next(start)
            return
        now, first = monotonic_ns(), self._next
        while self._next < len(plan.requests):
            due = start + plan.requests[self._next].offset_ns
            if due > now:
                self._send_alarm.set(due)
                break
            self._dispatch_next(due)
            now = monotonic_ns()
        self._dial_ahead(at_once=2 * (self._next - first))

    def _dispatch_next(self, intended_ns: int) -> None:
        request = self._plan.requests[self._next]
        self._next += 1
        self._dispatch(request.index, intended_ns)

    def _dispatch(self, index: int, intended_ns: int) -> None:
        self._log.last_due_ns = intended_ns
        exchange = Exchange(index, intended_ns)
        cap = self._plan.concurrency
        if cap is not None and self._in_flight >= cap:
            self._held.append(exchange)
            return
        self._start(exchange)

    def _start(self, exchange: Exchange) -> None:
        self._in_flight += 1
        self._deadlines.append((monotonic_ns() + self._plan.timeout_ns, exchange))
        connection = self._pool.take()
        if connection is None:
            self._waiting.append(exchange)
            self._pool.dial()
        else:
            self._send(connection, exchange)

    def _pause(self, turn: WireRequest, ended_ns: int) -> bool:
        """Let ``turn`` wait for its time; False if the run will be over by then."""
        due, duration = ended_ns + turn.offset_ns, self._plan.duration_ns
        if self._log.interrupted or (duration is not None and due >= self._log.start_ns + duration):
            return False
        heapq.heappush(self._pausing, (due, turn.index))
        self._turn_alarm.set(self._pausing[0][0])
        return True

    def _turns_due(self) -> None:
        while self._pausing and self._pausing[0][0] <= monotonic_ns():
            due, index = heapq.heappop(self._pausing)
            self._dispatch(index, due)
        if self._pausing:
            self._turn_alarm.set(self._pausing[0][0])

    def _skip_turns(self, index: int, detail: str) -> None:
        """The rest of a conversation whose turn ``index`` failed."""
        while (turn := self._turns.pop(index, None)) is not None:
            now, index = monotonic_ns(), turn.index
            skipped = Exchange(index, now, end=End.SKIPPED, detail=detail, ended_ns=now)
            self._log.exchanges.append(skipped)
            self._failed += 1

    def _send(self, connection: Connection, exchange: Exchange) -> None:
        self._busy[exchange.index] = connection
        connection.send(exchange, self._payloads[exchange.index])

    def _dial_ahead(self, at_once: int | None = None) -> None:
        """Have connections ready for the requests of the next half second.

        While the load runs only two are opened for each request sent: dozens at once would hold up what is
        due meanwhile by milliseconds.
        """
        plan = self._plan
        if plan.closed:
            wanted = len(plan.requests)
        else:
            horizon = monotonic_ns() + _DIAL_AHEAD_NS - self._log.start_ns
            while self._ahead < len(plan.requests) and plan.requests[self._ahead].offset_ns < horizon:
                self._ahead += 1
            more = self._in_flight if self._begun else _AT_START
            wanted = min(self._ahead - self._next, max(self._spare, more))
        if plan.concurrency is not None:
            wanted = min(wanted, plan.concurrency - self._in_flight)
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
        exchange.end, exchange.detail = end, detail
        complete = end is End.COMPLETE
        exchange.ended_ns = exchange.stamps[-1] if complete else monotonic_ns()
        self._busy.pop(exchange.index, None)
        self._in_flight -= 1
        self._failed += failed
        self._log.exchanges.append(exchange)
        if self._done.done():
            return
        goes_on = False
        if failed:
            self._skip_turns(exchange.index, f"turn {exchange.index} of its conversation failed")
        elif (turn := self._turns.pop(exchange.index, None)) is not None:
            goes_on = self._pause(turn, exchange.ended_ns)
        if self._held:
            self._start(self._held.popleft())
        elif self._plan.closed and not goes_on:
            self._continue_closed(exchange.ended_ns)
        self._finish_if_over()

    def _continue_closed(self, now_ns: int) -> None:
        duration = self._plan.duration_ns
        if self._log.interrupted:
            return
        if duration is not None and now_ns >= self._log.start_ns + duration:
            self._next = len(self._plan.requests)
        elif self._next < len(self._plan.requests):
            self._dispatch_next(now_ns)
        elif duration is not None:
            self._log.exhausted = True

    def _finish_if_over(self) -> None:
        over = self._next >= len(self._plan.requests) and not self._pausing
        if over and not self._in_flight and not self._held:
            self._end_run()

    def _end_run(self) -> None:
        if not self._done.done():
            self._done.set_result(None)

    # -- the heartbeat --------------------------------------------------------------------------

    def _beat(self) -> None:
        now = monotonic_ns()
        self._log.lags_ns.append(now - self._beat_due_ns)
        self._log.lag_at_ns.append(self._beat_due_ns)
        self._beats += 1
        self._expire(now)
        if self._beats % _PROGRESS_EVERY == 0:
            self._dial_ahead(at_once=2)
            self._progress(self._counts(now))
        if self._stop():
            self._log.interrupted = True
            self._cut(End.CANCELLED, "the run was interrupted")
        elif now > self._drain_deadline_ns():
            self._cut(End.UNFINISHED, "not finished when the time for the drain was over")
        if not self._done.done():
            self._beat_due_ns = max(self._beat_due_ns + BEAT_NS, now)
            self._beat_alarm.set(self._beat_due_ns)

    def _drain_deadline_ns(self) -> int:
        plan, start = self._plan, self._log.start_ns
        if plan.closed and plan.duration_ns is not None:
            return start + plan.duration_ns + plan.drain_ns
        if self._next < len(plan.requests) or self._pausing:
            return 1 << 63
        return max(self._log.last_due_ns, start + (plan.duration_ns or 0)) + plan.drain_ns

    def _expire(self, now: int) -> None:
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][1].ended_ns):
            _, exchange = self._deadlines.popleft()
            if not exchange.ended_ns:
                self._drop(exchange, End.TIMEOUT, "no complete answer within the time allowed")

    def _drop(self, exchange: Exchange, end: End, detail: str) -> None:
        connection = self._busy.get(exchange.index)
        if connection is not None:
            connection.drop()
        elif exchange in self._waiting:
            self._waiting.remove(exchange)
        self._finish(exchange, end, detail)

    def _cut(self, end: End, detail: str) -> None:
        """End the run now: everything in flight is dropped as ``end``, nothing more is sent."""
        self._next = len(self._plan.requests)
        self._pausing.clear()
        self._turns.clear()
        held, self._held = list(self._held), deque()
        for _, exchange in list(self._deadlines):
            if not exchange.ended_ns:
                self._drop(exchange, end, detail)
        for exchange in held:
            exchange.end, exchange.detail, exchange.ended_ns = end, detail, monotonic_ns()
            self._log.exchanges.append(exchange)
        self._end_run()

    def _counts(self, now: int) -> Progress:
        return Progress(
            elapsed=(now - self._log.start_ns) / 1e9,
            sent=len(self._log.exchanges) + self._in_flight,
            finished=len(self._log.exchanges),
            failed=self._failed,
            planned=len(self._plan.requests) + len(self._plan.turns),
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

    async def main() -> WireLog:
        begin = monotonic_ns() + LEAD_NS if start_ns is None else start_ns
        return await Driver(plan, begin, stop=stop, progress=progress).run()

    with _quiet_gc(), asyncio.Runner(loop_factory=event_loop) as runner:
        return runner.run(main())
