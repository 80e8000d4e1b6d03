"""Exchanges made by hand: exact bytes at exact times, for exact assertions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from loadgen.measure.record import ClientStats, Failure, Records, RequestRecord
from loadgen.plan.workload import PlannedRequest
from loadgen.wire.completion import parse_exchange
from loadgen.wire.messages import End, Exchange

MS = 1_000_000
HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def planned(
    max_tokens: int = 4, *, index: int = 0, cls: str = "a", ignore_eos: bool = True
) -> PlannedRequest:
    return PlannedRequest(index, cls, 0.0, (1, 2, 3), None, max_tokens, ignore_eos=ignore_eos)


def event(body: object, newline: bytes = b"\n") -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + newline * 2


def text(value: str, finish: str | None = None, **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "text": value, "finish_reason": finish}], **more})


def delta(finish: str | None = None, **value: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": value, "finish_reason": finish}]})


def usage(completion: int, prompt: int = 3) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def exchange(
    parts: Sequence[tuple[int, bytes]],
    end: End = End.COMPLETE,
    *,
    head: bytes = HEAD,
    intended: int = 0,
    sent: int = 1,
    bytewise: bool = False,
) -> Exchange:
    """``parts``: (ms, SSE bytes) each sent as a chunk; with COMPLETE the last is followed by the end."""
    pieces: list[tuple[int, bytes]] = [(at, chunk(data)) for at, data in parts]
    if pieces:
        pieces[0] = (pieces[0][0], head + pieces[0][1])
        if end is End.COMPLETE:
            pieces[-1] = (pieces[-1][0], pieces[-1][1] + END)
    if bytewise:
        pieces = [(at, bytes([byte])) for at, data in pieces for byte in data]
    return Exchange(
        index=0,
        intended_ns=intended * MS,
        sent_ns=sent * MS,
        ended_ns=(pieces[-1][0] if pieces else sent) * MS,
        end=end,
        stamps=[at * MS for at, _ in pieces],
        parts=[data for _, data in pieces],
    )


def parse(parts: Sequence[tuple[int, bytes]], max_tokens: int = 4, **options: Any) -> RequestRecord:
    return parse_exchange(exchange(parts, **options), planned(max_tokens), 0)


def record(
    index: int,
    intended_s: float,
    *,
    first_s: float = 0.1,
    gap_s: float = 0.01,
    tokens: int = 5,
    cls: str = "a",
    failure: Failure | None = None,
    late_s: float = 0.0,
) -> RequestRecord:
    """A request whose first token comes ``first_s`` after its intended time and the rest every ``gap_s``."""
    ns = [round((intended_s + first_s + k * gap_s) * 1e9) for k in range(tokens)]
    return RequestRecord(
        index=index,
        cls=cls,
        intended=round(intended_s * 1e9),
        sent=round((intended_s + late_s) * 1e9),
        end=ns[-1] if ns else round((intended_s + first_s) * 1e9),
        chunk_at=tuple(ns),
        chunk_tokens=(1.0,) * tokens,
        failure=failure,
        completion_tokens=tokens,
        max_tokens=tokens,
    )


HEALTHY = ClientStats("uvloop", 1, 0.1, 10.0, 1000, 0.0001, 0.0005, 0.001)


def records(
    requests: Iterable[RequestRecord], window: tuple[float, float] = (0.0, 10.0), **more: Any
) -> Records:
    values: dict[str, Any] = {
        "schedule_sha256": "0" * 64,
        "schedule": "by hand",
        "mode": "open",
        "concurrency": None,
        "client": HEALTHY,
        "environment": {"url": "http://x", "model": "m"},
        "start_unix_ms": 1_700_000_000_000,
        "verdict": "ok",
    }
    made = tuple(requests)
    return Records(requests=made, window=window, planned=len(made), **(values | more))
