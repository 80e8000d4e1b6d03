"""All engines of a model as one: rates added up, and quantiles of the summed histograms.

A fleet's P99 is not the mean of its engines' P99s. Beside each figure stand the engines with the lowest and
the highest of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from doctor.diagnosis.engine_view import EngineView
from doctor.metrics.evaluators import Evaluator, by_peers
from doctor.metrics.signals import SIGNALS
from servers.reading import Number

FIGURES = (
    *("request_rate", "generation_rate", "running_mean", "waiting_mean", "kv_max", "preemptions"),
    *("prefix_hit_rate", "ttft_p50", "ttft_p95", "ttft_p99", "itl_p50", "itl_p99"),
)


@dataclass(frozen=True)
class Figure:
    """One figure of a fleet. ``lowest`` and ``highest``: an engine's name, and its own value."""

    signal: str
    value: float
    unit: str
    query: str
    lowest: tuple[str, float]
    highest: tuple[str, float]


@dataclass(frozen=True)
class Fleet:
    """The engines that serve one model."""

    model: str
    engines: int
    figures: tuple[Figure, ...]


def fleets(evaluator: Evaluator, examined: Sequence[EngineView]) -> tuple[Fleet, ...]:
    """One for every model that several engines serve. Raises SourceError."""
    engines = by_peers(view.group for view in examined)
    shared = sorted(peers for peers, own in engines.items() if len(own) > 1)
    if not shared:
        return ()
    whole = evaluator.of_fleet()
    signals = [SIGNALS[name] for name in FIGURES]
    read = whole.read_all(signals)
    queries = {signal.name: whole.query(signal) for signal in signals}
    found = []
    for peers in shared:
        own = [view for view in examined if view.group.peers == peers]
        values = {name: read[name].get(peers) for name in FIGURES}
        known = {name: value.point for name, value in values.items() if isinstance(value, Number)}
        figures = [_figure(name, known[name], queries[name], own) for name in known]
        found.append(
            Fleet(peers.model_name, len(own), tuple(figure for figure in figures if figure is not None))
        )
    return tuple(found)


def _figure(name: str, value: float, query: str, engines: Sequence[EngineView]) -> Figure | None:
    own: Mapping[str, float] = {
        engine.name: reading.point
        for engine in engines
        if isinstance(reading := engine.readings[name], Number)
    }
    if not own:
        return None
    low, high = min(own, key=own.__getitem__), max(own, key=own.__getitem__)
    return Figure(name, value, SIGNALS[name].unit, query, (low, own[low]), (high, own[high]))
