"""What a diagnosis consists of, and its documented JSON form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from doctor.diagnosis.cost import Toll
from doctor.diagnosis.fleet import Fleet
from doctor.diagnosis.judged_objectives import JudgedObjectives
from doctor.diagnosis.objective_judgement import ObjectiveJudgement
from doctor.diagnosis.playbook import SEVERITIES, Severity
from servers.known_flags import Flag, Flags
from servers.reading import Missing, Number

SCHEMA = "vtune.doctor/1"


@dataclass(frozen=True)
class Evidence:
    """One figure behind a finding; ``note`` says where it is only a bound."""

    signal: str
    value: float
    unit: str
    query: str
    note: str | None = None


@dataclass(frozen=True)
class Prescription:
    """What to do. ``changes`` are new flag values (None: drop the flag), ``was`` the current ones."""

    changes: Mapping[str, Any]
    was: Mapping[str, Any]
    args: str
    text: str
    uncertain: Mapping[str, str]
    """Flags it was computed from that were not given, with where the value is from."""
    remedy: int = 0
    """Which of the playbook's cures it is."""
    verification: str = "not verified"
    """Whether an experiment has proven it, as ``verification_status.verification_of`` says."""


@dataclass(frozen=True)
class Finding:
    id: str
    severity: Severity
    title: str
    instance: str
    model: str
    engine: str
    labels: Mapping[str, str]
    """Everything that tells its engine from others, such as ``namespace``, ``pod`` and ``dp_rank``."""
    evidence: tuple[Evidence, ...]
    flags: Mapping[str, Flag]
    prescriptions: tuple[Prescription, ...]
    expect: Mapping[str, str]
    toll: Toll | None
    suppressed_by: str | None = None

    @property
    def cost(self) -> float | None:
        """Request-seconds of delay per second: how many requests are being held up, on average."""
        return None if self.toll is None else self.toll.delay


@dataclass(frozen=True)
class CannotTell:
    """A rule that could not be judged on one engine, and what it lacks."""

    id: str
    severity: Severity
    instance: str
    missing: tuple[Missing, ...]


@dataclass(frozen=True)
class Diagnosis:
    """Everything found in one window."""

    source: str
    family: str
    version: str | None
    window_s: float
    slo: JudgedObjectives
    objectives: tuple[ObjectiveJudgement, ...]
    """Every objective on every engine."""
    findings: tuple[Finding, ...]
    cannot_tell: tuple[CannotTell, ...]
    healthy: bool
    idle: bool
    engines: tuple[str, ...]
    notes: tuple[str, ...]
    not_judged: tuple[str, ...]
    """What no rule could look at in this window, although the server may have it."""
    since_start: bool = False
    """Judged by one scrape; ``window_s`` means nothing."""
    fleets: tuple[Fleet, ...] = ()
    """The models that several engines serve, each as one."""
    figures: Mapping[str, tuple[Evidence, ...]] = field(default_factory=dict)
    """What an engine does, by its name, whatever is found."""
    flags: Mapping[str, Flags] = field(default_factory=dict)
    """What each engine was judged by."""

    def worst(self) -> Severity | None:
        """The highest severity among findings that nothing else explains."""
        found = [finding.severity for finding in self.findings if finding.suppressed_by is None]
        return max(found, key=SEVERITIES.index) if found else None

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form (``schema``); null stands for what is not finite."""
        found: dict[str, Any] = _finite(self._fields())
        return found

    def _fields(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "source": self.source,
            "server": {"family": self.family, "version": self.version, "engines": list(self.engines)},
            "window_seconds": None if self.since_start else round(self.window_s, 3),
            "slo": {
                name: {
                    "seconds": value,
                    "from": self.slo.given.get(name, "default"),
                }
                for name, value in self.slo.values.items()
            },
            "objectives": [_objective_json(judged) for judged in self.objectives],
            "flags": _flags_json(self.flags),
            "findings": [_finding_json(finding) for finding in self.findings],
            "cannot_tell": [
                {
                    "id": item.id,
                    "severity": item.severity,
                    "instance": item.instance,
                    "missing": [{"name": m.name, "kind": m.kind, "why": m.why} for m in item.missing],
                }
                for item in self.cannot_tell
            ],
            "fleets": [_fleet_json(fleet) for fleet in self.fleets],
            "figures": {
                engine: [{"signal": one.signal, "value": one.value, "unit": one.unit} for one in own]
                for engine, own in self.figures.items()
            },
            "healthy": self.healthy,
            "idle": self.idle,
            "not_judged": list(self.not_judged),
            "notes": list(self.notes),
        }


def _finite(value: Any) -> Any:
    """``value`` with null for every number that JSON cannot write."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _objective_json(judged: ObjectiveJudgement) -> dict[str, Any]:
    return {
        "objective": judged.bound.metric,
        "operator": judged.bound.op,
        "limit": judged.bound.limit,
        "from": judged.origin,
        "instance": judged.instance,
        "signal": judged.signal,
        "value": judged.reading.point if isinstance(judged.reading, Number) else None,
        "between": list(judged.bucket) if judged.bucket else None,
        "query": judged.query,
        "held": judged.held,
        "remark": judged.remark,
    }


def _flags_json(engines: Mapping[str, Flags]) -> dict[str, Any]:
    """By name. Where engines differ: of the first, and ``engines`` has the value of each."""
    each = {engine: {flag.name: flag for flag in flags.judged_by()} for engine, flags in engines.items()}
    found: dict[str, Any] = {}
    for name in sorted({name for own in each.values() for name in own}):
        own = {engine: flags[name] for engine, flags in each.items() if name in flags}
        first = next(iter(own.values()))
        entry: dict[str, Any] = {
            "value": first.value,
            "origin": "default" if first.origin == "guessed" else first.origin,
        }
        if not first.number.exact:  # a bound that is not finite is null
            entry["between"] = [first.number.low, first.number.high]
        if len({str(flag.value) for flag in own.values()}) > 1:
            entry["engines"] = {engine: flag.value for engine, flag in own.items()}
        found[name] = entry
    return found


def _fleet_json(fleet: Fleet) -> dict[str, Any]:
    return {
        "model": fleet.model,
        "engines": fleet.engines,
        "figures": [
            {
                "signal": figure.signal,
                "value": figure.value,
                "unit": figure.unit,
                "query": figure.query,
                "lowest": {"instance": figure.lowest[0], "value": figure.lowest[1]},
                "highest": {"instance": figure.highest[0], "value": figure.highest[1]},
            }
            for figure in fleet.figures
        ],
    }


def _finding_json(finding: Finding) -> dict[str, Any]:
    return {
        "id": finding.id,
        "severity": finding.severity,
        "title": finding.title,
        "instance": finding.instance,
        "model": finding.model,
        "engine": finding.engine,
        "labels": dict(finding.labels),
        "evidence": [
            {"signal": e.signal, "value": e.value, "unit": e.unit, "query": e.query, "note": e.note}
            for e in finding.evidence
        ],
        "flags": {name: {"value": flag.value, "from": flag.origin} for name, flag in finding.flags.items()},
        "prescriptions": [
            {
                "set": dict(p.changes),
                "was": dict(p.was),
                "args": p.args,
                "text": p.text,
                "uncertain": dict(p.uncertain),
                "standing": p.verification,
                "verified": p.verification.startswith("verified"),
            }
            for p in finding.prescriptions
        ],
        "expect": dict(finding.expect),
        "cost": finding.cost,
        "cost_seconds_a_request": None if finding.toll is None else finding.toll.per_request,
        "cost_tokens_a_second": None if finding.toll is None else finding.toll.tokens,
        "suppressed_by": finding.suppressed_by,
    }
