"""From one window of metrics to findings: every rule judged, every figure shown, causes first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from doctor.diagnosis.coverage import not_judged
from doctor.diagnosis.engine_view import EngineView, engine_views, with_baseline
from doctor.diagnosis.finding import CannotTell, Diagnosis, Evidence, Finding
from doctor.diagnosis.fleet import fleets
from doctor.diagnosis.judged_objectives import JudgedObjectives, judged_objectives
from doctor.diagnosis.objective_judgement import ObjectiveJudgement
from doctor.diagnosis.playbook import SEVERITIES, Playbook, load_all, told_by
from doctor.diagnosis.prescribe import prescriptions
from doctor.metrics.signals import SIGNALS
from doctor.metrics.sources import Source
from servers.command import ServerCommand
from servers.kind import ServerKind
from servers.logs.log_facts import LogFacts
from servers.reading import Number

KEY_FIGURES = (
    *("running_mean", "running_max", "waiting_mean", "waiting_max", "kv_max", "preemptions", "prompt_rate"),
    *("generation_rate", "request_rate", "ttft_p50", "ttft_p95", "itl_mean", "itl_p99"),
)
"""What is said of an engine where no finding says it."""
FEW_REQUESTS = 20
"""Below this a P95 is the slowest request."""


def diagnose(
    source: Source,
    flags: ServerCommand | Mapping[str, Any] | None = None,
    slo: JudgedObjectives | str | None = None,
    *,
    log: LogFacts | None = None,
    assume: Mapping[str, float] | None = None,
    window: float | None = None,
    kind: ServerKind | None = None,
    baseline: Source | None = None,
    baseline_flags: ServerCommand | Mapping[str, Any] | None = None,
    playbooks: Sequence[Playbook] | None = None,
) -> Diagnosis:
    """Judge every playbook on every engine of ``source``.

    ``flags``: the server's command as ``parse_command`` gives it, or only its current flags (an
    empty mapping: started with defaults; None: not known).
    ``slo``: as :func:`judged_objectives` reads it. ``assume``: values for :data:`playbook.ASSUMPTIONS`.
    ``window``: seconds, None for the source's default.
    ``baseline``: an earlier time to compare with, under ``baseline_flags``.
    Raises SourceError, SloError, PlaybookError.
    """
    objectives = slo if isinstance(slo, JudgedObjectives) else judged_objectives(slo)
    observation = source.observe(window, objectives.values)
    books = [book for book in (load_all() if playbooks is None else playbooks) if book.when.parts]
    examined = engine_views(observation, flags, objectives, log, assume or {}, kind)
    if baseline is not None:
        earlier = baseline.observe(None, objectives.values)
        examined = with_baseline(
            examined, engine_views(earlier, baseline_flags, objectives, None, assume or {}, kind)
        )
    findings: list[Finding] = []
    cannot_tell: list[CannotTell] = []
    for view in examined:
        own: list[tuple[Playbook, Finding]] = []
        for book in books:
            when = view.asked(book.when)
            if when is None:
                continue
            truth = when.judge(view.lookup)
            if truth.value:
                own.append((book, _finding(book, view)))
            elif truth.value is None and not view.excuses(truth.missing):
                cannot_tell.append(CannotTell(book.id, book.severity, view.name, truth.missing))
        findings += _explain(own)
    findings = ranked(findings)
    idle = all(view.idle for view in examined)
    objectives_judged = tuple(judged for view in examined for judged in view.objectives)
    return Diagnosis(
        source=observation.name,
        family=observation.family,
        version=examined[0].flags.version,
        window_s=observation.window_s,
        slo=objectives,
        objectives=objectives_judged,
        findings=tuple(findings),
        cannot_tell=tuple(cannot_tell),
        healthy=not observation.since_start and _healthy(findings, cannot_tell, objectives_judged),
        since_start=observation.since_start,
        idle=idle,
        engines=tuple(view.name for view in examined),
        flags={view.name: view.flags for view in examined},
        notes=(*observation.notes, *_remarks(examined)),
        not_judged=not_judged(examined, observation.evaluator.keys),
        fleets=fleets(observation.evaluator, examined),
        figures={view.name: tuple(_evidence(view, KEY_FIGURES)) for view in examined},
    )


def _finding(book: Playbook, view: EngineView) -> Finding:
    named = set(book.when.names)
    return Finding(
        id=book.id,
        severity=book.severity,
        title=book.named(view.lookup),
        instance=view.name,
        model=view.group.model_name,
        engine=view.group.get("engine"),
        labels=dict(view.group.labels),
        evidence=(*_evidence(view, book.signals), *_told(book, view)),
        flags={name: flag for name, flag in view.flags.known.items() if name in named},
        prescriptions=prescriptions(book, view),
        expect=book.expect,
        toll=book.cost.of(view.lookup) if book.cost else None,
    )


def _evidence(view: EngineView, names: Iterable[str]) -> Iterator[Evidence]:
    """The signals that have a value."""
    for name in names:
        if isinstance(reading := view.readings[name], Number):
            unit = SIGNALS[name].unit
            yield Evidence(name, reading.point, unit, view.queries[name], _bound_note(reading))


def _told(book: Playbook, view: EngineView) -> list[Evidence]:
    """What a rule and its remedies ask of a log, a benchmark or labels, where it is said."""
    names = dict.fromkeys((*book.when.names, *(name for cure in book.remedies for name in cure.needs.names)))
    return [
        Evidence(
            name,
            view.constants[name],
            "s" if name.endswith("_seconds") else "count",
            who.removeprefix("needs "),
        )
        for name in names
        if (who := told_by(name)) is not None and view.constants.get(name)
    ]


def _bound_note(number: Number) -> str | None:
    if number.exact:
        return None
    if math.isinf(number.high):
        return f"at least {number.low:g}: in the last bucket"
    return f"between {number.low:g} and {number.high:g}: in the first bucket"


def _explain(found: list[tuple[Playbook, Finding]]) -> list[Finding]:
    """Mark every finding that another one on the same engine explains."""
    causes: dict[str, str] = {}
    books = {finding.id: book for book, finding in found}
    for finding in ranked([finding for _, finding in found]):
        for consequence in books[finding.id].explains:
            causes.setdefault(consequence, finding.id)

    def root(identity: str) -> str | None:
        cause = causes.get(identity)
        return None if cause is None else root(cause) or cause

    return [_placed(book, finding, root(finding.id)) for book, finding in found]


def _placed(book: Playbook, finding: Finding, cause: str | None) -> Finding:
    """A page that names what explains it is a symptom: without one of these its cause is not known."""
    unknown = cause is None and bool(book.explained_by)
    title = f"{finding.title} (cause not found)" if unknown else finding.title
    return replace(finding, suppressed_by=cause, title=title)


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """Causes first; of these what is to be cured, the costliest first; what is only worth knowing last.

    The cost of one finding on several engines is what it costs on all of them.
    """
    costs: dict[tuple[str, str | None], float] = {}
    for finding in findings:
        kind = finding.id, finding.suppressed_by
        costs[kind] = costs.get(kind, 0.0) + (finding.cost or 0.0)

    def rank(finding: Finding) -> tuple[Any, ...]:
        severity = SEVERITIES.index(finding.severity)
        return (
            finding.suppressed_by is not None,
            finding.severity == "info",
            -costs[finding.id, finding.suppressed_by],
            -severity,
            finding.id,
            -(finding.cost or 0.0),
            finding.instance,
        )

    return sorted(findings, key=rank)


def _healthy(
    findings: Sequence[Finding], cannot_tell: Sequence[CannotTell], objectives: Sequence[ObjectiveJudgement]
) -> bool:
    """Every objective is held, no warning, and none that only something missing keeps from being judged.

    What only the user or another source can know does not count against a server, nor does a fleet of one.
    """
    if any(SEVERITIES.index(finding.severity) >= SEVERITIES.index("warning") for finding in findings):
        return False
    if any(judged.held is False or (judged.held is None and not judged.excused) for judged in objectives):
        return False
    unknown = [{missing.kind for missing in item.missing} for item in cannot_tell if item.severity != "info"]
    return all("elsewhere" in kinds or kinds <= {"assumption", "peers"} for kinds in unknown)


def _remarks(examined: Sequence[EngineView]) -> list[str]:
    """What limits the diagnosis without being a finding."""
    unknown = dict.fromkeys((name, view.flags.kind.label) for view in examined for name in view.flags.unknown)
    notes = [
        f"--{name.replace('_', '-')}: no release of {label} that is known here has it, and it may change "
        "what is not stated: no default is taken for certain"
        for name, label in unknown
    ]
    for view in examined:
        restarts, requests = (view.readings[name] for name in ("restarts", "first_tokens"))
        if isinstance(restarts, Number) and restarts.point >= 1:
            notes.append(f"{view.name}: the counters restarted {restarts.point:g} time(s) in the window")
        if isinstance(requests, Number) and 0.5 <= requests.point < FEW_REQUESTS:
            notes.append(f"{view.name}: only {requests.point:.0f} requests, so percentiles are rough")
    return notes
