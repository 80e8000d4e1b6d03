"""Answers that no server should give: each ends in a named failure, none in a traceback or a success."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import pytest
from mock_sse_server import HEAD, choice, chunk, event, running, usage

from loadgen.measure.record import Failure
from loadgen.measure.run_validity import judge_run
from loadgen.plan.arrivals import ClosedLoop
from loadgen.plan.workload import preset
from loadgen.recording.proxy import Passage
from loadgen.recording.recorder import Recorder
from loadgen.targets.http import Http, NoAnswer
from loadgen.wire import http1
from loadgen.wire.client import ClientOptions, run_schedule
from loadgen.wire.probe import Unreachable, Url, probe

INLINE = ClientOptions(workers=0, timeout=60)
END = b"0\r\n\r\n"
TOKENS = event(choice("a")) + event(choice("é", "length")) + event(usage(8, 2))
DONE = b"data: [DONE]\n\n"
GOOD = HEAD + chunk(TOKENS + DONE) + END
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
DEEP = b"[" * 100_000
ENDLESS = b"endless"
"""Stands at the end of an answer: the part before it goes on for as long as it is read."""


def stream(*bodies: bytes) -> bytes:
    return HEAD + b"".join(map(chunk, bodies)) + END


def page(body: bytes, *headers: str, status: str = "200 OK", kind: str = "application/json") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def tokens_used(count: str) -> bytes:
    return b'data: {"choices": [], "usage": {"completion_tokens": %s}}\n\n' % count.encode()


HOSTILE: dict[str, tuple[Failure | None, bytes, *tuple[bytes, ...]]] = {
    # status lines and interim responses
    "status of four digits": (Failure.GARBAGE, GOOD.replace(b"200", b"2000")),
    "status of two digits": (Failure.GARBAGE, GOOD.replace(b"200", b"20")),
    "negative status": (Failure.GARBAGE, GOOD.replace(b"200", b"-200")),
    "no status": (Failure.GARBAGE, b"HTTP/1.1 OK\r\n\r\n"),
    "HTTP/9.9": (Failure.GARBAGE, GOOD.replace(b"HTTP/1.1", b"HTTP/9.9")),
    "another protocol": (Failure.GARBAGE, b"SSH-2.0-OpenSSH_9.2\r\n"),
    "a few interim responses": (None, b"HTTP/1.1 103 Hints\r\nLink: x\r\n\r\n" * 3 + GOOD),
    "a flood of interim responses": (Failure.GARBAGE, b"HTTP/1.1 100 Continue\r\n\r\n" * 1000, ENDLESS),
    "interim responses only": (Failure.CLOSED_MID_STREAM, b"HTTP/1.1 100 Continue\r\n\r\n"),
    "another protocol is switched to": (
        Failure.GARBAGE,
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n\x00\x01",
    ),
    # lengths and heads
    "length with a plus sign": (Failure.GARBAGE, PLAIN + b"Content-Length: +5\r\n\r\n" + TOKENS),
    "negative length": (Failure.GARBAGE, PLAIN + b"Content-Length: -5\r\n\r\n" + TOKENS),
    "length in other digits": (Failure.GARBAGE, PLAIN + "Content-Length: ٥\r\n\r\n".encode() + TOKENS),
    "length beyond 64 bits": (Failure.GARBAGE, PLAIN + b"Content-Length: %s\r\n\r\n" % (b"9" * 30) + TOKENS),
    "two lengths": (
        Failure.GARBAGE,
        PLAIN + b"Content-Length: 5\r\nContent-Length: 9\r\n\r\n" + TOKENS,
    ),
    "a length and chunks": (Failure.GARBAGE, GOOD.replace(b"Transfer", b"Content-Length: 5\r\nTransfer")),
    "no colon in a header": (Failure.GARBAGE, PLAIN + b"no colon here\r\n\r\n" + TOKENS),
    "a zero byte in a header": (Failure.GARBAGE, PLAIN + b"X: \x00\r\n\r\n" + TOKENS),
    "an endless header": (Failure.GARBAGE, PLAIN + b"X: ", b"x" * 10_000, ENDLESS),
    "an endless head": (Failure.GARBAGE, PLAIN, b"X: y\r\n" * 1000, ENDLESS),
    "no empty line": (Failure.CLOSED_MID_STREAM, PLAIN),
    "no line end at all": (Failure.CLOSED_MID_STREAM, b"HTTP/1.1 200 OK"),
    # chunks and bodies
    "a negative chunk": (Failure.GARBAGE, HEAD + b"-5\r\nabcde\r\n" + END),
    "a chunk size with a plus sign": (Failure.GARBAGE, HEAD + b"+5\r\nabcde\r\n" + END),
    "a chunk beyond 64 bits": (Failure.GARBAGE, HEAD + b"f" * 20 + b"\r\nabcde\r\n"),
    "no chunk size": (Failure.GARBAGE, HEAD + b"zz\r\n" + TOKENS),
    "a flood of chunk extensions": (Failure.GARBAGE, HEAD + b"5;x=", b"x" * 10_000, ENDLESS),
    "an endless trailer": (Failure.GARBAGE, HEAD + b"0\r\n", b"X: y\r\n" * 1000, ENDLESS),
    "an endless body": (Failure.GARBAGE, PLAIN + b"\r\n", b"\x00" * 10_000, ENDLESS),
    "an endless comment": (Failure.GARBAGE, PLAIN + b"\r\n: ", b"x" * 10_000, ENDLESS),
    "endless tokens": (Failure.GARBAGE, PLAIN + b"\r\n", event(choice("a")) * 100, ENDLESS),
    "a gzipped body": (
        Failure.GARBAGE,
        page(gzip.compress(TOKENS), "Content-Encoding: gzip", kind="text/event-stream"),
    ),
    "closed before the head": (Failure.CLOSED, b""),
    "closed inside the head": (Failure.CLOSED_MID_STREAM, GOOD[:40]),
    "closed after the head": (Failure.CLOSED_MID_STREAM, HEAD),
    "closed inside a chunk size": (Failure.CLOSED_MID_STREAM, HEAD + b"1"),
    "closed inside an event": (Failure.CLOSED_MID_STREAM, HEAD + b"ff\r\n" + TOKENS[:30]),
    "closed inside a character": (
        Failure.CLOSED_MID_STREAM,
        HEAD + b"fff\r\n" + event(choice("é"))[:-35].partition(b"\xa9")[0],
    ),
    "closed before the finish": (Failure.CLOSED_MID_STREAM, HEAD + chunk(event(choice("a")))),
    "closed inside a body of known length": (
        Failure.CLOSED_MID_STREAM,
        PLAIN + b"Content-Length: 99\r\n\r\n",
    ),
    # events
    "lines that end in CR": (None, stream(TOKENS.replace(b"\n", b"\r"))),
    "a byte order mark": (None, stream(b"\xef\xbb\xbf" + TOKENS)),
    "a character in two chunks": (None, stream(*TOKENS.partition(b"\xc3")[:2], TOKENS.partition(b"\xc3")[2])),
    "half a character": (Failure.GARBAGE, stream(TOKENS.replace(b"\xa9", b""))),
    "half of an escaped character": (None, stream(TOKENS.replace("é".encode(), b"\\ud83d"))),
    "no events": (Failure.NO_FINISH_REASON, stream()),
    "events without data": (Failure.NO_FINISH_REASON, stream(b"event: ping\n\nid: 5\n\nretry: 1\n\n")),
    "nothing but the end": (Failure.NO_FINISH_REASON, stream(DONE)),
    "a finish and no token": (Failure.NO_TOKENS, stream(event(choice("", "stop")))),
    "a finish, and usage of no token": (
        Failure.NO_TOKENS,
        stream(event(choice("", "stop")) + event(usage(8, 0))),
    ),
    "an error in the stream": (Failure.IN_BAND_ERROR, stream(event({"error": "the engine is dead"}))),
    "an error that is deep": (Failure.GARBAGE, stream(b'data: {"error": ' + DEEP + b"\n\n")),
    "deep JSON": (Failure.GARBAGE, stream(b'data: {"choices": ' + DEEP + b"\n\n")),
    "deep JSON where nobody looks": (Failure.GARBAGE, stream(b'data: {"x": ' + DEEP + b"\n\n")),
    "deep tool calls": (
        Failure.GARBAGE,
        stream(b'data: {"choices": [{"delta": {"tool_calls": ' + DEEP + b"\n\n"),
    ),
    "no object": (Failure.GARBAGE, stream(b"data: 5\n\n")),
    "an array of events": (Failure.GARBAGE, stream(b"data: [" + json.dumps(choice("a")).encode() + b"]\n\n")),
    # what the values are
    "usage beyond 64 bits": (None, stream(TOKENS + tokens_used("9" * 30))),
    "usage of 5,000 digits": (Failure.GARBAGE, stream(TOKENS + tokens_used("9" * 5000))),
    "infinite usage": (None, stream(TOKENS + tokens_used("1e999"))),
    "negative usage": (None, stream(TOKENS + tokens_used("-5"))),
    "a million tokens in three chunks": (Failure.TOKEN_COUNT, stream(TOKENS + tokens_used("1000000"))),
    "times that are none": (
        None,
        stream(TOKENS[:-2].replace(b'"usage"', b'"metrics": {"queue_time_ms": 1e308}, "usage"') + b"\n\n"),
    ),
    # no stream at all
    "200 with an error": (Failure.IN_BAND_ERROR, page(b'{"error": {"message": "no"}}')),
    "200 with a deep error": (Failure.GARBAGE, page(b'{"error": ' + DEEP)),
    "200 with another page": (Failure.GARBAGE, page(b"<hi>", kind="text/html")),
    "200 with nothing": (Failure.GARBAGE, page(b"")),
    "500 with a deep error": (Failure.HTTP_ERROR, page(b'{"error": ' + DEEP, status="500 No")),
    "500 that is cut off": (Failure.HTTP_ERROR, page(b'{"error": "x"}', status="500 No")[:-5]),
    "204": (Failure.HTTP_ERROR, b"HTTP/1.1 204 No Content\r\n\r\n"),
    "a status that is none": (Failure.HTTP_ERROR, page(b"{}", status="999 ?")),
    "retry after a date": (
        Failure.UNAVAILABLE,
        page(b"{}", f"Retry-After: {formatdate(0, usegmt=True)}", status="503 Later"),
    ),
    "retry after a date that is none": (
        Failure.UNAVAILABLE,
        page(b"{}", "Retry-After: Fri, 31 Dec 99999999999 23:59:59 GMT", status="503 Later"),
    ),
    "retry after an age": (Failure.RATE_LIMITED, page(b"{}", f"Retry-After: {'9' * 400}", status="429 No")),
}


class HostileServer:
    """Gives the answer that the first part of the path names, a number in :data:`HOSTILE`."""

    listener: asyncio.Server | None = None

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with (
            contextlib.closing(writer),
            contextlib.suppress(ConnectionError, asyncio.IncompleteReadError),
        ):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            _, _, length = head.partition("content-length: ")
            await reader.readexactly(int(length.split()[0]) if length else 0)
            _, *pieces = [*HOSTILE.values()][int(head.split("/")[1])]
            for piece in pieces:
                while piece is ENDLESS:
                    writer.write(pieces[-2])
                    await writer.drain()
                writer.write(piece)
                await writer.drain()


class DrippingServer:
    """A byte of a header every few milliseconds, for as long as it is read."""

    listener: asyncio.Server | None = None

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            writer.write(PLAIN + b"X: ")
            while not writer.is_closing():
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.005)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(HostileServer()) as port:  # type: ignore[arg-type]
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(autouse=True)
def _less_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "MAX_RESPONSE_BYTES", 1 << 20)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_ends_in_its_failure(url: str, name: str, tmp_path: Path) -> None:
    load = preset("random", max_model_len=4096, input_len=8, output_len=2)
    plan = load.schedule(seed=1, arrival=ClosedLoop(1), num_requests=1, warmup=0)
    number = [*HOSTILE].index(name)
    run = run_schedule(f"{url}/{number}", plan, model="m", options=INLINE)
    (record,) = run.requests
    assert record.failure is HOSTILE[name][0], record
    assert record.failure is not None or record.tokens == 2
    assert judge_run(run)[0]
    run.save(tmp_path / "run.json")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_server_is_not_reachable_and_the_message_says_why(url: str, name: str) -> None:
    """None of the answers lists models; that they end is the test's as well."""
    with pytest.raises(Unreachable, match=re.escape(url)) as caught:
        probe(Url.parse(f"{url}/{[*HOSTILE].index(name)}"))
    assert str(caught.value).count(": ") >= 1


@pytest.mark.parametrize("name", HOSTILE)
def test_a_question_to_a_hostile_server_has_an_answer_or_none(url: str, name: str) -> None:
    http = Http(f"{url}/{[*HOSTILE].index(name)}")
    with contextlib.suppress(NoAnswer):
        answer = http.get("/health", timeout=30)
        assert 200 <= answer.status <= 999
        assert answer.json() is None or answer.body


def test_a_slow_drip_does_not_outlast_the_time_for_an_answer() -> None:
    """Each byte comes soon enough; the whole answer does not."""
    drip = DrippingServer()
    with running(drip) as port, pytest.raises(NoAnswer, match=r"no answer in 0\.3 s") as caught:  # type: ignore[arg-type]
        Http(f"http://127.0.0.1:{port}").get("/health", timeout=0.3)
    assert caught.value.timed_out


def test_a_recording_survives_hostile_answers(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "t.jsonl")
    for number, (_, *pieces) in enumerate(HOSTILE.values()):
        parts = [piece for piece in pieces if piece is not ENDLESS]
        recorder.observe(
            Passage("POST", "/v1/completions", b'{"prompt": "hi"}', number, parts, [number] * len(parts))
        )
    recorder.close()
    assert recorder.tally.recorded + recorder.tally.failed == len(HOSTILE)
    assert recorder.tally.recorded >= sum(failure is None for failure, *_ in HOSTILE.values())
