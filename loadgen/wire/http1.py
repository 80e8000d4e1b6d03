"""HTTP/1.1 as a load generator needs it: build a request, notice where a response ends, decode it later.

:class:`Framing` runs while the load runs and looks at as few bytes as it can; :func:`decode` runs
afterwards on the saved bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

_HEAD_END = b"\r\n\r\n"
_STATUS_LINE = b"HTTP/1."
_MAX_HEAD = 1 << 16


class MalformedResponse(ValueError):
    """The bytes are no HTTP/1.x response; the message says what was there instead."""


@dataclass(frozen=True, slots=True)
class Head:
    """Status line and headers (names in lower case)."""

    status: int
    headers: Mapping[str, str]
    http10: bool

    @property
    def chunked(self) -> bool:
        return self.headers.get("transfer-encoding", "").lower().split(",")[-1].strip() == "chunked"

    @property
    def content_length(self) -> int | None:
        value = self.headers.get("content-length")
        if value is None:
            return None
        if not value.isascii() or not value.isdigit():
            raise MalformedResponse(f"Content-Length is {value!r}")
        return int(value)

    @property
    def interim(self) -> bool:
        """An informational response; the real one follows."""
        return 100 <= self.status < 200

    @property
    def body_length(self) -> int | None:
        """Of a body that is not chunked; None: it ends when the connection does."""
        return 0 if self.status in (204, 304) else self.content_length

    @property
    def keep_alive(self) -> bool:
        connection = self.headers.get("connection", "").lower()
        return "keep-alive" in connection if self.http10 else "close" not in connection


def build_request(path: str, host: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    """A complete POST request message. Raises ValueError if a header would break the message."""
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("a header or the path contains a line break")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def parse_head(data: bytes) -> Head:
    """From the bytes before the empty line."""
    status_line, *lines = data.split(b"\r\n")
    parts = status_line.split(None, 2)
    if len(parts) < 2 or not parts[0].startswith(_STATUS_LINE) or not parts[1].isdigit():
        raise MalformedResponse(f"not an HTTP/1.x status line: {status_line[:80]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon:
            raise MalformedResponse(f"not a header line: {line[:80]!r}")
        headers[name.decode("latin-1").strip().lower()] = value.decode("latin-1").strip()
    return Head(int(parts[1]), headers, http10=parts[0] == b"HTTP/1.0")


class Framing:
    """Says when a response is complete.

    A chunked body is walked only when the bytes at hand could be its end (they end in an empty line),
    from where the last walk stopped: one comparison for a usual chunk, and linear work at worst.
    """

    __slots__ = ("_left", "_pending", "_tail", "_take", "complete", "head", "reusable")

    def __init__(self) -> None:
        self.head: Head | None = None
        self.complete = False
        self.reusable = False
        """The connection may carry another request."""
        self._pending: list[bytes] = []
        self._tail = b""
        self._left = 0
        self._take: Callable[[bytes], bool] = self._take_head

    def feed(self, data: bytes) -> bool:
        """Take the next bytes; True once the response is complete. Raises MalformedResponse."""
        return self._take(data)

    def _take_head(self, data: bytes) -> bool:
        self._pending.append(data)
        data = b"".join(self._pending)
        self._pending = [data]
        end = data.find(_HEAD_END)
        if end < 0:
            if len(data) > _MAX_HEAD or not _STATUS_LINE.startswith(data[: len(_STATUS_LINE)]):
                raise MalformedResponse(f"not an HTTP/1.x response: {data[:80]!r}")
            return False
        head, rest = parse_head(data[:end]), data[end + 4 :]
        self._pending = []
        if head.interim:
            return self._take_head(rest)
        self.head = head
        if head.chunked:
            self._take = self._take_chunks
        elif head.body_length is None:
            self._take = self._take_until_close
        else:
            self._left = head.body_length
            self._take = self._take_length
        return self._take(rest)

    def _take_until_close(self, data: bytes) -> bool:
        return False

    def _take_length(self, data: bytes) -> bool:
        self._left -= len(data)
        return self._end(clean=self._left == 0) if self._left <= 0 else False

    def _take_chunks(self, data: bytes) -> bool:
        self._pending.append(data)
        self._tail = data[-4:] if len(data) >= 4 else (self._tail + data)[-4:]
        return self._tail == _HEAD_END and self._walk_chunks()

    def _walk_chunks(self) -> bool:
        data, position = b"".join(self._pending), 0
        while (line_end := data.find(b"\r\n", position)) >= 0:
            size = _chunk_size(data[position:line_end])
            if size == 0:
                if data.startswith(b"\r\n", line_end + 2) or data.find(_HEAD_END, line_end) >= 0:
                    return self._end(clean=True)
                break
            following = line_end + 2 + size + 2
            if following > len(data):
                break
            position = following
        self._pending = [data[position:]]
        return False

    def _end(self, clean: bool) -> bool:
        self.complete = True
        self.reusable = clean and self.head is not None and self.head.keep_alive
        return True


class RequestFraming:
    """Takes one request apart as its bytes come; a body is kept up to ``MAX_BODY`` bytes."""

    __slots__ = ("_body", "_data", "_left", "_length", "begun", "method", "path")

    MAX_BODY = 64 << 20

    def __init__(self) -> None:
        self.method = self.path = ""
        self.begun = False
        self._data = bytearray()
        self._body = bytearray()
        self._left: int | None = None
        """Bytes of the body, or of its current chunk, that are still to come; None: not in either."""
        self._length: int | None = None
        """Of the whole body; None while the head is not read, -1 for chunks."""

    @property
    def body(self) -> bytes:
        return bytes(self._body)

    def feed(self, data: bytes) -> bytes | None:
        """Take bytes: None while the request goes on, else those after its end.

        Raises MalformedResponse for what is no HTTP/1.x request.
        """
        self.begun = True
        self._data += data
        if self._length is None and not self._take_head():
            return None
        done = self._take_chunks() if self._length == -1 else self._take_length()
        return bytes(self._data) if done else None

    def _take_head(self) -> bool:
        while self._data.startswith(b"\r\n"):  # allowed before a request
            del self._data[:2]
        end = self._data.find(_HEAD_END)
        if end < 0:
            if len(self._data) > _MAX_HEAD:
                raise MalformedResponse(f"not an HTTP/1.x request: {bytes(self._data[:80])!r}")
            return False
        line, *lines = bytes(self._data[:end]).split(b"\r\n")
        parts = line.split(b" ")
        if len(parts) != 3 or not parts[2].startswith(_STATUS_LINE):
            raise MalformedResponse(f"not an HTTP/1.x request line: {line[:80]!r}")
        self.method, self.path = (part.decode("latin-1") for part in parts[:2])
        head = parse_head(b"\r\n".join([b"HTTP/1.1 200", *lines]))
        self._length = -1 if head.chunked else head.content_length or 0
        self._left = None if head.chunked else self._length
        del self._data[: end + 4]
        return True

    def _take_length(self) -> bool:
        assert self._left is not None
        self._take_body(min(self._left, len(self._data)))
        return self._left == 0

    def _take_body(self, count: int) -> None:
        assert self._left is not None
        if len(self._body) + count > self.MAX_BODY:
            raise MalformedResponse(f"a request body of more than {self.MAX_BODY} bytes")
        self._body += self._data[:count]
        del self._data[:count]
        self._left -= count

    def _take_chunks(self) -> bool:
        while True:
            if self._left:
                self._take_body(min(self._left, len(self._data)))
                if self._left:
                    return False
            if self._left == 0:  # the line end after a chunk
                if len(self._data) < 2:
                    return False
                del self._data[:2]
                self._left = None
            end = self._data.find(b"\r\n")
            if end < 0:
                return False
            size = _chunk_size(bytes(self._data[:end]))
            if size:
                del self._data[: end + 2]
                self._left = size
                continue
            if self._data.startswith(b"\r\n", end + 2):
                del self._data[: end + 4]
                return True
            trailer = self._data.find(_HEAD_END, end)
            if trailer < 0:
                return False
            del self._data[: trailer + 4]
            return True


def _chunk_size(line: bytes) -> int:
    text = line.split(b";", 1)[0].strip()
    try:
        size = int(text, 16)
    except ValueError:
        raise MalformedResponse(f"not a chunk size: {line[:40]!r}") from None
    if size < 0:
        raise MalformedResponse(f"not a chunk size: {line[:40]!r}")
    return size


@dataclass(frozen=True, slots=True)
class Piece:
    """Body bytes and when they arrived (ns)."""

    data: bytes
    at_ns: int


@dataclass(frozen=True, slots=True)
class Response:
    """A decoded response. ``complete`` is False when the connection ended before the body did."""

    head: Head
    pieces: tuple[Piece, ...]
    complete: bool

    @property
    def body(self) -> bytes:
        return b"".join(piece.data for piece in self.pieces)


def decode(parts: Sequence[bytes], stamps: Sequence[int]) -> Response:
    """Head and body with chunked coding removed; each body piece keeps the stamp of its last byte.

    Raises MalformedResponse.
    """
    data = b"".join(parts)
    ends = list(accumulate(len(part) for part in parts))
    start = 0
    while True:
        end = data.find(_HEAD_END, start)
        if end < 0:
            raise MalformedResponse(f"not an HTTP/1.x response: {data[start : start + 80]!r}")
        head = parse_head(data[start:end])
        start = end + 4
        if not head.interim:
            break
    spans, complete = _body_spans(head, data, start)
    pieces: list[Piece] = []
    for low, high in spans:
        pieces.extend(_split_by_arrival(data, low, high, ends, stamps))
    return Response(head, tuple(pieces), complete)


def _body_spans(head: Head, data: bytes, start: int) -> tuple[list[tuple[int, int]], bool]:
    """Where in ``data`` the body's bytes lie, and whether the body is complete."""
    if not head.chunked:
        length = head.body_length
        end = len(data) if length is None else min(len(data), start + length)
        return [(start, end)], length is None or len(data) - start >= length
    spans: list[tuple[int, int]] = []
    while True:
        line_end = data.find(b"\r\n", start)
        if line_end < 0:
            return spans, False
        size = _chunk_size(data[start:line_end])
        if size == 0:
            return spans, True
        low, high = line_end + 2, line_end + 2 + size
        spans.append((low, min(high, len(data))))
        if high > len(data):
            return spans, False
        start = high + 2


def _split_by_arrival(
    data: bytes, low: int, high: int, ends: Sequence[int], stamps: Sequence[int]
) -> list[Piece]:
    pieces: list[Piece] = []
    part = bisect_left(ends, low + 1)
    while low < high:
        upto = min(high, ends[part])
        pieces.append(Piece(data[low:upto], stamps[part]))
        low, part = upto, part + 1
    return pieces
