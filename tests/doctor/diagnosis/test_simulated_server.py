"""The doctor reads the metrics of a simulated server as it reads those of a real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llama_8b import CONFIG

from doctor.diagnosis.diagnose import diagnose
from doctor.metrics.sources import Scrapes
from loadgen.plan.arrivals import Poisson
from loadgen.plan.workload import preset
from loadgen.targets.simulated import SimulatedTarget


@pytest.mark.parametrize(("seqs", "found"), [(8, True), (256, False)])
def test_too_few_sequences_are_found_on_a_simulated_device(tmp_path: Path, seqs: int, found: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    target = SimulatedTarget("simulated:h100", str(tmp_path))
    schedule = preset("chat", max_model_len=8192).schedule(seed=0, arrival=Poisson(20), num_requests=500)
    with target.open({"max_num_seqs": seqs}) as server:
        records = server.run(schedule)
    findings = {finding.id for finding in diagnose(Scrapes(records.scrapes)).findings}
    assert ("seq-cap" in findings) is found
