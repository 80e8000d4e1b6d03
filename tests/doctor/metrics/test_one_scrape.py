"""A single pasted page: what counters since the start and gauges of a moment can say, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic_server import Server

from doctor.diagnosis.diagnose import Diagnosis, diagnose
from doctor.diagnosis.judged_objectives import DEFAULTS
from doctor.metrics.signals import SIGNALS
from doctor.metrics.sources import SeriesFile
from doctor.output.report import as_text
from servers.metrics.exposition import ONE_SCRAPE
from servers.reading import Missing, Number

QUEUED = Server(running=64, waiting=200, kv=0.3, histograms={"queue_time": {8.0: 10}, "ttft": {8.2: 10}})
REPORT = Path(__file__).parents[4] / "shared" / "reports" / "12-one-pasted-page" / "page.prom"


def page(server: Server, folder: Path, head: str = "") -> SeriesFile:
    path = folder / "page.prom"
    path.write_text(head + server.scrapes()[-1][1])
    return SeriesFile(path)


def judged(server: Server, folder: Path, seqs: int = 64) -> Diagnosis:
    return diagnose(page(server, folder), {"max_num_seqs": seqs})


@pytest.mark.parametrize("head", ["", "# scrape_unix_ms 1700000000000\n"])
def test_means_and_percentiles_are_since_the_start_and_rates_are_not_known(head: str, tmp_path: Path) -> None:
    evaluator = page(QUEUED, tmp_path, head).observe(None, DEFAULTS).evaluator
    told = {name: next(iter(evaluator.read(SIGNALS[name]).values())) for name in SIGNALS}
    means = [told[name] for name in ("ttft_mean", "queue_time_mean", "running_mean", "waiting_last")]
    assert [one.point for one in means if isinstance(one, Number)] == pytest.approx([8.2, 8.0, 64, 200])
    for name in ("generation_rate", "request_rate", "waiting_slope", "running_delta", "prefilling_mean"):
        missing = told[name]
        assert isinstance(missing, Missing), name
        assert missing.why == "one scrape does not tell: record two or more"


def test_a_queue_behind_a_cap_is_found(tmp_path: Path) -> None:
    found = judged(QUEUED, tmp_path)
    assert "seq-cap" in {finding.id for finding in found.findings}
    text = as_text(found)
    assert "TTFT P95 < 2 s (default): MISSED" in text
    assert "one scrape" in text.splitlines()[0]
    assert f"note: {ONE_SCRAPE}" in text


def test_no_server_is_healthy_by_one_scrape(tmp_path: Path) -> None:
    found = judged(Server(), tmp_path)
    assert found.findings == ()
    assert not found.healthy
    assert "No verdict: nothing of severity warning in what one scrape can tell." in as_text(found)
    assert found.to_json()["window_seconds"] is None


@pytest.mark.skipif(not REPORT.exists(), reason="no reports beside the repository")
def test_a_reported_page() -> None:
    """2,826 wait while 162 run and the pool is nearly empty."""
    found = diagnose(SeriesFile(REPORT))
    assert found.findings[0].id == "ttft-slo-queue"
    text = as_text(found)
    for part in ("TTFT P95 < 2 s (default): MISSED", "waiting_mean = 2,826 requests", "kv_max = 28 %"):
        assert part in text
