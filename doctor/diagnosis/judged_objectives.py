"""What counts as bad. Rules compare with the user's objectives, or with defaults that the output states."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from servers.slo.bounds import RATES, Bound, SloError, family_of, format_value, parse_bounds

DEFAULTS: Mapping[str, float] = {"slo_itl_p99": 0.2, "slo_ttft_p95": 2.0}
"""Lenient on purpose: a stream slower than 5 tokens a second, or a wait of 2 s for the first token (the upper
end of what long documents are granted), is bad for anyone."""

OBJECTIVE_NAMES = frozenset({*DEFAULTS, "slow_itl"})
"""What rules may name. ``slow_itl`` tells a slow step from a quick one: the ITL objective, or its default."""

MISSED: Mapping[str, tuple[str, ...]] = {
    "ttft_missed": ("ttft",),
    "itl_missed": ("itl", "tpot"),
    "work_missed": ("e2e", *RATES[:2]),
}
"""What rules may ask: 1 where an objective on one of these is missed, 0 where none is."""

JUDGED: Mapping[str, str] = {"itl": "slo_itl_p99", "tpot": "slo_itl_p99", "ttft": "slo_ttft_p95"}
"""Families of latency that the doctor has objectives for, and what rules call these."""


@dataclass(frozen=True)
class JudgedObjectives:
    """``values`` has every name that rules use, in seconds; ``given`` says which the user set.

    Stated objectives replace the defaults: what is not among them is no objective (infinite). ``bounds`` are
    all of them, as stated or by default: each is judged by its own figure.
    """

    values: Mapping[str, float]
    given: Mapping[str, str]
    bounds: tuple[Bound, ...]
    stated: bool
    """Whether these are the user's."""

    @classmethod
    def of(cls, bounds: Iterable[Bound]) -> Self:
        """Those stated, or the defaults; the strictest bound of each latency is what rules use."""
        stated = tuple(bounds)
        values: dict[str, float] = {}
        given: dict[str, str] = {}
        for bound in stated:
            name = JUDGED.get(family_of(bound.metric))
            if name is not None and (name not in given or bound.limit < values[name]):
                values[name], given[name] = bound.limit, written(bound)
        base = dict.fromkeys(DEFAULTS, math.inf) if stated else DEFAULTS
        slow = values.get("slo_itl_p99", DEFAULTS["slo_itl_p99"])
        usual = tuple(Bound(name.removeprefix("slo_"), "<=", limit) for name, limit in DEFAULTS.items())
        return cls({**base, **values, "slow_itl": slow}, given, stated or usual, bool(stated))

    def origin(self, bound: Bound) -> str:
        """A bound as the user wrote it, or "default"."""
        return written(bound) if self.stated else "default"


def written(bound: Bound) -> str:
    """``itl_p99<50ms``."""
    limit = f"{bound.limit:g}" if bound.metric in RATES else format_value(bound.metric, bound.limit)
    return f"{bound.name}{bound.op[0]}{limit}".replace(" ", "")


def judged_objectives(text: str | None) -> JudgedObjectives:
    """Read ``itl_p99<50ms,ttft_p95<300ms``. Raises SloError."""
    bounds = parse_bounds(text) if text and text.strip() else ()
    if any(bound.cls is not None for bound in bounds):
        fix = "leave out {…}: a server's metrics carry no request class"
        raise SloError(str(text), str(text).index("{"), "the doctor cannot judge a class", fix)
    return JudgedObjectives.of(bounds)
