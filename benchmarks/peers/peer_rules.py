"""What two published diagnosers would say, re-expressed as rules over the same recordings.

Thresholds are those of inferpilot 0.1.0 (``saturation.py``, ``diagnosis.py``) and inferguard 0.7.4
(``diagnose_bottleneck/rules.py``), both from PyPI. Both want figures of a client beside the server's; the
server's own histograms stand for them here. Where a rule wants a GPU's counters, these count as what the rule
asks for, in the peer's favour.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median

import numpy as np

from doctor.diagnosis.judged_objectives import DEFAULTS
from doctor.metrics.signals import Node, OverTime, Quantile
from doctor.metrics.sources import observe_recording
from servers.metrics.catalog import METRICS
from servers.metrics.exposition import Recording
from servers.reading import Number

BINS = 8


@dataclass(frozen=True)
class Peer:
    """``causes``: which of our causes each verdict stands for, at its most generous."""

    name: str
    causes: dict[str, frozenset[str]]
    judge: Callable[[Figures], str | None]
    """The verdict; None where it names no bottleneck."""


class Figures:
    """What the peers read, of a recording of one engine."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.evaluator = observe_recording(recording, "recording", None, DEFAULTS).evaluator
        (self.group,) = self.evaluator.groups

    def value(self, node: Node) -> float | None:
        number = self.evaluator.numbers(node).get(self.group)
        return number.point if isinstance(number, Number) else None

    def gauge(self, key: str) -> Sequence[float]:
        """A gauge at every scrape."""
        for name in METRICS[key].names:
            for series in self.recording.series.get(name, ()):
                return [float(value) for value in series.values]
        return []

    def p95(self, key: str) -> float | None:
        values = self.gauge(key)
        return float(np.percentile(values, 95)) if values else None

    @property
    def seconds(self) -> float:
        return float(self.recording.times[-1] - self.recording.times[0]) / 1000

    def in_flight(self) -> list[float]:
        """Running and waiting at the edges of :data:`BINS` equal bins."""
        both = [r + w for r, w in zip(self.gauge("running"), self.gauge("waiting"), strict=True)]
        edges = np.linspace(0, len(both) - 1, BINS + 1)
        return [both[round(edge)] for edge in edges]


def _exceeds(left: float | None, right: float | None) -> bool:
    return left is not None and right is not None and left > right


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value


def inferguard(seen: Figures) -> str | None:
    """The first verdict of its decision tree that fires."""
    waiting, running = seen.p95("waiting"), seen.p95("running")
    e2e = {q: seen.value(Quantile(q, "e2e")) for q in (0.5, 0.95, 0.99)}
    tpot = {q: seen.value(Quantile(q, "tpot")) for q in (0.5, 0.95)}
    if _exceeds(seen.p95("kv_usage"), 0.85):
        return "kv_bound"
    if _exceeds(waiting, max(running or 0.0, 1.0)) and _exceeds(e2e[0.99], _times(e2e[0.5], 1.5)):
        return "queue_bound"
    if (
        _exceeds(seen.value(Quantile(0.95, "ttft")), _times(e2e[0.95], 0.6))
        and _exceeds(seen.value(Quantile(0.95, "prefill_time")), _times(e2e[0.95], 0.5))
        and running is not None
        and running <= 2
    ):
        return "prefill_bound"
    if _exceeds(tpot[0.95], _times(tpot[0.5], 1.5)) and _exceeds(tpot[0.95], 0.030):
        return "decode_bound"
    return None


def inferpilot(seen: Figures, guarded: bool = True) -> str | None:
    """Overloaded by request pressure, and with a full pool and preemptions the one lever that it names.

    ``guarded``: it abstains below 30 s or 100 arrivals.
    """
    in_flight = seen.in_flight()
    grown = in_flight[-1] - in_flight[0]
    arrived = (seen.value(OverTime("finished", "increase")) or 0.0) + grown
    if guarded and (seen.seconds < 30 or arrived < 100):
        return None
    width = seen.seconds / BINS
    slope = median(
        (after - before) / ((j - i) * width)
        for (i, before), (j, after) in combinations(enumerate(in_flight), 2)
    )
    rising = sum(after > before for before, after in pairwise(in_flight))
    if not (grown > 0.05 * arrived and slope > 0.05 * arrived / seen.seconds and rising >= 0.75 * BINS):
        return None
    full = max(seen.gauge("kv_usage"), default=0.0) >= 0.95
    return (
        "kv_pressure"
        if full and _exceeds(seen.value(OverTime("preemptions", "increase")), 0)
        else "overloaded"
    )


_PILOT = {"overloaded": frozenset({"overload"}), "kv_pressure": frozenset({"kv-pressure"})}
PEERS = (
    Peer("inferpilot 0.1.0", _PILOT, inferpilot),
    Peer("... without its guard", _PILOT, lambda seen: inferpilot(seen, guarded=False)),
    Peer(
        "inferguard 0.7.4",
        {
            "kv_bound": frozenset({"kv-pressure", "kv-near-capacity"}),
            "queue_bound": frozenset({"seq-cap", "overload"}),
            "prefill_bound": frozenset({"prefill-slow", "prefix-misses"}),
            "decode_bound": frozenset({"itl-spikes-long-prefill", "itl-flat-high", "speculation-loses"}),
        },
        inferguard,
    ),
)
