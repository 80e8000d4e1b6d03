"""OpenAI's response bodies and stream chunks. Chunks are cut from a template: one is made for every token."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from engine.metrics.stats import FinishedStats
from engine.server.frontend import Delta
from engine.server.protocol import Generation
from engine.step import TokenLogprobs
from engine.text.text_stream import TextPiece
from engine.text.tokenizer import Tokenizer

_dumps = json.JSONEncoder(separators=(",", ":")).encode
DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


@dataclass(slots=True)
class Usage:
    """Tokens of one HTTP request."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: dict[int, int] | None = None
    """By prompt, how many of its tokens came from the prefix cache; None: not reported."""

    def as_json(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
        }
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": sum(self.cached_tokens.values())}
        return usage


@dataclass(frozen=True, slots=True)
class Tells:
    """What an answer tells beyond OpenAI's fields."""

    cached_tokens: bool = False
    """Usage has the prompts' cached tokens (--enable-prompt-tokens-details)."""
    timing: bool = False
    """The answer to one sequence has the engine's times of it (--enable-per-request-metrics)."""


def timing_metrics(timing: FinishedStats | None) -> dict[str, float]:
    """vLLM's ``metrics`` of an answer, in ms and tokens/s: ``time_to_first_token_ms`` begins when the request
    is first scheduled, ``generation_time_ms`` is the decode interval. Empty where the engine did not tell."""
    if timing is None:
        return {}
    metrics = {
        "time_to_first_token_ms": 1e3 * timing.prefill,
        "generation_time_ms": 1e3 * timing.decode,
        "queue_time_ms": 1e3 * timing.queue,
    }
    if timing.generation_tokens > 1:
        metrics["mean_itl_ms"] = 1e3 * timing.time_per_output_token
    if timing.inference > 0:
        metrics["tokens_per_second"] = timing.generation_tokens / timing.inference
    return metrics


@dataclass(slots=True)
class Choice:
    """One choice of an answer that is given whole."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, piece: TextPiece) -> None:
        self.text.append(piece.text)
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason


class Writer(ABC):
    """Formats the answer to one HTTP request; subclasses know their endpoint's shapes."""

    prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_name: ClassVar[str]

    def __init__(
        self,
        request_id: str,
        model: str,
        tokenizer: Tokenizer,
        generation: Generation,
        prompts: Sequence[list[int]],
        tells: Tells,
    ) -> None:
        self._id = f"{self.prefix}-{request_id}"
        self._model, self._tokenizer, self._body, self._prompts = model, tokenizer, generation.body, prompts
        self._created = int(time.time())
        self.usage = Usage(sum(map(len, prompts)), cached_tokens={} if tells.cached_tokens else None)
        self._timed = tells.timing and len(prompts) * generation.body.n == 1
        self._timing: FinishedStats | None = None
        self._opened: set[int] = set()
        head = {"id": self._id, "object": self.chunk_name, "created": self._created, "model": model}
        self._head = f'data: {_dumps(head)[:-1]},"choices":'

    def note(self, delta: Delta) -> None:
        """What the last chunk should know of a delta: prefix hits, of the first sequence of each prompt, and
        the engine's times."""
        self._timing = delta.timing or self._timing
        if self.usage.cached_tokens is not None and delta.index % self._body.n == 0:
            self.usage.cached_tokens[delta.index] = delta.cached_tokens

    # ---------------------------------------------------------------- given piece by piece

    def chunks(self, deltas: Iterable[Delta]) -> bytes:
        """The events of one step."""
        return "".join(map(self._chunk, deltas)).encode()

    def last_chunks(self) -> bytes:
        """What follows when every choice is finished."""
        if not self._body.include_usage:
            return DONE
        metrics = f',"metrics":{_dumps(timing_metrics(self._timing))}' if self._timed else ""
        return f'{self._head}[],"usage":{_dumps(self.usage.as_json())}{metrics}}}\n\n'.encode() + DONE

    def _chunk(self, delta: Delta) -> str:
        index, piece = delta.index, delta.piece
        self.note(delta)
        self.usage.completion_tokens += len(piece.token_ids)
        opening = ""
        extra = f',"token_ids":{_dumps(piece.token_ids)}' if self._body.return_token_ids else ""
        if index not in self._opened:
            self._opened.add(index)
            opening = self._opening(index)
            if self._body.return_token_ids:
                extra += f',"prompt_token_ids":{_dumps(self._prompt_of(index))}'
        logprobs = _dumps(self._logprobs(index, piece.logprobs)) if piece.logprobs else "null"
        choice = (
            f'{{"index":{index},{self._content(piece.text)},"logprobs":{logprobs},'
            f'"finish_reason":{_dumps(piece.finish_reason)},'
            f'"stop_reason":{_dumps(piece.stop_reason)}{extra}}}'
        )
        return f"{opening}{self._event(choice)}"

    def _event(self, choice: str) -> str:
        usage = f',"usage":{_dumps(self.usage.as_json())}' if self._body.continuous_usage else ""
        return f"{self._head}[{choice}]{usage}}}\n\n"

    def _opening(self, index: int) -> str:
        """An event before a choice's first delta, if the endpoint has one."""
        return ""

    @abstractmethod
    def _content(self, text: str) -> str:
        """The member of a chunk's choice that holds the text."""

    # ---------------------------------------------------------------- given whole

    def body(self, choices: Sequence[Choice]) -> dict[str, Any]:
        self.usage.completion_tokens = sum(len(choice.token_ids) for choice in choices)
        return {
            "id": self._id,
            "object": self.object_name,
            "created": self._created,
            "model": self._model,
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": self.usage.as_json(),
            **({"metrics": timing_metrics(self._timing)} if self._timed else {}),
        }

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        if self._body.return_token_ids:
            extra = {"token_ids": choice.token_ids, "prompt_token_ids": self._prompt_of(index)}
        return {
            "index": index,
            **self._whole("".join(choice.text)),
            "logprobs": self._logprobs(index, choice.logprobs) if choice.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **extra,
        }

    @abstractmethod
    def _whole(self, text: str) -> dict[str, Any]:
        """The member of a choice that holds the whole text."""

    # ---------------------------------------------------------------- both

    @abstractmethod
    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The member of a choice that holds what each token's alternatives were worth."""

    def _token(self, token_id: int) -> str:
        if self._body.return_tokens_as_token_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)

    def _prompt_of(self, index: int) -> list[int]:
        return self._prompts[index // self._body.n]


class CompletionWriter(Writer):
    """``/v1/completions``."""

    prefix, object_name, chunk_name = "cmpl", "text_completion", "text_completion"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._offsets: dict[int, int] = {}

    def _content(self, text: str) -> str:
        return f'"text":{_dumps(text)}'

    def _whole(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Parallel lists; ``text_offset`` counts characters of the choice's text, also across chunks."""
        tokens = [self._token(entry.token_id) for entry in entries]
        offsets, offset = [], self._offsets.get(index, 0)
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[index] = offset
        return {
            "text_offset": offsets,
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "tokens": tokens,
            "top_logprobs": [
                {self._token(token_id): _finite(value) for token_id, value in _alternatives(entry)}
                for entry in entries
            ],
        }


class ChatWriter(Writer):
    """``/v1/chat/completions``."""

    prefix, object_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _opening(self, index: int) -> str:
        delta = '{"role":"assistant","content":""}'
        return self._event(f'{{"index":{index},"delta":{delta},"logprobs":null,"finish_reason":null}}')

    def _content(self, text: str) -> str:
        return f'"delta":{{"content":{_dumps(text)}}}'

    def _whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._entry(entry.token_id, entry.logprob),
                    "top_logprobs": [self._entry(token_id, value) for token_id, value in entry.top],
                }
                for entry in entries
            ]
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        token = self._token(token_id)
        return {"token": token, "logprob": _finite(logprob), "bytes": list(token.encode())}


def _alternatives(entry: TokenLogprobs) -> Iterable[tuple[int, float]]:
    """The most likely tokens, and the one that was chosen if it is none of them."""
    return {**dict(entry.top), entry.token_id: entry.logprob}.items()


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def error_body(message: str, kind: str, param: str | None, code: int) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
