"""A diagnosis as Markdown, for an issue or a pull request."""

from __future__ import annotations

from collections.abc import Sequence

from doctor.diagnosis.finding import NOT_JUDGED, Diagnosis, Finding
from doctor.diagnosis.quantity import quantity
from doctor.output.report import (
    cannot_tell_lines,
    cost_words,
    fleet_lines,
    grouped,
    prescription_lines,
    verdict,
)


def as_markdown(diagnosis: Diagnosis, *, queries: bool = True) -> str:
    """The whole report; ``queries`` adds the PromQL behind every figure."""
    server = diagnosis.family + (f" ({diagnosis.version})" if diagnosis.version else "")
    parts = [
        f"# Diagnosis of {_cell(diagnosis.source)}",
        f"{server}, {len(diagnosis.engines)} engine(s), {diagnosis.window_s:.4g} s. "
        f"Objectives: {diagnosis.slo.describe()}.",
    ]
    if sentence := verdict(diagnosis):
        parts.append(f"**{sentence}**")
    if lines := fleet_lines(diagnosis.fleets):
        parts.append(
            "\n".join(f"- {line.strip()}" if line.startswith(" ") else f"{line}\n" for line in lines)
        )
    parts += [_finding(number, alike, queries) for number, alike in enumerate(grouped(diagnosis.findings), 1)]
    if missing := cannot_tell_lines(diagnosis.cannot_tell):
        parts.append("## Cannot tell\n\n" + "\n".join(f"- {line}" for line in missing))
    if diagnosis.notes:
        parts.append("## Notes\n\n" + "\n".join(f"- {note}" for note in diagnosis.notes))
    parts.append(f"Not judged: {', '.join(NOT_JUDGED)}.")
    return "\n\n".join(parts) + "\n"


def _finding(number: int, alike: Sequence[Finding], queries: bool) -> str:
    first = alike[0]
    where = ", ".join(f"`{finding.instance}`" for finding in alike[:5]) + (", …" if len(alike) > 5 else "")
    parts = [f"## {number}. {first.severity}: {first.title} (`{first.id}`)", f"On {where}."]
    if first.suppressed_by is not None:
        return "\n\n".join([*parts, f"Explained by `{first.suppressed_by}`."])
    if words := cost_words(alike):
        parts.append(words[0].upper() + words[1:] + ".")
    parts.append(_evidence(first, queries))
    if first.flags:
        known = ", ".join(
            f"`{name}` = {flag.value} ({flag.origin})" for name, flag in sorted(first.flags.items())
        )
        parts.append(f"Flags: {known}.")
    steps = [prescription_lines(item) for item in first.prescriptions]
    if steps:
        parts.append(
            "\n".join(f"- {line[0]}" + "".join(f"\n  {more.strip()}" for more in line[1:]) for line in steps)
        )
    if first.expect:
        expected = "; ".join(f"`{name}` {change}" for name, change in first.expect.items())
        parts.append(f"Expected (not verified on this server): {expected}.")
    return "\n\n".join(parts)


def _evidence(finding: Finding, queries: bool) -> str:
    rows = ["| signal | value |" + (" query |" if queries else ""), "|---|---|" + ("---|" if queries else "")]
    for item in finding.evidence:
        note = f" ({item.note})" if item.note else ""
        row = f"| {item.signal} | {quantity(item.value, item.unit)}{note} |"
        rows.append(row + (f" `{_cell(item.query)}` |" if queries else ""))
    return "\n".join(rows)


def _cell(text: str) -> str:
    """Text that may stand in a table."""
    return text.replace("|", "\\|").replace("\n", " ")
