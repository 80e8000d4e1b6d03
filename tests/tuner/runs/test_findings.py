"""What the doctor says of a trial: from scrapes and flags to what the study keeps."""

from __future__ import annotations

import json
import math
from pathlib import Path

import optuna
import pytest
from llama_8b import CONFIG

from loadgen.targets.simulated import SimulatedTarget
from servers.slo.bounds import parse_bounds
from servers.slo.objective import parse_slo
from tuner.job.job import Job
from tuner.runs.findings import TrialFinding, examine, objectives
from tuner.runs.interrupts import Interrupts
from tuner.runs.result import TrialResult
from tuner.study.observer import Observer
from tuner.study.optimize import Optimizer
from tuner.study.trial import Bench
from tuner.workers.storage import open_study

FLAGS = {"max_num_batched_tokens": 8192, "max_num_seqs": 256}


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> TrialResult:
    """Of a study on a simulated GPU whose prompts of 20,000 tokens fill steps of 8,192."""
    out = tmp_path_factory.mktemp("study")
    (out / "config.json").write_text(json.dumps(CONFIG))
    target = SimulatedTarget("simulated:h100", str(out / "config.json"))
    job = Job("itl_p99<35ms", "simulated:h100", flags=FLAGS, rate=8.0, trials=1, run_seconds=20.0, pairs=2)
    job = Job(**{**vars(job), "budget": None, "fix": ("all",), "vary": {"max_num_seqs": (128,)}})
    record = open_study(optuna.storages.InMemoryStorage(), "s", parse_slo(job.slo).objective)
    optimizer = Optimizer(job, Bench(target, Observer(), Interrupts(), out), record)
    optimizer.run()
    assert optimizer.study.baseline is not None
    return optimizer.study.baseline


def test_a_trial_keeps_the_doctors_findings_with_evidence_and_new_flags(baseline: TrialResult) -> None:
    found = {finding.id: finding for finding in baseline.findings}
    spikes = found["itl-spikes-long-prefill"]
    assert spikes.severity == "warning"
    assert 0 < spikes.evidence["itl_p50"] < spikes.evidence["itl_p99"]
    changed = [dict(prescription) for prescription in spikes.prescriptions]
    assert any(change.get("max_num_batched_tokens", math.inf) < 8192 for change in changed)
    assert baseline.unexamined == ""


def test_findings_survive_the_studys_storage(baseline: TrialResult) -> None:
    assert TrialResult.from_json(json.loads(json.dumps(baseline.to_json()))) == baseline


def test_results_of_before_there_were_findings_can_be_read(baseline: TrialResult) -> None:
    old = {k: v for k, v in baseline.to_json().items() if k not in ("findings", "unexamined")}
    assert TrialResult.from_json(old).findings == ()


@pytest.mark.parametrize(
    "scrapes", [[], [(0, "vllm:num_requests_running 1\n"), (1000, "{")], [(0, "{"), (1000, "{")]]
)
def test_what_cannot_be_judged_says_why(scrapes: list[tuple[int, str]], tmp_path: Path) -> None:
    found, why = examine(scrapes, FLAGS)
    assert found == ()
    assert why


def test_the_slos_bounds_are_the_doctors_objectives() -> None:
    given = objectives(parse_bounds("itl_p99<50ms,ttft_p95{class=short}<300ms,throughput>10"))
    assert given.values["slo_itl_p99"] == pytest.approx(0.05)
    assert math.isinf(given.values["slo_ttft_p95"]), "no objective was stated for all requests' TTFT"
    assert objectives(()).given == {}


def test_a_finding_is_plain_json() -> None:
    finding = TrialFinding("a", "info", "A", {"itl_p50": 0.1}, ({"max_num_seqs": 8},), "b")
    assert TrialFinding.from_json(json.loads(json.dumps(vars(finding)))) == finding
