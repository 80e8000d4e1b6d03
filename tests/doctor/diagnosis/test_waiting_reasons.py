"""What waits for something other than capacity is taken for no cap and no overload."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playbook_cases import ADAPTERS
from synthetic_server import Server

from doctor.diagnosis.diagnose import Diagnosis, diagnose
from doctor.metrics.log_source import LogSource
from doctor.metrics.sources import Scrapes

QUEUE = {"queue_time": {13.5: 10}, "ttft": {14.0: 10}}
DEFERRING = Server(running=8, waiting=60, deferred=60, kv=0.05, histograms=QUEUE)
CAPACITY = {"seq-cap", "overload", "kv-idle", "kv-pressure"}
REPORT = Path(__file__).parents[4] / "shared" / "reports" / "17-lora-deferred" / "series.prom"


def judged(server: Server, flags: dict[str, Any] | None = None) -> Diagnosis:
    return diagnose(Scrapes(server.scrapes()), flags)


def ids(found: Diagnosis) -> set[str]:
    return {finding.id for finding in found.findings}


@pytest.mark.parametrize("flags", [None, {}, {"max_num_seqs": 256, "max_loras": 2}, {"max_num_seqs": 16}])
def test_adapters_that_wait_for_slots_get_slots(flags: dict[str, Any] | None) -> None:
    found = judged(replace(DEFERRING, adapters=ADAPTERS), flags)
    assert found.findings[0].id == "adapter-slots"
    assert not CAPACITY & ids(found)
    assert found.findings[0].prescriptions[0].changes == {"max_loras": 4}


def test_before_there_were_reasons_full_slots_are_no_cap() -> None:
    found = judged(replace(DEFERRING, deferred=None, adapters=ADAPTERS))
    assert found.findings[0].id == "adapter-slots"
    assert "seq-cap" not in ids(found)


def test_a_queue_for_something_unknown_gets_no_flag() -> None:
    found = judged(DEFERRING, {"max_num_seqs": 16})
    assert found.findings[0].id == "deferred-requests"
    assert not CAPACITY & ids(found)
    assert not any(cure.changes for finding in found.findings for cure in finding.prescriptions)


def test_a_queue_for_capacity_beside_it_is_a_cap() -> None:
    found = judged(replace(DEFERRING, deferred=6), {"max_num_seqs": 8})
    assert found.findings[0].id == "seq-cap"
    (evidence,) = [item for item in found.findings[0].evidence if item.signal == "waiting_mean"]
    assert evidence.value == 54
    assert 'reason="capacity"' in evidence.query


def test_a_log_tells_them_apart(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(
        "".join(
            f"INFO 06-06 14:20:{n}4 [loggers.py:118] Engine 000: Avg prompt throughput: 10.0 tokens/s, Avg "
            "generation throughput: 300.0 tokens/s, Running: 8 reqs, Waiting: 60 reqs, Deferred: 58 reqs, "
            "GPU KV cache usage: 5.0%, Prefix cache hit rate: 0.0%\n"
            for n in range(4)
        )
    )
    found = diagnose(LogSource(path))
    assert found.findings[0].id == "deferred-requests"
    assert not CAPACITY & ids(found)


@pytest.mark.parametrize(
    ("server", "flags", "named"),
    [
        (Server(), None, {"LoRA", "MoE expert balance"}),
        (Server(), {}, set()),
        (Server(), {"enable_lora": True}, {"LoRA"}),
        (replace(DEFERRING, adapters=ADAPTERS), {"enable_lora": True}, set()),
        (Server(), {"kv_transfer_config": {"kv_role": "kv_consumer"}}, {"prefill/decode disaggregation"}),
        (Server(), {"data_parallel_size": 2}, {"data parallel ranks against each other"}),
    ],
)
def test_what_is_not_judged_is_what_the_server_may_have(
    server: Server, flags: dict[str, Any] | None, named: set[str]
) -> None:
    found = set(judged(server, flags).not_judged)
    assert named <= found
    assert flags is None or found == named


@pytest.mark.skipif(not REPORT.exists(), reason="no reports beside the repository")
def test_a_reported_server_waits_for_adapters() -> None:
    text = REPORT.read_text()
    scrapes = [part.split("\n", 1) for part in text.split("# scrape_unix_ms ")[1:]]
    found = diagnose(Scrapes([(int(at), page) for at, page in scrapes]))
    assert found.findings[0].id == "adapter-slots"
    assert found.findings[0].prescriptions[0].changes == {"max_loras": 8}
