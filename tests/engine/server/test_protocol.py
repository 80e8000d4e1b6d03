"""Request bodies: what is taken, what is refused, and with which words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.server.json_body import RequestError, parse_json
from engine.server.protocol import ChatRequest, CompletionRequest

CONFIG = EngineConfig(max_model_len=100)


def completion(**body: Any) -> CompletionRequest:
    return CompletionRequest.parse({"prompt": "x", **body}, CONFIG)


def chat(**body: Any) -> ChatRequest:
    return ChatRequest.parse({"messages": [{"role": "user", "content": "x"}], **body}, CONFIG)


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("text", ("text",)),
        ("", ("",)),
        (["one", "two"], ("one", "two")),
        ([1, 2, 3], ((1, 2, 3),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
)
def test_four_forms_of_prompts(prompt: object, parsed: tuple[object, ...]) -> None:
    assert completion(prompt=prompt).prompts == parsed


def test_every_sampling_parameter_arrives() -> None:
    given = {
        "min_tokens": 2,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 11,
        "repetition_penalty": 1.2,
        "presence_penalty": -1.0,
        "frequency_penalty": 2.0,
        "ignore_eos": True,
        "logprobs": 3,
    }
    generation = completion(**given, stop="end", stop_token_ids=[5], max_tokens=9, n=2).generation
    sampling = generation.sampling_for(10, 100, 16)
    assert {name: getattr(sampling, name) for name in given} == given
    assert (sampling.stop, sampling.stop_token_ids, sampling.max_tokens) == (("end",), (5,), 9)
    assert generation.body.n == 2


def test_null_is_absent() -> None:
    names = ("max_tokens", "temperature", "stop", "seed", "n", "logprobs", "stream", "stream_options", "user")
    assert completion(**dict.fromkeys(names)).generation == completion().generation


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": 5}, "prompt", "must be a string"),
        ({"prompt": []}, "prompt", "must be a string"),
        ({"prompt": [[]]}, "prompt", "must be a string"),
        ({"prompt": [1, "a"]}, "prompt", "must be a string"),
        ({"prompt": [-1]}, "prompt", "must be a string"),
        ({"prompt": [True]}, "prompt", "must be a string"),
        ({"max_tokens": -1}, "max_tokens", "must be an integer of at least 1, got -1"),
        ({"max_tokens": 0}, "max_tokens", "must be an integer of at least 1, got 0"),
        ({"max_tokens": "5"}, "max_tokens", 'must be an integer of at least 1, got "5"'),
        ({"max_tokens": 5.5}, "max_tokens", "must be an integer of at least 1, got 5.5"),
        ({"max_tokens": True}, "max_tokens", "must be an integer of at least 1, got true"),
        ({"temperature": -0.1}, "temperature", "must be a number in [0, 1000], got -0.1"),
        ({"temperature": float("nan")}, "temperature", "must be a number in [0, 1000], got NaN"),
        (
            {"temperature": 10**400},
            "temperature",
            "must be a number in [0, 1000], got 1000000000000000000000000000000000000000...",
        ),
        ({"temperature": "hot"}, "temperature", 'must be a number in [0, 1000], got "hot"'),
        ({"top_p": 0}, "top_p", "must be a number in (0, 1]"),
        ({"top_k": -2}, "top_k", "an integer of at least -1"),
        ({"min_p": 1.1}, "min_p", "must be a number in [0, 1]"),
        ({"repetition_penalty": 0}, "repetition_penalty", "must be a number in [0.01, 100]"),
        ({"presence_penalty": 3}, "presence_penalty", "must be a number in [-2, 2]"),
        ({"logprobs": 21}, "logprobs", "must be an integer of 0 to 20"),
        ({"n": 0}, "n", "must be an integer of 1 to 2048"),
        ({"prompt": ["x"] * 1025, "n": 2}, "n", "must not exceed 2048"),
        ({"seed": 1 << 63}, "seed", "must be below 2**63, got 9223372036854775808"),
        ({"stop": [""]}, "stop[0]", 'must be a non-empty string, got ""'),
        ({"stop": 4}, "stop", "non-empty string"),
        ({"stop": ["x"] * 257}, "stop", "at most 256 of them, got a list of 257"),
        (
            {"stop_token_ids": [1] * 4097},
            "stop_token_ids",
            "at most 4096 token ids, got a list of 4097",
        ),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]", 'must be a token id, got "a"'),
        ({"stream": "yes"}, "stream", "must be true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream to be true"),
        ({"stream": True, "stream_options": []}, "stream_options", "must be an object"),
        (
            {"stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
            "true or false",
        ),
        ({"priority": 1}, "priority", "--scheduling-policy priority"),
        ({"echo": True}, "echo", "not supported"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"best_of": 3}, "best_of", "not supported"),
        ({"guided_json": {}}, "guided_json", "send structured_outputs: {json: ...} instead"),
    ],
)
def test_refusals_name_field_value_and_rule(body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        completion(**body)
    assert caught.value.param == param
    assert words in caught.value.message
    assert caught.value.status == 400


def test_fields_that_change_nothing_are_taken() -> None:
    assert completion(echo=False, suffix=None, best_of=1, response_format={"type": "text"}, user="u")
    assert completion(surprise=1, another=2).generation.unknown == ("another", "surprise")
    assert len(completion(**{f"name{i}": 1 for i in range(100)}).generation.unknown) == 20


def test_priority_with_the_policy() -> None:
    config = EngineConfig(scheduling_policy="priority")
    assert CompletionRequest.parse({"prompt": "x", "priority": -3}, config).generation.body.priority == -3


def test_room_for_prompt_and_output() -> None:
    generation = completion().generation
    assert generation.sampling_for(10, 100, 16).max_tokens == 16
    assert generation.sampling_for(90, 100, 16).max_tokens == 10
    assert generation.sampling_for(10, 100, None).max_tokens == 90
    with pytest.raises(RequestError, match=r"maximum context length is 100 tokens.*at least 1 token"):
        generation.sampling_for(100, 100, 16)
    with pytest.raises(RequestError, match="you requested 91 tokens of output and the prompt has 10 tokens"):
        completion(max_tokens=91).generation.sampling_for(10, 100, 16)
    with pytest.raises(RequestError, match=r"min_tokens must not exceed max_tokens \(16\), got 20"):
        completion(min_tokens=20).generation.sampling_for(10, 100, 16)


def test_chat_has_its_own_limits_and_logprobs() -> None:
    assert chat(max_tokens=5).generation.max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=7).generation.max_tokens == 7
    assert chat().generation.max_tokens is None
    assert chat(logprobs=True).generation.sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).generation.sampling.logprobs == 4
    assert chat().generation.sampling.logprobs is None
    with pytest.raises(RequestError, match="needs logprobs"):
        chat(top_logprobs=4)


def test_chat_content_may_come_in_text_parts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0]["content"] == "one\ntwo"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, "non-empty list"),
        ([], "non-empty list"),
        (["hi"], "messages[0] must be an object with a role"),
        ([{"content": "hi"}], "messages[0] must be an object with a role"),
        ([{"role": "user", "content": 5}], "messages[0].content must be a string"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "only text parts"),
    ],
)
def test_messages_that_are_none(messages: object, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(messages=messages)
    assert words in caught.value.message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"\xff",
        b"[" * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a":"\\ud800"}',
        b'{"a":"\xed\xa0\x80"}',  # half of a pair, in the UTF-8 that it does not have
        '{"a":"\\ud800"}'.encode("utf-16"),
    ],
)
def test_bodies_that_are_no_json_object(body: bytes) -> None:
    with pytest.raises(RequestError):
        parse_json(body)


def test_escaped_pairs_are_text() -> None:
    assert parse_json(b'\xef\xbb\xbf{"prompt": "a"}') == {"prompt": "a"}
    assert parse_json(json.dumps({"prompt": "\U0001f600"}).encode()) == {"prompt": "\U0001f600"}
