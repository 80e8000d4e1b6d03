"""The bundled engine with a sequence cap, under real load: found by Prometheus and by our own scrapes."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_prometheus import needs_prometheus, prometheus

from doctor.diagnose import Diagnosis, diagnose
from doctor.sources import PrometheusSource, Scrapes
from loadgen.arrivals import ClosedLoop
from loadgen.targets.server import ServerTarget
from loadgen.wire import Progress
from loadgen.workload import preset

pytest.importorskip("torch", reason="the bundled engine needs the engine extra")


def roots(diagnosis: Diagnosis) -> list[str]:
    return [finding.id for finding in diagnosis.findings if finding.suppressed_by is None]


@needs_prometheus
def test_a_real_prometheus_scrapes_the_bundled_engine(tmp_path: Path) -> None:
    workload = preset("random", max_model_len=2048, input_len=64, output_len=32)
    schedule = workload.schedule(seed=1, arrival=ClosedLoop(8), num_requests=60)
    found: list[Diagnosis] = []

    with ServerTarget.bundled(log_dir=tmp_path).open({"max_num_seqs": 2}) as server:
        host = server.url.removeprefix("http://").rstrip("/")
        with prometheus(tmp_path, [host]) as url:

            def look(progress: Progress) -> None:
                if progress.finished >= 45 and not found:
                    found.append(diagnose(PrometheusSource(url, 'job="vllm"'), window=10))

            records = server.run(schedule, progress=look)

    (live,) = found
    assert live.engines == (host,)
    assert roots(live) == ["seq-cap"]
    assert live.findings[0].flags["max_num_seqs"].origin == "inferred"

    recorded = diagnose(Scrapes(records.scrapes, "bundled"), {"max_num_seqs": 2})
    assert roots(recorded) == ["seq-cap"]
    (cure,) = recorded.findings[0].prescriptions
    assert cure.was == {"max_num_seqs": 2}
    assert cure.changes["max_num_seqs"] in (7, 8)
