"""Two windows side by side: what changed, for "what happened at 14:05?"."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from doctor.diagnosis.diagnose import diagnose
from doctor.diagnosis.engine_view import EngineView, counterpart, engine_views
from doctor.diagnosis.expectation import ExpectationKind, parse_expectation
from doctor.diagnosis.finding import Diagnosis
from doctor.diagnosis.judged_objectives import JudgedObjectives
from doctor.diagnosis.quantity import quantity
from doctor.metrics.signals import SIGNALS
from doctor.metrics.sources import Observation, Source
from loadgen.measure.rounding import significant
from servers.known_flags import Flag
from servers.logs.log_facts import LogFacts
from servers.reading import Number

SCHEMA = "vtune.doctor-diff/1"
ChangeKind = Literal["server", "traffic", "cache", "load", "latency"]

_SIGNALS: Mapping[ChangeKind, tuple[str, ...]] = {
    "traffic": ("request_rate", "prompt_tokens_mean", "output_tokens_mean"),
    "cache": ("prefix_hit_rate", "acceptance"),
    "load": ("running_mean", "waiting_mean", "kv_mean", "kv_max", "preemptions", "generation_rate"),
    "latency": (
        *("ttft_p50", "ttft_p95", "itl_p50", "itl_p99", "tpot_mean", "e2e_mean"),
        *("queue_time_mean", "prefill_time_mean", "decode_time_mean"),
    ),
}
"""In the order of cause and effect."""

_LEAST: Mapping[str, float] = {"share": 0.05, "requests": 0.5, "count": 1.0, "1/s": 0.01, "s": 0.001}
"""Differences below these are none, however large the ratio."""
_LEAST_RATIO = 0.1
_FALLS: tuple[ExpectationKind, ...] = ("falls", "by", "none")
"""Expectations of a figure that is to go down."""
_NOT_FLAGS = {"kv_cache_tokens": "KV pool tokens", "num_gpu_blocks": "GPU blocks"}
"""Facts of a server that it takes no flag for."""


@dataclass(frozen=True)
class Change:
    """One thing that is different. ``size`` ranks it: e-folds, or tenths of a share; 0 where only named."""

    kind: ChangeKind
    name: str
    engine: str
    before: float | str | None
    after: float | str | None
    unit: str = ""
    size: float = 0.0

    def words(self) -> str:
        shown = [_shown(value, self.unit) for value in (self.before, self.after)]
        text = f"{self.name}: {shown[0]} -> {shown[1]}"
        if self.unit == "share" or not (isinstance(self.before, float) and isinstance(self.after, float)):
            return text
        if min(self.before, self.after) <= 0:
            return text
        ratio = self.after / self.before
        return (
            f"{text} ({significant(ratio, 2)} times)"
            if ratio > 10
            else f"{text} ({(ratio - 1) * 100:+.0f} %)"
        )


@dataclass(frozen=True)
class Difference:
    """Everything that changed from ``a`` to ``b``, causes before effects, the largest first."""

    a: Diagnosis
    b: Diagnosis
    changes: tuple[Change, ...]
    came: tuple[tuple[str, str], ...]
    """(finding, engine), those that nothing else explains first."""
    went: tuple[tuple[str, str], ...]
    refuted: tuple[str, ...] = ()
    """Cures of A that B had, while the finding stayed and nothing fell that was to fall."""

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form (``schema``)."""
        return {
            "schema": SCHEMA,
            "a": {"source": self.a.source, "window_seconds": self.a.window_s},
            "b": {"source": self.b.source, "window_seconds": self.b.window_s},
            "changes": [
                {
                    "kind": change.kind,
                    "name": change.name,
                    "engine": change.engine,
                    "before": change.before,
                    "after": change.after,
                    "unit": change.unit,
                    "size": round(change.size, 4),
                }
                for change in self.changes
            ],
            "findings": {
                "came": [{"id": name, "engine": engine} for name, engine in self.came],
                "went": [{"id": name, "engine": engine} for name, engine in self.went],
            },
            "refuted": list(self.refuted),
        }


class Observed(Source):
    """A window that was looked at already."""

    def __init__(self, observation: Observation) -> None:
        self.observation = observation
        self.name = observation.name

    def observe(self, window: float | None, slo: Mapping[str, float]) -> Observation:
        return self.observation


@dataclass(frozen=True)
class DiffSide:
    """One of the two windows, and what is known about the server then."""

    source: Source
    flags: Mapping[str, Any] | None = None
    log: LogFacts | None = None


def difference(before: DiffSide, after: DiffSide, slo: JudgedObjectives) -> Difference:
    """Raises SourceError, PlaybookError."""
    (a, examined_a), (b, examined_b) = _look(before, slo), _look(after, slo)
    changes = _servers(a, b)
    refuted: list[str] = []
    for engine, old, new in _pairs(examined_a, examined_b):
        if old is None or new is None:
            there = ("not there", "there") if old is None else ("there", "not there")
            changes.append(Change("server", "engine", engine, *there))
        else:
            changes += [*_facts(engine, old, new), *_figures(engine, old, new)]
            refuted += _refuted(a, b, old, new)
    order = ["server", *_SIGNALS]
    changes.sort(key=lambda change: (order.index(change.kind), -change.size))
    alone = len(a.engines) == len(b.engines) == 1
    found_a, found_b = (_found(diagnosis, alone) for diagnosis in (a, b))
    came = tuple(item for item in found_b if item not in found_a)
    went = tuple(item for item in found_a if item not in found_b)
    return Difference(a, b, tuple(changes), came, went, tuple(refuted))


def _refuted(a: Diagnosis, b: Diagnosis, old: EngineView, new: EngineView) -> Iterator[str]:
    """The cures of A that were tried in B and did not help, in words."""
    stayed = {finding.id for finding in b.findings if finding.instance == new.name}
    for finding in a.findings:
        if finding.instance != old.name or finding.id not in stayed:
            continue
        hoped = [name for name, text in finding.expect.items() if parse_expectation(text).kind in _FALLS]
        figures = [(name, old.readings[name], new.readings[name]) for name in hoped]
        known = [
            (n, x.point, y.point) for n, x, y in figures if isinstance(x, Number) and isinstance(y, Number)
        ]
        if not known or any(after < (1 - _LEAST_RATIO) * before for _, before, after in known):
            continue
        names = ", ".join(name for name, _, _ in known)
        for cure in finding.prescriptions:
            if cure.changes and all(
                _tried(cure.was[flag], wanted, new.flags.value(flag)) for flag, wanted in cure.changes.items()
            ):
                yield f"{cure.args} for {finding.id} was tried, and {names} did not fall: withdrawn"


def _tried(was: Any, wanted: Any, now: Any) -> bool:
    """Whether a flag went to the prescribed value, or half of the way there at least."""
    if all(isinstance(value, int | float) for value in (was, wanted, now)):
        return bool((now - was) * (wanted - was) > 0 and abs(now - was) >= abs(wanted - was) / 2)
    return bool(now == wanted != was)


def _look(side: DiffSide, slo: JudgedObjectives) -> tuple[Diagnosis, list[EngineView]]:
    observation = side.source.observe(None, slo.values)
    diagnosis = diagnose(Observed(observation), side.flags, slo, log=side.log)
    return diagnosis, engine_views(observation, side.flags, slo, side.log, {}, None)


def _servers(a: Diagnosis, b: Diagnosis) -> list[Change]:
    told = (("metrics of", a.family, b.family), ("version", a.version, b.version))
    return [Change("server", name, "", old, new) for name, old, new in told if old != new]


def _pairs(
    old: Sequence[EngineView], new: Sequence[EngineView]
) -> list[tuple[str, EngineView | None, EngineView | None]]:
    """Engines of both windows; where each has just one, they are compared whatever they are called."""
    if len(old) == len(new) == 1:
        return [("", old[0], new[0])]
    stayed = [(view, counterpart(view, old)) for view in new]
    kept = [before.group for _, before in stayed if before is not None]
    gone = [view for view in old if view.group not in kept]
    return sorted(
        [
            *((after.name, before, after) for after, before in stayed),
            *((before.name, before, None) for before in gone),
        ],
        key=lambda pair: pair[0],
    )


def _facts(engine: str, old: EngineView, new: EngineView) -> list[Change]:
    """Model, flags, restarts."""
    changes = []
    if old.group.model_name != new.group.model_name:
        changes.append(Change("server", "model", engine, old.group.model_name, new.group.model_name))
    for name in sorted(old.flags.known.keys() & new.flags.known.keys()):
        before, after = old.flags.known[name], new.flags.known[name]
        if before.certain and after.certain and before.value != after.value:
            option = _NOT_FLAGS.get(name, f"--{name.replace('_', '-')}")
            changes.append(Change("server", option, engine, _value(before), _value(after)))
    restarts = new.readings["restarts"]
    if isinstance(restarts, Number) and restarts.point >= 1:
        changes.append(
            Change("server", "restarts in B", engine, None, restarts.point, "count", restarts.point)
        )
    return changes


def _value(flag: Flag) -> float | str:
    return float(flag.value) if isinstance(flag.value, int | float) else str(flag.value)


def _figures(engine: str, old: EngineView, new: EngineView) -> list[Change]:
    """Signals that differ by more than chance: requests are counted, so a mean of n is good to 1/sqrt(n)."""
    counts = [reading.point for p in (old, new) if isinstance(reading := p.readings["first_tokens"], Number)]
    chance = 2 * math.sqrt(sum(1 / max(count, 1.0) for count in counts))
    changes = []
    for kind, names in _SIGNALS.items():
        for name in names:
            before, after = old.readings[name], new.readings[name]
            if isinstance(before, Number) and isinstance(after, Number):
                unit = SIGNALS[name].unit
                size = _size(before.point, after.point, unit, chance)
                if size:
                    changes.append(Change(kind, name, engine, before.point, after.point, unit, size))
    return changes


def _size(before: float, after: float, unit: str, chance: float) -> float:
    """How large a change is; 0 where it may be none."""
    if abs(after - before) < _LEAST.get(unit, 0.0):
        return 0.0
    if unit == "share":
        return abs(after - before) * 10
    if min(before, after) <= 0:
        return 10.0 if before != after else 0.0
    folds = abs(math.log(after / before))
    return folds if folds > max(_LEAST_RATIO, chance) else 0.0


def _found(diagnosis: Diagnosis, alone: bool) -> list[tuple[str, str]]:
    return [(finding.id, "" if alone else finding.instance) for finding in diagnosis.findings]


def as_lines(difference: Difference, *, markdown: bool = False) -> str:
    """The report as text, or as Markdown."""
    head = f"A: {difference.a.source} ({significant(difference.a.window_s)} s)   "
    head += f"B: {difference.b.source} ({significant(difference.b.window_s)} s)"
    lines = [head, ""]
    titles = {"server": "Server", "traffic": "Traffic", "cache": "Cache and speculation"}
    titles |= {"load": "Load", "latency": "Latency"}
    sections: dict[str, list[str]] = {
        "Findings": [f"New finding: {_named(item)}" for item in difference.came]
        + [f"No longer found: {_named(item)}" for item in difference.went]
        + [f"Refuted: {text}" for text in difference.refuted]
    }
    for change in difference.changes:
        where = f"{change.engine}: " if change.engine else ""
        sections.setdefault(titles[change.kind], []).append(where + change.words())
    for title, entries in sections.items():
        if entries:
            lines.append(f"## {title}\n" if markdown else title)
            lines += [f"- {entry}" if markdown else f"  {entry}" for entry in entries]
            lines.append("")
    if not any(sections.values()):
        lines.append("Nothing changed beyond chance.")
    return "\n".join(lines).rstrip("\n") + "\n"


def _named(item: tuple[str, str]) -> str:
    return item[0] + (f" on {item[1]}" if item[1] else "")


def _shown(value: float | str | None, unit: str) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else quantity(value, unit).rstrip()
