"""Lines that tell of failures, as the servers write them."""

from __future__ import annotations

import pytest

from servers.logs.incidents import SIGNS
from servers.server_log import parse_log

START = "INFO 11-29 11:44:20 [api_utils.py:286] non-default args: {'model': 'm'}"


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("(EngineCore pid=71) ERROR 11-29 11:50:01 [core.py:1586] EngineCore encountered a fatal error.",
         "log_engine_deaths"),
        ("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.", "log_engine_deaths"),
        ("ERROR 06-12 03:11:02 [multiproc_executor.py:135] Worker proc VllmWorker-1 died unexpectedly",
         "log_engine_deaths"),
        ("[2026-06-12 03:11:02 TP0] Scheduler hit an exception: Traceback (most recent call last):",
         "log_engine_deaths"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.95 GiB.", "log_out_of_memory"),
        ("INFO [shm_broadcast.py:501] No available shared memory broadcast block found in 60 s",
         "log_hung_steps"),
        ("[rank1]:[E612 03:11:02.123 ProcessGroupNCCL.cpp:629] [Rank 1] Watchdog caught collective operation "
         "timeout: WorkNCCL(SeqNum=4711, OpType=ALLREDUCE) ran for 600012 milliseconds", "log_hung_steps"),
        ("TimeoutError: RPC call to execute_model timed out.", "log_hung_steps"),
        ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, system error",
         "log_link_errors"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "log_device_errors"),
        ("kernel: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", "log_device_errors"),
    ],
)  # fmt: skip
def test_a_line_tells_of_its_kind_alone(line: str, kind: str) -> None:
    found = parse_log(f"{START}\n{line}").incidents
    assert found[kind] > 0
    assert {name for name, count in found.items() if count} == {kind, "log_starts"}


def test_starts_are_counted_and_a_log_without_failures_tells_of_none() -> None:
    assert parse_log("\n".join([START] * 4)).incidents == {**dict.fromkeys(SIGNS, 0.0), "log_starts": 4.0}


ENDING = (
    "INFO [core_client.py:774] [shutdown] MPClient: engine manager stopped",
    "ERROR [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
    "INFO:     Shutting down",
)
"""What vLLM 0.32 writes where it is told to stop."""


def test_an_orderly_end_is_no_death() -> None:
    assert parse_log("\n".join([START, *ENDING])).incidents["log_engine_deaths"] == 0
    died = [START, "ERROR EngineCore encountered a fatal error.", *ENDING]
    assert parse_log("\n".join(died)).incidents["log_engine_deaths"] == 1
    again = [START, *ENDING, *died]
    found = parse_log("\n".join(again)).incidents
    assert (found["log_engine_deaths"], found["log_starts"]) == (1, 2)
