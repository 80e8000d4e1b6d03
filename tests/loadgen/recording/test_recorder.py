"""The recording proxy: bytes pass unchanged and at once, the trace says what passed and no text of it."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from mock_sse_server import MockServer, running

from loadgen.commands.record_command import _conclusion
from loadgen.measure.record import Failure
from loadgen.plan.arrivals import ClosedLoop, Constant
from loadgen.plan.datasets import Dataset, Turn
from loadgen.plan.trace_formats import read_trace
from loadgen.plan.workload import Message, preset
from loadgen.recording.proxy import Passage, Proxy
from loadgen.recording.recorder import Prefixes, Recorder
from loadgen.wire.client import ClientOptions, run_schedule
from loadgen.wire.probe import Url, reach

INLINE = ClientOptions(workers=0, timeout=30)


@contextmanager
def recording(url: str, path: Path) -> Iterator[tuple[str, Recorder]]:
    """A proxy in a thread of its own, in front of ``url``."""
    import threading

    recorder = Recorder(path)
    ready = threading.Event()
    box: dict[str, Any] = {}

    async def main() -> None:
        box["loop"], box["stop"] = asyncio.get_running_loop(), asyncio.Event()
        proxy = Proxy(reach(Url.parse(url)), recorder.observe)
        box["port"] = await proxy.start("127.0.0.1", 0)
        ready.set()
        await box["stop"].wait()
        await proxy.close()
        await asyncio.sleep(0.01)

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    ready.wait()
    try:
        yield f"http://127.0.0.1:{box['port']}", recorder
    finally:
        box["loop"].call_soon_threadsafe(box["stop"].set)
        thread.join()
        recorder.close()


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[MockServer, str]]:
    mock = MockServer()
    with running(mock) as port:
        yield mock, f"http://127.0.0.1:{port}"


def common(sequences: Sequence[Sequence[int]]) -> list[int]:
    """The beginning that all have in common."""
    return [
        items[0] for items in takewhile(lambda items: len(set(items)) == 1, zip(*sequences, strict=False))
    ]


def test_a_recorded_load_replays_as_the_same_load(server: tuple[MockServer, str], tmp_path: Path) -> None:
    load = preset("shared-prefix", max_model_len=4096, scale=0.1)
    plan = load.schedule(seed=1, arrival=Constant(50.0), num_requests=12, warmup=0)
    with recording(server[1], tmp_path / "t.jsonl") as (url, recorder):
        run = run_schedule(url, plan, model="mock", options=INLINE)
    assert all(record.ok for record in run.requests)
    assert recorder.tally.recorded == 12
    trace = read_trace(tmp_path / "t.jsonl")
    assert [row.prompt_tokens for row in trace.rows] == [240] * 12
    assert [row.output_tokens for row in trace.rows] == [r.max_tokens for r in plan.requests]
    shared = len(common([row.blocks for row in trace.rows]))
    assert shared == 200 // 16
    replay = trace.schedule(seed=9, max_model_len=4096)
    prompts = [request.prompt_token_ids or () for request in replay.requests]
    assert len(common(prompts)) == shared * 16
    assert not list(tmp_path.glob("*.partial"))


def test_what_passes_is_what_was_sent_and_nothing_of_it_is_in_the_trace(
    server: tuple[MockServer, str], tmp_path: Path
) -> None:
    mock, url = server
    secret = "the launch code is 0000 " * 9
    talk = (Turn((Message("user", secret),), None, 5),)
    plan = Dataset("chat", (talk,)).schedule(seed=1, arrival=ClosedLoop(1))
    direct = len(mock.seen.bodies)
    run_schedule(url, plan, model="mock", options=INLINE)
    with recording(url, tmp_path / "t.jsonl") as (proxied, recorder):
        run_schedule(proxied, plan, model="mock", options=INLINE)
    warm, first, warm_again, second = mock.seen.bodies[direct:]
    assert (warm, first) == (warm_again, second)
    assert first["messages"][0]["content"] == secret
    text = (tmp_path / "t.jsonl").read_text()
    assert "launch" not in text
    assert "code" not in text
    assert recorder.tally.recorded == 2


def test_settings_are_recorded_and_others_are_not(server: tuple[MockServer, str], tmp_path: Path) -> None:
    body = {"prompt": [1] * 40, "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "user": "me", "n": True}
    with recording(server[1], tmp_path / "t.jsonl") as (url, _):
        post(url, body)
    (row,) = read_trace(tmp_path / "t.jsonl").rows
    assert row.sampling == (("temperature", 0.5), ("top_p", 0.9))
    assert (row.prompt_tokens, row.output_tokens, len(row.blocks)) == (40, 3, 3)


class Uncounting(MockServer):
    async def do_v1(self, body: dict[str, Any], write: Any) -> None:
        await self.do_nofinish(body, write)


def test_what_a_server_does_not_count_is_said(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}
    with (
        running(Uncounting()) as port,
        recording(f"http://127.0.0.1:{port}", tmp_path / "t.jsonl") as (url, recorder),
    ):
        post(url, body, "/v1/chat/completions")
    assert (recorder.tally.estimated, recorder.tally.uncounted) == (1, 1)
    said = _conclusion(recorder.tally, tmp_path)
    assert "1 prompts of an estimated length, as their answers had no usage (chats without what the" in said
    assert "1 answers counted by their chunks, for the same reason: at least so many tokens" in said


def test_each_of_several_answers_is_a_row(server: tuple[MockServer, str], tmp_path: Path) -> None:
    """Their tokens are counted together; the prompt is one, which a replay finds in the prefix cache."""
    with recording(server[1], tmp_path / "t.jsonl") as (url, _):
        post(url, {"prompt": [1] * 40, "max_tokens": 6, "n": 3})
        post(url, {"prompt": [[1] * 40, [2] * 40], "max_tokens": 8, "n": 2})
        post(url, {"prompt": [1] * 40, "max_tokens": 2, "n": 10**9})
    rows = read_trace(tmp_path / "t.jsonl").rows
    assert [(row.prompt_tokens, row.output_tokens) for row in rows] == [(40, 2)] * 7 + [(40, 1)] * 2
    assert len({row.blocks for row in rows[:3]}) == 1


def post(url: str, body: Any, path: str = "/v1/completions", raw: bytes | None = None) -> bytes:
    """One request by hand; everything that comes back until the connection ends."""
    data = json.dumps(body).encode() if raw is None else raw
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 120) as peer:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        peer.sendall(head.encode() + data)
        peer.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := peer.recv(65536):
            answer += piece
    return answer


def test_each_token_passes_before_the_next_is_made(tmp_path: Path) -> None:
    """The server sends a token only when it is told that the one before has arrived at the client."""
    gate = socket.create_server(("127.0.0.1", 0))
    with recording(f"http://127.0.0.1:{gate.getsockname()[1]}", tmp_path / "t.jsonl") as (url, recorder):
        probe, _ = gate.accept()  # the check that the server is there
        probe.close()
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), 120) as client:
            client.sendall(b'POST /v1/completions HTTP/1.1\r\nContent-Length: 19\r\n\r\n{"prompt":[1,2,3]} ')
            upstream, _ = gate.accept()
            assert upstream.recv(4096).endswith(b"[1,2,3]} ")
            upstream.sendall(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            assert client.recv(4096).endswith(b"\r\n\r\n")
            for number in range(5):
                data = b'data: {"choices":[{"text":"%d"}]}\n\n' % number
                upstream.sendall(b"%x\r\n%s\r\n" % (len(data), data))
                assert b'"text":"%d"' % number in client.recv(4096)
            upstream.sendall(b"0\r\n\r\n")
            assert client.recv(4096) == b"0\r\n\r\n"
            upstream.close()
    gate.close()
    assert recorder.tally.recorded == 1
    (row,) = read_trace(tmp_path / "t.jsonl").rows
    assert (row.prompt_tokens, row.output_tokens) == (3, 5)


@pytest.mark.parametrize(
    ("behaviour", "failure"),
    [("429", Failure.RATE_LIMITED), ("error", Failure.IN_BAND_ERROR), ("close", Failure.CLOSED_MID_STREAM)],
)
def test_failures_pass_through_as_they_are(
    server: tuple[MockServer, str], tmp_path: Path, behaviour: str, failure: Failure
) -> None:
    load = preset("random", max_model_len=512, input_len=8, output_len=4)
    plan = load.schedule(seed=1, arrival=ClosedLoop(1), num_requests=1, warmup=0)
    with recording(server[1], tmp_path / "t.jsonl") as (url, _):
        run = run_schedule(f"{url}/{behaviour}", plan, model="mock", options=INLINE)
    assert run.requests[0].failure is failure


def test_requests_of_other_pages_and_bodies_that_are_no_json_pass_and_are_not_recorded(
    server: tuple[MockServer, str], tmp_path: Path
) -> None:
    with recording(server[1], tmp_path / "t.jsonl") as (url, recorder):
        assert b"404" in post(url, {}, path="/404/elsewhere").split(b"\r\n")[0]
    assert recorder.tally.recorded == 0
    assert not (tmp_path / "t.jsonl").exists()
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_has_gone_is_a_502(tmp_path: Path) -> None:
    gone = socket.create_server(("127.0.0.1", 0))
    with recording(f"http://127.0.0.1:{gone.getsockname()[1]}", tmp_path / "t.jsonl") as (url, _):
        gone.close()
        assert post(url, {}).startswith(b"HTTP/1.1 502 ")
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), 120) as slow:
            slow.settimeout(0.2)
            with pytest.raises(TimeoutError):  # no answer to a request that has not come
                slow.recv(1)
            slow.settimeout(120)
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
            assert slow.recv(65536).startswith(b"HTTP/1.1 502 ")


def test_equal_blocks_after_equal_beginnings_have_equal_numbers_and_a_new_key_each_time() -> None:
    prefixes = Prefixes()
    first = prefixes.of_tokens([*range(32), 5])
    assert prefixes.of_tokens([*range(16), *range(100, 132)])[0] == first[0]
    assert prefixes.of_tokens([99, *range(1, 32)])[1] not in first
    assert prefixes.of_text("a" * 128)[:1] == prefixes.of_text("a" * 64)
    assert Prefixes()._key != prefixes._key


def test_rows_survive_a_kill(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "t.jsonl")
    answer = json.dumps({"usage": {"prompt_tokens": 7, "completion_tokens": 2}}).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(answer)
    passage = Passage("POST", "/v1/completions", b'{"prompt": "hello there"}', 5, [head + answer], [9], True)
    recorder.observe(passage)
    recorder._queue.put(None)
    recorder._thread.join()
    left_behind = (tmp_path / "t.jsonl.partial").read_text()
    recorder.close()
    (tmp_path / "kept.jsonl").write_text(left_behind)
    (row,) = read_trace(tmp_path / "kept.jsonl").rows
    assert (row.prompt_tokens, row.output_tokens) == (7, 2)


def test_ctrl_c_ends_a_recording_and_writes_it(server: tuple[MockServer, str], tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import vtune_cli; vtune_cli.main()", "bench", "record"]
    out = tmp_path / "t.jsonl"
    process = subprocess.Popen(
        [*command, "--url", server[1], "--port", "0", "--out", str(out)], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    url = process.stderr.readline().split()[1]
    post(url, {"prompt": [1, 2], "max_tokens": 2})
    while len((tmp_path / "t.jsonl.partial").read_text().splitlines()) < 2:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert err == f"1 requests recorded in {out}\n"
    assert len(read_trace(out).rows) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]
