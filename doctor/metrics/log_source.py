"""A server's log as a source of metrics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from doctor.metrics.sources import Observation, Scrapes, Source
from servers.errors import SourceError
from servers.server_log import read_log


class LogSource(Source):
    """A log as the only source: gauges every ten seconds, no latencies; most rules cannot tell."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)

    def observe(self, window: float | None, slo: Mapping[str, float]) -> Observation:
        """From the log's periodic load lines. Raises SourceError."""
        facts = read_log(self.path)
        if len(facts.scrapes) < 2:
            raise SourceError(
                f"--log {self.path}: fewer than two periodic load lines; add --series or --metrics"
            )
        return Scrapes(facts.scrapes, self.name).observe(window, slo)
