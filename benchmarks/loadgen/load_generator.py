"""What the load generator costs and how well it keeps time, against a loopback server that writes its own
``monotonic_ns`` into every token. Best of five runs: these are wall-clock figures and machines are noisy.

    python -m benchmarks.loadgen.load_generator [--runs 5] [--seconds 4] [--json FILE]

(As a module, from the root of the checkout: as a script this file would shadow the package it measures.)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic_ns
from typing import cast

import numpy as np

from loadgen.wire.driver import drive, event_loop
from loadgen.wire.http1 import build_request, decode
from loadgen.wire.messages import End, Endpoint, Exchange, WireLog, WirePlan, WireRequest
from loadgen.wire.sse import events

SECOND = 1_000_000_000
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
FILLER = "x" * 150
"""Brings a chunk to the size of vLLM's."""


# -- the server, in a process of its own --------------------------------------------------------


class Stream(asyncio.Protocol):
    """``POST /TOKENS/GAP_US/BATCH``: TOKENS events, BATCH of them in a write, every GAP_US."""

    stalled_until_ns = 0

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, _ = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        self._buffer = b""
        path = head.split(b" ", 2)[1].decode()
        if path == "/stall":
            Stream.stalled_until_ns = monotonic_ns() + 2 * SECOND
            path = "/1/0/1"
        tokens, gap_us, batch = (int(part) for part in path[1:].split("/"))
        wait = max(0, Stream.stalled_until_ns - monotonic_ns()) / 1e9
        if wait or gap_us:
            self._loop.call_later(wait + gap_us / 1e6, self._write, tokens, gap_us / 1e6, batch, HEAD)
        else:
            self._write(tokens, 0.0, batch, HEAD)

    def _write(self, left: int, gap: float, batch: int, head: bytes = b"") -> None:
        count = min(left, batch)
        left -= count
        body = b"".join(
            b'data: {"t":%d,"choices":[{"text":"%s"}]}\n\n' % (monotonic_ns(), FILLER.encode())
            for _ in range(count)
        )
        end = b"" if left else b"0\r\n\r\n"
        self._transport.write(head + b"%x\r\n%s\r\n" % (len(body), body) + end)
        if left and not self._transport.is_closing():
            self._loop.call_later(gap, self._write, left, gap, batch)


async def serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Stream(loop), "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)  # until the parent closes it


@contextmanager
def server() -> Iterator[Endpoint]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.loadgen.load_generator", "--serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield Endpoint("127.0.0.1", int(process.stdout.readline()))
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


# -- the client's side --------------------------------------------------------------------------


def load(endpoint: Endpoint, paths: list[str], offsets_ns: list[int]) -> WireLog:
    requests = tuple(
        WireRequest(i, offset, build_request(path, "x", b"{}", {}))
        for i, (path, offset) in enumerate(zip(paths, offsets_ns, strict=True))
    )
    plan = WirePlan(
        endpoint=endpoint,
        requests=requests,
        closed=False,
        concurrency=None,
        duration_ns=None,
        timeout_ns=60 * SECOND,
        connect_timeout_ns=10 * SECOND,
        drain_ns=60 * SECOND,
    )
    log = drive(plan)
    bad = [exchange for exchange in log.exchanges if exchange.end is not End.COMPLETE]
    if bad:
        raise SystemExit(f"{len(bad)} requests failed, e.g. {bad[0].end}: {bad[0].detail}")
    return log


def streams(endpoint: Endpoint, count: int, rate: int, seconds: float, batch: int = 1) -> WireLog:
    """``count`` streams of ``rate`` events a second, their starts spread over one gap."""
    gap_us = round(1e6 * batch / rate)
    path = f"/{round(rate * seconds)}/{gap_us}/{batch}"
    return load(endpoint, [path] * count, [i * gap_us * 1000 // count for i in range(count)])


def null_requests(endpoint: Endpoint, rate: int, seconds: float) -> WireLog:
    count = round(rate * seconds)
    return load(endpoint, ["/1/0/1"] * count, [i * SECOND // rate for i in range(count)])


def errors_us(exchange: Exchange) -> list[float]:
    """Stamp - the server's clock in the event."""
    response = decode(exchange.parts, exchange.stamps)
    found = events(response.parts, response.stamps)
    return [(at_ns - json.loads(data)["t"]) / 1e3 for data, at_ns in found]


def lags_us(log: WireLog) -> np.ndarray:
    return np.array([(exchange.sent_ns - exchange.intended_ns) / 1e3 for exchange in log.exchanges])


# -- the rows -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """``bound``: what must hold, as text."""

    name: str
    value: float
    unit: str
    bound: str
    ok: bool


def at_most(name: str, value: float, unit: str, bound: float) -> Row:
    return Row(name, value, unit, f"<= {bound:g}", value <= bound)


def best(runs: int, measure: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
    """The smallest of each figure."""
    return tuple(min(column) for column in zip(*(measure() for _ in range(runs)), strict=True))


def cost(log: WireLog, chunks: int) -> tuple[float]:
    return (log.cpu_s * 1e6 / chunks,)


def accuracy(log: WireLog) -> tuple[float, float]:
    found = np.array([error for exchange in log.exchanges for error in errors_us(exchange)])
    return float(np.quantile(found, 0.5)), float(np.quantile(found, 0.99))


def rows(endpoint: Endpoint, runs: int, seconds: float) -> Iterator[Row]:
    chunks = round(5000 * seconds)
    (plain,) = best(runs, lambda: cost(streams(endpoint, 100, 50, seconds), chunks))
    yield at_most("client CPU a chunk, 5,000 chunks/s, one a read", plain, "µs", 12)
    (coalesced,) = best(runs, lambda: cost(streams(endpoint, 100, 50, seconds, batch=25), chunks))
    yield at_most("client CPU a chunk, 5,000 chunks/s, 25 a read", coalesced, "µs", 2)
    p50, p99 = best(runs, lambda: accuracy(streams(endpoint, 100, 50, seconds)))
    yield at_most("timestamp error p50, 100 streams x 50/s", p50, "µs", 150)
    yield at_most("timestamp error p99, 100 streams x 50/s", p99, "µs", 2000)
    yield from send_lag(endpoint, runs, seconds)
    yield stalled(endpoint)
    yield highest_rate(endpoint, seconds)


def send_lag(endpoint: Endpoint, runs: int, seconds: float) -> Iterator[Row]:
    early: list[float] = []

    def measure() -> tuple[float, float]:
        lag = lags_us(null_requests(endpoint, 500, seconds))
        early.append(float(lag.min()))
        return float(np.quantile(lag, 0.5)), float(np.quantile(lag, 0.99))

    p50, p99 = best(runs, measure)
    yield at_most("send lag p50, 500 req/s", p50, "µs", 150)
    yield at_most("send lag p99, 500 req/s", p99, "µs", 2000)
    yield Row("earliest send, 500 req/s", min(early), "µs", ">= 0", min(early) >= 0)


def stalled(endpoint: Endpoint) -> Row:
    """The server stops for 2 s while 50 requests a second are due."""
    count = 150
    log = load(endpoint, ["/stall", *["/1/0/1"] * (count - 1)], [i * SECOND // 50 for i in range(count)])
    waits = np.array([(exchange.stamps[0] - exchange.intended_ns) / 1e9 for exchange in log.exchanges])
    p99 = float(np.quantile(waits, 0.99))
    return Row("p99 TTFT from intended, server stalled for 2 s", p99, "s", ">= 1.9", p99 >= 1.9)


def highest_rate(endpoint: Endpoint, seconds: float) -> Row:
    """Of one client process, as long as no more than 1 % of the requests are sent over 2 ms late."""
    highest = 0
    for rate in (500, 1000, 1500, 2000, 3000, 4000, 5000, 6000, 8000):
        late = min(
            float(np.quantile(lags_us(null_requests(endpoint, rate, seconds / 2)), 0.99)) for _ in range(2)
        )
        if late > 2000:
            break
        highest = rate
    return Row(
        "highest rate with send lag p99 <= 2 ms, null server", highest, "req/s", ">= 500", highest >= 500
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5, help="the best of so many (default 5)")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each (default 4)")
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        with asyncio.Runner(loop_factory=event_loop) as runner:
            runner.run(serve())
        return 0
    found = []
    with server() as endpoint:
        for row in rows(endpoint, arguments.runs, arguments.seconds):
            found.append(row)
            mark = "ok" if row.ok else "MISSED"
            print(f"{row.name:<54} {row.value:>9.1f} {row.unit:<6} {row.bound:<9} {mark}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in found], indent=2) + "\n")
    return 0 if all(row.ok for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
