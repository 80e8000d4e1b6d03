"""The mechanics under the endpoints: bodies with a limit, streams that notice a hang-up, errors, keys."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, Collection, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.metrics.http import UNCOUNTED, HttpMetrics
from engine.server.json_body import RequestError
from engine.server.process import EngineDeadError
from engine.server.responses import DONE, error_body

T = TypeVar("T")
MAX_BODY_BYTES = 16 << 20
"""The longest body of a request; a longer one is answered with 413."""
KEYED_PATHS = ("/v1", "/reset_prefix_cache")
"""Paths that need a key where keys are set. In vLLM the second exists in development mode only, without a
key."""
MAX_DRAIN_BYTES = 1 << 30
"""How much of an oversized body is read and dropped, so that its sender gets to read the answer."""
BODY_TIMEOUT_SECONDS = 120
"""How long a client may take to send a body, once its head is there."""
CLIENT_GONE = 499
"""nginx's status for a client that hung up. It is never received, but the access log shows it."""


def build_app(
    routes: Sequence[Route], api_keys: Sequence[str] = (), metrics: HttpMetrics | None = None
) -> ASGIApp:
    """The application; with ``api_keys``, :data:`KEYED_PATHS` need one of them as bearer token. ``metrics``
    are told of every exchange."""
    app = Starlette(
        routes=routes,
        exception_handlers={
            RequestError: _on_request_error,
            HTTPException: _on_http_error,
            EngineDeadError: _on_engine_dead,
            ClientDisconnect: _on_client_gone,
            Exception: _on_bug,
        },
    )
    served: ASGIApp = BearerAuth(app, api_keys) if api_keys else app
    return CountedExchanges(served, metrics, {route.path for route in routes}) if metrics else served


class CountedExchanges:
    """ASGI middleware: tells ``metrics`` of every exchange on one of ``paths``, or on none of them."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics, paths: Collection[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in UNCOUNTED:
            await self._app(scope, receive, send)
            return
        began, status, sent = time.monotonic(), 500, 0

        async def counted(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status, sent = message["status"], _length(message["headers"])
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "none"
            seconds = time.monotonic() - began
            self._metrics.record(scope["method"], path, status, seconds, _length(scope["headers"]), sent)


def _length(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """As the head says; 0 where it does not."""
    text = next((value for name, value in headers if name == b"content-length"), b"")
    return int(text) if text.isdigit() and len(text) < 16 else 0


class BearerAuth:
    """ASGI middleware: 401 for one of :data:`KEYED_PATHS` without a known key."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        # A key that is not UTF-8 is taken as the bytes of the command line.
        self._expected = [f"Bearer {key}".encode(errors="surrogateescape") for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(KEYED_PATHS):
            given = dict(scope["headers"]).get(b"authorization", b"")
            # Every key is compared, so that the time does not tell which key was close.
            if sum(secrets.compare_digest(given, key) for key in self._expected) == 0:
                response = _error("missing or wrong API key", "AuthenticationError", None, 401)
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


class EventStream(Response):
    """Sends events as they come; stops asking for them when the client hangs up."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if await unless_disconnected(receive, self._write(send)):
            await send({"type": "http.response.body", "body": b""})

    async def _write(self, send: Send) -> bool:
        async with contextlib.aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        return True


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of ``work``, or None when the client hangs up first; then ``work`` is cancelled."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def receive_body(request: Request) -> bytes:
    """The body, if it is at most :data:`MAX_BODY_BYTES` bytes long, and there in
    :data:`BODY_TIMEOUT_SECONDS`.

    Raises RequestError (413, 408).
    """
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
            return await _receive_body(request)
    except TimeoutError:
        message = f"the body was not there within {BODY_TIMEOUT_SECONDS} s"
        raise RequestError(message, None, 408, "RequestTimeoutError") from None


async def _receive_body(request: Request) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_DRAIN_BYTES:
            break
        if size > MAX_BODY_BYTES:
            chunks.clear()
        else:
            chunks.append(chunk)
    if size > MAX_BODY_BYTES:
        message = f"the body exceeds {MAX_BODY_BYTES >> 20} MiB; split the prompts over several requests"
        raise RequestError(message, None, 413, "RequestEntityTooLarge")
    return b"".join(chunks)


def error_event(message: str, kind: str, code: int) -> bytes:
    """An error in a stream after its headers were sent; clients of OpenAI's API raise it."""
    return f"data: {json.dumps(error_body(message, kind, None, code))}\n\n".encode() + DONE


def _error(message: str, kind: str, param: str | None, status: int) -> Response:
    return JSONResponse(error_body(message, kind, param, status), status)


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    response = _error(error.message, error.kind, error.param, error.status)
    if error.status == 408:  # the rest of the body is not waited for
        response.headers["connection"] = "close"
    return response


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = _error(message, error.detail.replace(" ", "") + "Error", None, error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _on_engine_dead(request: Request, error: Exception) -> Response:
    return _error(str(error), "EngineDeadError", None, 503)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _on_bug(request: Request, error: Exception) -> Response:
    return _error("internal error, see the server's log", "InternalServerError", None, 500)
