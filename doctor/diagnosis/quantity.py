"""Figures as people read them."""

from __future__ import annotations

import math


def quantity(value: float, unit: str) -> str:
    """A figure with its unit, to about four digits."""
    if math.isinf(value):
        return "infinite"
    match unit:
        case "s" if abs(value) < 1:
            return f"{value * 1000:.4g} ms"
        case "s/token":
            return f"{value * 1000:.4g} ms/token"
        case "share":
            return f"{value * 100:.4g} %"
        case "ratio" | "count":
            return f"{value:.4g}"
        case _:
            return f"{value:.4g} {unit}"
