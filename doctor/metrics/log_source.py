"""A server's log as a source of metrics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from doctor.metrics.evaluators import Group
from doctor.metrics.sources import Observation, Scrapes, Source
from doctor.metrics.stated import StatedEvaluator
from servers.kinds import KINDS
from servers.server_log import read_log

_NO_LOAD = "fewer than two periodic load lines in the log"


class LogSource(Source):
    """A log as the only source: gauges every ten seconds, no latencies; most rules cannot tell. Without lines
    on load it tells of the start and of failures alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)

    def observe(self, window: float | None, slo: Mapping[str, float]) -> Observation:
        """From the log's periodic load lines. Raises SourceError."""
        facts = read_log(self.path)
        if len(facts.scrapes) > 1:
            return Scrapes(facts.scrapes, self.name).observe(window, slo)
        kind = KINDS[facts.kind]
        evaluator = StatedEvaluator(self.name, Group.of(), _NO_LOAD, {})
        note = f"{_NO_LOAD}: it tells of the start and of failures; add --series or --metrics"
        return Observation(self.name, evaluator, kind.label, 0.0, kind, (note,))
