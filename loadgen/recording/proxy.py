"""A pass-through proxy: bytes go on as they come, and whole exchanges are told to an observer afterwards.

Each client connection has one connection of its own to the server, so that neither side sees anything that it
would not see without the proxy. Nothing is parsed before it has been passed on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import cast

from loadgen.wire.http1 import MalformedMessage, RequestParser, ResponseParser
from loadgen.wire.messages import Endpoint

MAX_KEPT = 32 << 20
"""Bytes of one answer that are kept for the observer; of a longer one it sees the beginning."""
_CONNECT_TIMEOUT = 10.0


@dataclass(slots=True)
class Passage:
    """One request and what came back. ``at_ns`` and ``stamps`` are of the monotonic clock."""

    method: str
    path: str
    body: bytes
    at_ns: int
    parts: list[bytes] = field(default_factory=list)
    stamps: list[int] = field(default_factory=list)
    complete: bool = False
    """The answer came to its end; False: one side hung up before."""


Observer = Callable[[Passage], None]


class Proxy:
    """Listens on ``host:port`` and passes everything on to ``endpoint``. ``observer`` hears of every exchange
    once it is over, in the event loop: it should only put it aside."""

    def __init__(self, endpoint: Endpoint, observer: Observer) -> None:
        self._endpoint, self._observer = endpoint, observer
        self._tls = endpoint.tls_context()
        self._clients: set[_Client] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """The port that it listens on. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Client(self, loop), host, port, backlog=1024)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and hang up on the connections that are left."""
        if self._server is not None:
            self._server.close()
        for client in list(self._clients):
            client.hang_up()

    def joined(self, client: _Client) -> None:
        self._clients.add(client)

    def left(self, client: _Client) -> None:
        self._clients.discard(client)

    def over(self, passage: Passage) -> None:
        self._observer(passage)

    async def dial(self, client: _Client) -> _Upstream:
        """Raises OSError, TimeoutError."""
        async with asyncio.timeout(_CONNECT_TIMEOUT):
            _, upstream = await asyncio.get_running_loop().create_connection(
                lambda: _Upstream(client),
                self._endpoint.address,
                self._endpoint.port,
                ssl=self._tls,
                server_hostname=self._endpoint.server_name,
            )
        return upstream


class _Side(asyncio.Protocol):
    """One end. What it cannot write at once makes the other end stop reading."""

    peer: _Side | None = None
    transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's does not derive from it

    def pause_writing(self) -> None:
        if self.peer is not None and self.peer.transport is not None:
            self.peer.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.peer is not None and self.peer.transport is not None:
            self.peer.transport.resume_reading()

    def hang_up(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class _Client(_Side):
    """A client's connection: its bytes go up, and its requests are told apart on the side."""

    def __init__(self, proxy: Proxy, loop: asyncio.AbstractEventLoop) -> None:
        self._proxy, self._loop = proxy, loop
        self._early: list[bytes] = []
        """What came before the server was connected."""
        self._ended = False
        """The client will send no more."""
        self._requests: RequestParser | None = RequestParser()
        """None: what this client sends is no HTTP."""
        self._passages: deque[Passage] = deque()
        """Requests whose answers are not over, the oldest first."""
        self._answer = ResponseParser()
        self._kept = 0
        self._dial: asyncio.Task[None] | None = None
        self._unreachable = False
        """The server behind does not answer."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._proxy.joined(self)
        self._dial = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        try:
            upstream = await self._proxy.dial(self)
        except (OSError, TimeoutError):
            self._unreachable = True
            self._refuse()
            return
        self.peer = upstream
        if self.transport is None or self.transport.is_closing():
            upstream.hang_up()
            return
        assert upstream.transport is not None
        upstream.transport.writelines(self._early)
        self._early.clear()
        if self._ended:
            self._end_upstream()

    def _refuse(self) -> None:
        """Answer 502 once a request is there: a connection that is closed with bytes unread is reset, and its
        client never sees the answer."""
        asked = self._passages or self._ended or self._requests is None
        if self.transport is not None and asked:
            text = b'{"error": {"message": "the server behind the recorder does not answer", "code": 502}}'
            self.transport.write(
                b"HTTP/1.1 502 Bad Gateway\r\nContent-Type: application/json\r\nConnection: close\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(text), text)
            )
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        now = monotonic_ns()
        if self.peer is not None and self.peer.transport is not None:
            self.peer.transport.write(data)
        elif not self._unreachable:
            self._early.append(data)
        self._watch(data, now)
        if self._unreachable:
            self._refuse()

    def _watch(self, data: bytes, now: int) -> None:
        """Tell requests apart. What is no HTTP is passed on all the same, and no longer looked at."""
        if self._requests is None:
            return
        try:
            found = self._requests.feed(data, now)
        except MalformedMessage:
            self._requests = None
            return
        self._passages += [Passage(each.method, each.path, each.body, each.at_ns) for each in found]

    def answered(self, data: bytes) -> None:
        """Bytes from the server: on to the client, then looked at."""
        now = monotonic_ns()
        if self.transport is not None:
            self.transport.write(data)
        if not self._passages:
            return
        passage = self._passages[0]
        if self._kept < MAX_KEPT:
            passage.parts.append(data)
            passage.stamps.append(now)
            self._kept += len(data)
        try:
            if self._answer.feed(data):
                passage.complete = True
                self._next_answer()
        except MalformedMessage:
            self._next_answer()

    def _next_answer(self) -> None:
        self._proxy.over(self._passages.popleft())
        self._answer, self._kept = ResponseParser(), 0

    def eof_received(self) -> bool:
        """A client that will send no more still wants its answer."""
        self._ended = True
        self._end_upstream()
        if self._unreachable:
            self._refuse()
        return True

    def _end_upstream(self) -> None:
        """A TLS connection cannot be ended on one side; the server learns it when the client hangs up."""
        if self.peer is not None and self.peer.transport is not None and self.peer.transport.can_write_eof():
            self.peer.transport.write_eof()

    def server_left(self) -> None:
        if self._passages:
            self._passages[0].complete = self._answer.ends_with_connection
        self._finish()
        if self.transport is not None:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._proxy.left(self)
        self._finish()
        if self._dial is not None:
            self._dial.cancel()
        if self.peer is not None:
            self.peer.hang_up()

    def _finish(self) -> None:
        while self._passages:
            self._next_answer()


class _Upstream(_Side):
    """The connection to the server that belongs to one client's."""

    def __init__(self, client: _Client) -> None:
        self.peer = self._client = client

    def data_received(self, data: bytes) -> None:
        self._client.answered(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.server_left()
