"""Sides of a comparison that differ in more than flags: each config names its own server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loadgen.target import OpenTarget, Target
from loadgen.targets.endpoint import EndpointTarget
from loadgen.targets.server import ServerTarget


class EitherTarget(Target):
    """Opens ``{"server": …}``: the URL of a server that runs, or a command that starts one.

    ``servers`` are those that will be asked for. Raises FlagError, UrlError for one that is neither.
    """

    name = "servers"

    def __init__(
        self, servers: Iterable[str], *, api_key: str | None = None, log_dir: Path | None = None
    ) -> None:
        self.max_model_len: int | None = None
        """The shortest context among the servers opened so far, as they report it."""
        self._targets: dict[str, Target] = {}
        for server in servers:
            if server.startswith(("http://", "https://")):
                self._targets[server] = EndpointTarget(server, api_key=api_key)
            else:
                self._targets[server] = ServerTarget(server, log_dir=log_dir, api_key=api_key)
        self.exclusive = sum(target.exclusive for target in self._targets.values()) > 1

    @contextmanager
    def open(self, config: Mapping[str, Any]) -> Iterator[OpenTarget]:
        with self._targets[config["server"]].open({}) as server:
            known = [length for length in (self.max_model_len, server.max_model_len) if length]
            self.max_model_len = min(known, default=None)
            yield server

    def launch_command(self, config: Mapping[str, Any]) -> str:
        return str(config["server"])
