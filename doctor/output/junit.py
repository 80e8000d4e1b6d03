"""A diagnosis as JUnit XML: one test case for every symptom and engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from doctor.diagnosis.finding import Diagnosis, Finding
from doctor.diagnosis.playbook import SEVERITIES, Playbook, Severity
from doctor.output.report import finding_lines
from loadgen.output.junit import Case, junit


def as_junit(diagnosis: Diagnosis, books: Sequence[Playbook], fail_on: Severity = "warning") -> str:
    """A case fails where a finding that nothing explains reaches ``fail_on``; it is skipped where the doctor
    cannot tell; a milder or explained finding passes, and is told in ``system-out``."""
    return junit(_cases(diagnosis, [book for book in books if book.when.parts], fail_on), "vtune doctor")


def _cases(diagnosis: Diagnosis, books: Sequence[Playbook], fail_on: Severity) -> Iterator[Case]:
    found = {(finding.id, finding.instance): finding for finding in diagnosis.findings}
    unclear = {(item.id, item.instance): item for item in diagnosis.cannot_tell}
    for engine in diagnosis.engines:
        for book in books:
            if (finding := found.get((book.id, engine))) is not None:
                yield _case(finding, fail_on)
            elif (item := unclear.get((book.id, engine))) is not None:
                why = "; ".join(f"{missing.name}: {missing.why}" for missing in item.missing)
                yield Case(book.id, skipped=f"cannot tell: {why}", group=engine)
            else:
                yield Case(book.id, group=engine)


def _case(finding: Finding, fail_on: Severity) -> Case:
    text = "\n".join(finding_lines(1, [finding], queries=True))
    if finding.suppressed_by is None and SEVERITIES.index(finding.severity) >= SEVERITIES.index(fail_on):
        return Case(finding.id, finding.title, text=text, group=finding.instance, kind=finding.severity)
    return Case(finding.id, text=text, group=finding.instance)
