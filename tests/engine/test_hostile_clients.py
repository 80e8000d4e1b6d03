"""What a server must survive: broken requests, hang-ups at every stage, a tokenizer of another model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving_kit import Server, make_model, serving

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
    return httpx.post(f"{server.url}{path}", content=content, timeout=60)


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
