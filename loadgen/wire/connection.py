"""Connections that are kept alive, dialled ahead, and stamp what they receive."""

from __future__ import annotations

import asyncio
import ssl
from time import monotonic_ns
from typing import Protocol, cast

from loadgen.wire.http1 import MalformedMessage, ResponseParser
from loadgen.wire.messages import End, Endpoint, Exchange

MAX_IDLE_NS = 2_000_000_000
"""A kept connection is not used after this; uvicorn closes an idle one after 5 s."""
_MAX_DIALS = 64


class Owner(Protocol):
    """Who is told what happens on a connection."""

    def connected(self, connection: Connection) -> None: ...

    def dial_failed(self, end: End, detail: str) -> None: ...

    def answered(self, exchange: Exchange, status: int) -> None:
        """The response is complete; the connection is already back in the pool."""

    def broken(self, exchange: Exchange, end: End, detail: str) -> None:
        """The exchange ended without a complete response."""

    def unsent(self, exchange: Exchange) -> None:
        """A kept connection turned out to be closed before any byte of the answer: send it again."""


class Connection(asyncio.Protocol):
    """One connection, at most one exchange at a time. What it receives is kept as it is, and stamped."""

    __slots__ = ("_parser", "_pool", "_transport", "exchange", "fresh", "idle_since_ns")

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser = ResponseParser()
        self.exchange: Exchange | None = None
        self.fresh = True
        self.idle_since_ns = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not derive from it

    def send(self, exchange: Exchange, payload: bytes) -> None:
        assert self._transport is not None
        self.exchange, self._parser = exchange, ResponseParser()
        self._transport.write(payload)
        exchange.sent_ns = monotonic_ns()

    def data_received(self, data: bytes) -> None:
        now = monotonic_ns()
        exchange = self.exchange
        if exchange is None:
            self.abort()  # bytes without a request: never reuse such a connection
            return
        exchange.stamps.append(now)
        exchange.parts.append(data)
        try:
            if self._parser.feed(data):
                self._answered(exchange)
        except MalformedMessage as error:
            self.drop()
            self._pool.owner.broken(exchange, End.MALFORMED, str(error))

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        exchange, self.exchange = self.exchange, None
        self._pool.forget(self)
        if exchange is None:
            return
        if not self.fresh and not exchange.stamps and not exchange.retried:
            exchange.retried = True
            self._pool.owner.unsent(exchange)
            return
        end = End.CLOSED if exc is None else End.TLS if isinstance(exc, ssl.SSLError) else End.RESET
        self._pool.owner.broken(exchange, end, "" if exc is None else str(exc))

    def drop(self) -> None:
        """Close at once; whatever was going on here is no longer reported."""
        self.exchange = None
        self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def _answered(self, exchange: Exchange) -> None:
        self.exchange, self.fresh = None, False
        if self._parser.reusable:
            self._pool.keep(self)
        else:
            self.abort()
        self._pool.owner.answered(exchange, self._parser.status)


class Pool:
    """Idle connections, the youngest first, and the dials under way."""

    def __init__(
        self, endpoint: Endpoint, connect_timeout_ns: int, loop: asyncio.AbstractEventLoop, owner: Owner
    ) -> None:
        self.owner = owner
        self._endpoint, self._timeout, self._loop = endpoint, connect_timeout_ns / 1e9, loop
        self._tls = endpoint.tls_context()
        self._idle: list[Connection] = []
        self._dials: set[asyncio.Task[None]] = set()

    def take(self) -> Connection | None:
        """An idle connection that the server has had no reason to close yet."""
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and monotonic_ns() - connection.idle_since_ns < MAX_IDLE_NS:
                return connection
            connection.abort()
        return None

    def keep(self, connection: Connection) -> None:
        connection.idle_since_ns = monotonic_ns()
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def prepare(self, wanted: int, within_ns: int, at_once: int | None = None) -> None:
        """Dial until ``wanted`` connections are open or on their way that will still be young after
        ``within_ns``; ``at_once``: no more than so many in this call."""
        oldest = monotonic_ns() - (MAX_IDLE_NS - within_ns)
        while self._idle and self._idle[0].idle_since_ns < oldest:
            self._idle.pop(0).abort()
        missing = wanted - len(self._idle) - len(self._dials)
        most = _MAX_DIALS if at_once is None else at_once
        for _ in range(min(missing, most, _MAX_DIALS - len(self._dials))):
            self.dial()

    def dial(self) -> None:
        """Open one; the owner hears ``connected`` or ``dial_failed``."""
        task = self._loop.create_task(self._connect())
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)

    async def close(self) -> None:
        for task in self._dials:
            task.cancel()
        for connection in self._idle:
            connection.abort()
        await asyncio.gather(*self._dials, return_exceptions=True)

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(self),
                    self._endpoint.address,
                    self._endpoint.port,
                    ssl=self._tls,
                    server_hostname=self._endpoint.server_name,
                )
        except TimeoutError:
            self.owner.dial_failed(End.CONNECT_TIMEOUT, "no connection within the time allowed")
        except ssl.SSLError as error:
            self.owner.dial_failed(End.TLS, str(error))
        except OSError as error:
            self.owner.dial_failed(End.REFUSED, error.strerror or str(error))
        else:
            self.owner.connected(connection)
