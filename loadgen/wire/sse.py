"""Server-sent events from body pieces that carry arrival stamps.

Lines end in LF, CRLF or CR and nothing else: U+2028 and its kind are content, so ``str.splitlines``
must not be used. https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from loadgen.wire.http1 import Piece


@dataclass(frozen=True, slots=True)
class Event:
    """The data of one event and the stamp (ns) of the byte that completed it."""

    data: bytes
    at_ns: int


def events(pieces: Iterable[Piece]) -> Iterator[Event]:
    """All events, in order. What stands at the end without its empty line counts as an event too:
    servers close right after the last line, and a finish reason must not be lost over that."""
    pending: list[bytes] = []
    at_ns = 0
    for line, at_ns in _lines(pieces):
        if not line:
            if pending:
                yield Event(b"\n".join(pending), at_ns)
                pending = []
        elif line.startswith(b"data"):
            name, _, value = line.partition(b":")
            if name == b"data":
                pending.append(value[1:] if value.startswith(b" ") else value)
    if pending:
        yield Event(b"\n".join(pending), at_ns)


def _lines(pieces: Iterable[Piece]) -> Iterator[tuple[bytes, int]]:
    rest = b""
    at_ns = 0
    after_cr = False
    first = True
    for piece in pieces:
        at_ns = piece.at_ns
        data = piece.data
        if after_cr and data.startswith(b"\n"):
            data = data[1:]
        if not data:
            after_cr = False
            continue
        after_cr = data.endswith(b"\r")
        # A lone CR ends a line as well; normalising costs nothing where there is none.
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in data else data
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield (line.removeprefix(b"\xef\xbb\xbf") if first else line), at_ns
            first = False
    if rest:
        yield rest, at_ns
