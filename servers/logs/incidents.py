"""What a log tells of failures while the server served: of the engine, a step, the links between GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise

SIGNS: Mapping[str, tuple[str, ...]] = {
    "log_starts": ("non-default args: {", "args: Namespace(", "server_args=ServerArgs("),
    "log_engine_deaths": (
        "EngineCore encountered a fatal error",
        "EngineCore encountered an issue",
        "EngineDeadError",
        "died unexpectedly",
        "Background loop has errored",
        "Engine background task failed",
        "Engine loop is dead",
        "Scheduler hit an exception",
        "Received sigquit from a child process",
    ),
    "log_out_of_memory": (
        "torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError", "CUDA out of memory", "HIP out of memory",
    ),
    "log_hung_steps": (
        "No available shared memory broadcast block found",
        "No available block found in",
        "RPC call to execute_model timed out",
        "RPC call to sample_tokens timed out",
        "collective operation timeout",
        "Watchdog timeout",
        "Engine iteration timed out",
    ),
    "log_link_errors": (
        "NCCL error", "NCCL WARN", "RCCL error", "ncclSystemError", "ncclInternalError", "ncclRemoteError",
        "ncclUnhandledCudaError", "DistBackendError",
    ),
    "log_device_errors": (
        "illegal memory access", "device-side assert", "unspecified launch failure", "uncorrectable ECC",
        "NVRM: Xid", "fallen off the bus", "HSA_STATUS_ERROR", "Memory access fault by GPU",
    ),
}  # fmt: skip
"""By the name that rules have for it: what such lines have in them. After vLLM's ``v1/engine``,
``v1/executor`` and ``distributed/device_communicators`` (V0's ``engine`` too), SGLang's ``managers``, torch's
NCCL backend, and the kernel's driver messages."""

_ENDING = re.compile(r"\[shutdown\] |^INFO: +Shutting down$|Gracefully stopping|Received exit signal", re.M)
"""A server that was told to stop: what its parts then say of each other is no failure."""
_START = re.compile("|".join(map(re.escape, SIGNS["log_starts"])))


def incidents(text: str) -> dict[str, float]:
    """How often ``text`` tells of each kind; all names of SIGNS. An orderly end counts for nothing."""
    starts = [0, *(match.start() for match in _START.finditer(text)), len(text)]
    lives = [_ENDING.split(text[begin:end], maxsplit=1)[0] for begin, end in pairwise(starts)]
    told = "\n".join(lives)
    return {name: float(sum(map(told.count, signs))) for name, signs in SIGNS.items()}
