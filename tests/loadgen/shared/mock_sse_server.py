"""A loopback OpenAI-like server for the load generator's tests; it misbehaves as told by the prompt.

The behaviour comes from the path's prefix: ``http://127.0.0.1:PORT/<behaviour>/v1/completions``, so one
server serves all of them. Every token's text holds the server's own ``monotonic_ns``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any

Write = Callable[[bytes], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(body: object, newline: bytes = b"\n") -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + newline * 2


def choice(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@dataclass
class Seen:
    """What the server was asked."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    connections: int = 0
    answered: int = 0


class MockServer:
    """``gap``: seconds between tokens."""

    def __init__(self, gap: float = 0.0) -> None:
        self.gap = gap
        self.seen = Seen()
        self.silent_until_request = 0
        """Answer nothing before so many requests have come."""
        self.lives_for_requests: int | None = None
        """Listen no more, and close the connection, once so many have been answered."""
        self.listener: asyncio.Server | None = None

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.seen.connections += 1
        try:
            while await self._one(reader, writer):
                continue
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        request, *lines = head.strip().split("\r\n")
        method, path, _ = request.split()
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))

        async def write(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        if method == "GET":
            return await self._get(path, write)
        self.seen.bodies.append(json.loads(body))
        self.seen.headers.append(headers)
        behaviour = path.split("/")[1]
        while len(self.seen.bodies) < self.silent_until_request:
            await asyncio.sleep(0.002)
        last = len(self.seen.bodies) == self.lives_for_requests
        if last and self.listener is not None:
            self.listener.close()
        keep = await getattr(self, f"do_{behaviour}", self.do_v1)(json.loads(body), write)
        self.seen.answered += 1
        return keep is not False and not last

    async def _get(self, path: str, write: Write) -> bool:
        if path.endswith("/v1/models"):
            await self._json(write, 200, {"data": [{"id": "mock", "max_model_len": 4096}]})
        elif path.endswith("/version"):
            await self._json(write, 200, {"version": "1.2.3"})
        else:
            await self._json(write, 404, {"error": {"message": "no such page"}})
        return True

    async def _json(self, write: Write, status: int, body: object, *extra: str) -> None:
        data = json.dumps(body).encode()
        lines = [
            f"HTTP/1.1 {status} X",
            "Content-Type: application/json",
            f"Content-Length: {len(data)}",
            *extra,
        ]
        await write("\r\n".join([*lines, "", ""]).encode() + data)

    async def _tokens(self, count: int) -> AsyncIterator[str]:
        for _ in range(count):
            if self.gap:
                await asyncio.sleep(self.gap)
            yield f" {monotonic_ns()}"

    async def do_v1(self, body: dict[str, Any], write: Write) -> None:
        """Well-behaved: a token a chunk, usage in the last, [DONE]."""
        count = body["max_tokens"]
        await write(HEAD)
        sent = 0
        async for text in self._tokens(count):
            sent += 1
            await write(chunk(event(choice(text, "length" if sent == count else None))))
        await write(
            chunk(event(usage(len(body.get("prompt", "")), count)))
            + chunk(b"data: [DONE]\n\n")
            + b"0\r\n\r\n"
        )

    async def do_null(self, body: dict[str, Any], write: Write) -> None:
        """Everything at once."""
        count = body["max_tokens"]
        data = b"".join(event(choice(" x", "length" if i == count - 1 else None)) for i in range(count))
        data += event(usage(len(body.get("prompt", "")), count)) + b"data: [DONE]\n\n"
        await write(HEAD + chunk(data) + b"0\r\n\r\n")

    async def do_bytewise(self, body: dict[str, Any], write: Write) -> None:
        """CRLF, comments, U+2028 in the text, and every byte on its own."""
        data = bytearray(b": hello\r\n\r\n")
        for i in range(body["max_tokens"]):
            last = i == body["max_tokens"] - 1
            data += event(choice("a\u2028b\u0085c\x0bd", "length" if last else None), b"\r\n")
        data += event(usage(3, body["max_tokens"]), b"\r\n") + b"data: [DONE]\r\n\r\n"
        for byte in HEAD + chunk(bytes(data)) + b"0\r\nX-Trailer: 1\r\n\r\n":
            await write(bytes([byte]))

    async def do_length(self, body: dict[str, Any], write: Write) -> None:
        """A body with Content-Length."""
        data = event(choice("a")) + event(choice("b", "length")) + event(usage(1, 2)) + b"data: [DONE]\n\n"
        await write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(data)
        )
        for start in range(0, len(data), 50):
            await write(data[start : start + 50])

    async def do_http10(self, body: dict[str, Any], write: Write) -> bool:
        """HTTP/1.0: the body ends with the connection."""
        data = event(choice("a")) + event(choice("b", "length")) + event(usage(1, 2)) + b"data: [DONE]\n\n"
        await write(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + data)
        return False

    async def do_error(self, body: dict[str, Any], write: Write) -> None:
        await write(HEAD + chunk(event(choice("a"))))
        await write(chunk(event({"error": {"message": "the engine is dead"}})) + b"0\r\n\r\n")

    async def do_nofinish(self, body: dict[str, Any], write: Write) -> None:
        await write(HEAD + chunk(event(choice("a"))) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async def do_nodone(self, body: dict[str, Any], write: Write) -> None:
        count = body["max_tokens"]
        await write(HEAD)
        for i in range(count):
            await write(chunk(event(choice("a", "length" if i == count - 1 else None))))
        await write(chunk(event(usage(1, count))) + b"0\r\n\r\n")

    async def do_short(self, body: dict[str, Any], write: Write) -> None:
        """Fewer tokens than were asked for."""
        await write(HEAD + chunk(event(choice("a", "stop"))) + chunk(event(usage(1, 1))) + b"0\r\n\r\n")

    async def do_close(self, body: dict[str, Any], write: Write) -> bool:
        await write(HEAD + chunk(event(choice("a"))) + b"2f\r\ndata: {")
        return False

    async def do_hangup(self, body: dict[str, Any], write: Write) -> bool:
        return False

    async def do_garbage(self, body: dict[str, Any], write: Write) -> bool:
        await write(b"\x00\x01\x02SSH-2.0-OpenSSH_9.2\r\n")
        return False

    async def do_html(self, body: dict[str, Any], write: Write) -> None:
        await write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 4\r\n\r\n<hi>")

    async def do_nojson(self, body: dict[str, Any], write: Write) -> None:
        await write(HEAD + chunk(b"data: {oops\n\n") + b"0\r\n\r\n")

    async def do_401(self, body: dict[str, Any], write: Write) -> None:
        await self._json(write, 401, {"error": {"message": "bad key"}})

    async def do_429(self, body: dict[str, Any], write: Write) -> None:
        await self._json(write, 429, {"error": {"message": "slow down"}}, "Retry-After: 7")

    async def do_503(self, body: dict[str, Any], write: Write) -> None:
        await self._json(write, 503, {"detail": "starting"}, "Retry-After: Fri, 31 Dec 1999 23:59:59 GMT")

    async def do_404(self, body: dict[str, Any], write: Write) -> None:
        await self._json(write, 404, {"detail": "Not Found"})

    async def do_never(self, body: dict[str, Any], write: Write) -> None:
        await asyncio.sleep(3600)

    async def do_stall(self, body: dict[str, Any], write: Write) -> None:
        """Two tokens and then nothing."""
        await write(HEAD + chunk(event(choice("a"))) + chunk(event(choice("b"))))
        await asyncio.sleep(3600)

    async def do_onceonly(self, body: dict[str, Any], write: Write) -> bool:
        """Answers, says keep-alive, and closes all the same."""
        await self.do_v1(body, write)
        return False


@contextlib.contextmanager
def running(server: MockServer, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Serve from a thread of its own; yields the port."""
    started: threading.Event = threading.Event()
    box: dict[str, Any] = {}

    async def main() -> None:
        box["loop"], box["stop"] = asyncio.get_running_loop(), asyncio.Event()
        listener = await asyncio.start_server(server.handle, "127.0.0.1", 0, ssl=tls, backlog=1024)
        server.listener = listener
        box["port"] = listener.sockets[0].getsockname()[1]
        started.set()
        await box["stop"].wait()
        listener.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    started.wait()
    try:
        yield box["port"]
    finally:
        box["loop"].call_soon_threadsafe(box["stop"].set)
        thread.join()
