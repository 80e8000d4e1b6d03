"""What a trial came to: all that the report needs, kept in the study's storage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from servers.slo.bounds import COUNTS, Bound, name_of
from servers.slo.objective import Objective
from tuner.runs.findings import TrialFinding

Status = Literal["measured", "stopped", "failed", "refused", "duplicate", "interrupted"]
"""measured: at full length. stopped: a short rung sufficed. failed: did not serve. refused: broke a rule and
was not launched. duplicate: carries the result of an earlier trial. interrupted: counts for nothing."""

BASELINE = "baseline"
"""The origin of the user's own config."""
SERVES = "serves"
"""The constraint that a trial violates whose server did not start, died, hung or answered errors."""


@dataclass(frozen=True)
class Reading:
    """One figure of a measurement: seconds, per second, or a count. NaN: ``n`` samples do not give it."""

    value: float
    n: int = 0
    low: float = math.nan
    high: float = math.nan
    """95 % interval; NaN where there is none."""


@dataclass(frozen=True)
class Measurement:
    """The figures of one config under load, by name (``itl_p99``, ``ttft_p95{class=short}``)."""

    readings: Mapping[str, Reading]
    window: float
    """Seconds measured."""
    verdict: str = "ok"
    """The run's judgement of itself (see loadgen): ok, client_limited, too_few_samples, …"""

    def reading(self, metric: str, cls: str | None = None) -> Reading:
        return self.readings.get(name_of(metric, cls), Reading(math.nan))

    def value(self, metric: str, cls: str | None = None) -> float:
        return self.reading(metric, cls).value

    def violations(self, bounds: tuple[Bound, ...]) -> dict[str, float]:
        """Bound's name -> relative violation; <= 0 holds it."""
        return {bound.name: bound.violation(self.value(bound.metric, bound.cls)) for bound in bounds}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        readings = {name: Reading(**_with_nan(item)) for name, item in data["readings"].items()}
        return cls(readings, data["window"], data["verdict"])


@dataclass(frozen=True)
class TrialResult:
    """``config`` is effective (see tuner.space.space): every tuned flag has its value in it."""

    number: int
    config: Mapping[str, Any]
    origin: str
    """Why it was tried: baseline, a starting point, the sampler, …"""
    status: Status
    reason: str = ""
    measurement: Measurement | None = None
    short: Measurement | None = None
    """The short rung alone, to compare later short rungs with."""
    violations: Mapping[str, float] = field(default_factory=dict)
    log_tail: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """``start``, ``warm-up``, ``load`` and ``total``."""
    kv_tokens: int | None = None
    """Size of the KV pool, as the server reported it."""
    peak_running: int | None = None
    preemptions: int | None = None
    peak_kv_usage: float | None = None
    """Share of the KV pool that requests held at most."""
    prefix_hits: int | None = None
    """Tokens that were found in the prefix cache."""
    records: tuple[str, ...] = ()
    """Files with every request of the trial, relative to the output directory."""
    expected: Mapping[str, float] = field(default_factory=dict)
    """What the search expected of it, by the figure's name."""
    request_set: int = 0
    """Of the load, which it was measured under: every config gets 0, repeats get others."""
    judged: bool = True
    """False: a repeat that the baseline was not measured beside, so that nothing can be said of it."""
    findings: tuple[TrialFinding, ...] = ()
    """The doctor's, on the trial's scrapes; causes first."""
    unexamined: str = ""
    """Why the doctor could not judge the scrapes of a trial that served."""

    @property
    def launched(self) -> bool:
        """Whether a server was started for it, and something came of that."""
        return self.status in ("measured", "stopped", "failed")

    @property
    def feasible(self) -> bool:
        """Measured in full, and every bound held."""
        return self.status == "measured" and self.judged and all(v <= 0 for v in self.violations.values())

    @property
    def slack(self) -> float:
        """Relative distance to the nearest bound that is not 0; negative where one is missed."""
        return min(
            (-v for name, v in self.violations.items() if name not in (SERVES, *COUNTS)), default=math.inf
        )

    @property
    def excess(self) -> float:
        """How far its bounds are missed, all together; of one that has none to show, 1."""
        return sum(max(0.0, v) for v in self.violations.values()) if self.violations else 1.0

    def reading(self, objective: Objective) -> Reading:
        measured = self.measurement
        return measured.reading(objective.metric, objective.cls) if measured else Reading(math.nan)

    def value(self, objective: Objective) -> float:
        return self.reading(objective).value

    def to_json(self) -> dict[str, Any]:
        """Plain JSON: NaN as null."""
        return without_nan(asdict(self))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        parts = {key: data[key] and Measurement.from_json(data[key]) for key in ("measurement", "short")}
        findings = tuple(map(TrialFinding.from_json, data.get("findings", ())))
        return cls(**{**data, **parts, "records": tuple(data["records"]), "findings": findings})


def without_nan(item: Any) -> Any:
    """``item`` as plain JSON: NaN and infinities as null."""
    if isinstance(item, Mapping):
        return {key: without_nan(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return [without_nan(value) for value in item]
    return None if isinstance(item, float) and not math.isfinite(item) else item


def _with_nan(reading: Mapping[str, Any]) -> dict[str, Any]:
    return {key: math.nan if value is None else value for key, value in reading.items()}
