"""Where responses end, and what is in them, however the bytes are cut."""

import pytest

from loadgen.wire import http1
from loadgen.wire.http1 import (
    MalformedMessage,
    RequestParser,
    ResponseParser,
    build_request,
    decode,
)

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


def feed(parts: list[bytes]) -> ResponseParser:
    parser = ResponseParser()
    for i, part in enumerate(parts):
        assert parser.feed(part) == (i == len(parts) - 1), f"after part {i} of {len(parts)}"
    return parser


@pytest.mark.parametrize("name", RESPONSES)
def test_the_end_is_found_wherever_the_bytes_are_cut(name: str) -> None:
    data, body = RESPONSES[name]
    cuts = [[data], [bytes([byte]) for byte in data]]
    cuts += [[data[:i], data[i:]] for i in range(1, len(data))]
    for parts in cuts:
        parser = feed(parts)
        assert parser.complete
        assert parser.reusable
        response = decode(parts, range(len(parts)))
        assert response.complete
        assert body is None or response.body == body


def test_pieces_carry_the_stamp_of_their_own_bytes() -> None:
    data = CHUNKED + chunks(b"abcdef", b"gh")
    cut = data.index(b"def")
    parts = [data[:cut], data[cut:-7], data[-7:]]
    response = decode(parts, [10, 20, 30])
    assert [*zip(response.parts, response.stamps, strict=True)] == [(b"abc", 10), (b"def", 20), (b"gh", 20)]


def test_a_connection_is_not_reused_against_the_servers_will() -> None:
    assert not feed([b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"]).reusable
    assert not feed([b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n"]).reusable
    assert feed([b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 0\r\n\r\n"]).reusable


def test_more_bytes_than_announced_spoil_the_connection() -> None:
    assert not feed([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabc"]).reusable


def test_a_body_that_ends_with_the_connection() -> None:
    parts = [b"HTTP/1.0 200 OK\r\n\r\n", b"abc\r\n\r\n", b"def"]
    parser = ResponseParser()
    assert not any(parser.feed(part) for part in parts)
    assert parser.ends_with_connection
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
    with pytest.raises(MalformedMessage):
        ResponseParser().feed(data)
    with pytest.raises(MalformedMessage):
        decode([data], [1])


ENDLESS = {
    "head": (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n", "a head of more than 65536 bytes"),
    "header": (b"HTTP/1.1 200 OK\r\nX: ", b"yyyyyy", "a head of more than 65536 bytes"),
    "interim responses": (b"", b"HTTP/1.1 100 Continue\r\n\r\n", "a head of more than 65536 bytes"),
    "chunk extension": (CHUNKED + b"5;x=", b"yyyyyy", "a response of more than"),
    "trailer": (CHUNKED + b"0\r\n", b"X: y\r\n", "a response of more than"),
    "body": (b"HTTP/1.1 200 OK\r\n\r\n", b"zzzzzz", "a response of more than"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_does_not_end_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "MAX_RESPONSE_BYTES", 1 << 18)
    begin, repeated, words = ENDLESS[name]
    parser = ResponseParser()
    parser.feed(begin)
    with pytest.raises(MalformedMessage, match=words):
        any(parser.feed(repeated * 1000) for _ in range(100))


def test_a_second_response_spoils_the_connection_and_leaves_the_first_as_it_is() -> None:
    second = b"HTTP/1.1 500 No\r\nContent-Length: 1\r\nX: 2\r\n\r\nb"
    first = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na"
    parser = feed([first + second])
    assert (parser.status, parser.reusable, parser.headers) == (200, False, {"content-length": "1"})
    assert decode([first + second], [1]).body == b"a"


REQUESTS = (
    b"\r\nPOST /a HTTP/1.1\r\nContent-Length: 3\r\n\r\nxyz"
    b"POST /b HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nT: 1\r\n\r\n"
    b"GET /c HTTP/1.1\r\n\r\n"
)


@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_requests_are_told_apart_however_their_bytes_come(size: int) -> None:
    parser = RequestParser()
    found = [
        request
        for start in range(0, len(REQUESTS), size)
        for request in parser.feed(REQUESTS[start : start + size], start)
    ]
    seen = [(request.method, request.path, request.body) for request in found]
    assert seen == [("POST", "/a", b"xyz"), ("POST", "/b", b"abcde"), ("GET", "/c", b"")]
    begun = [REQUESTS.index(b"POST /a"), REQUESTS.index(b"POST /b"), REQUESTS.index(b"GET")]
    assert [request.at_ns for request in found] == [at // size * size for at in begun]


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01" * 20 + b"\r\n\r\n",
        b"GET / FTP/1.1\r\n\r\n",
        b"A" * 70_000,
        b"GET /" + b"a" * 70_000,
    ],
)
def test_what_is_no_request_is_said_to_be_none(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        RequestParser().feed(data, 0)


def test_a_large_body_is_no_large_head_and_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "MAX_REQUEST_BYTES", 1 << 20)
    head = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n"
    parser, body = RequestParser(), b"x" * 200_000
    for _ in range(2):
        assert parser.feed(head % len(body), 0) == []
        assert [request.body for request in parser.feed(body, 0)] == [body]
    parser.feed(head % (1 << 30), 0)
    with pytest.raises(MalformedMessage, match="a request of more than"):
        parser.feed(b"x" * (1 << 20), 0)


def test_a_request_is_built_and_its_headers_cannot_break_it() -> None:
    message = build_request("/v1/x", "h:1", b"{}", {"A": "b"})
    assert message == b"POST /v1/x HTTP/1.1\r\nHost: h:1\r\nContent-Length: 2\r\nA: b\r\n\r\n{}"
    with pytest.raises(ValueError, match="line break"):
        build_request("/", "h", b"", {"Authorization": "Bearer a\r\nX: y"})
