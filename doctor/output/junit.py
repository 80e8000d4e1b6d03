"""A diagnosis as JUnit XML, which CI systems show: one test case for every symptom and engine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from doctor.diagnosis.finding import Diagnosis, Finding
from doctor.diagnosis.playbook import SEVERITIES, Playbook, Severity
from doctor.output.report import finding_lines

_UNWRITABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def as_junit(diagnosis: Diagnosis, books: Sequence[Playbook], fail_on: Severity = "warning") -> str:
    """A case fails where a finding that nothing explains reaches ``fail_on``; it is skipped where the doctor
    cannot tell; a milder or explained finding passes, and is told in ``system-out``."""
    suite = ElementTree.Element("testsuite", name="vtune doctor")
    found = {(finding.id, finding.instance): finding for finding in diagnosis.findings}
    unclear = {(item.id, item.instance): item for item in diagnosis.cannot_tell}
    failures = 0
    books = [book for book in books if book.when.parts]
    for engine in diagnosis.engines:
        for book in books:
            case = ElementTree.SubElement(suite, "testcase", classname=_clean(engine), name=book.id)
            if (finding := found.get((book.id, engine))) is not None:
                failures += _tell(case, finding, fail_on)
            elif (item := unclear.get((book.id, engine))) is not None:
                why = "; ".join(f"{missing.name}: {missing.why}" for missing in item.missing)
                ElementTree.SubElement(case, "skipped", message=_clean(f"cannot tell: {why}"))
    suite.set("tests", str(len(diagnosis.engines) * len(books)))
    suite.set("failures", str(failures))
    suite.set("skipped", str(len(suite.findall("testcase/skipped"))))
    suite.set("errors", "0")
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def _tell(case: ElementTree.Element, finding: Finding, fail_on: Severity) -> int:
    """Write one finding into its case; 1 where it is a failure."""
    text = _clean("\n".join(finding_lines(1, [finding], queries=True)))
    if finding.suppressed_by is None and SEVERITIES.index(finding.severity) >= SEVERITIES.index(fail_on):
        failure = ElementTree.SubElement(
            case, "failure", message=_clean(finding.title), type=finding.severity
        )
        failure.text = text
        return 1
    ElementTree.SubElement(case, "system-out").text = text
    return 0


def _clean(text: str) -> str:
    """Without what XML cannot hold."""
    return _UNWRITABLE.sub("\N{REPLACEMENT CHARACTER}", text)
