"""A diagnosis as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from doctor.finding import NOT_JUDGED, CannotTell, Diagnosis, Evidence, Finding, Prescription

_MARK = {"critical": "CRITICAL", "warning": "WARNING", "info": "INFO"}


def as_text(diagnosis: Diagnosis, *, queries: bool = True) -> str:
    """The whole report; ``queries`` prints the PromQL behind every figure."""
    lines = [*_header(diagnosis), ""]
    for number, alike in enumerate(_grouped(diagnosis.findings), start=1):
        lines += [*_finding(number, alike, queries), ""]
    lines += _verdict(diagnosis)
    lines += _cannot_tell(diagnosis.cannot_tell)
    lines += [f"note: {note}" for note in diagnosis.notes]
    lines.append(f"Not judged: {', '.join(NOT_JUDGED)}.")
    return "\n".join(lines) + "\n"


def quantity(value: float, unit: str) -> str:
    """A figure with its unit, to about four digits."""
    if math.isinf(value):
        return "infinite"
    match unit:
        case "s" if abs(value) < 1:
            return f"{value * 1000:.4g} ms"
        case "s/token":
            return f"{value * 1000:.4g} ms/token"
        case "share":
            return f"{value * 100:.4g} %"
        case "ratio" | "count":
            return f"{value:.4g}"
        case _:
            return f"{value:.4g} {unit}"


def _header(diagnosis: Diagnosis) -> list[str]:
    server = diagnosis.family + (f" (says {diagnosis.version})" if diagnosis.version else "")
    engines = diagnosis.engines
    return [
        f"{diagnosis.source}: {server}, {len(engines)} engine{'s' if len(engines) != 1 else ''}, "
        f"window {diagnosis.window_s:.4g} s",
        f"Objectives: {diagnosis.slo.describe()}",
    ]


def _grouped(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Findings of one id and cause, in rank order: a fleet shows one entry, not a hundred."""
    groups: dict[tuple[str, str | None], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.id, finding.suppressed_by), []).append(finding)
    return list(groups.values())


def _finding(number: int, alike: Sequence[Finding], queries: bool) -> list[str]:
    first = alike[0]
    behind = f"  (explained by {first.suppressed_by})" if first.suppressed_by else ""
    lines = [f"{number}. {_MARK[first.severity]} {first.id}: {first.title}{behind}"]
    others = f" and {len(alike) - 1} more: {_some([f.instance for f in alike[1:]])}" if len(alike) > 1 else ""
    lines.append(f"   on {first.instance}{others}")
    if first.suppressed_by is None:
        lines += [f"   {line}" for item in first.evidence for line in _evidence(item, queries)]
        lines += [
            f"   {name} = {_plain(flag.value)} ({flag.origin})" for name, flag in sorted(first.flags.items())
        ]
        lines += [f"   {line}" for item in first.prescriptions for line in _prescription(item)]
        if first.expect:
            expected = "; ".join(f"{name}: {change}" for name, change in first.expect.items())
            lines.append(f"   expect: {expected} (not verified on this server)")
    return lines


def _evidence(item: Evidence, queries: bool) -> list[str]:
    note = f"  [{item.note}]" if item.note else ""
    shown = f"{item.signal} = {quantity(item.value, item.unit)}{note}"
    return [shown, f"    {item.query}"] if queries else [shown]


def _prescription(item: Prescription) -> list[str]:
    if not item.changes:
        return [f"do: {item.text}"]
    was = ", ".join(f"{name} was {_plain(value)}" for name, value in item.was.items() if value is not None)
    lines = [f"try: {item.args}" + (f"   ({was})" if was else "")]
    if item.text:
        lines.append(f"     {item.text}")
    if item.uncertain:
        origins = ", ".join(f"{name} is {origin}" for name, origin in item.uncertain.items())
        lines.append(f"     computed with flags nobody stated: {origins}")
    return lines


def _verdict(diagnosis: Diagnosis) -> list[str]:
    if diagnosis.idle:
        return ["Idle: no request in the window, nothing to find.", ""]
    if diagnosis.healthy:
        return ["Healthy: nothing at severity warning or above.", ""]
    if diagnosis.worst() in (None, "info"):
        return ["No verdict: too much could not be judged (see below).", ""]
    return []


def _cannot_tell(items: Sequence[CannotTell]) -> list[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for item in items:
        reason = "; ".join(f"{missing.name}: {missing.why}" for missing in item.missing)
        groups.setdefault((item.id, reason), []).append(item.instance)
    if not groups:
        return []
    lines = ["Cannot tell:"]
    for (identity, reason), instances in groups.items():
        where = f" (on {len(instances)} engines)" if len(instances) > 1 else ""
        lines.append(f"  {identity}{where}: {reason}")
    return [*lines, ""]


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _some(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")
