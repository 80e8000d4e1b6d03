"""Events, their line endings and their stamps."""

import json

import pytest

from loadgen.wire.http1 import Piece
from loadgen.wire.sse import events

TEXT = "a\u2028b\u2029c\u0085d\x0b\x0c\x1ce"


def stream(newline: bytes) -> bytes:
    lines = [
        b": a comment",
        b"",
        b"data: " + json.dumps({"t": TEXT}, ensure_ascii=False).encode(),
        b"",
        b"event: x",
    ]
    lines += [
        b"id: 1",
        b"data:1",
        b"data: 2",
        b"",
        b"retry: 5",
        b"",
        b"database: no",
        b"",
        b"data: [DONE]",
        b"",
        b"",
    ]
    return newline.join(lines)


EXPECTED = [TEXT, b"1\n2", b"[DONE]"]


def read(pieces: list[bytes]) -> list[object]:
    data = [event.data for event in events(Piece(piece, i) for i, piece in enumerate(pieces))]
    return [json.loads(data[0])["t"], *data[1:]]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
def test_line_endings_and_nothing_else_end_lines(newline: bytes) -> None:
    data = stream(newline)
    assert read([data]) == EXPECTED
    assert read([bytes([byte]) for byte in data]) == EXPECTED
    for cut in range(1, len(data)):
        assert read([data[:cut], data[cut:]]) == EXPECTED


def test_an_event_has_the_stamp_of_the_byte_that_completed_it() -> None:
    pieces = [Piece(b"data: a\n", 1), Piece(b"\ndata: b\n\ndata", 2), Piece(b": c\n", 3), Piece(b"\n", 4)]
    assert [(event.data, event.at_ns) for event in events(pieces)] == [(b"a", 2), (b"b", 2), (b"c", 4)]


def test_the_last_event_needs_no_empty_line() -> None:
    assert [event.data for event in events([Piece(b"data: a\n\ndata: b", 5)])] == [b"a", b"b"]


def test_a_byte_order_mark_is_no_content() -> None:
    assert [event.data for event in events([Piece(b"\xef\xbb\xbfdata: a\n\n", 1)])] == [b"a"]
