"""What an OpenAI-compatible server streams: text, counts and errors of each event."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import msgspec

from loadgen.measure.record import Failure
from loadgen.wire.http1 import Response
from loadgen.wire.sse import events

_MOST_TOKENS = 1 << 31
"""A larger count is taken for none: what it stands for is no number of tokens."""
_MESSAGE_BYTES = 1 << 20
"""Of a body, where an error's message is looked for."""


class _Message(msgspec.Struct, gc=False):
    """What a chat's choice adds. ``role`` is UNSET where it has none."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None
    role: Any = msgspec.UNSET

    def text(self) -> str:
        """Generated text of any kind: content, reasoning, tool arguments."""
        text = (self.content or "") + (self.reasoning_content or "") + (self.reasoning or "")
        return text if not self.tool_calls else text + json.dumps(self.tool_calls)


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Message | None = None
    finish_reason: str | None = None
    token_ids: list[Any] | None = None


class _Event(msgspec.Struct, gc=False):
    """What is read of an event: the usual types, or nothing."""

    choices: list[_Choice] | None = None
    usage: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
    error: Any = None


_usual = msgspec.json.Decoder(_Event)


class Delta(msgspec.Struct, frozen=True, gc=False):
    """One event with a choice: how much text, and how many tokens where the server counts them."""

    at_ns: int
    chars: int
    tokens: int | None
    role_only: bool
    finished: bool


@dataclass(slots=True)
class Stream:
    """What a stream said."""

    deltas: list[Delta] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    """The engine's own times of the request, where it sends them."""
    failure: Failure | None = None
    detail: str = ""


def read_stream(response: Response) -> Stream:
    """Walk the events up to the first that ends or spoils the stream."""
    stream = Stream()
    counted = 0
    for data, at_ns in events(response.parts, response.stamps):
        if data == b"[DONE]":
            break
        try:
            event = _event(data)
            if event is None:
                if response.complete:  # else the connection ended inside this event
                    stream.failure, stream.detail = Failure.GARBAGE, f"not a JSON object: {data[:80]!r}"
                break
            if event.error is not None:
                stream.failure, stream.detail = Failure.IN_BAND_ERROR, error_message(data)
                break
            counted = _take(event, at_ns, stream, counted)
        except RecursionError:
            stream.failure, stream.detail = Failure.GARBAGE, f"nested too deeply: {data[:80]!r}"
            break
    return stream


def _event(data: bytes) -> _Event | None:
    """None for what is no JSON object. Raises RecursionError."""
    try:
        return _usual.decode(data)
    except msgspec.DecodeError:
        found = read_json(data)
        return _unusual(found) if isinstance(found, dict) else None


def _unusual(found: dict[str, Any]) -> _Event:
    """An event with other types than the usual ones, or with half a character: what is of use in it."""
    choices, error = found.get("choices"), found.get("error")
    first = choices[0] if isinstance(choices, list) and choices else None
    return _Event(
        [_unusual_choice(first)] if isinstance(first, dict) else None,
        _of(dict, found.get("usage")),
        _of(dict, found.get("metrics")),
        error,
    )


def _unusual_choice(found: dict[str, Any]) -> _Choice:
    finish, delta = found.get("finish_reason"), _of(dict, found.get("delta"))
    message = (
        None
        if delta is None
        else _Message(
            _of(str, delta.get("content")),
            _of(str, delta.get("reasoning_content")),
            _of(str, delta.get("reasoning")),
            delta.get("tool_calls"),
            delta.get("role", msgspec.UNSET),
        )
    )
    return _Choice(
        _of(str, found.get("text")),
        message,
        None if finish is None else str(finish),
        _of(list, found.get("token_ids")),
    )


def _of(kind: type, value: Any) -> Any:
    return value if isinstance(value, kind) else None


def _take(event: _Event, at_ns: int, stream: Stream, counted: int) -> int:
    """Add one event; returns the tokens that the server has counted so far."""
    if event.usage is not None:
        stream.usage = event.usage
    if event.metrics is not None:
        stream.metrics = event.metrics
    if not event.choices:
        return counted
    choice = event.choices[0]
    tokens = None
    if choice.token_ids is not None:
        tokens = len(choice.token_ids)
        counted += tokens
    elif event.usage is not None and (total := token_count(event.usage.get("completion_tokens"))) is not None:
        tokens, counted = total - counted, total
    if choice.finish_reason is not None:
        stream.finish_reason = choice.finish_reason
    text, delta = choice.text, choice.delta
    if text is None:
        text = "" if delta is None else delta.text()
    role_only = not text and delta is not None and delta.role is not msgspec.UNSET
    finished = choice.finish_reason is not None
    stream.deltas.append(Delta(at_ns, len(text), tokens, role_only, finished))
    return counted


def token_count(value: object) -> int | None:
    """None for what is no count of tokens."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 <= value < _MOST_TOKENS else None


def read_json(data: bytes) -> object:
    """None for what is no JSON. Half a character passes, and a number beyond any float."""
    try:
        # Given bytes, it guesses their encoding first.
        return json.loads(data.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return None


def error_message(body: bytes) -> str:
    """The server's own words, cut to a line."""
    body = body[:_MESSAGE_BYTES]
    parsed = read_json(body)
    error = parsed.get("error", parsed) if isinstance(parsed, dict) else None
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail")
    try:
        text = str(error) if error else ""
    except RecursionError:
        text = ""
    return " ".join((text or body.decode("utf-8", "replace")).split())[:300]
