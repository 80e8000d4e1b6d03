"""JUnit XML, which CI systems show."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One question and its answer, as a test runner sees it. ``failure`` and ``skipped`` say why; both empty:
    it passed. ``group`` is what is tested, the suite's name by default; ``kind`` is the failure's type."""

    name: str
    failure: str = ""
    skipped: str = ""
    text: str = ""
    group: str = ""
    kind: str = ""


def junit(cases: Iterable[Case], suite: str) -> str:
    """A document of one suite."""
    from loadgen.output.page import render

    return render("junit.xml.j2", cases=list(cases), suite=suite)
