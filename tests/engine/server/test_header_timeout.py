"""Requests that do not come: half a head, a head without its body. Time is told, not waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from starlette.requests import Request
from uvicorn.server import ServerState

from engine.server import asgi
from engine.server.header_timeout import HEADER_TIMEOUT_SECONDS, HeaderTimeoutProtocol
from engine.server.json_body import RequestError


class Timer:
    def __init__(self, seconds: float, ring: Callable[[], None]) -> None:
        self.seconds, self.ring = seconds, ring
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Task:
    def add_done_callback(self, callback: Any) -> None:
        """It is never done."""


class Loop:
    """Keeps timers and tasks, and runs none of them."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []

    def call_later(self, seconds: float, ring: Callable[[], None]) -> Timer:
        self.timers.append(Timer(seconds, ring))
        return self.timers[-1]

    def create_task(self, coroutine: Any, **options: Any) -> Task:
        coroutine.close()
        return Task()


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.sent += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


async def no_app(scope: Any, receive: Any, send: Any) -> None:
    """Never runs."""


def connect() -> tuple[HeaderTimeoutProtocol, Loop, Transport]:
    loop, transport = Loop(), Transport()
    config = uvicorn.Config(no_app, lifespan="off", log_config=None)
    protocol = HeaderTimeoutProtocol(config, ServerState(), {}, _loop=loop)
    protocol.connection_made(transport)
    return protocol, loop, transport


@pytest.mark.parametrize("sent", [b"", b"G", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConte"])
def test_half_a_head_is_not_waited_for(sent: bytes) -> None:
    protocol, loop, transport = connect()
    if sent:
        protocol.data_received(sent)
    (timer,) = loop.timers
    assert (timer.seconds, timer.cancelled) == (HEADER_TIMEOUT_SECONDS, False)
    timer.ring()
    assert transport.closed
    assert transport.sent.startswith(b"HTTP/1.1 408 ")


def test_a_whole_head_stops_the_clock() -> None:
    protocol, loop, transport = connect()
    protocol.data_received(b"GET /health HTTP/1.1\r\nHost: x\r\n")
    protocol.data_received(b"\r\n")
    assert [timer.cancelled for timer in loop.timers] == [True]
    protocol.data_received(b"GET /hea")  # the next one on the same connection
    assert [timer.cancelled for timer in loop.timers] == [True, False]
    loop.timers[-1].ring()
    assert transport.closed


def test_a_connection_that_is_gone_has_no_clock() -> None:
    protocol, loop, _ = connect()
    protocol.connection_lost(None)
    assert [timer.cancelled for timer in loop.timers] == [True]


def test_a_body_that_does_not_come_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def read() -> None:
        await asgi.receive_body(Request({"type": "http", "method": "POST", "headers": []}, receive))

    monkeypatch.setattr(asgi, "BODY_TIMEOUT_SECONDS", 0)
    with pytest.raises(RequestError, match="not there within") as caught:
        asyncio.run(read())
    assert caught.value.status == 408
