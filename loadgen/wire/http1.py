"""HTTP/1.1 as a load generator needs it; llhttp (by httptools) parses what comes in.

:class:`ResponseParser` notices where a response ends while the load runs; :func:`decode` runs it again
afterwards, on the saved bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import httptools

MAX_HEAD_BYTES = 1 << 16
"""With the interim responses before it."""
MAX_RESPONSE_BYTES = 256 << 20
MAX_REQUEST_BYTES = 64 << 20


_NotUnderstood = (httptools.HttpParserError, httptools.HttpParserUpgrade)


class MalformedMessage(ValueError):
    """The bytes are no HTTP/1.x message, or one without an end; the message says what was there instead."""


def build_request(
    path: str, host: str, body: bytes, headers: Mapping[str, str], method: str = "POST"
) -> bytes:
    """A complete request message. Raises ValueError if a header would break the message."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("a header or the path contains a line break")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class ResponseParser:
    """Takes one response apart as its bytes come. ``on_body`` is called with the body's bytes, in order."""

    __slots__ = (
        "_bytes",
        "_limit",
        "_parser",
        "complete",
        "head_complete",
        "headers",
        "on_body",
        "reusable",
        "status",
    )

    def __init__(self, on_body: Callable[[bytes], object] | None = None) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        """Names in lower case."""
        self.head_complete = self.complete = False
        self.reusable = False
        """The connection may carry another request."""
        self._bytes, self._limit = 0, MAX_HEAD_BYTES
        if on_body is not None:
            self.on_body = on_body
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> bool:
        """Take the next bytes; True once the response is complete, and nothing may be fed after that.

        Raises MalformedMessage.
        """
        try:
            self._parser.feed_data(data)
        except _NotUnderstood as error:
            if not self.complete:
                raise MalformedMessage(f"{error}: {data[:80]!r}") from None
            self.reusable = False  # more bytes than the response has
        self._bytes += len(data)
        if self.complete:
            del self._parser  # it refers to this object, and the garbage collector is off during a load
        elif self._bytes > self._limit:
            part = "response" if self.head_complete else "head"
            raise MalformedMessage(f"a {part} of more than {self._limit} bytes")
        return self.complete

    @property
    def ends_with_connection(self) -> bool:
        """Nothing but the end of the connection ends this response."""
        coding = self.headers.get("transfer-encoding", "").lower().rpartition(",")[2].strip()
        framed = coding == "chunked" if coding else "content-length" in self.headers
        return self.head_complete and not self.complete and not framed

    # -- what the parser calls ------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.complete:
            raise MalformedMessage("a second response")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.head_complete:  # else it is a trailer
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if not self._interim:
            self.head_complete, self._limit = True, MAX_RESPONSE_BYTES

    def on_message_complete(self) -> None:
        if self._interim:
            self.headers.clear()
        else:
            self.complete, self.reusable = True, self._parser.should_keep_alive()

    @property
    def _interim(self) -> bool:
        """An informational response; the real one follows."""
        return 100 <= self.status < 200


@dataclass(frozen=True, slots=True)
class Response:
    """A decoded response: its body in the parts that arrived, and when each did (ns).

    ``complete`` is False when the connection ended before the body did.
    """

    status: int
    headers: Mapping[str, str]
    parts: Sequence[bytes]
    stamps: Sequence[int]
    complete: bool

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)


def decode(parts: Sequence[bytes], stamps: Sequence[int]) -> Response:
    """Head and body with chunked coding removed. Raises MalformedMessage."""
    body: list[bytes] = []
    arrived: list[int] = []
    parser = ResponseParser(body.append)
    for part, stamp in zip(parts, stamps, strict=True):
        over = parser.feed(part)
        arrived += [stamp] * (len(body) - len(arrived))
        if over:
            break
    if not parser.head_complete:
        raise MalformedMessage(f"not a whole head: {b''.join(parts)[:80]!r}")
    complete = parser.complete or parser.ends_with_connection
    return Response(parser.status, parser.headers, body, arrived, complete)


@dataclass(frozen=True, slots=True)
class Request:
    """A request as a server gets it; ``at_ns``: when its first bytes came."""

    method: str
    path: str
    body: bytes
    at_ns: int


class RequestParser:
    """Tells the requests of one connection apart."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._path, self._body = b"", bytearray()
        self._bytes, self._limit = 0, MAX_HEAD_BYTES
        self._now_ns = self._at_ns = 0
        self._whole: list[Request] = []

    def feed(self, data: bytes, at_ns: int) -> list[Request]:
        """Take bytes that came at ``at_ns``; returns the requests that they complete.

        Raises MalformedMessage for what is no HTTP/1.x request; nothing may be fed after that.
        """
        self._now_ns, self._whole = at_ns, []
        try:
            self._parser.feed_data(data)
        except _NotUnderstood as error:
            raise MalformedMessage(f"{error}: {data[:80]!r}") from None
        self._bytes = 0 if self._whole else self._bytes + len(data)
        if self._bytes > self._limit:
            raise MalformedMessage(f"a request of more than {self._limit} bytes")
        return self._whole

    # -- what the parser calls ------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._at_ns = self._now_ns
        self._path, self._body = b"", bytearray()

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_headers_complete(self) -> None:
        self._limit = MAX_REQUEST_BYTES

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        method = self._parser.get_method().decode("latin-1")
        self._whole.append(Request(method, self._path.decode("latin-1"), bytes(self._body), self._at_ns))
        self._limit = MAX_HEAD_BYTES
