"""Faults injected into simulated servers are found through a Prometheus, with the right cure.

A part of ``benchmarks/doctor/faults.py``, which has every fault, more loads of each, and the live ones.
"""

from __future__ import annotations

from pathlib import Path

from live_prometheus import needs_prometheus

from benchmarks.doctor.fault_catalog import CONTROLS, FAULTS, HEALTHY
from benchmarks.doctor.faults import Outcome, simulated

CHOSEN = (
    "a cap of 2 sequences",
    "a pool of 4,096 tokens",
    "long prompts in one step",
    "a budget of 16 tokens",
    "a header before the common prefix",
    "clients that hang up",
    "short prompts behind long ones",
    "one replica with most of the load",
    "longer prompts than last week",
    "steady chat",
    "a prefix that hits",
)
SECONDS = 75.0


def test_there_are_a_dozen_faults_and_four_healthy_servers_each_with_three_further_loads() -> None:
    assert len(FAULTS) >= 12
    assert len(CONTROLS) >= 4
    assert all(len(fault.simulated) == 3 for fault in (*FAULTS, *CONTROLS))
    assert all(fault.right for fault in FAULTS)
    assert {fault.truth for fault in CONTROLS} == {HEALTHY}


@needs_prometheus
def test_faults_are_found_through_a_prometheus_that_looks_every_15_s(tmp_path: Path) -> None:
    chosen = [fault for fault in (*FAULTS, *CONTROLS) if fault.name in CHOSEN]
    assert len(chosen) == len(CHOSEN)
    found = simulated([fault.simulated[0] for fault in chosen], SECONDS, tmp_path)
    outcomes = [Outcome.of(fault, diagnosis) for fault, diagnosis in zip(chosen, found, strict=True)]
    assert [outcome for outcome in outcomes if not outcome.hit] == []
    assert [outcome for outcome in outcomes if outcome.prescribed is False] == []
