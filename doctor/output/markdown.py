"""A diagnosis as Markdown, for an issue or a pull request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from doctor.diagnosis.finding import Diagnosis, Finding
from doctor.diagnosis.quantity import quantity
from doctor.output.report import (
    cannot_tell_lines,
    cost_words,
    figure_lines,
    fleet_lines,
    grouped,
    objective_lines,
    prescription_lines,
    verdict,
    where,
    window_words,
)
from loadgen.output.page import render

_SHOWN = 5
"""Engines that are named per finding."""


def as_markdown(diagnosis: Diagnosis, *, queries: bool = True) -> str:
    """The whole report; ``queries`` adds the PromQL behind every figure."""
    return render(
        "diagnosis.md.j2",
        "doctor.output",
        diagnosis=diagnosis,
        server=diagnosis.family + (f" ({diagnosis.version})" if diagnosis.version else ""),
        window=window_words(diagnosis),
        objectives=objective_lines(diagnosis.objectives),
        verdict=verdict(diagnosis),
        figures=figure_lines(diagnosis) if verdict(diagnosis) else [],
        fleets=[fleet_lines([fleet]) for fleet in diagnosis.fleets],
        findings=[_finding(alike) for alike in grouped(diagnosis.findings)],
        cannot_tell=cannot_tell_lines(diagnosis.cannot_tell),
        not_judged=diagnosis.not_judged,
        queries=queries,
    )


def _finding(alike: Sequence[Finding]) -> dict[str, Any]:
    """What the template shows of findings of one id and cause."""
    first = alike[0]
    return {
        "first": first,
        "instances": [where(finding) for finding in alike[:_SHOWN]],
        "more": len(alike) > _SHOWN,
        "cost": cost_words(alike),
        "evidence": [
            (
                item.signal,
                quantity(item.value, item.unit) + (f" ({item.note})" if item.note else ""),
                item.query,
            )
            for item in first.evidence
        ],
        "flags": sorted(first.flags.items()),
        "steps": [prescription_lines(item) for item in first.prescriptions],
    }
