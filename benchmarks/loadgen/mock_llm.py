"""A quick OpenAI-like server for measuring clients: it streams tokens whose text is its own ``monotonic_ns``.

    python -m benchmarks.loadgen.mock_llm [--gap-ms 20] [--stall-after 100 --stall-s 2]

Prints its port. It answers completions and chats with as many tokens as they ask for, all at once or one
every ``--gap-ms``; with ``--stall-after N`` it falls silent for a while at request N. ``GET /arrivals``
gives the times (ns) at which requests came, ``GET /reset`` forgets them. It ends when its input does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import cast
from urllib.request import urlopen

from loadgen.wire.driver import event_loop

MODEL = "mock"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_TOKENS = re.compile(rb'"max(?:_completion)?_tokens": *(\d+)')
_EVENT = {
    False: b'data: {"id":"c-1","object":"text_completion","created":1,"model":"mock","choices":'
    b'[{"index":0,"text":" %d","logprobs":null,"finish_reason":%s}]}\n\n',
    True: b'data: {"id":"c-1","object":"chat.completion.chunk","created":1,"model":"mock","choices":'
    b'[{"index":0,"delta":{"role":"assistant","content":" %d"},"logprobs":null,"finish_reason":%s}]}\n\n',
}
_USAGE = (
    b'data: {"id":"c-1","object":"%s","created":1,"model":"mock","choices":[],"usage":'
    b'{"prompt_tokens":8,"completion_tokens":%d,"total_tokens":%d}}\n\ndata: [DONE]\n\n'
)
_OBJECT = {False: b"text_completion", True: b"chat.completion.chunk"}


@dataclass
class Behaviour:
    """``gap``: seconds between tokens, 0: all at once. ``stall_after``: silence for ``stall`` seconds from
    the arrival of that request on."""

    gap: float = 0.0
    stall_after: int | None = None
    stall: float = 0.0
    arrivals: list[int] = field(default_factory=list)
    silent_until_ns: int = 0

    def arrived(self) -> float:
        """Note a request; the seconds for which it must be kept waiting."""
        now = monotonic_ns()
        self.arrivals.append(now)
        if len(self.arrivals) == self.stall_after:
            self.silent_until_ns = now + round(self.stall * 1e9)
        return max(0, self.silent_until_ns - now) / 1e9


class _Client(asyncio.Protocol):
    def __init__(self, behaviour: Behaviour, loop: asyncio.AbstractEventLoop) -> None:
        self._behaviour, self._loop = behaviour, loop
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        data = self._buffer + data
        head, separator, body = data.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if not separator or (length and len(body) < int(length[1])):
            self._buffer = data
            return
        self._buffer = b""
        method, path, _ = head.split(b" ", 2)
        if method == b"GET":
            self._page(path)
            return
        asked = _TOKENS.search(body)
        self._begin(int(asked[1]) if asked else 16, chat=b"/chat/" in path)

    def _page(self, path: bytes) -> None:
        if path == b"/reset":
            self._behaviour.arrivals.clear()
        content: object = {"data": [{"id": MODEL, "object": "model", "max_model_len": 8192}]}
        if path == b"/arrivals":
            content = self._behaviour.arrivals
        text = json.dumps(content).encode()
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
            % (len(text), text)
        )

    def _begin(self, tokens: int, chat: bool) -> None:
        wait, gap = self._behaviour.arrived(), self._behaviour.gap
        if gap:
            due = self._loop.time() + wait + gap
            self._loop.call_at(due, self._token, due, tokens, tokens, chat)
        elif wait:
            self._loop.call_later(wait, self._all, tokens, chat)
        else:
            self._all(tokens, chat)

    def _all(self, tokens: int, chat: bool) -> None:
        now = monotonic_ns()
        last = _EVENT[chat] % (now, b'"length"') + self._usage(tokens, chat)
        self._write(HEAD, b"".join([_EVENT[chat] % (now, b"null")] * (tokens - 1)) + last, b"0\r\n\r\n")

    def _token(self, due: float, left: int, tokens: int, chat: bool) -> None:
        """The next one is due a gap after this one was, however late this one is."""
        if self._transport.is_closing():
            return
        event = _EVENT[chat] % (monotonic_ns(), b"null" if left > 1 else b'"length"')
        if left == 1:
            self._write(HEAD if tokens == 1 else b"", event + self._usage(tokens, chat), b"0\r\n\r\n")
            return
        self._write(HEAD if left == tokens else b"", event, b"")
        due += self._behaviour.gap
        self._loop.call_at(due, self._token, due, left - 1, tokens, chat)

    def _usage(self, tokens: int, chat: bool) -> bytes:
        return _USAGE % (_OBJECT[chat], tokens, tokens + 8)

    def _write(self, head: bytes, body: bytes, end: bytes) -> None:
        self._transport.write(b"%s%x\r\n%s\r\n%s" % (head, len(body), body, end))


@dataclass(frozen=True)
class Mock:
    """A mock that is up."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def arrivals(self) -> list[int]:
        """When requests came, ns of the monotonic clock, in order."""
        with urlopen(f"{self.url}/arrivals") as answer:
            return list(json.load(answer))

    def reset(self) -> None:
        urlopen(f"{self.url}/reset").close()


@contextmanager
def mock(*arguments: str) -> Iterator[Mock]:
    """One in a process of its own, with these options."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.loadgen.mock_llm", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield Mock(int(process.stdout.readline()))
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


async def serve(behaviour: Behaviour) -> None:
    """Print the port and serve until the input ends."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Client(behaviour, loop), "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gap-ms", type=float, default=0.0, help="between tokens; 0: all at once (default)")
    parser.add_argument("--stall-after", type=int, help="fall silent at this request")
    parser.add_argument("--stall-s", type=float, default=2.0, help="for so long (default 2)")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=event_loop) as runner:
        runner.run(serve(Behaviour(options.gap_ms / 1e3, options.stall_after, options.stall_s)))


if __name__ == "__main__":
    main()
