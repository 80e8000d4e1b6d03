"""Service level objectives: what a config must hold to be feasible, and what is made best among those.

An SLO is a preset (``itl``, ``stall``, ``ttft``, ``throughput``) or bounds as in
:mod:`servers.slo.bounds`, such as ``itl_p99<50ms,ttft_p95{class=short}<300ms,throughput>100``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from servers.slo.bounds import LATENCIES, PER_REQUEST, Bound, family_of, name_of, parse_bounds

Measure = Callable[[str, str | None], float]
"""(metric name, class or None) -> value in seconds or per second; NaN where there is none."""


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
    def on_ratio(self) -> Bound:
        """The same of what a config measured as a share of what the baseline did."""
        return Bound(self.metric, self.op, self.factor)

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
    def compared(self) -> Objective:
        """The figure that tells configs apart: the objective; where that is goodput, of which all have the
        same while they keep up, the first latency that is bounded."""
        latencies = [bound for bound in self.bounds if family_of(bound.metric) in LATENCIES]
        if self.objective.metric != "goodput" or not latencies:
            return self.objective
        return Objective(latencies[0].metric, "minimize", latencies[0].cls)

    @property
    def per_request(self) -> tuple[tuple[str, str | None, float], ...]:
        """What goodput asks of each request: (metric family, class, seconds) of the latency bounds."""
        asked = ((family_of(bound.metric), bound) for bound in self.bounds)
        return tuple((family, bound.cls, bound.limit) for family, bound in asked if family in PER_REQUEST)

    @property
    def metrics(self) -> tuple[tuple[str, str | None], ...]:
        """(metric, class) of the objective and of every bound, each once."""
        pairs = [(self.objective.metric, self.objective.cls)]
        pairs += [(bound.metric, bound.cls) for bound in self.bounds]
        pairs += [(bound.metric, None) for bound in self.relative]
        return tuple(dict.fromkeys(pairs))

    def describe(self) -> str:
        verb = {"minimize": "minimise", "maximize": "maximise"}[self.objective.direction]
        bounds = [str(bound) for bound in self.bounds]
        bounds += [f"{b.metric} {b.op} {b.note}" for b in self.relative]
        return f"{verb} {self.objective.name}" + (f" subject to {', '.join(bounds)}" if bounds else "")


NO_FAILURE = Bound("failed", "<=", 0, note="no failed request")
_THROUGHPUT = RelativeBound("throughput", ">=", 0.9)
_TTFT, _ITL = RelativeBound("ttft_es95", "<=", 1.2), RelativeBound("itl_es99", "<=", 1.2)

PRESETS: Mapping[str, Slo] = {
    "itl": Slo("itl", Objective("itl_es99", "minimize"), (NO_FAILURE,), (_THROUGHPUT, _TTFT)),
    "stall": Slo("stall", Objective("max_stall_mean", "minimize"), (NO_FAILURE,), (_THROUGHPUT, _TTFT)),
    "ttft": Slo("ttft", Objective("ttft_es95", "minimize"), (NO_FAILURE,), (_THROUGHPUT, _ITL)),
    "throughput": Slo("throughput", Objective("throughput", "maximize"), (NO_FAILURE,), saturated=True),
}
"""Tails are expected shortfalls, the mean of the slowest 1 % of the gaps and 5 % of the waits: a percentile
jumps as a stall more or less falls among its share, and does not see what fewer than that share meet. A
config that does not keep up is seen in its TTFT and throughput: whether requests pile up over a run of 20 s
that begins with an idle server is chance at 70 % of the capacity already."""


def parse_slo(text: str) -> Slo:
    """An SLO from a preset's name or explicit bounds (which maximise goodput). Raises SloError."""
    if text.strip() in PRESETS:
        return PRESETS[text.strip()]
    bounds = parse_bounds(text, PRESETS)
    return Slo(text.strip(), Objective("goodput", "maximize"), (*bounds, NO_FAILURE))
