"""Figures as people read them."""

from __future__ import annotations

import math

from loadgen.measure.rounding import significant


def quantity(value: float, unit: str) -> str:
    """A figure with its unit, to about four digits."""
    if math.isinf(value):
        return "infinite"
    match unit:
        case "s" if abs(value) < 1:
            return f"{significant(value * 1000)} ms"
        case "s/token":
            return f"{significant(value * 1000)} ms/token"
        case "share":
            return f"{significant(value * 100)} %"
        case "ratio" | "count":
            return f"{significant(value)}"
        case _:
            return f"{significant(value)} {unit}"
