"""What counts as bad. Rules compare with the user's objectives, or with defaults that the output states."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from servers.slo.bounds import Bound, SloError, family_of, format_value, parse_bounds

DEFAULTS: Mapping[str, float] = {"slo_itl_p99": 0.2, "slo_ttft_p95": 2.0}
"""Lenient on purpose: a stream slower than 5 tokens a second, or a wait of 2 s for the first token (the upper
end of what long documents are granted), is bad for anyone."""

OBJECTIVE_NAMES = frozenset({*DEFAULTS, "slow_itl"})
"""What rules may name. ``slow_itl`` tells a slow step from a quick one: the ITL objective, or its default."""

JUDGED: Mapping[str, str] = {"itl": "slo_itl_p99", "tpot": "slo_itl_p99", "ttft": "slo_ttft_p95"}
"""Families of latency that the doctor has objectives for, and what rules call these."""


@dataclass(frozen=True)
class JudgedObjectives:
    """``values`` has every name that rules use, in seconds; ``given`` says which the user set.

    Stated objectives replace the defaults: what is not among them is no objective (infinite).
    """

    values: Mapping[str, float]
    given: Mapping[str, str]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, bounds: Iterable[Bound]) -> Self:
        """Those that the doctor can judge; the strictest bound of each latency is what rules use."""
        values: dict[str, float] = {}
        given: dict[str, str] = {}
        notes: list[str] = []
        for bound in bounds:
            written = f"{bound.name}{bound.op[0]}{format_value(bound.metric, bound.limit)}".replace(" ", "")
            name = JUDGED.get(family_of(bound.metric))
            if name is None:
                notes.append(f"--slo {written}: not judged by the doctor")
            elif name not in given or bound.limit < values[name]:
                values[name], given[name] = bound.limit, written
        base = dict.fromkeys(DEFAULTS, math.inf) if given else DEFAULTS
        slow = values.get("slo_itl_p99", DEFAULTS["slo_itl_p99"])
        return cls({**base, **values, "slow_itl": slow}, given, tuple(notes))

    def describe(self) -> str:
        labels = {"slo_itl_p99": "ITL P99", "slo_ttft_p95": "TTFT P95"}
        return ", ".join(self._one(name, label) for name, label in labels.items())

    def _one(self, name: str, label: str) -> str:
        if not math.isfinite(self.values[name]):
            return f"none for {label}"
        whose = "yours" if name in self.given else "default"
        return f"{label} < {format_value('itl', self.values[name])} ({whose})"


def judged_objectives(text: str | None) -> JudgedObjectives:
    """Read ``itl_p99<50ms,ttft_p95<300ms``. Raises SloError."""
    bounds = parse_bounds(text) if text and text.strip() else ()
    if any(bound.cls is not None for bound in bounds):
        fix = "leave out {…}: a server's metrics carry no request class"
        raise SloError(str(text), str(text).index("{"), "the doctor cannot judge a class", fix)
    return JudgedObjectives.of(bounds)
