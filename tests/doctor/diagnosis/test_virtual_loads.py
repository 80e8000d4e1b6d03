"""Other loads than the recorded ones: the true cause still comes first or second, and health stays health."""

from __future__ import annotations

import pytest

from benchmarks.doctor.drawn import drawn
from benchmarks.doctor.loads import CASES, HEALTHY, Case, recorded
from benchmarks.doctor.matrix import of_doctor
from benchmarks.loadgen.virtual_server import GPU
from doctor.diagnosis.diagnose import Diagnosis, diagnose
from doctor.metrics.sources import Scrapes

WELL = [case for case in CASES.values() if case.truth == HEALTHY and case.pace != GPU]
SICK = [case for case in CASES.values() if case.truth != HEALTHY and case.pace != GPU]
"""Those of a GPU's pace take longer to simulate; ``benchmarks/doctor/matrix.py`` has them too."""


def examine(case: Case, flags_known: bool, thinned: slice = slice(None)) -> Diagnosis:
    scrapes, flags = recorded(case)
    known = flags if flags_known else None
    return diagnose(Scrapes(scrapes[thinned]), known, case.slo, assume=case.assume)


def knowledge(case: Case) -> tuple[bool, ...]:
    """Whether the flags are known; not to know them is the harder way."""
    return (False,) if case.further else (True, False)


def is_found(case: Case, found: Diagnosis) -> bool:
    return bool({case.truth, *case.also} & {finding.id for finding in found.findings[:2]})


@pytest.mark.parametrize("case", SICK, ids=lambda case: case.name)
def test_the_true_cause_is_found(case: Case) -> None:
    for flags_known in knowledge(case):
        found = examine(case, flags_known)
        assert is_found(case, found)
        assert not found.healthy


@pytest.mark.parametrize("case", WELL, ids=lambda case: case.name)
def test_a_healthy_server_is_called_healthy_where_it_holds_its_objectives(case: Case) -> None:
    for flags_known in knowledge(case):
        found = examine(case, flags_known)
        judged = [objective.held for objective in found.objectives]
        assert (found.healthy, bool(found.findings)) == (all(judged), False in judged)
        assert all(finding.title.endswith("(cause not found)") for finding in found.findings)


@pytest.mark.parametrize(
    "name", ["one sequence, 4 clients", "8 sequences, 32 clients", "a mild overload, cut"]
)
@pytest.mark.parametrize("offset", range(0, 7, 2))
def test_a_scrape_every_15_s_calls_no_sick_server_healthy(name: str, offset: int) -> None:
    found = examine(CASES[name], True, slice(offset, None, 7))
    assert is_found(CASES[name], found)
    assert not found.healthy


@pytest.mark.parametrize("seed", range(1, 32, 3))
def test_the_cause_of_a_drawn_load_is_found(seed: int) -> None:
    """A part of ``benchmarks/doctor/drawn.py``, which draws five hundred."""
    exhibit = drawn(seed)
    verdict = of_doctor(exhibit, flags_known=True)
    assert verdict.right, (exhibit.name, exhibit.truth, verdict.first)
