"""From passing traffic to a trace that can be replayed: times, lengths, shared prefixes, settings. No text.

Which prompts begin alike is told by numbers that stand for their blocks. A block's number is the order in
which it was first seen, looked up by a keyed hash whose key is made anew for each recording and never
written: from the trace nothing of the text can be found, not even by guessing it.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from loadgen.plan.datasets import CHARS_PER_TOKEN
from loadgen.plan.trace_formats import SAMPLING, SCHEMA
from loadgen.plan.traces import class_of
from loadgen.recording.proxy import Passage
from loadgen.wire.http1 import MalformedMessage, Response, decode
from loadgen.wire.stream import read_stream
from servers.files import write_atomically

PATHS = ("/v1/completions", "/v1/chat/completions")
BLOCK_TOKENS = 16
"""Of text, this many times CHARS_PER_TOKEN characters, whatever answers with usage say, so that blocks are
the same for every client."""


class Prefixes:
    """Numbers for the blocks of prompts: equal for equal blocks after equal beginnings."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._numbers: dict[bytes, int] = {}

    def of_tokens(self, tokens: Sequence[int]) -> list[int]:
        return self._of(
            [json.dumps(tokens[i : i + BLOCK_TOKENS]).encode() for i in _starts(tokens, BLOCK_TOKENS)]
        )

    def of_text(self, text: str) -> list[int]:
        size = BLOCK_TOKENS * CHARS_PER_TOKEN
        return self._of([text[i : i + size].encode("utf-8", "surrogatepass") for i in _starts(text, size)])

    def _of(self, blocks: Sequence[bytes]) -> list[int]:
        numbers, parent = [], b""
        for block in blocks:
            parent = hashlib.blake2b(parent + block, key=self._key, digest_size=16).digest()
            numbers.append(self._numbers.setdefault(parent, len(self._numbers)))
        return numbers


def _starts(items: Sequence[Any], size: int) -> range:
    return range(0, len(items), size)


@dataclass
class Tally:
    """What was seen; ``estimated`` prompts were text whose server sent no usage."""

    recorded: int = 0
    estimated: int = 0
    uncounted: int = 0
    """Answers whose server sent no usage: recorded with a token for each chunk that has text, which is too
    few where one carries several, or holds back half a character."""
    cut: int = 0
    """Answers that one side broke off; recorded with the tokens that came."""
    failed: int = 0
    """Requests that the server refused, or that were no requests: not recorded."""
    ratios: list[float] = field(default_factory=list)
    """Characters per token, of the prompts with usage."""


class Recorder:
    """Turns passages into the rows of a trace, in a thread of its own.

    Rows are appended to ``path`` with ``.partial`` behind it as they come, so that a killed recording loses
    none; :meth:`close` puts them in order of time and gives the file its name. Raises OSError.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._partial = path, path.with_name(path.name + ".partial")
        self.tally = Tally()
        self._prefixes = Prefixes()
        self._rows: list[dict[str, Any]] = []
        self._queue: SimpleQueue[Passage | None] = SimpleQueue()
        self._first_ns: int | None = None
        self._error: OSError | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._partial.open("x", encoding="utf-8")
        self._append({"schema": SCHEMA, "block_tokens": BLOCK_TOKENS})
        self._thread = threading.Thread(target=self._work, name="recorder", daemon=True)
        self._thread.start()

    def observe(self, passage: Passage) -> None:
        """Put aside; returns at once."""
        if passage.method == "POST" and passage.path.partition("?")[0] in PATHS:
            self._queue.put(passage)

    def close(self) -> None:
        """Write the trace whole. Without a single request there is none."""
        self._queue.put(None)
        self._thread.join()
        self._file.close()
        if self._error is not None:
            raise self._error
        if self._rows:
            rows = sorted(self._rows, key=lambda row: row["at"])
            start = rows[0]["at"]
            head = {"schema": SCHEMA, "block_tokens": BLOCK_TOKENS}
            lines = [head, *({**row, "at": round(row["at"] - start, 6)} for row in rows)]
            write_atomically(self.path, (json.dumps(line) + "\n" for line in lines))
        self._partial.unlink()

    def _work(self) -> None:
        while (passage := self._queue.get()) is not None:
            try:
                for row in self._rows_of(passage):
                    self._rows.append(row)
                    self._append(row)
                    self.tally.recorded += 1
            except OSError as error:
                self._error = error

    def _append(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def _rows_of(self, passage: Passage) -> Iterator[dict[str, Any]]:
        body = _object(passage.body)
        response = _response(passage)
        if body is None or response is None or response.status != 200:
            self.tally.failed += 1
            return
        usage, output = _answer(response)
        if output == 0 and not passage.complete:
            output = 1  # hung up before the first token: the server had worked on it all the same
        self.tally.cut += not passage.complete
        self.tally.uncounted += usage.get("completion_tokens") is None
        prompts = _prompts(body)
        if not prompts or output < 1:
            self.tally.failed += 1
            return
        if self._first_ns is None:
            self._first_ns = passage.at_ns
        choices = min(_choices(body), max(1, output // len(prompts)))
        for prompt in prompts:
            tokens = self._length(prompt, usage.get("prompt_tokens") if len(prompts) == 1 else None)
            blocks = (
                self._prefixes.of_text(prompt)
                if isinstance(prompt, str)
                else self._prefixes.of_tokens(prompt)
            )
            row = {
                "at": (passage.at_ns - self._first_ns) / 1e9,
                "prompt_tokens": tokens,
                "output_tokens": math.ceil(output / (len(prompts) * choices)),
                "class": class_of(tokens),
                "blocks": blocks[: -(-tokens // BLOCK_TOKENS)],
                "sampling": _sampling(body),
            }
            yield from [row] * choices  # each is a sequence of its own in the engine

    def _length(self, prompt: str | list[int], counted: Any) -> int:
        """Tokens of a prompt: counted by the server, given, or estimated from its characters."""
        if isinstance(counted, int) and not isinstance(counted, bool) and counted > 0:
            if isinstance(prompt, str):
                self.tally.ratios.append(len(prompt) / counted)
            return counted
        if not isinstance(prompt, str):
            return len(prompt)
        self.tally.estimated += 1
        ratios = self.tally.ratios
        return max(1, round(len(prompt) / (sum(ratios) / len(ratios) if ratios else CHARS_PER_TOKEN)))


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _response(passage: Passage) -> Response | None:
    try:
        return decode(passage.parts, passage.stamps) if passage.parts else None
    except MalformedMessage:
        return None


def _answer(response: Response) -> tuple[Mapping[str, Any], int]:
    """(usage, output tokens): counted by the server, else chunks with content."""
    if "text/event-stream" in response.headers.get("content-type", ""):
        stream = read_stream(response)
        usage, chunks = stream.usage, sum(delta.chars > 0 for delta in stream.deltas)
    else:
        body = _object(response.body) or {}
        found = body.get("usage")
        usage, chunks = (found if isinstance(found, dict) else {}), 0
    counted = usage.get("completion_tokens")
    return usage, counted if isinstance(counted, int) and not isinstance(counted, bool) else chunks


def _prompts(body: Mapping[str, Any]) -> list[str | list[int]]:
    """Each prompt of a request, a chat as one text. Empty where there is none that can be read."""
    messages, prompt = body.get("messages"), body.get("prompt")
    if isinstance(messages, list):
        text = "".join(_said(message) for message in messages)
        return [text] if text else []
    if isinstance(prompt, str):
        return [prompt] if prompt else []
    if not isinstance(prompt, list) or not prompt:
        return []
    if all(isinstance(token, int) for token in prompt):
        return [prompt]
    return [item for item in prompt if item and isinstance(item, str | list)]


def _choices(body: Mapping[str, Any]) -> int:
    """Answers that are asked for each prompt."""
    n = body.get("n")
    return n if isinstance(n, int) and not isinstance(n, bool) and n > 1 else 1


def _said(message: Any) -> str:
    """Role and text of a message; of several parts, the texts."""
    if not isinstance(message, dict):
        return ""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return f"{message.get('role', '')}\n{content or ''}\n"


def _sampling(body: Mapping[str, Any]) -> dict[str, float]:
    given = {name: body.get(name) for name in SAMPLING}
    return {
        name: value
        for name, value in given.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
