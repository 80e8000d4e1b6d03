"""From one window of metrics to findings: every rule judged, every figure shown, causes first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from doctor import flags as server_flags
from doctor.evaluators import Group
from doctor.expression import Comparison, Lookup
from doctor.flags import Engine, Flag, Flags
from doctor.logfile import LogFacts
from doctor.playbook import ASSUMPTIONS, SEVERITIES, Playbook, Remedy, Severity, load_all
from doctor.reading import Missing, Number, Reading
from doctor.signals import SIGNALS
from doctor.slo import Slo, parse_slo
from doctor.sources import Observation, Source

SCHEMA = "vtune.doctor/1"
NOT_JUDGED = (
    "LoRA",
    "MoE expert balance",
    "data parallel ranks against each other",
    "prefill/decode disaggregation",
    "GPU and CPU utilisation",
)


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
    """Flags it was computed from that nobody told us, with where the value is from."""


@dataclass(frozen=True)
class Finding:
    id: str
    severity: Severity
    title: str
    instance: str
    model: str
    engine: str
    evidence: tuple[Evidence, ...]
    flags: Mapping[str, Flag]
    prescriptions: tuple[Prescription, ...]
    expect: Mapping[str, str]
    cost: float | None
    """Request-seconds of delay a second: how many requests are being held up, on average."""
    suppressed_by: str | None = None


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
    slo: Slo
    findings: tuple[Finding, ...]
    cannot_tell: tuple[CannotTell, ...]
    healthy: bool
    idle: bool
    engines: tuple[str, ...]
    notes: tuple[str, ...]

    def worst(self) -> Severity | None:
        """The highest severity among findings that nothing else explains."""
        found = [finding.severity for finding in self.findings if finding.suppressed_by is None]
        return max(found, key=SEVERITIES.index) if found else None

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form (``schema``)."""
        return {
            "schema": SCHEMA,
            "source": self.source,
            "server": {"family": self.family, "version": self.version, "engines": list(self.engines)},
            "window_seconds": round(self.window_s, 3),
            "slo": {
                name: {
                    "seconds": value if math.isfinite(value) else None,
                    "from": self.slo.given.get(name, "default"),
                }
                for name, value in self.slo.values.items()
            },
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
            "healthy": self.healthy,
            "idle": self.idle,
            "not_judged": list(NOT_JUDGED),
            "notes": list(self.notes),
        }


def diagnose(
    source: Source,
    flags: Mapping[str, Any] | None = None,
    slo: Slo | str | None = None,
    *,
    log: LogFacts | None = None,
    assume: Mapping[str, float] | None = None,
    window: float | None = None,
    engine: Engine | None = None,
    playbooks: Sequence[Playbook] | None = None,
) -> Diagnosis:
    """Judge every playbook on every engine of ``source``.

    ``flags``: the server's current flags as ``loadgen.flags.parse_command`` gives them (an empty mapping:
    started with defaults; None: not known). ``slo``: as :func:`doctor.slo.parse_slo` reads it. ``assume``:
    values for :data:`doctor.playbook.ASSUMPTIONS`. ``window``: seconds, None for the source's default.
    Raises SourceError, SloError, PlaybookError.
    """
    objectives = slo if isinstance(slo, Slo) else parse_slo(slo)
    observation = source.observe(window, objectives.values)
    books = load_all() if playbooks is None else tuple(playbooks)
    patients = _patients(observation, flags, objectives, log, assume or {}, engine)
    findings: list[Finding] = []
    cannot_tell: list[CannotTell] = []
    for patient in patients:
        own: list[tuple[Playbook, Finding]] = []
        for book in books:
            truth = book.when.judge(patient.lookup)
            if truth.value:
                own.append((book, _finding(book, patient)))
            elif truth.value is None and not patient.excuses(truth.missing):
                cannot_tell.append(CannotTell(book.id, book.severity, patient.name, truth.missing))
        findings += _explain(own)
    findings.sort(key=_rank)
    idle = all(patient.idle for patient in patients)
    return Diagnosis(
        source=observation.name,
        family=observation.family,
        version=patients[0].flags.version,
        window_s=observation.window_s,
        slo=objectives,
        findings=tuple(findings),
        cannot_tell=tuple(cannot_tell),
        healthy=_healthy(findings, cannot_tell),
        idle=idle,
        engines=tuple(patient.name for patient in patients),
        notes=(*observation.notes, *objectives.notes, *_restarts(patients)),
    )


@dataclass(frozen=True)
class _Patient:
    """One engine with everything that rules may ask about it."""

    group: Group
    name: str
    readings: Mapping[str, Reading]
    queries: Mapping[str, str]
    flags: Flags
    constants: Mapping[str, float]
    """SLOs and assumptions."""

    def lookup(self, name: str) -> Reading:
        if name in self.readings:
            return self.readings[name]
        if name in self.constants:
            return Number.exactly(self.constants[name])
        if name in ASSUMPTIONS:
            return Missing(name, "assumption", ASSUMPTIONS[name])
        reading = self.flags.reading(name)
        return reading if isinstance(reading, Number) else Missing(name, "flag", reading.why)

    @property
    def idle(self) -> bool:
        """No request was seen in the window."""
        seen = [self.readings[name] for name in ("running_max", "waiting_max", "first_tokens")]
        known = [reading.point for reading in seen if isinstance(reading, Number)]
        return bool(known) and not any(known)

    def excuses(self, missing: Iterable[Missing]) -> bool:
        """Whether a rule does not apply here, rather than being undecided: no peers, or no traffic at all."""
        kinds = {item.kind for item in missing}
        return kinds <= ({"peers", "empty"} if self.idle else {"peers"})


def _patients(
    observation: Observation,
    given: Mapping[str, Any] | None,
    slo: Slo,
    log: LogFacts | None,
    assume: Mapping[str, float],
    engine: Engine | None,
) -> list[_Patient]:
    evaluator = observation.evaluator
    read = {name: evaluator.read(signal) for name, signal in SIGNALS.items()}
    queries = {name: evaluator.query(signal) for name, signal in SIGNALS.items()}
    configs = evaluator.cache_config()
    kind: Engine = engine or ("sglang" if observation.family == "SGLang" else "vllm")
    patients = []
    for group in evaluator.groups:
        config = _config_of(group, configs)
        flags = server_flags.resolve(given, log, config, engine=kind, version=observation.version)
        readings = {name: values[group] for name, values in read.items()}
        patients.append(
            _Patient(
                group,
                _name(group, observation.name),
                readings,
                queries,
                _infer(flags, readings),
                {**slo.values, **assume},
            )
        )
    return patients


def _config_of(group: Group, configs: Sequence[Mapping[str, str]]) -> Mapping[str, str] | None:
    """``cache_config_info`` carries no model name, so instance and engine must do."""
    for labels in configs:
        if labels.get("instance", "") == group.instance and labels.get("engine", "") in ("", group.engine):
            return labels
    return None


def _infer(flags: Flags, readings: Mapping[str, Reading]) -> Flags:
    """Read off the metrics what no metric says outright."""
    flags = _infer_speculation(flags, readings)
    wanted = (
        "running_max",
        "running_when_waiting",
        "waiting_share",
        "kv_max",
        "decode_time_mean",
        "prefill_time_mean",
    )
    found = [reading.point for name in wanted if isinstance(reading := readings[name], Number)]
    if flags.known["max_num_seqs"].certain or len(found) < len(wanted):
        return flags
    most, usual, waiting, kv, decode, prefill = found
    # Requests wait, the KV pool has room, slots are held by decoding, and running stays at its maximum: that
    # maximum is the cap. A slot is empty for a step whenever a request finishes, hence half a slot less.
    if waiting > 0.5 and kv < 0.9 and decode > prefill and usual > 0.8 * most - 0.5:
        return flags.with_flag(server_flags.inferred("max_num_seqs", most, most, most))
    return flags


def _infer_speculation(flags: Flags, readings: Mapping[str, Reading]) -> Flags:
    """The speculative families exist only while speculation is on."""
    if flags.known["num_speculative_tokens"].certain:
        return flags
    drafted = readings["tokens_drafted_per_draft"]
    if isinstance(drafted, Number):
        tokens = float(math.ceil(round(drafted.point, 3)))
        return flags.with_flag(
            server_flags.inferred("num_speculative_tokens", tokens, drafted.point, max(tokens, 64.0))
        )
    if drafted.kind == "metric":
        return flags.with_flag(server_flags.inferred("num_speculative_tokens", 0.0, 0.0, 0.0))
    return flags


def _name(group: Group, source: str) -> str:
    instance = group.instance or source
    return f"{instance} engine {group.engine}" if group.engine not in ("", "0") else instance


def _finding(book: Playbook, patient: _Patient) -> Finding:
    evidence = []
    for name in book.signals:
        reading = patient.readings[name]
        if isinstance(reading, Number):
            unit = SIGNALS[name].unit
            evidence.append(Evidence(name, reading.point, unit, patient.queries[name], _bound_note(reading)))
    named = set(book.when.names)
    cost = book.cost.value(patient.lookup) if book.cost else None
    return Finding(
        id=book.id,
        severity=book.severity,
        title=book.title,
        instance=patient.name,
        model=patient.group.model_name,
        engine=patient.group.engine,
        evidence=tuple(evidence),
        flags={name: flag for name, flag in patient.flags.known.items() if name in named},
        prescriptions=_prescriptions(book, patient),
        expect=book.expect,
        cost=max(cost.point, 0.0) if isinstance(cost, Number) and math.isfinite(cost.point) else None,
    )


def _bound_note(number: Number) -> str | None:
    if number.exact:
        return None
    if math.isinf(number.high):
        return f"at least {number.low:g}: in the last bucket"
    return f"between {number.low:g} and {number.high:g}: in the first bucket"


def _prescriptions(book: Playbook, patient: _Patient) -> tuple[Prescription, ...]:
    """The remedies that apply here, as exact flags."""
    built = []
    for remedy in book.remedies:
        needed = remedy.needs.judge(patient.lookup)
        if needed.value is False or any(item.kind != "flag" for item in needed.missing):
            continue
        # Undecided only because a flag is not known: prescribed with the condition in words.
        condition = None if needed.value else _condition(remedy, patient)
        prescription = _prescription(remedy, patient, condition)
        if prescription is not None:
            built.append(prescription)
    return tuple(built)


def _condition(remedy: Remedy, patient: _Patient) -> str:
    """The needs that hang on a flag nobody told us, with what can be computed computed."""
    words = []
    for part in remedy.needs.parts:
        if part.judge(patient.lookup).value is None and isinstance(part, Comparison):
            limit = part.right.value(_points(patient.lookup))
            shown = f"{limit.point:.4g}" if isinstance(limit, Number) else part.right.text
            words.append(f"{part.left.text} {part.operator} {shown}")
    return "only if " + " and ".join(words)


def _points(lookup: Lookup) -> Lookup:
    """A lookup that takes every range for its best single figure."""

    def point(name: str) -> Reading:
        reading = lookup(name)
        return Number.exactly(reading.point) if isinstance(reading, Number) else reading

    return point


def _prescription(remedy: Remedy, patient: _Patient, condition: str | None) -> Prescription | None:
    """None where the server has none of the flags, or where nothing would change."""
    flags = patient.flags
    wanted: dict[str, Any] = dict.fromkeys(remedy.unset)
    used = set(remedy.needs.names)
    for name, setting in remedy.settings.items():
        if isinstance(setting, str):
            wanted[name] = setting
            continue
        number = setting.value(_points(patient.lookup))
        if not isinstance(number, Number) or not math.isfinite(number.point):
            return None
        used |= setting.names | {name}
        wanted[name] = _rounded(name, number.point)
    refused = [reason for name in wanted if (reason := flags.unavailable(name))]
    changes = {name: value for name, value in wanted.items() if flags.unavailable(name) is None}
    if wanted and not changes and not remedy.do:
        return None
    if changes and all(value is not None and value == flags.value(name) for name, value in changes.items()):
        return None
    was = {name: flags.value(name) for name in changes}
    changes, was = _as_typed(changes, was, flags)
    known = flags.known
    uncertain = {n: known[n].origin for n in sorted(used & known.keys()) if not known[n].certain}
    text = "; ".join(filter(None, [remedy.do, remedy.because, condition, *dict.fromkeys(refused)]))
    return Prescription(changes, was, _arguments(changes, flags), text, uncertain)


def _rounded(name: str, value: float) -> int | float | bool:
    if name == "gpu_memory_utilization":
        return math.floor(value * 100 + 1e-9) / 100
    if name in server_flags.SWITCHES:
        return bool(value)
    whole = math.floor(value + 1e-9)
    return whole // 16 * 16 if name == "max_num_batched_tokens" and whole >= 64 else whole


def _as_typed(
    changes: Mapping[str, Any], was: Mapping[str, Any], flags: Flags
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The number of draft tokens is a key of ``speculative_config``, not a flag of its own."""
    key, config = "num_speculative_tokens", "speculative_config"
    if key not in changes:
        return dict(changes), dict(was)
    current = flags.raw.get(config)
    current = dict(current) if isinstance(current, Mapping) else {}
    return {config: {**current, key: changes[key]}}, {config: {**current, key: was[key]}}


def _arguments(changes: Mapping[str, Any], flags: Flags) -> str:
    """The flags as one types them; a dropped flag is named in words."""
    from loadgen.flags import render

    kept = {flags.spelled(name): value for name, value in changes.items() if value is not None}
    dropped = [
        f"drop --{flags.spelled(n).replace('_', '-')}" for n, value in changes.items() if value is None
    ]
    return ", ".join(filter(None, [" ".join(render(kept)), *dropped]))


def _explain(found: list[tuple[Playbook, Finding]]) -> list[Finding]:
    """Mark every finding that another one on the same engine explains."""
    causes: dict[str, str] = {}
    for book, _ in sorted(found, key=lambda pair: _rank(pair[1])):
        for consequence in book.explains:
            causes.setdefault(consequence, book.id)

    def root(identity: str) -> str | None:
        cause = causes.get(identity)
        return None if cause is None else root(cause) or cause

    return [replace(finding, suppressed_by=root(finding.id)) for _, finding in found]


def _rank(finding: Finding) -> tuple[bool, int, float, str, str]:
    """Causes first, then the more severe, then the costlier."""
    severity = SEVERITIES.index(finding.severity)
    return finding.suppressed_by is not None, -severity, -(finding.cost or 0.0), finding.id, finding.instance


def _healthy(findings: Sequence[Finding], cannot_tell: Sequence[CannotTell]) -> bool:
    """No unexplained warning, and no warning that only a missing metric keeps from being judged."""
    if any(SEVERITIES.index(finding.severity) >= SEVERITIES.index("warning") for finding in findings):
        return False
    blind = (
        item
        for item in cannot_tell
        if item.severity != "info" and any(missing.kind in ("metric", "empty") for missing in item.missing)
    )
    return not any(blind)


def _restarts(patients: Sequence[_Patient]) -> list[str]:
    notes = []
    for patient in patients:
        restarts = patient.readings["restarts"]
        if isinstance(restarts, Number) and restarts.point >= 1:
            notes.append(f"{patient.name}: the counters restarted {restarts.point:g} time(s) in the window")
    return notes


def _finding_json(finding: Finding) -> dict[str, Any]:
    return {
        "id": finding.id,
        "severity": finding.severity,
        "title": finding.title,
        "instance": finding.instance,
        "model": finding.model,
        "engine": finding.engine,
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
                "verified": False,
            }
            for p in finding.prescriptions
        ],
        "expect": dict(finding.expect),
        "cost": finding.cost,
        "suppressed_by": finding.suppressed_by,
    }
