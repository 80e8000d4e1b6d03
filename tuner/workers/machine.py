"""What a worker runs on, for the trials that it measures."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from loadgen.measure.processor import processor

VISIBLE = "CUDA_VISIBLE_DEVICES"
_PROBE_SECONDS = 20
_LOOK_SECONDS = 0.25
NOTABLE_SHARE = 0.15
"""Share of the processors' time that is worth a word when others take it."""


@dataclass(frozen=True)
class Machine:
    host: str
    pid: int
    hardware: str
    """What measurements depend on: the GPUs' names, else the processor's and how many of its cores."""
    devices: str = ""
    """CUDA_VISIBLE_DEVICES, where it is set."""

    @classmethod
    def here(cls) -> Machine:
        return cls(socket.gethostname(), os.getpid(), _hardware(), os.environ.get(VISIBLE, ""))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def busy_share() -> float:
    """Share of the processors' time that other programs (or the host's other guests) take. It looks for a
    quarter of a second, in which vtune itself must do nothing."""
    return psutil.cpu_percent(_LOOK_SECONDS) / 100


def busy_warning(share: float) -> str:
    """A warning where others take a notable share; "" where not."""
    if share < NOTABLE_SHARE:
        return ""
    return (
        f"other programs take {share:.0%} of this machine's processor time: a server that shares it is "
        "measured slower and less even than it is. End them, or expect wider intervals"
    )


def visible_devices() -> list[str]:
    """What CUDA_VISIBLE_DEVICES lists, else the index of every NVIDIA GPU; empty where there is none."""
    listed = os.environ.get(VISIBLE)
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip()]
    return [line.partition(",")[0].strip() for line in _gpus()]


def _hardware() -> str:
    gpus = {line.split(",")[0].strip(): line.split(",")[-1].strip() for line in _gpus()}
    if gpus:
        names = [gpus.get(device, device) for device in visible_devices()]
        return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "no GPU visible"
    name = processor() or platform.processor() or platform.machine()
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def _gpus() -> list[str]:
    """``index, name`` of each NVIDIA GPU, as its driver's tool says."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=index,name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line for line in answer.stdout.splitlines() if line.strip()]
