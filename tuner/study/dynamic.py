"""Which config for which load: where the curves of configs over the load cross, with an interval.

A server's flags are set once, but its load changes: speculation pays at a low rate and costs at the peak, a
large token budget suits the night and a small one the day. Here is the arithmetic; ``loads.py`` measures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from tuner.runs.result import Reading, without_nan

MIN_GAIN = 0.05
"""A config must be worse by this much at some load, beside its interval, before another is advised there."""
_INTERVAL_WIDTH_SDS = 2 * 1.96


@dataclass(frozen=True)
class Curve:
    """One config at every level of load."""

    name: str
    """What it changes, for people."""
    flags: Mapping[str, Any]
    readings: tuple[Reading, ...]
    """Of the metric that is compared, a level each; NaN: not measured."""
    holds: tuple[bool, ...]
    """Whether the SLO's bounds hold at each level."""
    predicted: bool = False
    """Simulated rather than measured."""
    pressure: tuple[Reading, ...] = ()
    """Of the bound that is nearest to being missed, value over limit at each level; () where not known."""


@dataclass(frozen=True)
class Crossing:
    """The load at which two configs are equally good; 95 % interval, infinite or 0 beyond the loads tried."""

    at: float
    low: float
    high: float


@dataclass(frozen=True)
class Regime:
    """From ``begin`` to ``end`` (0 and infinity: beyond the loads tried) the curve ``best`` is advised."""

    best: int
    begin: float
    end: float
    crossing: Crossing | None = None
    """Where the next regime begins."""


def crossing(
    loads: Sequence[float],
    a: Sequence[Reading],
    b: Sequence[Reading],
    lower_is_better: bool = True,
    near: float = math.inf,
) -> Crossing | None:
    """Where ``b`` becomes better than ``a`` with rising load; None where it does not.

    The log ratio of the two is taken as linear between levels over the logarithm of the load, and so are the
    ends of its interval: the interval of the crossing is where theirs meet zero. Levels where either reading
    is missing do not count. Of several crossings it is the one next to the load ``near``.
    """
    points = [
        (math.log(load), *_log_ratio(x, y))
        for load, x, y in zip(loads, a, b, strict=True)
        if x.value > 0 and y.value > 0
    ]
    sign = 1.0 if lower_is_better else -1.0
    where = _fall([(at, sign * ratio) for at, ratio, _ in points], math.log(near))  # above 0: a is better
    if where is None:
        return None
    low, high = (
        _fall([(at, sign * ratio + side * margin) for at, ratio, margin in points], where) for side in (-1, 1)
    )
    return Crossing(
        math.exp(where),
        0.0 if low is None or low > where else math.exp(low),
        math.inf if high is None or high < where else math.exp(high),
    )


def regimes(loads: Sequence[float], curves: Sequence[Curve], lower_is_better: bool = True) -> list[Regime]:
    """The fewest changes of config at which no level has one that is proven worse than another.

    At a level, configs that hold the SLO count where any does. One is proven worse than the best where it is
    so by MIN_GAIN and beyond both intervals. Of equally few changes the better sum of log ratios wins. Levels
    are in rising order; raises ValueError where a level has no reading at all.
    """
    sign = 1.0 if lower_is_better else -1.0
    chosen = _path([_losses(level, curves, sign) for level in range(len(loads))])
    found: list[Regime] = []
    begin = 0.0
    for level, (now, then) in enumerate(pairwise(chosen)):
        if now != then:
            edge = _edge(loads, curves[now], curves[then], level, lower_is_better)
            found.append(Regime(now, begin, edge.at, edge))
            begin = edge.at
    return [*found, Regime(chosen[-1], begin, math.inf)]


def advise(
    loads: Sequence[float], curves: Sequence[Curve], found: Sequence[Regime], unit: str, metric: str
) -> str:
    """``By ITL P99 … up to 6.3 req/s (95 % 5.1 … 7.8) speculation k=3, above it no speculation``."""
    names = _short(curves, found)
    if len(found) == 1:
        span = f"{loads[0]:.3g} to {loads[-1]:.3g} {unit}"
        return f"By {metric}, one config suits every load tried ({span}): {names[found[0].best]}"
    parts = []
    for place, regime in enumerate(found):
        if regime.crossing is None:
            parts.append(f"above it {names[regime.best]}")
            continue
        edge = regime.crossing
        where = f"up to {edge.at:.3g} {unit} ({_interval(edge)})"
        parts.append(f"{'then ' if place else ''}{where} {names[regime.best]}")
    return f"By {metric}, the best config depends on the load: {', '.join(parts)}"


def advised(found: Sequence[Regime], load: float) -> int:
    """The curve that is advised at ``load``."""
    return next(regime.best for regime in found if load < regime.end)


def regimes_json(found: Sequence[Regime], curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """The regimes with what to start in each; null stands for an end that is open."""
    rows = [
        {
            "from": regime.begin,
            "to": regime.end,
            "flags": dict(curves[regime.best].flags),
            "changes": curves[regime.best].name,
            "crossing": asdict(regime.crossing) if regime.crossing else None,
        }
        for regime in found
    ]
    plain: list[dict[str, Any]] = without_nan(rows)
    return plain


def _log_ratio(a: Reading, b: Reading) -> tuple[float, float]:
    """log(b / a), and the half width of its 95 % interval: the two intervals' widths, at right angles."""
    return math.log(b.value / a.value), 1.96 * math.hypot(_error(a), _error(b))


def _error(reading: Reading) -> float:
    """Standard error of the logarithm, read off a 95 % interval; 0 where there is none."""
    low, high = reading.low, reading.high
    return math.log(high / low) / _INTERVAL_WIDTH_SDS if 0 < low <= high < math.inf else 0.0


def _fall(points: Sequence[tuple[float, float]], near: float) -> float | None:
    """Where the line through (x, y) goes from above to below zero, next to ``near``."""
    falls = [x0 + (x1 - x0) * y0 / (y0 - y1) for (x0, y0), (x1, y1) in pairwise(points) if y0 >= 0 > y1]
    return min(falls, key=lambda x: abs(x - near), default=None)


class Loss(NamedTuple):
    """How bad it is to advise a curve at a level; smaller is better."""

    rank: int
    """0: it may be the best. 1: another is proven better. 2: it misses the SLO, or is not known."""
    size: float
    """Log ratio to the best."""


def _losses(level: int, curves: Sequence[Curve], sign: float) -> list[Loss]:
    """Of every curve at ``level``. Raises ValueError where none is known."""
    known = {k: curve.readings[level] for k, curve in enumerate(curves) if curve.readings[level].value > 0}
    holding = {k: reading for k, reading in known.items() if curves[k].holds[level]} or known
    if not holding:
        raise ValueError(f"level {level}: nothing was measured")
    best = min(holding.values(), key=lambda reading: sign * reading.value)
    return [_loss(best, holding[k], sign) if k in holding else Loss(2, 0.0) for k in range(len(curves))]


def _loss(best: Reading, reading: Reading, sign: float) -> Loss:
    ratio, margin = _log_ratio(best, reading)
    return Loss(int(sign * ratio > max(margin, math.log1p(MIN_GAIN))), sign * ratio)


def _path(losses: Sequence[Sequence[Loss]]) -> list[int]:
    """A curve per level: the fewest proven losses, then the fewest changes, then the least loss in all."""
    ways = [((loss.rank, 0, loss.size), [k]) for k, loss in enumerate(losses[0])]
    for row in losses[1:]:
        ways = [
            min(
                ((rank + loss.rank, changes + (path[-1] != k), size + loss.size), [*path, k])
                for (rank, changes, size), path in ways
            )
            for k, loss in enumerate(row)
        ]
    return min(ways)[1]


def _edge(loads: Sequence[float], a: Curve, b: Curve, level: int, lower_is_better: bool) -> Crossing:
    """Where ``b`` takes over between ``level`` and the next.

    Where the SLO decides, that is where ``a`` comes to miss it. Where intervals decide there is no such
    place, and the middle stands for it.
    """
    low, high = loads[level], loads[level + 1]
    middle = math.sqrt(low * high)
    if a.holds[level + 1] or not b.holds[level + 1]:
        found = crossing(loads, a.readings, b.readings, lower_is_better, near=middle)
    else:
        found = crossing(loads, a.pressure, [Reading(1.0)] * len(loads), near=middle) if a.pressure else None
    return found if found is not None and low <= found.at <= high else Crossing(middle, low, high)


def _short(curves: Sequence[Curve], found: Sequence[Regime]) -> dict[int, str]:
    """Of the curves that are advised, the flags in which they differ from one another."""
    used = dict.fromkeys(regime.best for regime in found)
    if len(used) == 1:
        only = next(iter(used))
        return {only: curves[only].name or "your own flags"}
    names = dict.fromkeys(flag for k in used for flag in curves[k].flags)
    differing = [flag for flag in names if len({str(curves[k].flags.get(flag)) for k in used}) > 1]
    return {k: _flags_text(curves[k].flags, differing) for k in used}


def _flags_text(flags: Mapping[str, Any], names: Sequence[str]) -> str:
    shown = []
    for name in names:
        value = flags.get(name)
        if name == "speculative_config":
            shown.append(f"speculation {_drafts(value)}" if value else "no speculation")
        else:
            shown.append(f"{name} {'as by default' if value is None else value}")
    return " and ".join(shown) or "your own flags"


def _drafts(value: Any) -> str:
    given = value if isinstance(value, Mapping) else {}
    return f"{given.get('method', '')} k={given.get('num_speculative_tokens', '?')}".strip()


def _interval(edge: Crossing) -> str:
    low = f"{edge.low:.3g}" if edge.low > 0 else "below the loads tried"
    high = f"{edge.high:.3g}" if math.isfinite(edge.high) else "above them"
    return f"95 % {low} … {high}"
