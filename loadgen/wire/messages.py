"""What crosses between the client and the process that does its I/O: a plan in, stamps and bytes out."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from enum import StrEnum

from servers.connection import Tls


class End(StrEnum):
    """How an exchange ended, as seen on the wire."""

    COMPLETE = "complete"
    CLOSED = "closed"
    RESET = "reset"
    TIMEOUT = "timeout"
    REFUSED = "refused"
    CONNECT_TIMEOUT = "connect_timeout"
    TLS = "tls"
    MALFORMED = "malformed"
    UNFINISHED = "unfinished"
    """Still going when the time for the drain was over."""
    CANCELLED = "cancelled"
    """Still going when the run was interrupted."""
    SKIPPED = "skipped"
    """Never sent: the turn before it failed."""


@dataclass(frozen=True, slots=True)
class WireRequest:
    """One message to send ``offset_ns`` after the start (closed loop: when a slot is free)."""

    index: int
    offset_ns: int
    payload: bytes
    follows: int | None = None
    """The request after whose answer this one is sent, ``offset_ns`` later."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address that answered; the name that its certificate is for, None without TLS."""

    address: str
    port: int
    server_name: str | None = None
    tls: Tls = field(default_factory=Tls)

    def tls_context(self) -> ssl.SSLContext | None:
        """Raises OptionError for certificates that cannot be used."""
        return None if self.server_name is None else self.tls.context()


@dataclass(frozen=True, slots=True)
class WirePlan:
    """What one client process does. Times in ns."""

    endpoint: Endpoint
    requests: tuple[WireRequest, ...]
    """In order of time; those that follow another stand in ``turns``."""
    closed: bool
    concurrency: int | None
    duration_ns: int | None
    """Closed loop: no new request after this."""
    timeout_ns: int
    """For one request, from sending to its last byte."""
    connect_timeout_ns: int
    drain_ns: int
    """How long to wait for answers after the last request was sent (or the duration ended)."""
    turns: tuple[WireRequest, ...] = ()
    """Later turns of conversations. A closed loop's slot stays with its conversation; with a duration, turns
    that are due after it are not sent."""


@dataclass(slots=True, eq=False)
class Exchange:
    """One request's life on the wire: stamps and raw bytes."""

    index: int
    intended_ns: int
    sent_ns: int = 0
    ended_ns: int = 0
    end: End = End.CANCELLED
    detail: str = ""
    retried: bool = False
    stamps: list[int] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class WireLog:
    """What one client process saw. ``lags_ns``: how late each 10 ms heartbeat was, ``lag_at_ns`` when
    it was due."""

    start_ns: int
    stop_ns: int = 0
    last_due_ns: int = 0
    exchanges: list[Exchange] = field(default_factory=list)
    lags_ns: list[int] = field(default_factory=list)
    lag_at_ns: list[int] = field(default_factory=list)
    cpu_s: float = 0.0
    loop: str = ""
    interrupted: bool = False
    exhausted: bool = False
    """A closed loop ran out of planned requests before its duration ended."""
