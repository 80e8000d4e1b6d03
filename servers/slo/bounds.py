"""Bounds on a run's figures as people write them: ``itl_p99<50ms,ttft_p95{class=short}<300ms``.

Grammar (blanks are free between the parts)::

    bounds = bound { "," bound }
    bound  = metric [ "{" "class" "=" name "}" ] ( "<" | "<=" | ">" | ">=" ) number [ unit ]

Latencies need a unit (``ms``, ``s``, ``us``) and are bounded from above; rates (``throughput`` in output
tokens/s, ``request_rate`` in requests/s) take none and are bounded from below. Inside vtune every latency is
in seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from servers.errors import UserError

LATENCIES = ("ttft", "tpot", "itl", "inter_chunk", "e2e", "max_stall", "service_ttft")
PER_REQUEST = ("ttft", "tpot", "itl", "e2e", "max_stall", "service_ttft")
"""Latencies that a single request has; its ITL is its token-weighted mean."""
STATISTICS = ("p50", "p90", "p95", "p99", "mean", "es95", "es99")
"""``es95`` and ``es99``: expected shortfall, the mean of the slowest 5 or 1 % of the samples."""
RATES = ("throughput", "request_rate", "goodput")
COUNTS = ("failed",)
UNITS = {"ms": 1e-3, "s": 1.0, "us": 1e-6, "µs": 1e-6}


LABELS = {
    "itl": "ITL",
    "ttft": "TTFT",
    "tpot": "TPOT",
    "e2e": "E2E",
    "inter_chunk": "inter-chunk latency",
    "max_stall": "longest gap",
}


def name_of(metric: str, cls: str | None) -> str:
    """``ttft_p95`` or ``ttft_p95{class=short}``."""
    return metric if cls is None else f"{metric}{{class={cls}}}"


class SloError(UserError):
    """An SLO that does not parse. The message shows the text and a caret at the place."""

    def __init__(self, text: str, position: int, problem: str, fix: str) -> None:
        self.text, self.position = text, position
        super().__init__(
            f"--slo: {problem} (at character {position + 1})\n  {text}\n  {' ' * position}^ {fix}"
        )


@dataclass(frozen=True)
class Bound:
    """``metric`` (of one class, or of all requests) must stay on the right side of ``limit``."""

    metric: str
    op: Literal["<=", ">="]
    limit: float
    """Seconds, or per second, or a count."""
    cls: str | None = None
    note: str = ""
    """How the limit came about, e.g. "1.2x of the baseline's"."""

    @property
    def name(self) -> str:
        return name_of(self.metric, self.cls)

    def violation(self, value: float) -> float:
        """How far ``value`` is beyond the limit, relative, in (-inf, 1); <= 0 holds the bound.

        A metric that could not be measured (NaN) violates it by 1.
        """
        if math.isnan(value):
            return 1.0
        if self.limit == 0:
            return value if self.op == "<=" else -value
        excess = value - self.limit if self.op == "<=" else self.limit - value
        if excess <= 0:
            return excess / self.limit
        return excess / max(value, self.limit)

    def __str__(self) -> str:
        text = f"{self.name} {self.op} {format_value(self.metric, self.limit)}"
        return f"{text} ({self.note})" if self.note else text


def parse_bounds(text: str, presets: Collection[str] = ()) -> tuple[Bound, ...]:
    """The bounds in ``text``. ``presets``: words that the caller takes in place of bounds, for the messages.

    Raises SloError.
    """
    return _Parser(text, presets).bounds()


class _Parser:
    def __init__(self, text: str, presets: Collection[str]) -> None:
        self.text, self.presets, self.at = text, presets, 0

    def bounds(self) -> tuple[Bound, ...]:
        found: list[Bound] = []
        while True:
            start = self._skip_blanks()
            bound = self._bound()
            if any((bound.metric, bound.cls) == (other.metric, other.cls) for other in found):
                raise self._error(start, f"{bound.name} is bounded twice", "keep one of the two")
            found.append(bound)
            if self._skip_blanks() == len(self.text):
                return tuple(found)
            self._take(",", "expected a comma or the end", "write one bound, a comma, the next bound")

    def _bound(self) -> Bound:
        start = self._skip_blanks()
        metric = self._metric(start)
        cls = self._class()
        op_at = self._skip_blanks()
        op = self._match(r"<=|>=|<|>")
        if op is None:
            raise self._error(op_at, f"expected < or > after {metric}", "e.g. itl_p99<50ms")
        wanted = ">" if metric in RATES else "<"
        if op[0] != wanted:
            kind = "a rate is bounded from below" if metric in RATES else "a latency is bounded from above"
            raise self._error(op_at, f"{metric} {op}: {kind}", f"write {metric}{wanted}…")
        return Bound(metric, ">=" if wanted == ">" else "<=", self._limit(metric), cls)

    def _metric(self, start: int) -> str:
        name = self._match(r"[A-Za-z_][A-Za-z0-9_]*")
        if name is None:
            raise self._error(start, "expected a metric", "e.g. itl_p99<50ms")
        if name in RATES[:2]:
            return name
        family, _, statistic = name.rpartition("_")
        if family in LATENCIES and statistic in STATISTICS:
            return name
        if name in LATENCIES:
            raise self._error(
                start, f"{name} of what statistic?", f"write {name}_p99 ({', '.join(STATISTICS)})"
            )
        if name in self.presets:
            raise self._error(start, f"the preset {name!r} stands alone", "give the preset, or bounds")
        known = ", ".join([f"{family}_p99" for family in LATENCIES] + list(RATES[:2]))
        known += f"; or a preset {', '.join(self.presets)}" if self.presets else ""
        raise self._error(start, f"unknown metric {name!r}", f"known: {known}")

    def _class(self) -> str | None:
        self._skip_blanks()
        if self._match(r"\{") is None:
            return None
        at = self._skip_blanks()
        if self._match(r"class\s*=\s*") is None:
            raise self._error(at, "only class=NAME may stand in braces", "e.g. ttft_p95{class=short}<300ms")
        at = self.at
        name = self._match(r"[A-Za-z0-9_.-]+")
        if name is None:
            raise self._error(at, "the class has no name", "e.g. {class=short}")
        self._skip_blanks()
        self._take("}", "the brace is not closed", "write }")
        return name

    def _limit(self, metric: str) -> float:
        at = self._skip_blanks()
        number = self._match(r"\d+(\.\d*)?([eE][+-]?\d+)?|\.\d+")
        if number is None:
            raise self._error(at, f"expected a positive number for {metric}", "e.g. 50ms")
        if not 0 < float(number) < math.inf:
            raise self._error(at, f"{number} can never be met", "give a positive, finite bound")
        unit_at = self._skip_blanks()
        unit = self._match(r"[A-Za-zµ/]+")
        if metric in RATES:
            if unit is not None:
                raise self._error(unit_at, f"{metric} takes no unit", "it is per second already")
            return float(number)
        if unit is None:
            raise self._error(unit_at, f"{metric} needs a unit", "write ms, s or us")
        if unit not in UNITS:
            raise self._error(unit_at, f"unknown unit {unit!r}", "write ms, s or us")
        return float(number) * UNITS[unit]

    def _skip_blanks(self) -> int:
        self._match(r"\s+")
        return self.at

    def _match(self, pattern: str) -> str | None:
        found = re.compile(pattern).match(self.text, self.at)
        if found is None:
            return None
        self.at = found.end()
        return found.group()

    def _take(self, char: str, problem: str, fix: str) -> None:
        if self.text[self.at : self.at + 1] != char:
            raise self._error(self.at, problem, fix)
        self.at += 1

    def _error(self, at: int, problem: str, fix: str) -> SloError:
        return SloError(self.text, at, problem, fix)


def family_of(metric: str) -> str:
    """``ttft`` of ``ttft_p95``."""
    family, _, statistic = metric.rpartition("_")
    return family if statistic in STATISTICS else metric


def metric_label(metric: str) -> str:
    """``itl_p99`` -> ``ITL P99``, ``ttft_p95{class=short}`` -> ``TTFT P95{class=short}``."""
    name, brace, cls = metric.partition("{")
    family, _, statistic = name.rpartition("_")
    if statistic not in STATISTICS:
        family, statistic = name, ""
    shown = statistic if statistic == "mean" else statistic.upper()
    text = f"{LABELS.get(family, family.replace('_', ' '))} {shown}".strip()
    return text + brace + cls


def format_value(metric: str, value: float) -> str:
    """A value as a person reads it: ``138 ms``, ``1.25 s``, ``201 tok/s``, ``2.1 req/s``."""
    if math.isnan(value):
        return "n/a"
    family = family_of(metric)
    if family in LATENCIES:
        return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
    if family == "throughput":
        return f"{value:.4g} tok/s"
    if family in RATES:
        return f"{value:.3g} req/s"
    return f"{value:g}"
