"""Prompts and conversations from files: ShareGPT-format JSON, and JSON lines of prompts or chats.

The turns of a conversation are sent one after another, ``think`` seconds after the answer before has ended.
Each brings the history as it was recorded, so that what is sent does not depend on what the server said, and
one seed is one load.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.plan.arrivals import Arrival
from loadgen.plan.workload import PlannedRequest, Schedule, WorkloadError, mode_of, schedule_hash, warm

CHARS_PER_TOKEN = 4
"""English text, most tokenisers. A guess, for text that comes without its number of tokens."""
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_DEFAULT_OUTPUT = 128


class DatasetError(WorkloadError):
    """A file of prompts cannot be read; the message says where, what and the fix."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: everything said before it, and how many tokens are to be answered."""

    messages: tuple[tuple[str, str], ...] | None
    prompt: str | None
    output_tokens: int


@dataclass(frozen=True)
class Dataset:
    """Conversations; a lone prompt is one of one turn."""

    name: str
    conversations: tuple[tuple[Turn, ...], ...]
    guessed: bool = False
    """Lengths of answers were guessed from their characters."""

    def schedule(
        self,
        *,
        seed: int,
        arrival: Arrival,
        num_requests: int | None = None,
        duration: float | None = None,
        max_concurrency: int | None = None,
        output_len: int | None = None,
        think: float = 0.0,
        natural_stop: bool = False,
        shuffle: bool = True,
    ) -> Schedule:
        """``num_requests`` conversations (all of them by default) that begin as ``arrival`` says.

        Drawn without replacement; when all were used, anew. ``output_len`` replaces the recorded lengths.
        ``think`` is the mean pause in seconds before a further turn, exponentially distributed.
        ``natural_stop`` lets the model end an answer early. Raises DatasetError, ArrivalError.
        """
        if not (math.isfinite(think) and think >= 0):
            raise DatasetError(f"a think time of {think} s: it must not be negative")
        order_rng, times_rng, think_rng = np.random.default_rng(seed).spawn(3)
        if num_requests is None and (duration is None or arrival.concurrency is not None):
            num_requests = len(self.conversations)
        times = arrival.times(times_rng, num_requests=num_requests, duration=duration)
        if len(times) == 0:
            raise DatasetError(
                f"{arrival.description} for {duration:g} s gives no request; raise one of them"
            )
        requests: list[PlannedRequest] = []
        for begin, which in zip(times, self._order(len(times), order_rng, shuffle), strict=True):
            for place, turn in enumerate(self.conversations[which]):
                requests.append(
                    PlannedRequest(
                        index=len(requests),
                        cls="first turn" if place == 0 else "later turns",
                        intended=float(begin),
                        prompt_token_ids=None,
                        prompt=turn.prompt,
                        max_tokens=output_len or turn.output_tokens,
                        ignore_eos=not natural_stop,
                        messages=turn.messages,
                        follows=len(requests) - 1 if place else None,
                        think=float(think_rng.exponential(think)) if place and think else 0.0,
                    )
                )
        mode, cap = mode_of(arrival, max_concurrency)
        return Schedule(
            requests=tuple(requests),
            warmup=(warm(replace(requests[0], index=-1)),),
            mode=mode,
            concurrency=cap,
            duration=duration,
            sha256=schedule_hash(requests, mode, cap, duration),
            description=f"{self.name}: {len(times)} conversations, {len(requests)} requests"
            + (f", think time {think:g} s" if think else "")
            + (
                f", answers guessed at {CHARS_PER_TOKEN} characters per token"
                * (self.guessed and not output_len)
            )
            + f"; {arrival.description}; seed {seed}",
            seed=seed,
        )

    def _order(self, count: int, rng: np.random.Generator, shuffle: bool) -> Iterator[int]:
        size = len(self.conversations)
        for start in range(0, count, size):
            once = rng.permutation(size) if shuffle else range(size)
            yield from (int(i) for i in once[: count - start])


def read_dataset(path: Path) -> Dataset:
    """ShareGPT-format JSON (a list of ``{"conversations": [{"from", "value"}]}``), or JSON lines of
    ``{"prompt"}`` or ``{"messages": [{"role", "content"}]}``, each with ``output_tokens`` if known.

    Raises DatasetError, which names file and line (in a list: the item).
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise DatasetError(f"cannot read the dataset {path}: {reason}") from None
    reader = _Reader()
    conversations = tuple(reader.conversation(where, item) for where, item in _items(path, text))
    conversations = tuple(turns for turns in conversations if turns)
    if not conversations:
        raise DatasetError(f"{path}: no prompt in it")
    return Dataset(path.name, conversations, reader.guessed)


def _items(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """(where, item): of a JSON list, or of JSON lines."""
    if text.lstrip().startswith("["):
        try:
            items = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise DatasetError(f"{path}: no JSON ({error})") from None
        yield from ((f"{path}, item {number}", item) for number, item in enumerate(items))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield f"{path}, line {number}", json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            at = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            raise DatasetError(f"{path}, line {number}{at}: no JSON; write one object per line") from None


class _Reader:
    """Makes turns of what was recorded."""

    def __init__(self) -> None:
        self.guessed = False

    def conversation(self, where: str, item: Any) -> tuple[Turn, ...]:
        if not isinstance(item, dict):
            raise DatasetError(f"{where}: no JSON object")
        if isinstance(item.get("prompt"), str):
            if not item["prompt"]:
                raise DatasetError(f"{where}, key 'prompt': empty")
            return (Turn(None, item["prompt"], self._length(where, item, item.get("completion"))),)
        for key, names in (("messages", ("role", "content")), ("conversations", ("from", "value"))):
            if key in item:
                return self._turns(where, item, _messages(f"{where}, key {key!r}", item[key], *names))
        raise DatasetError(f"{where}: it has none of the keys prompt, messages, conversations")

    def _turns(self, where: str, item: dict[str, Any], said: Sequence[tuple[str, str]]) -> tuple[Turn, ...]:
        """A turn for every message of the user; the assistant's after it says how long the answer was."""
        turns = []
        for place, (role, _) in enumerate(said):
            if role == "user":
                answer = (
                    said[place + 1][1]
                    if place + 1 < len(said) and said[place + 1][0] == "assistant"
                    else None
                )
                turns.append(Turn(tuple(said[: place + 1]), None, self._length(where, item, answer)))
        return tuple(turns)

    def _length(self, where: str, item: dict[str, Any], answer: Any) -> int:
        known = item.get("output_tokens")
        if known is not None:
            if isinstance(known, bool) or not isinstance(known, int) or known < 1:
                raise DatasetError(f"{where}, key 'output_tokens': {known!r} is no positive whole number")
            return known
        if not isinstance(answer, str) or not answer:
            return _DEFAULT_OUTPUT
        self.guessed = True
        return math.ceil(len(answer) / CHARS_PER_TOKEN)


def _messages(where: str, value: Any, role_key: str, text_key: str) -> list[tuple[str, str]]:
    if not isinstance(value, list):
        raise DatasetError(f"{where}: no list of messages")
    said = []
    for number, message in enumerate(value):
        role = message.get(role_key) if isinstance(message, dict) else None
        text = message.get(text_key) if isinstance(message, dict) else None
        if role not in _ROLES or not isinstance(text, str):
            raise DatasetError(
                f"{where}, message {number}: needs {role_key!r} (one of {', '.join(_ROLES)}) and a text "
                f"in {text_key!r}"
            )
        said.append((_ROLES[role], text))
    return said
