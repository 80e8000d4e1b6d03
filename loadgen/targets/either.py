"""Sides of a comparison that differ in more than flags: each config names its own server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loadgen.target import OpenTarget, Target
from loadgen.targets.endpoint import EndpointTarget
from loadgen.targets.server import ServerTarget
from servers.connection import NO_LOGIN, Connection, masked


class EitherTarget(Target):
    """Opens ``{"server": …}``: the URL of a server that runs, or a command that starts one (as it is, or
    masked).

    ``servers`` are those that will be asked for. Raises FlagError, UrlError for one that is neither.
    """

    name = "servers"

    def __init__(
        self, servers: Iterable[str], *, connection: Connection = NO_LOGIN, log_dir: Path | None = None
    ) -> None:
        self.max_model_len: int | None = None
        """The shortest context among the servers opened so far, as they report it."""
        self._targets: dict[str, Target] = {}
        for server in servers:
            if server.startswith(("http://", "https://")):
                self._targets[masked(server)] = EndpointTarget(server, connection=connection)
            else:
                self._targets[masked(server)] = ServerTarget(server, log_dir=log_dir, connection=connection)
        self.exclusive = sum(target.exclusive for target in self._targets.values()) > 1

    @contextmanager
    def open(self, config: Mapping[str, Any]) -> Iterator[OpenTarget]:
        with self._targets[masked(config["server"])].open({}) as server:
            known = [length for length in (self.max_model_len, server.max_model_len) if length]
            self.max_model_len = min(known, default=None)
            yield server

    def launch_command(self, config: Mapping[str, Any]) -> str:
        return masked(config["server"])
