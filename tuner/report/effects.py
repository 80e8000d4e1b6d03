"""Which flag mattered: how far each knob alone moves the objective, the rest as in the best config."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tuner.report.curves import KnobCurve

MIN_VALUES = 2


@dataclass(frozen=True)
class Effect:
    """``low`` and ``high``: the objective's extremes over ``values`` values of the knob."""

    axis: str
    low: float
    high: float
    values: int
    source: Literal["simulated", "measured"]
    share: float
    """Of the logarithms of high / low of all knobs; 0 where no knob does anything."""


def effects(curves: Sequence[KnobCurve]) -> list[Effect]:
    """The largest first, of the knobs of which two values or more are known.

    A simulation has no noise, which few trials would take for an effect: where it knows two values or more
    and sees a difference, they are taken; what was measured, elsewhere.
    """
    found: list[tuple[str, list[float], Literal["simulated", "measured"]]] = []
    for curve in curves:
        simulated = _usable([point.reading.value for point in curve.predicted])
        measured = _usable([point.reading.value for point in curve.through])
        sees = len(simulated) >= MIN_VALUES and max(simulated) > min(simulated)
        if len(measured) >= MIN_VALUES and not sees:
            found.append((curve.axis, measured, "measured"))
        elif len(simulated) >= MIN_VALUES:
            found.append((curve.axis, simulated, "simulated"))
    reach = {axis: math.log(max(values) / min(values)) for axis, values, _ in found}
    whole = sum(reach.values())
    made = [
        Effect(axis, min(values), max(values), len(values), source, reach[axis] / whole if whole else 0.0)
        for axis, values, source in found
    ]
    return sorted(made, key=lambda effect: -reach[effect.axis])


def _usable(values: Sequence[float]) -> list[float]:
    return [value for value in values if 0 < value < math.inf]
