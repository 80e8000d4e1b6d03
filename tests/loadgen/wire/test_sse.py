"""Events, their line endings and their stamps."""

import json

import pytest

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
    data = [data for data, _ in events(pieces, range(len(pieces)))]
    return [json.loads(data[0])["t"], *data[1:]]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
def test_line_endings_and_nothing_else_end_lines(newline: bytes) -> None:
    data = stream(newline)
    assert read([data]) == EXPECTED
    assert read([bytes([byte]) for byte in data]) == EXPECTED
    for cut in range(1, len(data)):
        assert read([data[:cut], data[cut:]]) == EXPECTED


def test_an_event_has_the_stamp_of_the_byte_that_completed_it() -> None:
    parts = [b"data: a\n", b"\ndata: b\n\ndata", b": c\n", b"\n", b"data: d\n\n"]
    assert [*events(parts, range(5))] == [(b"a", 1), (b"b", 1), (b"c", 3), (b"d", 4)]


def test_the_last_event_needs_no_empty_line() -> None:
    assert [*events([b"data: a\n\ndata: b"], [5])] == [(b"a", 5), (b"b", 5)]


@pytest.mark.parametrize("size", [1, 2, 100])
def test_a_byte_order_mark_is_no_content(size: int) -> None:
    data = b"\xef\xbb\xbfdata: a\n\n"
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    assert [found for found, _ in events(parts, range(len(parts)))] == [b"a"]


def test_a_line_without_an_end_costs_no_more_than_its_bytes() -> None:
    """It would be copied once per part: 20,000 times 10 MB on average."""
    parts = [b"data: ", *[b"x" * 1000] * 20_000]
    ((data, at),) = events(parts, range(len(parts)))
    assert (len(data), at) == (20_000_000, 20_000)
