"""Adapters over HTTP: chosen by the name of the model, listed, counted, in one batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serving_kit import HTTP, Server, make_model, serving
from tiny_adapters import save_adapter

from engine.llm import LLM
from engine.lora_config import LoRAModule
from engine.request import SamplingParams

NAMES = ("m", "sql", "chat")
PROMPT = "x" * 40


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapters")
    model = make_model(directory / "model")
    for seed, name in enumerate(NAMES[1:]):
        save_adapter(directory / name, model, seed=seed)
    return directory


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[Server]:
    flags = ["--served-model-name", "m", "--enable-lora", "--lora-modules", f"sql={home / 'sql'}"]
    flags += [json.dumps({"name": "chat", "path": str(home / "chat"), "base_model_name": "base"})]
    with serving(home / "model", home / "log", *flags, "--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="module")
def texts(home: Path) -> dict[str, str]:
    """What the engine says without a server, by the name of the model."""
    modules = tuple(LoRAModule(name, str(home / name)) for name in NAMES[1:])
    llm = LLM(
        str(home / "model"),
        load_format="dummy",
        dtype="float32",
        device_memory=256 << 20,
        enable_lora=True,
        lora_modules=modules,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    done = llm.generate([PROMPT] * 3, sampling, lora_names=["", *NAMES[1:]])
    return dict(zip(NAMES, (completion.text for completion in done), strict=True))


def complete(server: Server, model: str | None, **body: Any) -> dict[str, Any]:
    asked = {"model": model, "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True, **body}
    response = HTTP.post(f"{server.url}/v1/completions", json=asked)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_the_model_of_a_request_chooses_the_adapter(server: Server, texts: dict[str, str]) -> None:
    assert len(set(texts.values())) == 3
    with ThreadPoolExecutor(9) as pool:  # together, on one slot
        answers = list(pool.map(lambda name: complete(server, name), NAMES * 3))
    for name, answer in zip(NAMES * 3, answers, strict=True):
        assert (answer["model"], answer["choices"][0]["text"]) == (name, texts[name])
    assert complete(server, None)["choices"][0]["text"] == texts["m"]


def test_chats_and_streams_too(server: Server) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0}
    said = {}
    for name in NAMES:
        answer = HTTP.post(f"{server.url}/v1/chat/completions", json={**chat, "model": name}).json()
        assert answer["model"] == name
        said[name] = answer["choices"][0]["message"]["content"]
    assert len(set(said.values())) == 3
    body = {"model": "sql", "prompt": PROMPT, "max_tokens": 2, "stream": True}
    text = HTTP.post(f"{server.url}/v1/completions", json=body).text
    assert text.count('"model":"sql"') >= 2


def test_adapters_are_listed_beside_the_model(server: Server, home: Path) -> None:
    cards = HTTP.get(f"{server.url}/v1/models").json()["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        ("m", str(home / "model"), None),
        ("sql", str(home / "sql"), "m"),
        ("chat", str(home / "chat"), "base"),
    ]
    assert HTTP.get(f"{server.url}/v1/models/sql").json()["parent"] == "m"


def test_an_unknown_name_is_answered_with_those_that_there_are(server: Server) -> None:
    response = HTTP.post(f"{server.url}/v1/completions", json={"model": "none", "prompt": "x"})
    assert response.status_code == 404
    assert "`none` does not exist; this server has `m`, `sql`, `chat`" in response.text


def test_the_metrics_tell_of_adapters(server: Server) -> None:
    complete(server, "chat")
    label = 'running_lora_adapters="",waiting_lora_adapters=""'
    server.wait_for(
        lambda found: f'vllm:lora_requests_info{{max_lora="1",{label}}}' in found, "no adapter is in use"
    )
    text = HTTP.get(f"{server.url}/metrics").text
    assert 'running_lora_adapters="chat",waiting_lora_adapters=""' in text
