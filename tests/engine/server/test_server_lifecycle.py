"""How a server starts, fails, stops and dies; each test has servers of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from quiet_port import quiet_port
from serving_kit import HTTP, PATIENCE_SECONDS, VTUNE, Server, make_model, process_alive, serving, wait_until

LONG = {"prompt": "a" * 100, "max_tokens": 30_000, "ignore_eos": True}
"""No client waits for its end."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(make_model(tmp_path / "model", max_position_embeddings=32_768), tmp_path / "log") as running:
        yield running


def refused(*arguments: str) -> str:
    """The message of a ``vtune serve`` that exits with 2."""
    result = subprocess.run(
        [VTUNE, "serve", *arguments], capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    return re.sub(r"[\s│]+", " ", result.stderr)


def test_ctrl_c_stops_it_with_130(server: Server) -> None:
    engine = server.engine_pid
    assert server.stop(signal.SIGINT) == 130
    assert not process_alive(engine)
    assert "Traceback" not in server.log


def test_sigterm_fails_what_runs_and_stops_with_0(server: Server) -> None:
    engine = server.engine_pid
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        name = client.models.list().data[0].id
        stream = client.completions.create(
            model=name, prompt="a", max_tokens=30_000, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        server.process.terminate()
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
    assert server.process.wait(PATIENCE_SECONDS) == 0
    assert not process_alive(engine)
    assert "Traceback" not in server.log


def test_a_killed_engine_fails_requests_and_health_and_then_the_server(server: Server) -> None:
    whole: list[httpx.Response] = []
    waiting = threading.Thread(
        target=lambda: whole.append(HTTP.post(f"{server.url}/v1/completions", json=LONG))
    )
    waiting.start()
    server.wait_for(lambda m: m["vllm:num_requests_running"] == 1, "one runs")
    with HTTP.stream("POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith('data: {"id"')
        os.kill(server.engine_pid, signal.SIGKILL)
        *_, error, done = [line for line in lines if line]
    assert done == "data: [DONE]"
    assert "killed by SIGKILL" in json.loads(error.removeprefix("data: "))["error"]["message"]
    waiting.join(PATIENCE_SECONDS)
    assert whole[0].status_code == 503
    assert whole[0].json()["error"]["type"] == "EngineDeadError"
    assert HTTP.get(f"{server.url}/health").status_code == 503
    assert HTTP.post(f"{server.url}/v1/completions", json=LONG).status_code == 503
    assert HTTP.get(f"{server.url}/metrics").status_code == 200
    assert server.process.wait(PATIENCE_SECONDS) == 1


def test_the_engine_leaves_when_its_server_is_killed(server: Server) -> None:
    engine = server.engine_pid
    with HTTP.stream("POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}) as stream:
        next(stream.iter_lines())
        server.process.kill()
        wait_until(lambda: not process_alive(engine), "the engine is gone")


def test_a_port_in_use_is_refused_before_the_model_is_loaded(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        message = refused(str(model), "--load-format", "dummy", "--port", str(port))
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in message
    assert "EngineCore" not in message


def test_of_two_servers_started_at_once_on_a_port_one_is_refused(model: Path, tmp_path: Path) -> None:
    """Both can bind it, as neither listens before its model is loaded."""
    port = quiet_port()
    command = [VTUNE, "serve", str(model), "--load-format", "dummy", "--device-memory", "256MiB"]
    command += ["--port", str(port)]
    logs = [tmp_path / "first", tmp_path / "second"]
    servers = []
    for log in logs:
        with log.open("wb") as stream:
            servers.append(subprocess.Popen(command, stderr=stream, stdin=subprocess.DEVNULL))
    try:
        wait_until(lambda: any(server.poll() is not None for server in servers), "one is refused")
        loser = 0 if servers[0].poll() is not None else 1
        assert servers[loser].returncode == 2
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in logs[loser].read_text()
        wait_until(lambda: "Starting vtune server" in logs[1 - loser].read_text(), "the other one serves")
        assert HTTP.get(f"http://127.0.0.1:{port}/health").status_code == 200
    finally:
        for server in servers:
            server.terminate()
            server.wait(PATIENCE_SECONDS)


def test_wrong_flags_and_models(model: Path, tmp_path: Path) -> None:
    """Those that are wrong whatever the model are in test_serve_command.py."""
    missing = refused(str(tmp_path / "nothing"), "--port", "0")
    assert "no such file or directory" in missing
    # Known only when the model is: the child says it, the parent passes it on.
    too_long = refused(str(model), "--load-format", "dummy", "--port", "0", "--max-model-len", "4096")
    assert "--max-model-len 4096" in too_long


def test_api_key_priority_and_speculation(model: Path, tmp_path: Path) -> None:
    speculation = '{"method": "ngram", "num_speculative_tokens": 3}'
    flags = ("--api-key", "secret", "--scheduling-policy", "priority", "--speculative-config", speculation)
    with serving(model, tmp_path / "log", *flags) as server:
        assert "secret" not in server.log
        body = {"prompt": "ab" * 20, "max_tokens": 30, "temperature": 0, "ignore_eos": True, "priority": -1}
        url = f"{server.url}/v1/completions"
        assert HTTP.post(url, json=body).status_code == 401
        assert HTTP.post(url, json=body, headers={"authorization": "Bearer wrong"}).status_code == 401
        answer = HTTP.post(url, json=body, headers={"authorization": "Bearer secret"})
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 30
        metrics = server.metrics()
        drafted = metrics["vllm:spec_decode_num_draft_tokens_total"]
        assert metrics["vllm:spec_decode_num_drafts_total"] <= drafted
        accepted = [
            metrics[f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}}'] for i in range(3)
        ]
        assert sum(accepted) == metrics["vllm:spec_decode_num_accepted_tokens_total"] <= drafted


def test_a_stalled_client_does_not_stop_the_others(server: Server) -> None:
    """It never reads what it is sent; the others, and the server's end, do not wait for it."""
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({**LONG, "stream": True, "n": 8, "logprobs": 20}).encode()
    with socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect((host, int(port)))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        stalled.sendall(head.encode() + body)
        server.wait_for(lambda m: m["vllm:num_requests_running"] == 8, "the stalled one runs")
        answer = HTTP.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 5})
        assert answer.status_code == 200
        assert server.stop() == 0
