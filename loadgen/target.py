"""What can be measured: something that is opened with a config and run with a schedule."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from servers.errors import UserError

if TYPE_CHECKING:
    from loadgen.measure.record import Records
    from loadgen.plan.workload import Schedule
    from servers.flags.offered_flags import OfferedFlags

CLIENT_KILLED = "client_killed"
ENVIRONMENTAL = frozenset(
    {
        "not_found",
        "model_not_found",
        "port_taken",
        "log",
        "disk_full",
        "unreachable",
        "unauthorized",
        "not_restartable",
        CLIENT_KILLED,
    }
)
"""Reasons that say nothing about the config: the machine or the set-up is at fault."""


class TargetFailed(UserError):
    """A target that could not be opened or did not last.

    ``reason`` is one word to count by: out_of_memory, kv_cache_too_small, bad_flag, model_not_found,
    port_taken, not_found (the program), disk_full, killed, exited, timeout (never healthy), hangs
    (healthy, but the first request gets no answer), unhealthy (the first request fails), unauthorized (it
    asks for a key), unreachable, not_restartable, client_killed (what sends the load, not the server).
    ``detail`` is a sentence for people;
    ``log_tail`` the last lines of the server's log, "" where there is none.
    """

    def __init__(self, reason: str, detail: str, log_tail: str = "", log_path: Path | None = None) -> None:
        self.reason, self.detail, self.log_tail, self.log_path = reason, detail, log_tail, log_path
        self.side: Literal["a", "b", ""] = ""
        """Which config of a comparison it was."""
        super().__init__(f"{reason}: {detail}" + (f" (log: {log_path})" if log_path else ""))

    @property
    def environmental(self) -> bool:
        """True when the config is not to blame, so that nothing should be learnt about it."""
        return self.reason in ENVIRONMENTAL


class AtOnce(KeyboardInterrupt):
    """An interrupt after an interrupt: servers of targets that are open end without grace."""


class StartFailed(TargetFailed):
    """The target did not come up, or came up and could not serve its first request."""


class RunFailed(TargetFailed):
    """The server ended during a load."""

    records: Records | None = None
    """What was measured until then."""


class OpenTarget(ABC):
    """A target that is up. Usable for several runs, one at a time, until its context closes."""

    url: str = ""
    """Base URL without a trailing slash; "" for a target without HTTP."""
    model: str = ""
    """The model's name as the server gives it."""
    version: str = ""
    """The server's, as it reports it; "" where it does not."""
    max_model_len: int | None = None
    """The context length that the server reports, in tokens; None where it does not."""
    start_seconds: float = 0.0
    """From the launch to the answer of the first request; 0 when nothing was launched."""
    log_path: Path | None = None

    @abstractmethod
    def run(
        self,
        schedule: Schedule,
        progress: Callable[..., None] | None = None,
        stop: threading.Event | None = None,
        *,
        timeout: float = 600.0,
        drain: float | None = None,
    ) -> Records:
        """Warm up, send the schedule, and return what was measured, with the metrics of every second.

        ``stop`` ends the load early and keeps what was measured. ``timeout`` and ``drain`` are those of
        ``loadgen.wire.client``. Raises RunFailed when the server ends meanwhile.
        """

    @abstractmethod
    def scrape(self) -> str:
        """The metrics now, in Prometheus text format; "" where the target has none."""

    @abstractmethod
    def log_tail(self, lines: int = 30) -> str:
        """The last lines of the server's log; "" where there is none."""


class Target(ABC):
    """Where configs are tried: a kind of server, or a simulation of one."""

    name: str
    restartable: bool = True
    """False for a server that was there before us: it is measured as it is."""
    exclusive: bool = False
    """True when two opened at once would fight for the device, so that a comparison must alternate."""
    estimate: str = ""
    """What the figures are estimated from, where nothing is measured."""

    def clock(self) -> float:
        """Seconds of the time that opening and running take; they begin anywhere."""
        return time.monotonic()

    def offered_flags(self) -> OfferedFlags | None:
        """The flags that can matter here, in the target's own names; None where it does not say."""
        return None

    @abstractmethod
    def open(self, config: Mapping[str, Any]) -> AbstractContextManager[OpenTarget]:
        """Start the target with these flags; leaving the context ends it. Raises StartFailed."""

    @abstractmethod
    def launch_command(self, config: Mapping[str, Any]) -> str:
        """What a user types to get this config, quoted for a shell."""

    def run(self, config: Mapping[str, Any], schedule: Schedule) -> Records:
        """Open, run one schedule, close."""
        with self.open(config) as target:
            return target.run(schedule)
