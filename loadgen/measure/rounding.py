"""Figures as people read them."""

from __future__ import annotations

import math


def significant(value: float, digits: int = 4) -> str:
    """``value`` to so many digits, with commas between thousands and no exponent: ``93,180``, ``0.0012``."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    text = f"{round(value, places):,.{max(0, places)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
