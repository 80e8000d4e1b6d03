"""What vLLM's users expect beside completions: names, cached tokens in usage, the cache's reset, the load."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving_kit import HTTP, Server, make_model, serving, wait_until

from engine.llm import LLM
from engine.request import SamplingParams
from loadgen.measure.stats import elsewhere
from loadgen.plan.arrivals import ClosedLoop
from loadgen.plan.workload import preset
from loadgen.wire.client import ClientOptions, run_schedule
from servers.connection import Connection

KEY = {"authorization": "Bearer key"}
PROMPT = "x" * 64


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("extras")
    flags = ["--served-model-name", "first", "second", "--enable-prompt-tokens-details", "--api-key", "key"]
    flags += ["--enable-per-request-metrics"]
    with serving(make_model(directory / "model"), directory / "log", *flags) as running:
        yield running


def post(server: Server, path: str, body: Any = None, headers: dict[str, str] = KEY) -> httpx.Response:
    return HTTP.post(f"{server.url}{path}", json=body, headers=headers)


def usage(server: Server, **body: Any) -> dict[str, Any]:
    asked = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, **body}
    response = post(server, "/v1/completions", asked)
    assert response.status_code == 200, response.text
    return response.json()["usage"]


def test_every_name_is_the_model(server: Server) -> None:
    listed = HTTP.get(f"{server.url}/v1/models", headers=KEY).json()["data"]
    assert [card["id"] for card in listed] == ["first", "second"]
    assert {card["root"] for card in listed} == {listed[0]["root"]}
    for name in ("first", "second"):
        assert HTTP.get(f"{server.url}/v1/models/{name}", headers=KEY).json()["id"] == name
        answer = post(server, "/v1/completions", {"prompt": "x", "model": name, "max_tokens": 1}).json()
        assert answer["model"] == "first"
    assert post(server, "/v1/completions", {"prompt": "x", "model": "third"}).status_code == 404


def test_usage_tells_cached_tokens_until_the_cache_is_reset(server: Server) -> None:
    assert post(server, "/reset_prefix_cache").json() == {"success": True}
    assert usage(server)["prompt_tokens_details"] == {"cached_tokens": 0}
    assert usage(server)["prompt_tokens_details"] == {"cached_tokens": 48}  # the last token is computed
    assert usage(server, n=2)["prompt_tokens_details"] == {"cached_tokens": 48}
    two = usage(server, prompt=[PROMPT, "y" * 40])
    assert (two["prompt_tokens"], two["prompt_tokens_details"]) == (104, {"cached_tokens": 48})
    assert post(server, "/reset_prefix_cache").json() == {"success": True}
    assert usage(server)["prompt_tokens_details"] == {"cached_tokens": 0}


def test_streams_tell_them_in_their_last_chunk(server: Server) -> None:
    usage(server)
    body = {
        "prompt": PROMPT,
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text = post(server, "/v1/completions", body).text
    assert text.count('"prompt_tokens_details":{"cached_tokens":48}') == 1


TIMES = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"}


def test_an_answer_tells_how_long_the_engine_took_for_it(server: Server) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}
    times = post(server, "/v1/completions", asked).json()["metrics"]
    assert set(times) == TIMES
    assert times["mean_itl_ms"] == pytest.approx(times["generation_time_ms"] / 3)
    inference = times["time_to_first_token_ms"] + times["generation_time_ms"]
    assert times["tokens_per_second"] == pytest.approx(1e3 * 4 / inference)
    streamed = {**asked, "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}
    text = post(server, "/v1/completions", streamed).text
    last = json.loads(text.strip().split("\n\n")[-2].removeprefix("data: "))
    assert set(last["metrics"]) == TIMES - {"mean_itl_ms"}
    assert text.count('"metrics"') == 1
    several = post(server, "/v1/completions", {**asked, "n": 2}).json()
    assert "metrics" not in several


def test_the_load_generator_reads_those_times(server: Server) -> None:
    plan = preset("random", max_model_len=256, vocab_size=64, input_len=20, output_len=4)
    schedule = plan.schedule(seed=1, arrival=ClosedLoop(2), num_requests=6, warmup=0)
    run = run_schedule(
        server.url,
        schedule,
        model="first",
        connection=Connection(api_key="key"),
        options=ClientOptions(workers=0),
    )
    assert all(r.ok and r.server_queue is not None and r.server_prefill is not None for r in run.requests)
    parts = [elsewhere(r) for r in run.requests]
    assert all(part > 0 for part in parts)


def test_the_cache_is_not_reset_under_a_running_request(server: Server) -> None:
    body = {"prompt": PROMPT, "n": 40, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with HTTP.stream("POST", f"{server.url}/v1/completions", json=body, headers=KEY) as stream:
        lines = stream.iter_lines()  # kept: the stream is closed with it
        assert next(lines).startswith("data: ")
        assert HTTP.get(f"{server.url}/load").json()["server_load"] > 0
        assert post(server, "/reset_prefix_cache").json() == {"success": False}
    server.wait_for(lambda metrics: metrics["vllm:kv_cache_usage_perc"] == 0, "the request is gone")
    wait_until(lambda: HTTP.get(f"{server.url}/load").json() == {"server_load": 0}, "no request is served")
    assert post(server, "/reset_prefix_cache").json() == {"success": True}


def test_what_the_reset_refuses(server: Server) -> None:
    assert post(server, "/reset_prefix_cache", headers={}).status_code == 401
    response = post(server, "/reset_prefix_cache?reset_running_requests=true")
    assert response.status_code == 400
    assert "not supported" in response.text


def test_ping_is_health(server: Server) -> None:
    assert HTTP.get(f"{server.url}/ping").status_code == 200
    assert post(server, "/ping", headers={}).status_code == 200


def test_offline_the_cache_is_reset_too(tmp_path: Any) -> None:
    llm = LLM(str(make_model(tmp_path)), load_format="dummy")
    ask = SamplingParams(max_tokens=1)
    cached = [llm.generate([PROMPT], ask)[0].num_cached_tokens for _ in range(2)]
    assert llm.reset_prefix_cache()
    cached.append(llm.generate([PROMPT], ask)[0].num_cached_tokens)
    assert cached == [0, 48, 0]
