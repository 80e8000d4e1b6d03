"""What the doctor makes of failures that a log tells of."""

from __future__ import annotations

from pathlib import Path

import pytest

from doctor.diagnosis.diagnose import Diagnosis, diagnose
from doctor.metrics.log_source import LogSource
from servers.server_log import read_log

LOAD = (
    "INFO 11-29 11:45:{second:02} [loggers.py:335] Engine 000: Avg prompt throughput: 551.9 tokens/s, "
    "Avg generation throughput: 110.2 tokens/s, Running: 3 reqs, Waiting: 0 reqs, "
    "GPU KV cache usage: 12.0%, Prefix cache hit rate: 0.0%"
)
START = (
    "INFO 11-29 11:44:20 [api_utils.py:286] non-default args: {'model': 'm', 'max_num_batched_tokens': 8192}"
)
DEATH = "ERROR 11-29 11:50:01 [core.py:1586] EngineCore encountered a fatal error."
MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.95 GiB."
HANG = "INFO 06-12 [shm_broadcast.py:501] No available shared memory broadcast block found in 60 seconds."
LINK = "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled system error"


def examined(tmp_path: Path, *lines: str) -> Diagnosis:
    path = tmp_path / "server.log"
    path.write_text("\n".join([START, LOAD.format(second=10), LOAD.format(second=20), *lines]))
    return diagnose(LogSource(path), log=read_log(path))


@pytest.mark.parametrize(
    ("lines", "causes"),
    [
        ([], []),
        ([DEATH], ["engine-died"]),
        ([MEMORY, DEATH], ["engine-died"]),
        ([HANG], ["hung-step"]),
        ([HANG, DEATH], ["hung-step"]),
        ([LINK, DEATH], ["link-errors"]),
        ([START] * 3, ["crash-loop"]),
    ],
)
def test_the_cause_is_what_failed_first(tmp_path: Path, lines: list[str], causes: list[str]) -> None:
    found = [
        f.id
        for f in examined(tmp_path, *lines).findings
        if f.suppressed_by is None and f.severity == "critical"
    ]
    assert found == causes


def test_a_death_for_memory_names_it_and_makes_room(tmp_path: Path) -> None:
    finding = next(f for f in examined(tmp_path, MEMORY, DEATH).findings if f.id == "engine-died")
    assert finding.title == "The engine ran out of device memory and died"
    changes = [p.changes for p in finding.prescriptions]
    assert {"max_num_batched_tokens": 4096} in changes
    assert any("gpu_memory_utilization" in change for change in changes)
