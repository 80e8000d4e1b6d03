"""Readers of datasets: ShareGPT-format JSON, JSON lines of prompts or chats, and OpenAI batch files.

A row that cannot be sent is left out, counted and named in the report; one odd conversation of 90,000 does
not refuse the others. A message goes out as recorded, with its parts, calls of tools and their results.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from loadgen.plan.datasets import CHARS_PER_TOKEN, Dataset, DatasetError, Turn
from loadgen.plan.trace_formats import SAMPLING
from loadgen.plan.workload import Message

_ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "claude", "model", "bot"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "function_response", "tool_response", "observation"), "tool"),
    **dict.fromkeys(("system", "developer"), "system"),
}
"""The names of ShareGPT's files and their descendants (LLaMA-Factory's sharegpt format, OpenAssistant,
Gemini), by what they are for a chat."""
_ASKS = ("user", "tool")
"""What an assistant answers."""
_CHATS = ("messages", "conversations", "conversation")
_SENT = ("name", "tool_calls", "tool_call_id", "function_call")
"""What OpenAI's API takes in a message beside its role and content."""
_KEYS = (("role", "from"), ("content", "value"))
_DEFAULT_OUTPUT = 128
_MOST_REASONS = 3


class _Unsendable(Exception):
    """A row cannot be sent; the reason is the same for rows of a kind."""


def read_dataset(path: Path) -> Dataset:
    """ShareGPT-format JSON (a list of ``{"conversations": [{"from", "value"}]}``), or JSON lines of
    ``{"prompt"}`` or ``{"messages": [{"role", "content"}]}``, each with ``output_tokens`` if known, or an
    OpenAI batch file, whose lines hold such a request as their ``body``.

    Raises DatasetError where the file cannot be read or none of its rows can be sent; it names the first.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise DatasetError(f"cannot read the dataset {path}: {reason}") from None
    reader, conversations = _Reader(), []
    total, left_out, first = 0, Counter[str](), dict[str, str]()
    for place, item in _items(path, text):
        total += 1
        try:
            conversations.append(reader.conversation(item))
        except _Unsendable as error:
            left_out[str(error)] += 1
            first.setdefault(str(error), place)
    reasons = [
        f"{count} x {reason} (first: {first[reason]})"
        for reason, count in left_out.most_common(_MOST_REASONS)
    ] + ["others"] * (len(left_out) > _MOST_REASONS)
    if not conversations:
        raise DatasetError(f"{path}: no prompt in it" + "".join(f"; {reason}" for reason in reasons))
    notes = [f"{left_out.total()} of {total} rows left out: {', '.join(reasons)}"] * bool(left_out)
    if reader.limits:
        notes.append(f"{reader.limits} answers as long as the recorded limit of tokens allows")
    return Dataset(path.name, tuple(conversations), reader.guessed, tuple(notes))


def _items(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """(place, item): of a JSON list, or of JSON lines, where None stands for a line that is no JSON."""
    if text.lstrip().startswith("["):
        try:
            items = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise DatasetError(f"{path}: no JSON ({error})") from None
        yield from ((f"item {number}", item) for number, item in enumerate(items))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except (json.JSONDecodeError, RecursionError):
                yield f"line {number}", None


class _Reader:
    """Makes turns of what was recorded."""

    def __init__(self) -> None:
        self.guessed = False
        self.limits = 0
        """Answers whose length is a limit that was set, not a length that was measured."""

    def conversation(self, item: Any) -> tuple[Turn, ...]:
        """Its turns, at least one. Raises _Unsendable."""
        if not isinstance(item, dict):
            raise _Unsendable("no JSON object")
        body = item.get("body")
        if isinstance(body, dict):
            return (self._request(body),)
        if isinstance(item.get("response"), dict):
            raise _Unsendable("an answer of a batch, not a request")
        if "prompt" in item:
            return (self._prompt(item),)
        return self._turns(item, _said(item))

    def _prompt(self, item: Mapping[str, Any]) -> Turn:
        prompt = item["prompt"]
        if not isinstance(prompt, str) or not prompt:
            raise _Unsendable("key 'prompt': empty" if prompt in ("", None) else "key 'prompt': no text")
        return Turn(None, prompt, self._length(item, item.get("completion")), _settings(item))

    def _request(self, body: Mapping[str, Any]) -> Turn:
        """One request of a batch, whose earlier messages are only its history."""
        if "prompt" in body:
            return self._prompt(body)
        return Turn(tuple(_said(body)), None, self._length(body, None), _settings(body))

    def _turns(self, item: Mapping[str, Any], said: Sequence[Message]) -> tuple[Turn, ...]:
        """A turn wherever an assistant was to answer; what it said says how long the answer was."""
        turns = []
        for place, message in enumerate(said):
            after = said[place + 1] if place + 1 < len(said) else None
            if message.role in _ASKS and (after is None or after.role not in _ASKS):
                answer = after.text if after and after.role == "assistant" else None
                length = self._length(item, answer)
                turns.append(Turn(tuple(said[: place + 1]), None, length, _settings(item)))
        if not turns:
            raise _Unsendable("no message of a user in it")
        return tuple(turns)

    def _length(self, item: Mapping[str, Any], answer: Any) -> int:
        known = item.get("output_tokens")
        if known is not None:
            return _positive("output_tokens", known)
        if isinstance(answer, str) and answer:
            self.guessed = True
            return math.ceil(len(answer) / CHARS_PER_TOKEN)
        for key in ("max_completion_tokens", "max_tokens"):
            if item.get(key) is not None:
                length = _positive(key, item[key])
                self.limits += 1
                return length
        return _DEFAULT_OUTPUT


def _positive(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _Unsendable(f"key {key!r}: no positive whole number")
    return value


def _settings(item: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Sampling of the request, and its tools: they are part of the prompt, but are not to be called."""
    settings = {
        name: item[name]
        for name in SAMPLING
        if isinstance(item.get(name), int | float) and not isinstance(item[name], bool)
    }
    if isinstance(item.get("tools"), list) and item["tools"]:
        settings |= {"tools": item["tools"], "tool_choice": "none"}
    return tuple(sorted(settings.items()))


def _said(item: Mapping[str, Any]) -> list[Message]:
    key = next((key for key in _CHATS if key in item), None)
    if key is None:
        raise _Unsendable(f"it has none of the keys prompt, {', '.join(_CHATS)}")
    if not isinstance(item[key], list):
        raise _Unsendable(f"key {key!r}: no list of messages")
    return [_message(message) for message in item[key]]


def _message(message: Any) -> Message:
    if not isinstance(message, dict):
        raise _Unsendable("a message that is no JSON object")
    name, content = (message.get(key, message.get(other)) for key, other in _KEYS)
    role = _ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise _Unsendable("a message without a role" if name is None else f"a message of role {_shown(name)}")
    more = {key: message[key] for key in _SENT if message.get(key)}
    called = [call.get("function", call) for call in _calls(more)]
    text = _text("" if content is None and called else content) + "".join(map(json.dumps, called))
    if isinstance(content, str) and not more:
        return Message(role, text)
    return Message(role, text, json.dumps({"role": role, "content": content} | more))


def _calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The calls of tools in a message, of either of OpenAI's kinds."""
    calls = message.get("tool_calls", [message["function_call"]] if "function_call" in message else [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise _Unsendable("calls of tools that are no list of objects")
    return calls


def _text(content: Any) -> str:
    """A message's text; of several parts, their texts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise _Unsendable("a message without a text")
    texts = [part.get("text", "") for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise _Unsendable("a part of a message whose text is none")
    return "".join(texts)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
