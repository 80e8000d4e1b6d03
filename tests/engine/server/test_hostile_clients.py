"""What a server must survive: broken requests, hang-ups at every stage, a tokenizer of another model."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving_kit import HTTP, PATIENCE_SECONDS, Server, make_model, serving, wait_until

VOCABULARY = 120
"""Smaller than the tokenizer's: "y" and "z" are tokens that the model does not have."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("hostile")
    model = make_model(directory / "model", vocab_size=VOCABULARY, eos_token_id=0)
    with serving(model, directory / "log", "--served-model-name", "tiny") as running:
        yield running
        assert "Traceback" not in running.log


def post(server: Server, path: str, body: bytes | dict[str, Any]) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return HTTP.post(f"{server.url}{path}", content=content)


def test_a_token_that_the_model_lacks_is_refused(server: Server) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "xyz"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),  # <|im_start|>
    ):
        response = post(server, path, body)
        assert response.status_code == 400
        assert "the server's tokenizer is not the model's" in response.json()["error"]["message"]
    assert post(server, "/v1/completions", {"prompt": "abc", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "\xed\xa0\x80", "messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        b'{"model": "\xed\xa0\x80", "prompt": "a", "tokens": [1]}',
        b'{"temperature": 1' + b"0" * 400 + b', "prompt": 1, "tokens": 1}',
        b'{"chat_template_kwargs": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b', "prompt": 1}',
    ],
    ids=["surrogate", "surrogate-model", "huge", "deep"],
)
def test_a_broken_body_is_the_clients_fault(server: Server, path: str, body: bytes) -> None:
    response = post(server, path, body)
    assert 400 <= response.status_code < 500
    assert response.json()["error"]["message"]


def test_long_inputs_are_converted_in_a_thread(server: Server) -> None:
    tokens = post(server, "/tokenize", {"prompt": "abc" * 10_000, "return_token_strs": True}).json()
    assert (tokens["count"], tokens["token_strs"][:3]) == (30_000, ["a", "b", "c"])
    text = post(server, "/detokenize", {"tokens": tokens["tokens"]}).json()["prompt"]
    assert text == "abc" * 10_000


def wire(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def hang_up(server: Server, seed: int) -> None:
    """Send a request, or the beginning of one, read some of the answer or none, and go."""
    chooser = random.Random(seed)
    request = wire(
        {
            "prompt": "abc",
            "max_tokens": 1500,
            "ignore_eos": True,
            "n": chooser.randint(1, 4),
            "stream": chooser.random() < 0.5,
        }
    )
    stage = seed % 4
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as connection:
        connection.sendall(request[: chooser.randrange(1, len(request))] if stage == 0 else request)
        if stage == 2:
            connection.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                connection.recv(5000)
        if stage == 3:  # a reset instead of a farewell
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def open_files(server: Server) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files in /proc")
def test_a_storm_of_hang_ups_leaves_nothing(server: Server) -> None:
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    assert post(server, "/v1/completions", {"prompt": "abc", "max_tokens": 1}).status_code == 200
    before = open_files(server)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda seed: hang_up(server, seed), range(200)))
    server.wait_for(lambda metrics: all(metrics[gauge] == 0 for gauge in gauges), "everything is freed")
    wait_until(lambda: open_files(server) <= before, "every connection is closed")
    assert post(server, "/v1/completions", {"prompt": "abc", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=["tls", "length", "chunk", "http2"],
)
def test_what_is_no_http_is_told_so(server: Server, data: bytes) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as connection:
        connection.sendall(data)
        assert connection.recv(1000).startswith(b"HTTP/1.1 400 ")
