"""The client against a loopback server: everything is sent, told apart and cleaned up. No wall clock."""

import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from mock_sse_server import MockServer, running

from loadgen.measure.record import Failure, Records
from loadgen.measure.stats import Summary
from loadgen.plan.arrivals import Arrival, ClosedLoop, Constant, Poisson
from loadgen.plan.workload import Schedule, preset
from loadgen.wire.client import ClientOptions, Progress, Unreachable, run_schedule
from loadgen.wire.driver import busiest
from loadgen.wire.probe import Url, UrlError, probe
from servers.connection import Connection, Tls

INLINE = ClientOptions(workers=0, timeout=30)


def schedule(arrival: Arrival, count: int, tokens: int = 4, **options: object) -> Schedule:
    load = preset("random", max_model_len=4096, input_len=8, output_len=tokens)
    return load.schedule(seed=1, arrival=arrival, num_requests=count, **({"warmup": 0} | options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[MockServer, str]]:
    mock = MockServer()
    with running(mock) as port:
        yield mock, f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def url(server: tuple[MockServer, str]) -> str:
    return server[1]


def one(url: str, behaviour: str, tokens: int = 4, options: ClientOptions = INLINE) -> Records:
    return run_schedule(
        f"{url}/{behaviour}", schedule(ClosedLoop(1), 1, tokens), model="mock", options=options
    )


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
def test_an_open_loop_sends_everything_at_its_time_and_never_early(url: str, workers: int) -> None:
    plan = schedule(Poisson(300.0), 60)
    run = run_schedule(url, plan, options=replace(INLINE, workers=workers))
    assert [r.index for r in run.requests] == list(range(60))
    assert all(r.ok and r.tokens == 4 for r in run.requests)
    assert [r.intended for r in run.requests] == [round(p.intended * 1e9) for p in plan.requests]
    assert all(r.sent is not None and r.sent >= r.intended for r in run.requests)
    assert run.client.workers == max(1, workers)
    assert run.schedule_sha256 == plan.sha256


def test_stamps_come_after_what_the_server_says_it_sent(url: str) -> None:
    """The mock writes its own clock into every token; it is the same clock."""
    before = time.monotonic_ns()
    run = run_schedule(url, schedule(Poisson(200.0), 20, tokens=8), options=INLINE)
    after = time.monotonic_ns()
    assert all(after - before >= r.chunk_at[-1] >= r.chunk_at[0] >= (r.sent or 0) for r in run.requests)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_closed_loop_keeps_its_concurrency(url: str, workers: int) -> None:
    run = run_schedule(url, schedule(ClosedLoop(3), 30), options=replace(INLINE, workers=workers))
    assert len(run.requests) == 30
    edges = sorted([(r.intended, 1) for r in run.requests] + [(r.end, -1) for r in run.requests])
    level = peak = 0
    for _, step in edges:
        level += step
        peak = max(peak, level)
    assert peak == 3
    assert all(r.sent is not None and r.sent >= r.intended for r in run.requests)


def test_connections_are_kept_and_reused() -> None:
    mock = MockServer()
    with running(mock) as port:
        run = run_schedule(f"http://127.0.0.1:{port}", schedule(ClosedLoop(2), 40), model="m", options=INLINE)
    assert all(r.ok for r in run.requests)
    assert mock.seen.connections == 3  # two, and the one that asked whether anyone is there


def test_a_kept_connection_that_the_server_closed_is_replaced(url: str) -> None:
    run = run_schedule(f"{url}/onceonly", schedule(ClosedLoop(2), 20), model="m", options=INLINE)
    assert [r.failure for r in run.requests] == [None] * 20


def test_a_cap_makes_it_semi_open_and_latency_still_runs_from_the_intended_time() -> None:
    mock = MockServer(gap=0.02)
    with running(mock) as port:
        plan = schedule(Constant(500.0), 10, tokens=2, max_concurrency=1)
        run = run_schedule(f"http://127.0.0.1:{port}", plan, model="m", options=INLINE)
    assert run.mode == "semi-open"
    assert [r.intended for r in run.requests] == [k * 2_000_000 for k in range(10)]
    # Each takes 40 ms at the server, one at a time: the last has waited for nine others.
    assert Summary(run).distribution("ttft").values[-1] >= 9 * 0.04
    assert Summary(run).distribution("service_ttft").values[0] >= 0.02


def test_a_stalled_server_is_seen_by_all_requests_that_were_due_meanwhile() -> None:
    """A stall of 100 gaps, as 2 s are at 50 requests a second: the P99 from intended is 96 gaps and more."""
    mock = MockServer()
    mock.silent_until_request = 100
    with running(mock) as port:
        plan = schedule(Constant(500.0), 300)
        run = run_schedule(f"http://127.0.0.1:{port}", plan, model="m", options=INLINE)
    assert all(r.ok for r in run.requests)
    first_answer = min(r.chunk_at[0] for r in run.requests)
    assert all(r.sent is not None and r.sent < first_answer for r in run.requests[:100])
    waits = sorted(r.chunk_at[0] - r.intended for r in run.requests)
    assert waits[296] >= 96 * 2_000_000


def test_connections_grow_with_what_is_in_flight() -> None:
    """Nothing is answered before 150 requests have come, far more than are kept open beforehand."""
    mock = MockServer()
    mock.silent_until_request = 150
    with running(mock) as port:
        plan = schedule(Constant(1000.0), 150)
        run = run_schedule(f"http://127.0.0.1:{port}", plan, model="m", options=INLINE)
    assert all(r.ok for r in run.requests)
    assert mock.seen.connections >= 150


def test_the_busiest_moment_of_a_schedule() -> None:
    assert busiest([0, 10, 20, 30, 31, 32, 90], 20) == 4  # 20, 30, 31 and 32; 0 and 20 are 20 apart
    assert busiest([5] * 7, 1) == 7
    assert busiest([], 10) == 0


BEHAVIOURS = {
    "error": Failure.IN_BAND_ERROR,
    "nofinish": Failure.NO_FINISH_REASON,
    "short": Failure.TOKEN_COUNT,
    "close": Failure.CLOSED_MID_STREAM,
    "hangup": Failure.CLOSED,
    "garbage": Failure.GARBAGE,
    "html": Failure.GARBAGE,
    "nojson": Failure.GARBAGE,
    "401": Failure.UNAUTHORIZED,
    "404": Failure.WRONG_PATH,
    "429": Failure.RATE_LIMITED,
    "503": Failure.UNAVAILABLE,
}


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_failures_are_told_apart(url: str, behaviour: str) -> None:
    (record,) = one(url, behaviour).requests
    assert record.failure is BEHAVIOURS[behaviour]


def test_retry_after_is_kept(url: str) -> None:
    assert one(url, "429").requests[0].retry_after == 7.0
    assert one(url, "503").requests[0].retry_after == 0.0


@pytest.mark.parametrize(("behaviour", "failure"), [("never", Failure.NO_ANSWER), ("stall", Failure.STALLED)])
def test_a_server_that_goes_silent_costs_one_timeout(
    server: tuple[MockServer, str], behaviour: str, failure: Failure
) -> None:
    """A busy machine may take longer than the timeout to connect, or for the first two tokens."""
    for timeout in (0.2, 2.0, 20.0):
        (record,) = one(server[1], behaviour, options=replace(INLINE, timeout=timeout)).requests
        if record.failure is failure:
            break
    assert record.failure is failure
    assert record.tokens == (2 if behaviour == "stall" else 0)


def test_what_is_unfinished_after_the_drain_is_a_failure(url: str) -> None:
    plan = schedule(Constant(100.0), 3)
    run = run_schedule(f"{url}/never", plan, model="m", options=replace(INLINE, drain=0.1))
    assert [r.failure for r in run.requests] == [Failure.UNFINISHED] * 3
    assert any("3 requests were unfinished" in reason for reason in run.reasons)


@pytest.mark.parametrize("behaviour", ["null", "bytewise", "nodone"])
def test_odd_but_right_streams(url: str, behaviour: str) -> None:
    (record,) = one(url, behaviour).requests
    assert record.failure is None
    assert record.tokens == 4


@pytest.mark.parametrize("behaviour", ["length", "http10"])
def test_other_framings(url: str, behaviour: str) -> None:
    (record,) = one(url, behaviour, tokens=2).requests
    assert (record.failure, record.tokens) == (None, 2)


def test_what_is_sent(server: tuple[MockServer, str]) -> None:
    mock, url = server
    load = preset("mixed", max_model_len=4096)
    plan = load.schedule(seed=2, arrival=Poisson(200.0), num_requests=20)
    mock.seen.bodies.clear()
    mock.seen.headers.clear()
    run_schedule(
        url,
        plan,
        model="m",
        connection=Connection(api_key="secret"),
        options=replace(INLINE, chunk_usage=True),
    )
    sent = {
        headers["x-request-id"]: body
        for headers, body in zip(mock.seen.headers, mock.seen.bodies, strict=True)
    }
    assert set(sent) == {f"vtune-{k}" for k in range(-3, 20)}
    for request in plan.requests + plan.warmup:
        body = sent[f"vtune-{request.index}"]
        assert body["prompt"] == list(request.prompt_token_ids or ())
        assert body["max_tokens"] == request.max_tokens
        assert body.get("priority", 0) == request.priority
        assert body["ignore_eos"] is True
        assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert {headers["authorization"] for headers in mock.seen.headers} == {"Bearer secret"}


def test_warm_up_is_sent_first_and_not_measured(server: tuple[MockServer, str]) -> None:
    mock, url = server
    mock.seen.headers.clear()
    run = run_schedule(url, schedule(Poisson(100.0), 5, warmup=6), options=INLINE)
    ids = [int(headers["x-request-id"].removeprefix("vtune-")) for headers in mock.seen.headers]
    assert sorted(ids[:6]) == [-6, -5, -4, -3, -2, -1]
    assert len(run.requests) == 5
    assert run.warmup_failures == ()


def test_a_failing_warm_up_is_told(url: str) -> None:
    run = run_schedule(f"{url}/503", schedule(Poisson(100.0), 5, warmup=1), model="m", options=INLINE)
    assert run.warmup_failures == ("unavailable: HTTP 503: starting",)


@pytest.mark.parametrize("workers", [0, 2])
def test_stop_keeps_what_was_measured(workers: int) -> None:
    stop = threading.Event()

    def progress(counts: Progress) -> None:
        if counts.finished >= 10:
            stop.set()

    with running(MockServer(gap=0.01)) as port:
        run = run_schedule(
            f"http://127.0.0.1:{port}",
            schedule(Poisson(50.0), 3000),
            model="m",
            progress=progress,
            stop=stop,
            options=replace(INLINE, workers=workers),
        )
    assert run.partial
    assert 10 <= sum(r.ok for r in run.requests) < 3000
    assert {r.failure for r in run.requests} <= {None, Failure.CANCELLED}
    assert run.window[1] <= max(r.end for r in run.requests) / 1e9
    assert Failure.CANCELLED not in {r.failure for r in run.in_window()}


def test_a_closed_loop_ends_with_its_duration() -> None:
    load = preset("random", max_model_len=4096, input_len=8, output_len=2)
    plan = load.schedule(seed=1, arrival=ClosedLoop(2), duration=0.5, num_requests=5000, warmup=0)
    with running(MockServer(gap=0.01)) as port:
        run = run_schedule(f"http://127.0.0.1:{port}", plan, model="m", options=INLINE)
    assert 0 < len(run.requests) < 5000
    assert all(r.intended <= 500_000_000 for r in run.requests)


def test_a_closed_loop_that_runs_out_of_requests_says_so(url: str) -> None:
    load = preset("random", max_model_len=4096, input_len=8, output_len=2)
    plan = load.schedule(seed=1, arrival=ClosedLoop(2), duration=60, num_requests=6, warmup=0)
    run = run_schedule(url, plan, options=INLINE)
    assert len(run.requests) == 6
    assert "used up before the duration ended" in run.reasons[-1]


def test_a_client_that_stood_still_says_when(url: str) -> None:
    """The progress callback runs in the loop here, so it can hold it up."""
    calls: list[Progress] = []

    def progress(counts: Progress) -> None:
        calls.append(counts)
        if len(calls) == 1:
            time.sleep(0.3)

    run = run_schedule(url, schedule(Constant(40.0), 40), progress=progress, options=INLINE)
    assert run.verdict == "client_limited"
    since = calls[0].elapsed - 0.05
    assert [length for at, length in run.client.stalls if at >= since and length >= 0.28]
    assert any("stood still" in reason for reason in run.reasons)


@pytest.mark.skipif(sys.platform != "linux", reason="looks the worker up in /proc")
def test_a_client_process_that_was_stopped_says_when(url: str) -> None:
    """SIGSTOP for 300 ms, as a suspended virtual machine or a debugger does it."""
    stopped_at: list[float] = []

    def progress(counts: Progress) -> None:
        if not stopped_at and counts.elapsed > 0:
            children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
            stopped_at.append(counts.elapsed)
            os.kill(int(children[-1]), signal.SIGSTOP)
            time.sleep(0.3)
            os.kill(int(children[-1]), signal.SIGCONT)

    run = run_schedule(
        url, schedule(Constant(40.0), 60), progress=progress, options=replace(INLINE, workers=1)
    )
    assert run.verdict == "client_limited"
    assert [length for at, length in run.client.stalls if at >= stopped_at[0] and length >= 0.28]
    assert any("stood still" in reason for reason in run.reasons)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_nobody_there() -> None:
    with pytest.raises(Unreachable, match="Connection refused"):
        run_schedule(f"http://127.0.0.1:{free_port()}", schedule(Constant(1.0), 1), model="m")


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(Unreachable, match="cannot be resolved"):
        run_schedule("http://no-such-host.invalid", schedule(Constant(1.0), 1), model="m")


def test_a_server_that_dies_refuses_the_rest() -> None:
    mock = MockServer()
    mock.lives_for_requests = 10
    with running(mock) as port:
        run = run_schedule(f"http://127.0.0.1:{port}", schedule(ClosedLoop(1), 60), model="m", options=INLINE)
    assert [r.failure for r in run.requests] == [None] * 10 + [Failure.REFUSED] * 50


@pytest.mark.parametrize(
    "text",
    ["ftp://x", "http://", "http://h:99999", "http://h:x", "http://u:p@h", "http://h?q=1", "http://[::1"],
)
def test_bad_urls(text: str) -> None:
    with pytest.raises(UrlError, match=r"URL|port|key"):
        run_schedule(text, schedule(Constant(1.0), 1))


def test_urls() -> None:
    assert str(Url.parse("127.0.0.1:8000")) == "http://127.0.0.1:8000"
    assert str(Url.parse("https://h/v1/")) == "https://h"
    assert Url.parse("https://h").port == 443
    assert str(Url.parse("http://[::1]:8000/proxy")) == "http://[::1]:8000/proxy"


def test_probe(url: str) -> None:
    info = probe(Url.parse(url))
    assert (info.model, info.max_model_len, info.version) == ("mock", 4096, "1.2.3")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    folder: Path = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    try:
        subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context


def test_https(certificate: ssl.SSLContext) -> None:
    plan = schedule(Poisson(200.0), 10)
    with running(MockServer(), certificate) as port:
        url = f"https://localhost:{port}"
        run = run_schedule(url, plan, connection=Connection(tls=Tls(verify=False)), options=INLINE)
        assert all(r.ok and r.tokens == 4 for r in run.requests)
        distrusted = run_schedule(url, plan, model="m", options=INLINE)
        assert {r.failure for r in distrusted.requests} == {Failure.TLS}
        assert "certificate" in distrusted.requests[0].detail
        with pytest.raises(Unreachable, match="TLS"):
            run_schedule(url, plan, options=INLINE)


def test_https_to_a_plain_server(url: str) -> None:
    run = run_schedule(
        url.replace("http:", "https:"),
        schedule(Constant(100.0), 2),
        model="m",
        options=replace(INLINE, timeout=0.5),
    )
    assert {r.failure for r in run.requests} <= {Failure.TLS, Failure.CONNECT_TIMEOUT}


@pytest.mark.skipif(sys.platform != "linux", reason="looks the worker up in /proc")
def test_a_worker_does_not_outlive_its_parent() -> None:
    """The parent is killed in the middle of a run; the worker notices that its input has ended."""
    program = (
        "import sys; from loadgen.plan.arrivals import Constant; "
        "from loadgen.wire.client import run_schedule; "
        "from loadgen.plan.workload import preset; "
        "load = preset('random', max_model_len=100, input_len=8, output_len=4); "
        "plan = load.schedule(seed=0, arrival=Constant(20.0), duration=600, warmup=0); "
        "run_schedule(sys.argv[1], plan, model='m', progress=lambda p: print(p.sent, flush=True))"
    )
    with running(MockServer()) as port:
        parent = subprocess.Popen(
            [sys.executable, "-c", program, f"http://127.0.0.1:{port}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert parent.stdout is not None
        assert parent.stderr is not None
        parent.stdout.readline()
        (worker,) = (
            int(pid) for pid in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        )
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
        while Path(f"/proc/{worker}/cmdline").exists() and Path(f"/proc/{worker}/cmdline").read_bytes():
            time.sleep(0.02)  # the test's own time limit is the assertion
        assert (
            parent.stderr.read() == ""
        )  # nobody is there to be told the progress: no reason for a traceback
        parent.stderr.close()


def test_nothing_is_left_open(url: str) -> None:
    """Of the client; the mock in this process takes a moment to close its own ends."""
    before = open_files()
    for workers in (0, 1, 2):
        run_schedule(url, schedule(Poisson(200.0), 10), options=replace(INLINE, workers=workers))
    deadline = time.monotonic() + 60
    while open_files() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert open_files() <= before


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
