"""Events as servers write them, and as none should: one reading of both."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loadgen.wire.stream import Stream, _Event, _event, _take, _unusual, _usual


def taken(event: _Event | None) -> tuple[Stream, int, object]:
    assert event is not None
    stream = Stream()
    return stream, _take(event, 5, stream, 1), event.error


USUAL: list[dict[str, Any]] = [
    {"id": "x", "choices": [{"index": 0, "text": "a", "finish_reason": None, "logprobs": {"tokens": ["a"]}}]},
    {"choices": [{"text": "", "finish_reason": "length", "token_ids": [1, 2]}], "usage": None},
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"role": None, "reasoning_content": "hm"}, "finish_reason": "stop"}]},
    {"choices": [{"delta": {"reasoning": "hm", "tool_calls": [{"function": {"arguments": "{}"}}]}}]},
    {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4, "x": [1.5]}},
    {"choices": None, "metrics": {"queue_time_ms": 1.25}},
    {"error": {"message": "no"}},
    {},
]


@pytest.mark.parametrize("body", USUAL, ids=str)
def test_the_quick_reader_and_the_lenient_one_agree(body: dict[str, Any]) -> None:
    assert taken(_usual.decode(json.dumps(body))) == taken(_unusual(body))


ODD: dict[str, dict[str, Any]] = {
    '{"choices": [null]}': {},
    '{"choices": {}, "usage": []}': {},
    '{"choices": [{"delta": {"content": ["x"]}, "finish_reason": 5}]}': {
        "choices": [{"delta": {}, "finish_reason": "5"}]
    },
    '{"choices": [{"text": "a", "delta": 5}, 7], "metrics": 1}': {"choices": [{"text": "a"}]},
    '{"choices": [{"text": "a", "token_ids": 5}], "usage": {"a": 1e999}}': {
        "choices": [{"text": "a"}],
        "usage": {"a": float("inf")},
    },
}


@pytest.mark.parametrize("text", ODD)
def test_what_is_of_use_in_an_odd_event_is_read(text: str) -> None:
    assert taken(_event(text.encode())) == taken(_unusual(ODD[text]))


@pytest.mark.parametrize("text", ["", "{oops", "5", "[]", "null", '{"a": 1} x', '"\\ud800"'])
def test_what_is_no_object_is_no_event(text: str) -> None:
    assert _event(text.encode()) is None
