"""Where responses end, and what is in them, however the bytes are cut."""

import pytest

from loadgen.wire.http1 import Framing, MalformedResponse, build_request, decode

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
BODY = b"data: 1\n\n"


def chunks(*bodies: bytes, trailer: bytes = b"") -> bytes:
    return (
        b"".join(b"%X;ext=1\r\n%s\r\n" % (len(body), body) for body in bodies) + b"0\r\n" + trailer + b"\r\n"
    )


RESPONSES = {
    "chunked": (CHUNKED + chunks(BODY, b"x" * 300, BODY), BODY + b"x" * 300 + BODY),
    "trailer": (CHUNKED + chunks(BODY, trailer=b"X: 1\r\n"), BODY),
    "looks like the end": (CHUNKED + chunks(b"10\r\n\r\n", b"0\r\n\r\n", b"\r\n0\r\n\r\n"), None),
    "empty chunked": (CHUNKED + chunks(), b""),
    "length": (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n" + BODY, BODY),
    "length 0": (b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n", b""),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    "interim": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nLink: x\r\n\r\n" + CHUNKED + chunks(BODY),
        BODY,
    ),
}


def feed(parts: list[bytes]) -> Framing:
    framing = Framing()
    for i, part in enumerate(parts):
        assert framing.feed(part) == (i == len(parts) - 1), f"after part {i} of {len(parts)}"
    return framing


@pytest.mark.parametrize("name", RESPONSES)
def test_the_end_is_found_wherever_the_bytes_are_cut(name: str) -> None:
    data, body = RESPONSES[name]
    cuts = [[data], [bytes([byte]) for byte in data]]
    cuts += [[data[:i], data[i:]] for i in range(1, len(data))]
    for parts in cuts:
        framing = feed(parts)
        assert framing.complete
        assert framing.reusable
        response = decode(parts, range(len(parts)))
        assert response.complete
        assert body is None or response.body == body


def test_pieces_carry_the_stamp_of_their_own_bytes() -> None:
    data = CHUNKED + chunks(b"abcdef", b"gh")
    cut = data.index(b"def")
    parts = [data[:cut], data[cut:-7], data[-7:]]
    pieces = decode(parts, [10, 20, 30]).pieces
    assert [(piece.data, piece.at_ns) for piece in pieces] == [(b"abc", 10), (b"def", 20), (b"gh", 20)]


def test_a_connection_is_not_reused_against_the_servers_will() -> None:
    assert not feed([b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"]).reusable
    assert not feed([b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n"]).reusable
    assert feed([b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 0\r\n\r\n"]).reusable


def test_more_bytes_than_announced_spoil_the_connection() -> None:
    assert not feed([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabc"]).reusable


def test_a_body_that_ends_with_the_connection() -> None:
    parts = [b"HTTP/1.0 200 OK\r\n\r\n", b"abc\r\n\r\n", b"def"]
    framing = Framing()
    assert not any(framing.feed(part) for part in parts)
    assert decode(parts, [1, 2, 3]).body == b"abc\r\n\r\ndef"


@pytest.mark.parametrize("cut", range(len(CHUNKED), len(CHUNKED + chunks(BODY)) - 5))
def test_a_body_that_was_cut_off_is_incomplete(cut: int) -> None:
    response = decode([(CHUNKED + chunks(BODY))[:cut]], [1])
    assert not response.complete
    assert BODY.startswith(response.body)


GARBAGE = [
    b"SSH-2.0-OpenSSH\r\n",
    b"\x15\x03\x01\x00\x02\x02",
    b"HTTP/1.1 abc\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nno colon here\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
    CHUNKED + b"zz\r\nabc\r\n\r\n",
    CHUNKED + b"-5\r\nabc\r\n\r\n",
]


@pytest.mark.parametrize("data", GARBAGE)
def test_garbage_is_refused_at_once_and_afterwards(data: bytes) -> None:
    with pytest.raises(MalformedResponse):
        Framing().feed(data)
    with pytest.raises(MalformedResponse):
        decode([data], [1])


def test_an_endless_head_is_refused() -> None:
    framing = Framing()
    for _ in range(600):
        framing.feed(b"HTTP/1.1 200 OK" + b"x" * 85)
    with pytest.raises(MalformedResponse):
        framing.feed(b"x" * (1 << 14))


def test_requests() -> None:
    message = build_request("/v1/x", "h:1", b"{}", {"A": "b"})
    assert message == b"POST /v1/x HTTP/1.1\r\nHost: h:1\r\nContent-Length: 2\r\nA: b\r\n\r\n{}"
    with pytest.raises(ValueError, match="line break"):
        build_request("/", "h", b"", {"Authorization": "Bearer a\r\nX: y"})
