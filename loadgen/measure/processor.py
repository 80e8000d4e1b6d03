"""The processor that this process runs on."""

from __future__ import annotations

from pathlib import Path


def processor() -> str:
    """Its name, as Linux says it; "" on other systems, and on processors without one."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
    names = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(names, "")
