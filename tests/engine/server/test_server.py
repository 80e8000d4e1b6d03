"""The HTTP API of a running server: a tiny model of random weights, the official client."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from serving_kit import EOS, HTTP, Server, make_model, serving, wait_until

MODEL = "tiny"
CONTEXT = 16_384
PROMPT = "It was a bright cold day in April"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("server")
    model = make_model(directory / "model", max_position_embeddings=CONTEXT)
    with serving(model, directory / "log", "--served-model-name", MODEL, "--seed", "3") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(server: Server, **body: Any) -> dict[str, Any]:
    response = HTTP.post(f"{server.url}/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events(server: Server, path: str, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, which must end with [DONE]."""
    response = HTTP.post(f"{server.url}{path}", json={**body, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *data, done = re.findall(r"^data: (.*)$", response.text, re.MULTILINE)
    assert done == "[DONE]"
    return [json.loads(item) for item in data]


def settled_metrics(server: Server) -> dict[str, float]:
    """Metrics, once nothing runs."""
    server.wait_for(lambda m: m["vllm:num_requests_running"] == 0 == m["vllm:kv_cache_usage_perc"], "idle")
    return server.metrics()


# ---------------------------------------------------------------- completions


def test_completion_whole_and_streamed_agree(server: Server, client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**request, extra_body={"ignore_eos": True})
    assert whole.object == "text_completion"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (
        33,
        12,
        45,
    )
    assert whole.choices[0].finish_reason == "length"
    stream = client.completions.create(
        **request, stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert len(chunks) == 12
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 11 + ["length"]
    assert last.choices == []
    assert last.usage == whole.usage


def test_token_ids_as_prompt(server: Server) -> None:
    ids = [ord(letter) for letter in PROMPT]
    common = {"max_tokens": 6, "temperature": 0, "return_token_ids": True}
    as_text, as_ids = (complete(server, prompt=prompt, **common) for prompt in (PROMPT, ids))
    assert as_ids["choices"] == as_text["choices"]
    assert as_ids["choices"][0]["prompt_token_ids"] == ids
    many = complete(server, prompt=[ids, ids[:5]], **common)
    assert [choice["index"] for choice in many["choices"]] == [0, 1]
    assert many["choices"][0]["text"] == as_text["choices"][0]["text"]
    assert many["choices"][1]["prompt_token_ids"] == ids[:5]
    assert many["usage"]["prompt_tokens"] == len(ids) + 5


def test_n_choices_of_several_prompts(server: Server) -> None:
    before = settled_metrics(server)
    body = {"prompt": ["one", "two"], "n": 3, "max_tokens": 8, "seed": 5, "ignore_eos": True}
    answer = complete(server, **body)
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert len(set(texts)) == 6
    assert answer["usage"] == {"prompt_tokens": 6, "total_tokens": 6 + 48, "completion_tokens": 48}
    streamed = [""] * 6
    for event in events(server, "/v1/completions", **body):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == texts
    after = settled_metrics(server)
    assert after["vllm:request_params_n_sum"] - before["vllm:request_params_n_sum"] == 2 * (3 + 3)
    assert after["vllm:request_params_n_count"] - before["vllm:request_params_n_count"] == 4


def test_a_seed_repeats_and_another_does_not(server: Server) -> None:
    texts = [
        complete(server, prompt=PROMPT, max_tokens=10, seed=seed, ignore_eos=True)["choices"][0]["text"]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_logprobs(server: Server, client: openai.OpenAI) -> None:
    whole = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=5, temperature=0, logprobs=2, extra_body={"ignore_eos": True}
    )
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert "".join(logprobs.tokens) == whole.choices[0].text
    assert logprobs.text_offset == [0, 1, 2, 3, 4]
    for token, value, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert value == max(top.values()) == top[token]  # greedy
        assert len(top) == 2
        assert -math.inf < value < 0
    chunks = events(
        server, "/v1/completions", prompt=PROMPT, max_tokens=5, temperature=0, logprobs=2, ignore_eos=True
    )
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0], [1], [2], [3], [4]]
    assert [chunk["choices"][0]["logprobs"]["tokens"][0] for chunk in chunks] == logprobs.tokens


def test_stop_strings_across_chunks(server: Server) -> None:
    common = {"prompt": PROMPT, "max_tokens": 300, "seed": 7, "ignore_eos": True}
    text = complete(server, **common)["choices"][0]["text"]
    stop = text[9:13]  # four tokens, so four chunks
    start = text.index(stop)
    before = settled_metrics(server)
    for include, expected in ((False, text[:start]), (True, text[: start + 4])):
        body = {**common, "stop": [stop, "never there"], "include_stop_str_in_output": include}
        choice = complete(server, **body)["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (expected, "stop", stop)
        chunks = [event["choices"][0] for event in events(server, "/v1/completions", **body)]
        assert "".join(chunk["text"] for chunk in chunks) == expected
        assert (chunks[-1]["finish_reason"], chunks[-1]["stop_reason"]) == ("stop", stop)
    after = settled_metrics(server)
    name = 'vllm:request_success_total{finished_reason="stop"}'
    assert after[name] - before[name] == 4


def test_min_tokens_holds_for_stop_strings(server: Server) -> None:
    common = {"prompt": PROMPT, "max_tokens": 40, "seed": 7, "min_tokens": 30}
    text = complete(server, **common)["choices"][0]["text"]
    stop = text[9:13]
    assert text.count(stop) == 1
    assert complete(server, **common, stop=stop)["choices"][0]["text"] == text


def test_stop_token_ids_and_eos(server: Server) -> None:
    common = {"prompt": PROMPT, "max_tokens": 30, "seed": 7, "return_token_ids": True, "ignore_eos": True}
    free = complete(server, **common)["choices"][0]
    stop_id = free["token_ids"][4]
    first = free["token_ids"].index(stop_id)
    stopped = complete(server, **common, stop_token_ids=[stop_id])["choices"][0]
    assert stopped["token_ids"] == free["token_ids"][: first + 1]
    assert stopped["text"] == free["text"][:first]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop_id)
    kept = complete(server, **common, stop_token_ids=[stop_id], include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == free["text"][: first + 1]


def test_eos_is_silent_and_can_be_ignored(server: Server) -> None:
    """Sampled at random, EOS comes sooner or later; the seeds are fixed, so always at the same place."""
    common = {"prompt": PROMPT, "max_tokens": 200, "temperature": 2.0, "return_token_ids": True}
    answers = complete(server, **common, n=8, seed=1)["choices"]
    ended = [choice for choice in answers if choice["finish_reason"] == "stop"]
    assert ended
    for choice in ended:
        assert choice["token_ids"][-1] == EOS
        assert EOS not in choice["token_ids"][:-1]
        assert "<|endoftext|>" not in choice["text"]
    ignored = complete(server, **common, n=8, seed=1, ignore_eos=True)["choices"]
    assert {choice["finish_reason"] for choice in ignored} == {"length"}


# ---------------------------------------------------------------- chat


def test_chat_whole_and_streamed_agree(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 6,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**request)
    assert whole.choices[0].message.role == "assistant"
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    letters = len(re.sub(r"<\|\w+\|>", "X", prompt))
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == letters
    first, *rest = client.chat.completions.create(**request, stream=True)
    assert first.choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in rest) == whole.choices[0].message.content
    assert rest[-1].choices[0].finish_reason == "length"


def test_chat_logprobs(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=3,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        extra_body={"ignore_eos": True},
    )
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == whole.choices[0].message.content
    for entry in logprobs.content:
        assert entry.bytes == list(entry.token.encode())
        assert entry.top_logprobs[0].token == entry.token
        assert len(entry.top_logprobs) == 2


# ---------------------------------------------------------------- the rest of the API


def test_models_version_health(server: Server, client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert (card.id, card.object) == (MODEL, "model")
    assert card.model_dump()["max_model_len"] == CONTEXT
    assert client.models.retrieve(MODEL) == card
    assert set(HTTP.get(f"{server.url}/version").json()) == {"version", "engine"}
    health = HTTP.get(f"{server.url}/health")
    assert (health.status_code, health.content) == (200, b"")


def test_tokenize_and_back(server: Server) -> None:
    answer = HTTP.post(f"{server.url}/tokenize", json={"prompt": "hey", "return_token_strs": True}).json()
    assert answer == {
        "count": 3,
        "max_model_len": CONTEXT,
        "tokens": [104, 101, 121],
        "token_strs": list("hey"),
    }
    assert HTTP.post(f"{server.url}/detokenize", json={"tokens": [104, EOS]}).json() == {
        "prompt": "h<|endoftext|>"
    }
    chat = HTTP.post(f"{server.url}/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert chat["count"] == 21


def test_metrics_count_what_was_served(server: Server) -> None:
    before = settled_metrics(server)
    complete(server, prompt="abc" * 20, max_tokens=7, ignore_eos=True)
    after = settled_metrics(server)

    def gained(name: str) -> float:
        return after[f"vllm:{name}"] - before[f"vllm:{name}"]

    assert gained("prompt_tokens_total") == 60
    assert gained("generation_tokens_total") == 7
    assert gained("time_to_first_token_seconds_count") == 1
    assert gained("inter_token_latency_seconds_count") == 6
    assert gained('request_success_total{finished_reason="length"}') == 1
    info = next(name for name in after if name.startswith("vllm:cache_config_info"))
    assert 'block_size="16"' in info
    blocks = int(re.search(r'num_gpu_blocks="(\d+)"', info)[1])
    assert f'kv_cache_size_tokens="{(blocks - 1) * 16}"' in info


def test_unknown_fields_are_told_once(server: Server) -> None:
    for _ in range(2):
        complete(server, prompt="a", max_tokens=1, never_heard_of=1)
    assert server.log.count("ignored: never_heard_of") == 1
    complete(server, **{"prompt": "a", "max_tokens": 1, "\n\x1b[31mfake": 1})
    assert r"ignored: \n\x1b[31mfake" in server.log


def test_logs_in_vllms_manner(server: Server) -> None:
    head = r"\(APIServer pid=\d+\) INFO \d\d-\d\d [\d:]+ \[server.py:\d+\] "
    assert re.search(head + r"non-default args: \{.*'max_num_seqs': 16", server.log)
    assert re.search(r"KV cache: [\d,]+ tokens .*, max concurrency [\d.]+x", server.log)
    size = rf"KV cache size: [\d,]+ tokens, Maximum concurrency for {CONTEXT:,} tokens per request: [\d.]+x"
    assert re.search(size, server.log)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        (b"{", 400, None, "not valid JSON"),
        (b'{"prompt":"a","model":"other"}', 404, "model", "`other` does not exist"),
        (b'{"prompt":"a","model":"tiny","max_tokens":-1}', 400, "max_tokens", "at least 1, got -1"),
        (b'{"prompt":[131]}', 400, "prompt", "out of vocabulary (0 to 130)"),
        (b'{"prompt":""}', 400, "prompt", "the prompt is empty"),
        (b'{"prompt":"a","priority":1}', 400, "priority", "--scheduling-policy priority"),
        (
            json.dumps({"prompt": "a" * CONTEXT}).encode(),
            400,
            "prompt",
            f"maximum context length is {CONTEXT}",
        ),
        (json.dumps({"prompt": "a" * 30_000}).encode(), 400, "prompt", "has 30000 tokens"),
    ],
)
def test_refusals_in_openais_shape(
    server: Server, body: bytes, status: int, param: str | None, words: str
) -> None:
    response = HTTP.post(f"{server.url}/v1/completions", content=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, status, param)
    assert words in error["message"]
    assert error["type"] == {400: "BadRequestError", 404: "NotFoundError"}[status]
    assert complete(server, prompt="a", max_tokens=1)  # it serves on


def test_the_client_sees_its_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="temperature must be a number in") as caught:
        client.completions.create(model=MODEL, prompt="a", temperature=-1)
    assert caught.value.param == "temperature"


def test_unknown_paths_and_methods(server: Server) -> None:
    for response, status in (
        (HTTP.get(f"{server.url}/v1/nothing"), 404),
        (HTTP.get(f"{server.url}/v1/completions"), 405),
    ):
        assert response.status_code == status
        assert response.json()["error"]["code"] == status


def resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/status") as stream:
        return int(re.search(r"VmHWM:\s+(\d+)", stream.read())[1]) * 1024


def test_a_body_of_50_megabytes_is_refused_and_not_kept(server: Server) -> None:
    before = resident_bytes(server.process.pid)
    body = b'{"prompt":"' + b"a" * 50_000_000 + b'"}'
    response = HTTP.post(f"{server.url}/v1/completions", content=body)
    assert response.status_code == 413
    assert "exceeds 16 MiB" in response.json()["error"]["message"]
    chunked = HTTP.post(f"{server.url}/v1/completions", content=(b"a" * 1_000_000 for _ in range(50)))
    assert chunked.status_code == 413
    assert resident_bytes(server.process.pid) - before < 40_000_000
    assert complete(server, prompt="a", max_tokens=1)


def test_http_answers_while_the_engine_does_not(server: Server) -> None:
    """As in a step that takes for ever: health and metrics answer, and what was asked of the engine waits."""
    done = threading.Event()

    def ask() -> None:
        HTTP.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 1})
        done.set()

    request = threading.Thread(target=ask)
    os.kill(server.engine_pid, signal.SIGSTOP)
    try:
        request.start()
        for _ in range(5):
            assert HTTP.get(f"{server.url}/health").status_code == 200
            assert "vllm:num_requests_running" in HTTP.get(f"{server.url}/metrics").text
        assert not done.is_set()
    finally:
        os.kill(server.engine_pid, signal.SIGCONT)
    request.join()


# ---------------------------------------------------------------- hang-ups


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_blocks(server: Server, stream: bool) -> None:
    before = settled_metrics(server)
    body = {"prompt": PROMPT, "max_tokens": 16_000, "ignore_eos": True, "stream": stream, "n": 2}
    payload = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(payload)}\r\n\r\n"
        connection.sendall(head.encode() + payload)
        if stream:
            assert b"200 OK" in connection.recv(4096)
        server.wait_for(lambda m: m["vllm:num_requests_running"] == 2, "two sequences run")
    after = settled_metrics(server)
    finished = [name for name in after if name.startswith("vllm:request_success_total")]
    assert {name: after[name] - before[name] for name in finished} == dict.fromkeys(finished, 0)
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] < 32_000
    assert complete(server, prompt="a", max_tokens=1)


def test_odd_sampling_parameters_leave_the_engine_alive(server: Server) -> None:
    odd: dict[str, list[Any]] = {
        "temperature": [0, 1e-300, 1e-4, 1000],
        "top_k": [-1, 1, 2**62],
        "top_p": [1e-300, 1e-9],
        "min_p": [1e-300, 1],
        "seed": [-(2**63), 2**63 - 1],
        "repetition_penalty": [0.01, 100],
        "presence_penalty": [-2, 2],
        "frequency_penalty": [-2, 2],
        "logprobs": [0, 20],
        "stop_token_ids": [[2**62], list(range(130))],
        "min_tokens": [1, 6],
        "prompt": [[0], [128, 129, 130], [5] * 100],
        "n": [1, 3],
        "skip_special_tokens": [False],
    }
    chooser = random.Random(1)

    bodies = [
        {name: chooser.choice(values) for name, values in odd.items() if chooser.random() < 0.5}
        for _ in range(100)
    ]

    def ask(body: dict[str, Any]) -> int:
        body = {"prompt": "a", "max_tokens": 6, **body}
        return HTTP.post(f"{server.url}/v1/completions", json=body).status_code

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, bodies)) == {200}
    settled_metrics(server)


def test_many_at_once(server: Server) -> None:
    """More streams than max_num_seqs, whole and streamed mixed: each gets what it would get alone."""
    bodies = [{"prompt": f"prompt {i}", "max_tokens": 20, "seed": i, "ignore_eos": True} for i in range(40)]

    def ask(i: int) -> str:
        if i % 2:
            return str(complete(server, **bodies[i])["choices"][0]["text"])
        return "".join(
            event["choices"][0]["text"] for event in events(server, "/v1/completions", **bodies[i])
        )

    with ThreadPoolExecutor(40) as pool:
        together = list(pool.map(ask, range(40)))
    assert together[:6] == [ask(i) for i in range(6)]
    assert all(len(text) <= 20 for text in together)
    settled_metrics(server)


def test_exchanges_are_counted_by_path_and_what_only_watches_is_not(server: Server) -> None:
    """As by prometheus-fastapi-instrumentator, with which vLLM counts them."""

    def counted() -> dict[str, float]:
        lines = HTTP.get(f"{server.url}/metrics").text.splitlines()
        return {
            name: float(value) for name, value in (x.rsplit(" ", 1) for x in lines if x.startswith("http_"))
        }

    before = counted()
    complete(server, prompt="ab", max_tokens=2)
    events(server, "/v1/completions", prompt="ab", max_tokens=2)
    HTTP.post(f"{server.url}/v1/completions", json={"prompt": "a", "temperature": -1})
    HTTP.get(f"{server.url}/nowhere")
    HTTP.get(f"{server.url}/health")
    every = "http_request_duration_highr_seconds_count"
    wait_until(lambda: counted()[every] - before.get(every, 0) == 4, "all are counted")
    after = counted()
    grown = {name: value - before.get(name, 0) for name, value in after.items() if "_total" in name}
    path = 'handler="/v1/completions",method="POST"'
    assert {name: count for name, count in grown.items() if count} == {
        f'http_requests_total{{{path},status="2xx"}}': 2,
        f'http_requests_total{{{path},status="4xx"}}': 1,
        'http_requests_total{handler="none",method="GET",status="4xx"}': 1,
    }
    name = f"http_request_duration_seconds_count{{{path}}}"
    assert after[name] - before.get(name, 0) == 3
    assert (
        after["http_request_duration_highr_seconds_count"]
        - before.get("http_request_duration_highr_seconds_count", 0)
        == 4
    )
