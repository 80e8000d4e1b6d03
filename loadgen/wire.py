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
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from time import monotonic_ns
from typing import cast

from loadgen.alarm import Alarm
from loadgen.http1 import Framing, MalformedResponse

BEAT_NS = 10_000_000
LEAD_NS = 100_000_000
"""Between "all is ready" and the start: room to open the first connections."""
_DIAL_AHEAD_NS = 500_000_000
_MAX_IDLE_NS = 2_000_000_000  # uvicorn closes an idle connection after 5 s
_MAX_DIALS = 64
_PROGRESS_EVERY = 25  # beats


class End(StrEnum):
    """How an exchange ended, as seen on the wire."""

    COMPLETE = "complete"
    CLOSED = "closed"
    RESET = "reset"
    TIMEOUT = "timeout"
    REFUSED = "refused"
    CONNECT_TIMEOUT = "connect_timeout"
    TLS = "tls"
    MALFORMED = "malformed"
    UNFINISHED = "unfinished"
    """Still going when the time for the drain was over."""
    CANCELLED = "cancelled"
    """Still going when the run was interrupted."""


@dataclass(frozen=True, slots=True)
class WireRequest:
    """One message to send ``offset_ns`` after the start (closed loop: when a slot is free)."""

    index: int
    offset_ns: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address that answered, and the name for TLS. ``verify``: check the certificate."""

    address: str
    port: int
    server_name: str | None = None
    verify: bool = True

    def tls_context(self) -> ssl.SSLContext | None:
        if self.server_name is None:
            return None
        context = ssl.create_default_context()
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


@dataclass(frozen=True, slots=True)
class WirePlan:
    """What one client process does. Times in ns."""

    endpoint: Endpoint
    requests: tuple[WireRequest, ...]
    closed: bool
    concurrency: int | None
    duration_ns: int | None
    """Closed loop: no new request after this."""
    timeout_ns: int
    """For one request, from sending to its last byte."""
    connect_timeout_ns: int
    drain_ns: int
    """How long to wait for answers after the last request was sent (or the duration ended)."""


@dataclass(slots=True)
class Exchange:
    """One request's life on the wire: stamps and raw bytes."""

    index: int
    intended_ns: int
    sent_ns: int = 0
    ended_ns: int = 0
    end: End = End.CANCELLED
    detail: str = ""
    retried: bool = False
    stamps: list[int] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Progress:
    """Counts so far. ``planned`` is what the schedule holds; a closed loop with a duration sends fewer."""

    elapsed: float
    sent: int
    finished: int
    failed: int
    planned: int

    @property
    def in_flight(self) -> int:
        return self.sent - self.finished


@dataclass(slots=True)
class WireLog:
    """What one client process saw. ``lags_ns``: how late each 10 ms heartbeat was, ``lag_at_ns`` when
    it was due."""

    start_ns: int
    stop_ns: int = 0
    last_due_ns: int = 0
    exchanges: list[Exchange] = field(default_factory=list)
    lags_ns: list[int] = field(default_factory=list)
    lag_at_ns: list[int] = field(default_factory=list)
    cpu_s: float = 0.0
    loop: str = ""
    interrupted: bool = False
    exhausted: bool = False
    """A closed loop ran out of planned requests before its duration ended."""


class Connection(asyncio.Protocol):
    """One connection, at most one exchange at a time."""

    __slots__ = ("_driver", "_framing", "_transport", "exchange", "fresh", "idle_since_ns")

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._transport: asyncio.Transport | None = None
        self._framing = Framing()
        self.exchange: Exchange | None = None
        self.fresh = True
        self.idle_since_ns = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not derive from it

    def send(self, exchange: Exchange, payload: bytes) -> None:
        assert self._transport is not None
        self.exchange, self._framing = exchange, Framing()
        self._transport.write(payload)
        exchange.sent_ns = monotonic_ns()

    def data_received(self, data: bytes) -> None:
        now = monotonic_ns()
        exchange = self.exchange
        if exchange is None:
            self.abort()  # bytes that nobody asked for: never reuse such a connection
            return
        exchange.stamps.append(now)
        exchange.parts.append(data)
        try:
            if self._framing.feed(data):
                self.exchange, self.fresh = None, False
                self._driver.answered(self, exchange, self._framing)
        except MalformedResponse as error:
            self.exchange = None
            self.abort()
            self._driver.finish(exchange, End.MALFORMED, str(error))

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        exchange, self.exchange = self.exchange, None
        self._driver.lost(self, exchange, exc)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()


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
        self._loop = asyncio.get_running_loop()
        self._log = WireLog(start_ns, loop=type(self._loop).__module__.split(".")[0])
        self._payloads = {request.index: request.payload for request in plan.requests}
        self._next = 0
        self._ahead = 0
        self._idle: list[Connection] = []
        self._busy: dict[int, Connection] = {}
        self._held: deque[Exchange] = deque()
        self._waiting: deque[Exchange] = deque()
        self._dials: set[asyncio.Task[None]] = set()
        self._deadlines: deque[tuple[int, Exchange]] = deque()
        self._in_flight = self._failed = self._beats = 0
        self._last_due_ns = start_ns
        self._beat_due_ns = 0
        self._tls = plan.endpoint.tls_context()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._send_alarm = Alarm(self._loop, self._send_due)
        self._beat_alarm = Alarm(self._loop, self._beat)

    async def run(self) -> WireLog:
        cpu = time.process_time()
        self._beat_due_ns = monotonic_ns() + BEAT_NS
        self._beat_alarm.set(self._beat_due_ns)
        try:
            self._dial_ahead()
            self._send_alarm.set(self._log.start_ns)
            await self._done
        finally:
            self._close()
            if self._dials:
                await asyncio.gather(*self._dials, return_exceptions=True)
        log = self._log
        log.stop_ns, log.last_due_ns = monotonic_ns(), self._last_due_ns
        log.cpu_s = time.process_time() - cpu
        return log

    # -- sending --------------------------------------------------------------------------------

    def _send_due(self) -> None:
        plan, start = self._plan, self._log.start_ns
        if plan.closed:
            for _ in range(min(plan.concurrency or 1, len(plan.requests))):
                self._dispatch_next(start)
            return
        now = monotonic_ns()
        while self._next < len(plan.requests):
            due = start + plan.requests[self._next].offset_ns
            if due > now:
                self._send_alarm.set(due)
                break
            self._dispatch_next(due)
            now = monotonic_ns()
        self._dial_ahead()

    def _dispatch_next(self, intended_ns: int) -> None:
        request = self._plan.requests[self._next]
        self._next += 1
        self._last_due_ns = intended_ns
        exchange = Exchange(request.index, intended_ns)
        cap = self._plan.concurrency
        if cap is not None and self._in_flight >= cap:
            self._held.append(exchange)
            return
        self._start(exchange)

    def _start(self, exchange: Exchange) -> None:
        self._in_flight += 1
        self._deadlines.append((monotonic_ns() + self._plan.timeout_ns, exchange))
        connection = self._take_idle()
        if connection is None:
            self._waiting.append(exchange)
            self._dial()
        else:
            self._send(connection, exchange)

    def _send(self, connection: Connection, exchange: Exchange) -> None:
        self._busy[exchange.index] = connection
        connection.send(exchange, self._payloads[exchange.index])

    # -- connections ----------------------------------------------------------------------------

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and monotonic_ns() - connection.idle_since_ns < _MAX_IDLE_NS:
                return connection
            connection.abort()
        return None

    def _dial_ahead(self) -> None:
        """Have a connection ready for every request of the next half second."""
        plan = self._plan
        stale = monotonic_ns() - (_MAX_IDLE_NS - _DIAL_AHEAD_NS)
        while self._idle and self._idle[0].idle_since_ns < stale:
            self._idle.pop(0).abort()
        if plan.closed:
            wanted = min(plan.concurrency or 1, len(plan.requests))
        else:
            horizon = monotonic_ns() + _DIAL_AHEAD_NS - self._log.start_ns
            while self._ahead < len(plan.requests) and plan.requests[self._ahead].offset_ns < horizon:
                self._ahead += 1
            wanted = self._ahead - self._next
        if plan.concurrency is not None:
            wanted = min(wanted, plan.concurrency - self._in_flight)
        for _ in range(min(wanted - len(self._idle) - len(self._dials), _MAX_DIALS - len(self._dials))):
            self._dial()

    def _dial(self) -> None:
        task = self._loop.create_task(self._connect())
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)

    async def _connect(self) -> None:
        endpoint = self._plan.endpoint
        try:
            async with asyncio.timeout(self._plan.connect_timeout_ns / 1e9):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(self),
                    endpoint.address,
                    endpoint.port,
                    ssl=self._tls,
                    server_hostname=endpoint.server_name,
                )
        except TimeoutError:
            self._dial_failed(End.CONNECT_TIMEOUT, "no connection within the time allowed")
        except ssl.SSLError as error:
            self._dial_failed(End.TLS, str(error))
        except OSError as error:
            self._dial_failed(End.REFUSED, error.strerror or str(error))
        else:
            self._connected(connection)

    def _connected(self, connection: Connection) -> None:
        if self._done.done():
            connection.abort()
        elif self._waiting:
            self._send(connection, self._waiting.popleft())
        else:
            connection.idle_since_ns = monotonic_ns()
            self._idle.append(connection)

    def _dial_failed(self, end: End, detail: str) -> None:
        if self._waiting:
            self.finish(self._waiting.popleft(), end, detail)

    # -- what comes back ------------------------------------------------------------------------

    def answered(self, connection: Connection, exchange: Exchange, framing: Framing) -> None:
        if framing.reusable:
            connection.idle_since_ns = exchange.stamps[-1]
            self._idle.append(connection)
        else:
            connection.abort()
        failed = framing.head is not None and framing.head.status != 200
        self.finish(exchange, End.COMPLETE, failed=failed)

    def lost(self, connection: Connection, exchange: Exchange | None, exc: Exception | None) -> None:
        if exchange is None:
            if connection in self._idle:
                self._idle.remove(connection)
            return
        if not connection.fresh and not exchange.stamps and not exchange.retried:
            exchange.retried = True
            self._waiting.append(exchange)
            self._dial()
            return
        end = End.CLOSED if exc is None else End.TLS if isinstance(exc, ssl.SSLError) else End.RESET
        self.finish(exchange, end, "" if exc is None else str(exc))

    def finish(self, exchange: Exchange, end: End, detail: str = "", *, failed: bool = True) -> None:
        exchange.end, exchange.detail = end, detail
        complete = end is End.COMPLETE
        exchange.ended_ns = exchange.stamps[-1] if complete else monotonic_ns()
        self._busy.pop(exchange.index, None)
        self._in_flight -= 1
        self._failed += failed
        self._log.exchanges.append(exchange)
        if self._done.done():
            return
        if self._held:
            self._start(self._held.popleft())
        elif self._plan.closed:
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
        if self._next >= len(self._plan.requests) and not self._in_flight and not self._held:
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
            self._dial_ahead()
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
        if self._next < len(plan.requests):
            return 1 << 63
        return max(self._last_due_ns, start + (plan.duration_ns or 0)) + plan.drain_ns

    def _expire(self, now: int) -> None:
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][1].ended_ns):
            _, exchange = self._deadlines.popleft()
            if not exchange.ended_ns:
                self._drop(exchange, End.TIMEOUT, "no complete answer within the time allowed")

    def _drop(self, exchange: Exchange, end: End, detail: str) -> None:
        connection = self._busy.get(exchange.index)
        if connection is not None:
            connection.exchange = None
            connection.abort()
        elif exchange in self._waiting:
            self._waiting.remove(exchange)
        self.finish(exchange, end, detail)

    def _cut(self, end: End, detail: str) -> None:
        """End the run now: everything in flight is dropped as ``end``, nothing more is sent."""
        self._next = len(self._plan.requests)
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
            planned=len(self._plan.requests),
        )

    def _close(self) -> None:
        self._send_alarm.close()
        self._beat_alarm.close()
        for task in self._dials:
            task.cancel()
        for connection in (*self._idle, *self._busy.values()):
            connection.exchange = None
            connection.abort()


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
