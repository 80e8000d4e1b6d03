"""Service level objectives: what a config must hold to be feasible, and what is made best among those.

Grammar (blanks are free between the parts)::

    slo    = preset | bound { "," bound }
    preset = "itl" | "ttft" | "throughput"
    bound  = metric [ "{" "class" "=" name "}" ] ( "<" | "<=" | ">" | ">=" ) number [ unit ]

For example ``itl_p99<50ms,ttft_p95{class=short}<300ms,throughput>100``. Latencies need a unit (``ms``, ``s``,
``us``) and are bounded from above; rates (``throughput`` in output tokens/s, ``request_rate`` in requests/s)
take none and are bounded from below. Inside vtune every latency is in seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from loadgen.stats import DEFINITIONS

LATENCIES = ("ttft", "tpot", "itl", "inter_chunk", "e2e", "max_stall", "service_ttft")
PER_REQUEST = ("ttft", "tpot", "itl", "e2e", "max_stall", "service_ttft")
"""Latencies that a single request has; its ITL is its token-weighted mean."""
STATISTICS = ("p50", "p90", "p95", "p99", "mean")
RATES = ("throughput", "request_rate", "goodput")
COUNTS = ("failed", "backlog")
UNITS = {"ms": 1e-3, "s": 1.0, "us": 1e-6, "µs": 1e-6}

Measure = Callable[[str, str | None], float]
"""(metric name, class or None) -> value in seconds or per second; NaN where there is none."""


def name_of(metric: str, cls: str | None) -> str:
    """``ttft_p95`` or ``ttft_p95{class=short}``."""
    return metric if cls is None else f"{metric}{{class={cls}}}"


class SloError(ValueError):
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


@dataclass(frozen=True)
class Objective:
    """The one figure that is made best among the feasible configs."""

    metric: str
    direction: Literal["minimize", "maximize"]
    cls: str | None = None

    @property
    def name(self) -> str:
        return name_of(self.metric, self.cls)

    def better(self, a: float, b: float) -> bool:
        """True when ``a`` is strictly better than ``b``; a NaN is worse than any number."""
        if math.isnan(a) or math.isnan(b):
            return math.isnan(b) and not math.isnan(a)
        return a < b if self.direction == "minimize" else a > b


@dataclass(frozen=True)
class RelativeBound:
    """A bound that is a multiple of what the baseline measured."""

    metric: str
    op: Literal["<=", ">="]
    factor: float

    def resolve(self, measure: Measure) -> Bound:
        return Bound(self.metric, self.op, self.factor * measure(self.metric, None), note=self.note)

    @property
    def note(self) -> str:
        return f"{self.factor:g}x of the baseline's"


@dataclass(frozen=True)
class Slo:
    """An objective under bounds; the relative ones become numbers once the baseline is measured."""

    text: str
    objective: Objective
    bounds: tuple[Bound, ...] = ()
    relative: tuple[RelativeBound, ...] = ()
    saturated: bool = False
    """True: measured under a closed loop at saturation instead of an offered rate."""

    def resolve(self, baseline: Measure) -> tuple[Bound, ...]:
        """Every bound as a number. ``baseline`` measures the user's current config."""
        resolved = (bound.resolve(baseline) for bound in self.relative)
        return self.bounds + tuple(bound for bound in resolved if not math.isnan(bound.limit))

    @property
    def per_request(self) -> tuple[tuple[str, str | None, float], ...]:
        """What goodput asks of each request: (metric family, class, seconds) of the latency bounds."""
        asked = ((_family(bound.metric), bound) for bound in self.bounds)
        return tuple((family, bound.cls, bound.limit) for family, bound in asked if family in PER_REQUEST)

    @property
    def metrics(self) -> tuple[tuple[str, str | None], ...]:
        """(metric, class) of the objective and of every bound, each once."""
        pairs = [(self.objective.metric, self.objective.cls)]
        pairs += [(bound.metric, bound.cls) for bound in self.bounds]
        pairs += [(bound.metric, None) for bound in self.relative]
        return tuple(dict.fromkeys(pairs))

    @property
    def definitions(self) -> dict[str, str]:
        """Definitions of the metric families that this SLO speaks of, as they are measured."""
        families = dict.fromkeys(_family(metric) for metric, _ in self.metrics)
        return {family: DEFINITIONS[family] for family in families if family in DEFINITIONS}

    def describe(self) -> str:
        verb = {"minimize": "minimise", "maximize": "maximise"}[self.objective.direction]
        bounds = [str(bound) for bound in self.bounds]
        bounds += [f"{b.metric} {b.op} {b.note}" for b in self.relative]
        return f"{verb} {self.objective.name}" + (f" subject to {', '.join(bounds)}" if bounds else "")


NO_FAILURE = Bound("failed", "<=", 0, note="no failed request")
NO_BACKLOG = Bound("backlog", "<=", 0, note="no backlog left")

NO_LONGER_STALLS = RelativeBound("max_stall_mean", "<=", 1.2)
"""A percentile of gaps does not see a stall that fewer than one gap in a hundred meets: without this bound a
larger budget, which stalls everybody longer but less often, could win.
"""

PRESETS: Mapping[str, Slo] = {
    "itl": Slo(
        "itl",
        Objective("itl_p99", "minimize"),
        (NO_FAILURE, NO_BACKLOG),
        (RelativeBound("throughput", ">=", 0.9), RelativeBound("ttft_p95", "<=", 1.2), NO_LONGER_STALLS),
    ),
    "ttft": Slo(
        "ttft",
        Objective("ttft_p95", "minimize"),
        (NO_FAILURE, NO_BACKLOG),
        (RelativeBound("throughput", ">=", 0.9), RelativeBound("itl_p99", "<=", 1.2)),
    ),
    "throughput": Slo("throughput", Objective("throughput", "maximize"), (NO_FAILURE,), saturated=True),
}


def parse_slo(text: str) -> Slo:
    """An SLO from a preset's name or explicit bounds (which maximise goodput). Raises SloError."""
    if text.strip() in PRESETS:
        return PRESETS[text.strip()]
    bounds = _Parser(text).bounds()
    return Slo(text.strip(), Objective("goodput", "maximize"), (*bounds, NO_FAILURE))


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

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
        if name in PRESETS:
            raise self._error(start, f"the preset {name!r} stands alone", "give the preset, or bounds")
        known = ", ".join([f"{family}_p99" for family in LATENCIES] + list(RATES[:2]))
        raise self._error(
            start, f"unknown metric {name!r}", f"known: {known}; or a preset {', '.join(PRESETS)}"
        )

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


def _family(metric: str) -> str:
    family, _, statistic = metric.rpartition("_")
    return family if statistic in STATISTICS else metric


def format_value(metric: str, value: float) -> str:
    """A value as a person reads it: ``138 ms``, ``1.25 s``, ``201 tok/s``, ``2.1 req/s``."""
    if math.isnan(value):
        return "n/a"
    family = _family(metric)
    if family in LATENCIES:
        return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
    if family == "throughput":
        return f"{value:.4g} tok/s"
    if family in RATES:
        return f"{value:.3g} req/s"
    return f"{value:g}"
