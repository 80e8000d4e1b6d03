"""One knob at a time through the best config: what was measured there, and what a simulation predicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from servers.slo.objective import Objective
from tuner.runs.result import Reading, TrialResult
from tuner.space.space import Axis, Space, config_key, render_value

MIN_POINTS = 2


@dataclass(frozen=True)
class Point:
    """One value of the knob. ``trial``: the number; None for a prediction."""

    value: str
    place: int
    """Of the value among the axis's."""
    reading: Reading
    trial: int | None = None
    feasible: bool = True
    best: bool = False


@dataclass(frozen=True)
class KnobCurve:
    """The objective over the values of one axis."""

    axis: str
    values: tuple[str, ...]
    """All of the ladder, in order."""
    through: tuple[Point, ...]
    """Trials that differ from the best config in this axis alone (or in what exists only with it)."""
    others: tuple[Point, ...]
    """All other trials, whatever else they changed."""
    predicted: tuple[Point, ...]
    """What the simulation says of the best config with each value."""


def one_knob_curves(
    results: Sequence[TrialResult],
    best: Mapping[str, Any],
    space: Space,
    objective: Objective,
    predictions: Mapping[str, Mapping[str, float]],
) -> list[KnobCurve]:
    """A curve for every axis of the best config of which two values or more are known, by measurement or by
    ``predictions`` (config's key -> metric's name -> value)."""
    found = []
    there = space.params(best)
    for axis in (axis for axis in space.axes if axis.name in there):
        curve = _curve(axis, results, best, space, objective, predictions)
        known = {point.place for point in (*curve.through, *curve.others, *curve.predicted)}
        if len(known) >= MIN_POINTS:
            found.append(curve)
    return found


def along(axis: Axis, best: Mapping[str, Any], space: Space) -> list[dict[str, Any]]:
    """The best config with every value of ``axis``; what exists only beside it takes its first value."""
    return [space.moved(best, axis, value) for value in axis.values]


def _curve(
    axis: Axis,
    results: Sequence[TrialResult],
    best: Mapping[str, Any],
    space: Space,
    objective: Objective,
    predictions: Mapping[str, Mapping[str, float]],
) -> KnobCurve:
    own = space.params(best)
    words = tuple(render_value(value) for value in axis.values)
    params = [axis.param(value) for value in axis.values]
    through: list[Point] = []
    others: list[Point] = []
    for result in results:
        theirs = space.params(result.config)
        if result.status not in ("measured", "stopped") or axis.name not in theirs:
            continue
        place = params.index(theirs[axis.name])
        point = Point(
            words[place],
            place,
            result.reading(objective),
            result.number,
            result.feasible,
            config_key(result.config) == config_key(best),
        )
        same = {other.name for other in space.axes if other.needs != axis.name and other is not axis}
        alike = all(theirs.get(name) == own.get(name) for name in same)
        (through if alike else others).append(point)
    predicted = [
        Point(words[place], place, Reading(known[objective.name]))
        for place, config in enumerate(along(axis, best, space))
        if objective.name in (known := predictions.get(config_key(config), {}))
    ]
    order = (sorted(points, key=lambda point: point.place) for points in (through, others, predicted))
    return KnobCurve(axis.name, words, *map(tuple, order))
