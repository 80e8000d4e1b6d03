"""The bundled server as benchmarks use it: its processes, and single requests with their times."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from loadgen.targets.endpoint import OpenServer
from loadgen.targets.server import ServerTarget


@dataclass(frozen=True)
class OwnServer:
    """A ``vtune serve`` that is up."""

    target: OpenServer

    @property
    def log(self) -> str:
        assert self.target.log_path is not None
        return self.target.log_path.read_text(errors="replace")

    def pid(self, role: str) -> int:
        """Of the process "APIServer" or "EngineCore"."""
        found = re.search(rf"\({role} pid=(\d+)\)", self.log)
        if found is None:
            raise SystemExit(f"{role} has not logged anything:\n{self.log}")
        return int(found[1])

    def connect(self, timeout: float = 120.0) -> http.client.HTTPConnection:
        where = urlsplit(self.target.url)
        assert where.hostname is not None
        return http.client.HTTPConnection(where.hostname, where.port, timeout=timeout)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        """Status and JSON of the answer."""
        with contextlib.closing(self.connect()) as connection:
            payload = None if body is None else json.dumps(body)
            connection.request("POST", path, payload, {"content-type": "application/json"})
            response = connection.getresponse()
            text = response.read()
            return response.status, json.loads(text) if text else None

    def ttft(self, body: Mapping[str, Any]) -> float:
        """Seconds from a completion request to its first event; the rest of it is read too."""
        with contextlib.closing(self.connect()) as connection:
            payload = json.dumps({**body, "stream": True})
            started = time.perf_counter()
            connection.request("POST", "/v1/completions", payload, {"content-type": "application/json"})
            response = connection.getresponse()
            first = response.readline()
            seconds = time.perf_counter() - started
            if response.status != 200 or not first.startswith(b"data:"):
                raise SystemExit(f"{response.status}: {(first + response.read()).decode(errors='replace')}")
            response.read()
            return seconds

    def metrics(self) -> dict[str, float]:
        """Gauges and counters by name, summed over their labels."""
        values: dict[str, float] = {}
        for line in self.target.scrape().splitlines():
            name, _, value = line.rpartition(" ")
            if name and not line.startswith("#"):
                name = name.partition("{")[0]
                values[name] = values.get(name, 0.0) + float(value)
        return values


@contextlib.contextmanager
def own_server(flags: Mapping[str, Any]) -> Iterator[OwnServer]:
    """The bundled model, served with ``flags``."""
    with ServerTarget.bundled().open(dict(flags)) as target:
        assert isinstance(target, OpenServer)
        yield OwnServer(target)
