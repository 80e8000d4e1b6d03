"""Run a schedule against an OpenAI-compatible server and return what was measured."""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from time import monotonic_ns
from typing import Any

from loadgen.measure.record import ClientStats, Records, RequestRecord
from loadgen.measure.run_validity import judge_run
from loadgen.measure.window import measured_window
from loadgen.plan.load_policy import Progress
from loadgen.plan.workload import PlannedRequest, Schedule
from loadgen.wire.completion import parse_all
from loadgen.wire.driver import LEAD_NS, drive
from loadgen.wire.http1 import build_request
from loadgen.wire.messages import WireLog, WirePlan, WireRequest
from loadgen.wire.probe import Endpoint, Unreachable, Url, probe, reach
from loadgen.wire.worker import Worker
from servers.connection import NO_LOGIN, Connection

__all__ = ["ClientOptions", "Progress", "Unreachable", "run_schedule"]

PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"
_STALL_NS = 20_000_000
_MAX_STALLS = 100


@dataclass(frozen=True)
class ClientOptions:
    """How the client behaves. Seconds.

    ``timeout``: one request, from sending to its last byte. ``drain``: how long to wait after the last
    request for answers; what is still going then is a failure ("unfinished"). ``workers``: client
    processes; 0 runs in the calling thread, whose interpreter then must do nothing else.
    """

    timeout: float = 600.0
    connect_timeout: float = 10.0
    drain: float | None = None
    """None: as long as a request may take."""
    workers: int = 1
    chunk_usage: bool = False
    """Ask for running usage in every chunk (vLLM, SGLang): exact tokens per chunk, slightly larger chunks."""

    @property
    def longest_drain(self) -> float:
        return self.timeout + self.connect_timeout if self.drain is None else self.drain


def run_schedule(
    url: str,
    schedule: Schedule,
    *,
    model: str | None = None,
    connection: Connection = NO_LOGIN,
    progress: Callable[[Progress], None] | None = None,
    stop: threading.Event | None = None,
    timeout: float = 600.0,
    drain: float | None = None,
    options: ClientOptions | None = None,
) -> Records:
    """Warm up, send every request of ``schedule`` at its time, and measure.

    ``progress`` is called about four times a second in this thread. ``stop`` ends the run early and
    keeps what was measured. ``options`` wins over ``timeout`` and ``drain``.

    Raises Unreachable if the server does not accept a connection, UrlError for a bad URL. A request
    that fails is a record with its reason, never an exception.
    """
    options = options or ClientOptions(timeout=timeout, drain=drain)
    stop = stop or threading.Event()
    target = Url.parse(url)
    endpoint = reach(target, connection, options.connect_timeout)
    if model is None:
        model = probe(target, connection).model
    encode = _Encoder(target, model, connection, options)
    warmup_failures = _warm_up(endpoint, schedule.warmup, encode, options, stop)
    plans = _split(schedule, endpoint, encode, options)
    start_unix_ms = time.time_ns() // 1_000_000 + LEAD_NS // 1_000_000
    logs = _run(plans, options, stop, progress or (lambda _: None))
    planned = {request.index: request for request in schedule.requests}
    start_ns = logs[0].start_ns
    requests = parse_all(chain.from_iterable(log.exchanges for log in logs), planned, start_ns)
    requests = tuple(replace(r, detail=connection.hide(r.detail)) if r.detail else r for r in requests)
    return _records(schedule, requests, logs, start_unix_ms, warmup_failures, str(target), model)


class _Encoder:
    """Turns a planned request into the bytes of an HTTP message."""

    def __init__(self, url: Url, model: str, connection: Connection, options: ClientOptions) -> None:
        self._prefix, self._host, self._model = url.prefix, url.netloc, model
        own = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        self._headers = {**own, **connection.sent()}
        self._stream_options: dict[str, bool] = {"include_usage": True}
        if options.chunk_usage:
            self._stream_options["continuous_usage_stats"] = True

    def __call__(self, request: PlannedRequest) -> bytes:
        body: dict[str, Any] = {
            "model": self._model,
            **_content(request),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "stream": True,
            "stream_options": self._stream_options,
        }
        if request.ignore_eos:
            body["ignore_eos"] = True
        if request.priority:
            body["priority"] = request.priority
        body.update(request.sampling)
        headers = self._headers | {"X-Request-Id": f"vtune-{request.index}"}
        path = self._prefix + (PATH if request.messages is None else CHAT_PATH)
        return build_request(path, self._host, json.dumps(body).encode(), headers)


def _content(request: PlannedRequest) -> dict[str, Any]:
    """What is asked: a chat, token ids, or a text."""
    if request.messages is not None:
        return {"messages": [message.body for message in request.messages]}
    return {"prompt": request.prompt if request.prompt_token_ids is None else request.prompt_token_ids}


def _wire(requests: Sequence[PlannedRequest], encode: _Encoder) -> tuple[WireRequest, ...]:
    return tuple(
        WireRequest(
            r.index, round((r.intended if r.follows is None else r.think) * 1e9), encode(r), r.follows
        )
        for r in requests
    )


def _split(
    schedule: Schedule, endpoint: Endpoint, encode: _Encoder, options: ClientOptions
) -> list[WirePlan]:
    """One plan a client process: requests dealt round robin, a concurrency cap shared out. The turns of a
    conversation go where its first went."""
    workers = max(1, options.workers)
    if schedule.concurrency is not None:
        workers = min(workers, schedule.concurrency)
    wire = _wire([r for r in schedule.requests if r.follows is None], encode)
    turns: list[list[WireRequest]] = [[] for _ in range(workers)]
    home = {request.index: k for k in range(workers) for request in wire[k::workers]}
    for turn in _wire([r for r in schedule.requests if r.follows is not None], encode):
        assert turn.follows is not None
        home[turn.index] = home[turn.follows]
        turns[home[turn.index]].append(turn)
    return [
        WirePlan(
            endpoint=endpoint,
            requests=wire[k::workers],
            closed=schedule.mode == "closed",
            concurrency=_share(schedule.concurrency, k, workers),
            duration_ns=None if schedule.duration is None else round(schedule.duration * 1e9),
            timeout_ns=round(options.timeout * 1e9),
            connect_timeout_ns=round(options.connect_timeout * 1e9),
            drain_ns=round(options.longest_drain * 1e9),
            turns=tuple(turns[k]),
        )
        for k in range(workers)
    ]


def _share(total: int | None, k: int, workers: int) -> int | None:
    return None if total is None else total // workers + (k < total % workers)


def _warm_up(
    endpoint: Endpoint,
    requests: Sequence[PlannedRequest],
    encode: _Encoder,
    options: ClientOptions,
    stop: threading.Event,
) -> tuple[str, ...]:
    """Send the warm-up, four at a time; returns what failed."""
    if not requests:
        return ()
    plan = WirePlan(
        endpoint=endpoint,
        requests=_wire(requests, encode),
        closed=True,
        concurrency=4,
        duration_ns=None,
        timeout_ns=round(options.timeout * 1e9),
        connect_timeout_ns=round(options.connect_timeout * 1e9),
        drain_ns=round((options.timeout + options.connect_timeout) * 1e9),
    )
    log = drive(plan, monotonic_ns(), stop=stop.is_set)
    records = parse_all(log.exchanges, {r.index: r for r in requests}, log.start_ns)
    return tuple(f"{r.failure}: {r.detail}" for r in records if r.failure is not None)


def _run(
    plans: Sequence[WirePlan],
    options: ClientOptions,
    stop: threading.Event,
    progress: Callable[[Progress], None],
) -> list[WireLog]:
    if options.workers == 0:
        return [drive(plans[0], stop=stop.is_set, progress=progress)]
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(plan)) for plan in plans]
        for worker in workers:
            worker.prepare()
        for worker in workers:
            worker.wait_ready()
        start_ns = monotonic_ns() + LEAD_NS
        for worker in workers:
            worker.start(start_ns)
        return _collect(workers, stop, progress)


def _collect(
    workers: Sequence[Worker], stop: threading.Event, progress: Callable[[Progress], None]
) -> list[WireLog]:
    """Read reports until every worker has handed in its log. Each reports four times a second, so
    going round them in turn notices ``stop`` in time."""
    latest: dict[Worker, Progress] = {}
    logs: dict[Worker, WireLog] = {}
    stopped = False
    while len(logs) < len(workers):
        for worker in workers:
            if worker in logs:
                continue
            report = worker.receive()
            if isinstance(report, WireLog):
                logs[worker] = report
            else:
                latest[worker] = report
        if latest:
            progress(_total(list(latest.values())))
        if stop.is_set() and not stopped:
            stopped = True
            for worker in workers:
                if worker not in logs:
                    worker.stop()
    return [logs[worker] for worker in workers]


def _total(parts: Sequence[Progress]) -> Progress:
    return Progress(
        elapsed=max(part.elapsed for part in parts),
        sent=sum(part.sent for part in parts),
        finished=sum(part.finished for part in parts),
        failed=sum(part.failed for part in parts),
        planned=sum(part.planned for part in parts),
    )


def _records(
    schedule: Schedule,
    requests: tuple[RequestRecord, ...],
    logs: Sequence[WireLog],
    start_unix_ms: int,
    warmup_failures: tuple[str, ...],
    url: str,
    model: str,
) -> Records:
    interrupted = any(log.interrupted for log in logs)
    last_due = max(log.last_due_ns for log in logs) - logs[0].start_ns
    window, steady = measured_window(requests, schedule.mode, schedule.duration, last_due / 1e9, interrupted)
    records = Records(
        schedule_sha256=schedule.sha256,
        schedule=schedule.description,
        mode=schedule.mode,
        concurrency=schedule.concurrency,
        planned=len(schedule.requests),
        requests=requests,
        window=window,
        client=_client_stats(logs),
        environment=_environment(url, model),
        start_unix_ms=start_unix_ms,
        seed=schedule.seed,
        partial=interrupted,
        warmup_failures=warmup_failures,
        steady=steady,
    )
    verdict, reasons = judge_run(records)
    if any(log.exhausted for log in logs):
        reasons += (
            f"all {len(schedule.requests)} planned requests were used up before the duration ended; "
            "plan more with num_requests",
        )
    return replace(records, verdict=verdict, reasons=reasons)


def _client_stats(logs: Sequence[WireLog]) -> ClientStats:
    lags = sorted(lag for log in logs for lag in log.lags_ns) or [0]
    start = logs[0].start_ns
    stalls = sorted(
        ((at - start) / 1e9, lag / 1e9)
        for log in logs
        for at, lag in zip(log.lag_at_ns, log.lags_ns, strict=True)
        if lag > _STALL_NS
    )
    return ClientStats(
        loop=logs[0].loop,
        workers=len(logs),
        cpu=sum(log.cpu_s for log in logs),
        wall=(max(log.stop_ns for log in logs) - start) / 1e9,
        reads=sum(len(exchange.stamps) for log in logs for exchange in log.exchanges),
        lag_p50=lags[len(lags) // 2] / 1e9,
        lag_p95=lags[len(lags) * 95 // 100] / 1e9,
        lag_p99=lags[len(lags) * 99 // 100] / 1e9,
        lag_max=lags[-1] / 1e9,
        stalls=tuple(sorted(sorted(stalls, key=lambda s: -s[1])[:_MAX_STALLS])),
    )


def _environment(url: str, model: str) -> Mapping[str, Any]:
    return {
        "url": url,
        "model": model,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
    }
