import json
from pathlib import Path
from typing import Any

import pytest
from analytic_study import SLO, drive, make

from tuner.runs.findings import TrialFinding
from tuner.search.from_doctor import (
    MAX_PRESCRIPTIONS,
    FindingsError,
    Hints,
    of_trial,
    prescribed,
    read_findings,
)
from tuner.search.model import ModelStrategy
from tuner.space.space import build_space, effective

SPACE = build_space(effective({}, "vllm"), 8192)


def report(tmp_path: Path, *findings: Any, **more: Any) -> Any:
    path = tmp_path / "findings.json"
    path.write_text(json.dumps({"schema": "vtune.doctor/1", "findings": findings, **more}))
    return path


def finding(identity: Any, *changes: Any, suppressed_by: Any = None) -> dict[str, Any]:
    return {"id": identity, "prescriptions": [{"set": c} for c in changes], "suppressed_by": suppressed_by}


def test_prescriptions_are_read_without_those_that_a_cause_explains(tmp_path: Path) -> None:
    path = report(
        tmp_path,
        finding("itl-spikes-long-prefill", {"max_num_batched_tokens": 512}, {}),
        finding("itl-flat-high", {"max_num_seqs": 64}, suppressed_by="itl-spikes-long-prefill"),
    )
    assert read_findings(path) == ({"id": "itl-spikes-long-prefill", "set": {"max_num_batched_tokens": 512}},)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not JSON"),
        ("[]", "schema None"),
        ('{"schema": "other/1"}', "schema 'other/1'"),
        ('{"schema": "vtune.doctor/1"}', "lacks 'findings'"),
        ('{"schema": "vtune.doctor/1", "findings": [{"prescriptions": [1]}]}', "a finding lacks"),
    ],
)
def test_a_file_that_is_not_the_doctors_is_a_clear_error(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "findings.json"
    path.write_text(text)
    with pytest.raises(FindingsError, match=problem):
        read_findings(path)
    with pytest.raises(FindingsError, match="cannot be read"):
        read_findings(tmp_path / "none.json")


def test_a_trials_own_findings_say_the_same() -> None:
    own = TrialFinding("seq-cap", "warning", "t", {}, ({"max_num_seqs": 512},))
    explained = TrialFinding("x", "warning", "t", {}, ({"max_num_seqs": 1024},), suppressed_by="seq-cap")
    assert list(of_trial([own, explained])) == [{"id": "seq-cap", "set": {"max_num_seqs": 512}}]


def test_what_the_space_does_not_search_or_a_rule_refuses_is_not_tried() -> None:
    items = [
        {"id": "a", "set": {"tensor_parallel_size": 2}},
        {"id": "b", "set": {"max_num_batched_tokens": 64}},
        {"id": "c", "set": {"max_num_seqs": 500}},
        {"id": "d", "set": {"max_num_seqs": 512}},
    ]
    assert list(prescribed(items, SPACE)) == [({"max_num_seqs": 500}, "doctor: c")], "d is the same rung as c"
    many = [{"id": str(n), "set": {"max_num_seqs": n}} for n in (16, 32, 64, 96, 128)]
    assert len(list(prescribed(many, SPACE))) == MAX_PRESCRIPTIONS


def hints(*changes: Any, until: int = 8) -> Hints:
    return Hints.of([{"id": "test", "set": change} for change in changes], SPACE, until)


def test_a_prescription_points_to_a_side_of_the_baseline_and_two_that_disagree_to_none() -> None:
    found = hints({"max_num_batched_tokens": 512, "max_num_seqs": 512}, {"max_num_seqs": 64})
    assert found.directions == {"max_num_batched_tokens": -1}
    assert hints({"unknown": 3}, {"max_num_batched_tokens": None}).directions == {}


@pytest.mark.parametrize(("tokens", "right"), [(512, True), (8192, False)])
def test_the_other_side_is_left_out_of_the_first_half_and_a_wrong_finding_does_not_hide_the_best(
    tokens: int, right: bool
) -> None:
    """In the formula the smaller budgets are the better ones; the baseline's is 2048."""
    study = make(ModelStrategy(1))
    study.strategy.hints = Hints.of([{"set": {"max_num_batched_tokens": tokens}}], study.space, until=8)
    told = [r.config["max_num_batched_tokens"] for r in drive(study, 24)]
    first, rest = told[1:8], told[8:]
    assert all(value <= 2048 if right else value >= 2048 for value in first)
    assert right or min(rest) < 1024
    assert study.best().value(SLO.objective) < 0.4 * study.baseline.value(SLO.objective)
