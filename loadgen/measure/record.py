"""What was measured: one record per request, and the run around them. Saved as schema-versioned JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from loadgen.measure import saved
from servers.files import write_atomically

SCHEMA = "vtune.records/1"


class Failure(StrEnum):
    """Why a request does not count as a success."""

    REFUSED = "connection refused"
    CONNECT_TIMEOUT = "no connection"
    TLS = "TLS error"
    UNAUTHORIZED = "unauthorized"
    WRONG_PATH = "wrong path"
    RATE_LIMITED = "rate limited"
    UNAVAILABLE = "unavailable"
    HTTP_ERROR = "HTTP error"
    NO_ANSWER = "no answer"
    CLOSED = "closed without an answer"
    STALLED = "timed out mid-stream"
    CLOSED_MID_STREAM = "closed mid-stream"
    GARBAGE = "garbage"
    IN_BAND_ERROR = "error in the stream"
    NO_FINISH_REASON = "no finish reason"
    NO_TOKENS = "no tokens"
    TOKEN_COUNT = "wrong token count"
    UNFINISHED = "unfinished"
    SKIPPED = "turn before failed"
    CANCELLED = "cancelled"
    """The run was interrupted: neither a success nor a failure of the server, left out of the figures."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request. Times are integer nanoseconds after the start of the run."""

    index: int
    cls: str
    intended: int
    sent: int | None
    """When the bytes were written; None: never."""
    end: int
    """Last byte, or the moment the failure was noticed."""
    chunk_at: tuple[int, ...] = ()
    """Arrival of each chunk that carries tokens."""
    chunk_tokens: tuple[float, ...] = ()
    """Tokens in each; they add up to completion_tokens."""
    failure: Failure | None = None
    detail: str = ""
    status: int | None = None
    retry_after: float | None = None
    """Seconds, from the server's Retry-After."""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    """From the server's usage, as completion_tokens and cached_tokens are."""
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    planned_prompt: int | None = None
    max_tokens: int = 0
    retried: bool = False
    """Sent again because the server had closed the kept-alive connection."""
    server_queue: float | None = None
    """Seconds between the engine's queue and its first step on the request, where the server tells
    (vLLM's --enable-per-request-metrics); so is server_prefill, from there to the first token."""
    server_prefill: float | None = None

    def __post_init__(self) -> None:
        if len(self.chunk_at) != len(self.chunk_tokens):
            raise ValueError(f"{len(self.chunk_at)} chunks, but {len(self.chunk_tokens)} counts of tokens")

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def tokens(self) -> float:
        """Output tokens delivered."""
        return sum(self.chunk_tokens)


@dataclass(frozen=True)
class ClientStats:
    """How the client itself fared. Seconds; lags are of the 10 ms heartbeat."""

    loop: str
    workers: int
    cpu: float
    wall: float
    reads: int
    """Pieces that arrived, over all requests."""
    lag_p50: float
    lag_p99: float
    lag_max: float
    stalls: tuple[tuple[float, float], ...] = ()
    """(when, how long) of the heartbeats that were more than 20 ms late, seconds after the start."""
    lag_p95: float = 0.0


@dataclass(frozen=True)
class Records:
    """A whole run. ``window``: (start, end) of the measured part, seconds after the start."""

    schedule_sha256: str
    schedule: str
    mode: str
    concurrency: int | None
    planned: int
    requests: tuple[RequestRecord, ...]
    window: tuple[float, float]
    client: ClientStats
    environment: Mapping[str, Any]
    start_unix_ms: int
    """Wall clock of the start: a label, never subtracted from."""
    seed: int | None = None
    partial: bool = False
    """The run was interrupted."""
    warmup_failures: tuple[str, ...] = ()
    steady: bool = True
    """The window is a steady part of the run; False: the run was too short and the window is all of it."""
    verdict: str = ""
    """A key of ``run_validity.VERDICT_WORDS``."""
    reasons: tuple[str, ...] = ()
    scrapes: tuple[tuple[int, str], ...] = field(default=(), repr=False)
    """(unix ms, text of /metrics), where the target was scraped."""

    @property
    def classes(self) -> tuple[str, ...]:
        """In order of first appearance."""
        return tuple(dict.fromkeys(record.cls for record in self.requests))

    def in_window(self, cls: str | None = None) -> list[RequestRecord]:
        """The requests that count: intended inside the window and not cancelled."""
        low, high = (round(edge * 1e9) for edge in self.window)
        return [
            record
            for record in self.requests
            if low <= record.intended <= high
            and record.failure is not Failure.CANCELLED
            and (cls is None or record.cls == cls)
        ]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON; the file appears whole or not at all."""
        write_atomically(Path(path), [_json(self.to_json()), "\n"])

    def save_requests(self, path: str | os.PathLike[str]) -> None:
        """Write one JSON object per line and request (JSONL)."""
        write_atomically(Path(path), (_json(_request_json(record)) + "\n" for record in self.requests))

    def to_json(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("requests", "client")}
        return {
            "schema": SCHEMA,
            **plain,
            "client": asdict(self.client),
            "requests": [_request_json(record) for record in self.requests],
        }

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Records:
        """Raises SavedFileError."""
        return saved.read(
            cls,
            Path(path),
            SCHEMA,
            if_missing="give a file written by `vtune bench run`",
            if_unusable="measure again",
        )


def _request_json(record: RequestRecord) -> dict[str, Any]:
    """Without the fields that hold their default: a run has thousands of these."""
    return {f.name: value for f in fields(record) if (value := getattr(record, f.name)) != f.default}


def _json(plain: dict[str, Any]) -> str:
    try:
        return msgspec.json.encode(plain).decode()
    except UnicodeEncodeError:  # half a character: names of files and models can have one
        return json.dumps(plain, ensure_ascii=False).encode("utf-8", "replace").decode()
