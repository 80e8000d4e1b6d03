"""What counts as bad. Rules compare with the user's objectives, or with defaults that the output states."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

DEFAULTS: Mapping[str, float] = {"slo_itl_p99": 0.2, "slo_ttft_p95": 2.0}
"""Lenient on purpose: a stream slower than 5 tokens a second, or a wait of 2 s for the first token (the upper
end of what long documents are granted), is bad for anyone."""

NAMES = frozenset({*DEFAULTS, "slow_itl"})
"""What rules may name. ``slow_itl`` tells a slow step from a quick one: the ITL objective, or its default."""

_TERM = re.compile(
    r"(?P<metric>[a-z0-9_]+?)_(?P<stat>p\d{1,2}|mean)\s*<=?\s*(?P<value>[0-9.]+)\s*(?P<unit>us|ms|s|)"
)
_RULE_NAME = {"itl": "slo_itl_p99", "tpot": "slo_itl_p99", "ttft": "slo_ttft_p95"}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}
_UNJUDGED = ("e2e", "throughput", "goodput", "request_rate", "inter_chunk", "max_stall", "service_ttft")


class SloError(ValueError):
    """An objective that cannot be read or that metrics cannot judge."""


@dataclass(frozen=True)
class Slo:
    """``values`` has every name that rules use, in seconds; ``given`` says which the user set.

    Stated objectives replace the defaults: what is not among them is no objective (infinite).
    """

    values: Mapping[str, float]
    given: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        labels = {"slo_itl_p99": "ITL P99", "slo_ttft_p95": "TTFT P95"}
        return ", ".join(
            f"{label} < {_written(self.values[name])} ({'yours' if name in self.given else 'default'})"
            if math.isfinite(self.values[name])
            else f"none for {label}"
            for name, label in labels.items()
        )


def parse_slo(text: str | None) -> Slo:
    """Read ``itl_p99<50ms,ttft_p95<300ms``. The strictest term of each latency is what rules use.

    Raises SloError.
    """
    values: dict[str, float] = {}
    given: dict[str, str] = {}
    notes: list[str] = []
    for term in filter(None, (part.strip() for part in re.split(r",(?![^{]*})", text or ""))):
        if "{" in term:
            raise SloError(f"--slo {term}: a server's metrics carry no request class; leave out {{…}}")
        match = _TERM.fullmatch(term)
        if match is None:
            if term.split("<")[0].split(">")[0].strip().startswith(_UNJUDGED):
                notes.append(f"--slo {term}: not judged by the doctor")
                continue
            raise SloError(f"--slo {term}: write e.g. itl_p99<50ms or ttft_p95<300ms")
        name = _RULE_NAME.get(match["metric"])
        if name is None:
            notes.append(f"--slo {term}: not judged by the doctor")
            continue
        value = _positive(match["value"], term) * _SECONDS[match["unit"]]
        if name not in given or value < values[name]:
            values[name], given[name] = value, term.replace(" ", "")
    base = dict.fromkeys(DEFAULTS, math.inf) if given else DEFAULTS
    slow = values.get("slo_itl_p99", DEFAULTS["slo_itl_p99"])
    return Slo({**base, **values, "slow_itl": slow}, given, tuple(notes))


def _positive(text: str, term: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise SloError(f"--slo {term}: {text} is not a positive number")
    return value


def _written(seconds: float) -> str:
    return f"{seconds * 1000:g} ms" if seconds < 1 else f"{seconds:g} s"
