"""What a cure is expected to do, in words that can be judged, and what paired runs say about it.

An expectation begins with one of these; what follows is for people:

    falls | rises         the interval excludes "no change", and the change counts (5 %, tails 15 %)
    -50% | -50% to -75%   the same, and the least of these is within the interval
    +10%                  no rise beyond it is proven
    0 | towards 0         none is left of some, or the interval excludes a fall by less than half
    0.7 to 0.9            where it ends, on average
    unchanged             the interval lies within 10 %
    may …                 a price that is named, not a promise: never judged
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from loadgen.measure.estimator import Estimate, floor_of
from servers.errors import UserError

Outcome = Literal["met", "missed", "open", "allowed"]
"""``open``: the interval decides neither way. ``allowed``: nothing was promised."""
ExpectationKind = Literal["falls", "rises", "by", "at most", "none", "range", "unchanged", "may"]
_SAME = 0.10
_HALF = 0.5
_PERCENT = r"([+-]?\d+(?:\.\d+)?)\s?%"
_NUMBER = r"(\d+(?:\.\d+)?)"
_FORMS: tuple[tuple[ExpectationKind, re.Pattern[str]], ...] = (
    ("may", re.compile(r"may\b")),
    ("unchanged", re.compile(r"unchanged\b")),
    ("by", re.compile(rf"{_PERCENT}(?: to {_PERCENT})?")),
    ("range", re.compile(rf"{_NUMBER} to {_NUMBER}")),
    ("none", re.compile(r"(?:towards )?0\b")),
    ("falls", re.compile(r"falls?\b")),
    ("rises", re.compile(r"rises?\b")),
)


@dataclass(frozen=True)
class Expectation:
    """``low`` and ``high``: of a range, or the least and the most change as ratios."""

    text: str
    kind: ExpectationKind
    low: float = math.nan
    high: float = math.nan


class ExpectationError(UserError):
    """Text that says nothing that can be judged."""


def parse_expectation(text: str) -> Expectation:
    """Raises ExpectationError where the text begins with none of the known forms."""
    for kind, form in _FORMS:
        if match := form.match(text):
            return _made(text, kind, [float(group) for group in match.groups() if group is not None])
    raise ExpectationError(
        f"{text!r} cannot be judged: begin with falls, rises, -50%, +10%, 0, unchanged or may"
    )


def _made(text: str, kind: ExpectationKind, numbers: Sequence[float]) -> Expectation:
    if kind == "range":
        return Expectation(text, kind, *numbers)
    if kind != "by":
        return Expectation(text, kind)
    ratios = sorted(1 + number / 100 for number in numbers)
    if ratios[-1] > 1:
        return Expectation(text, "at most", high=ratios[-1])
    return Expectation(text, "by", ratios[0], ratios[-1])


def judge_expectation(expected: Expectation, seen: Estimate) -> Outcome:
    """Whether ``seen`` is what was expected of its figure."""
    if expected.kind == "may":
        return "allowed"
    if expected.kind == "range":
        return (
            "open" if math.isnan(seen.b) else "met" if expected.low <= seen.b <= expected.high else "missed"
        )
    if expected.kind == "none" and seen.b == 0:  # where side A had none either, nothing is shown
        return "met" if seen.a > 0 else "open"
    if math.isnan(seen.ratio):
        return _without_ratio(expected, seen)
    floor = floor_of(seen.figure)
    match expected.kind:
        case "falls":
            return _moved(seen.ratio, seen.low, seen.high, floor)
        case "rises":
            return _risen(seen, floor)
        case "by":
            moved = _moved(seen.ratio, seen.low, seen.high, floor)
            return "missed" if moved == "met" and seen.low > expected.high else moved
        case "at most":
            return "missed" if seen.low > expected.high else "met" if seen.high <= expected.high else "open"
        case "none":
            return "met" if seen.high < _HALF else "missed" if seen.low > _HALF else "open"
        case _:
            inside = seen.low >= 1 - _SAME and seen.high <= 1 + _SAME
            outside = seen.low > 1 + _SAME or seen.high < 1 - _SAME
            return "met" if inside else "missed" if outside else "open"


def _moved(ratio: float, low: float, high: float, floor: float) -> Outcome:
    """A fall is shown, excluded, or neither."""
    if high < 1 and ratio < 1 - floor:
        return "met"
    return "missed" if low > 1 - floor else "open"


def _risen(seen: Estimate, floor: float) -> Outcome:
    if seen.low > 1 and seen.ratio > 1 + floor:
        return "met"
    return "missed" if seen.high < 1 + floor else "open"


def _without_ratio(expected: Expectation, seen: Estimate) -> Outcome:
    """Side A had none of it: nothing can fall, and whatever there is has risen."""
    if math.isnan(seen.a) or math.isnan(seen.b) or seen.pairs == 0:
        return "open"
    if expected.kind == "rises":
        return "met" if seen.b > 0 else "missed"
    if expected.kind in ("unchanged", "at most"):
        return "met" if seen.b == 0 else "missed"
    return "missed"
